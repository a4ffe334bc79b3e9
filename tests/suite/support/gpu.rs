//! Work on streams, by the driver's own functions.

#![allow(unsafe_code, reason = "functions of a loaded library")]

use std::{
    ffi::{c_int, c_uint, c_void},
    ptr,
};

use libloading::os::unix::Library;
use vmmfd::driver::Stream;

use super::{Fake, Subject};

/// The driver's functions, with the device's primary context.
pub(crate) struct Gpu {
    library: Fake,
    ordinal: i32,
}

impl Gpu {
    pub(crate) fn of(subject: &Subject) -> Self {
        let library = match &subject.fake {
            Some(fake) => fake.again(),
            // SAFETY: the driver is loaded already.
            None => Fake::of(unsafe { Library::new("libcuda.so.1") }.unwrap()),
        };
        Self { library, ordinal: 0 }
    }

    /// The default stream of the calling thread.
    pub(crate) fn per_thread_stream(subject: &Subject) -> Stream {
        // SAFETY: it always exists.
        unsafe { subject.driver.stream(0, 2) }.unwrap()
    }

    /// Runs calls with the context.
    fn with<T>(&self, calls: impl FnOnce() -> T) -> T {
        let mut context: *mut c_void = ptr::null_mut();
        // SAFETY: the types are the functions'.
        unsafe {
            let retain = self
                .library
                .function::<unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_uint>("cuDevicePrimaryCtxRetain");
            let release =
                self.library.function::<unsafe extern "C" fn(c_int) -> c_uint>("cuDevicePrimaryCtxRelease_v2");
            let push = self.library.function::<unsafe extern "C" fn(*mut c_void) -> c_uint>("cuCtxPushCurrent_v2");
            let pop = self.library.function::<unsafe extern "C" fn(*mut *mut c_void) -> c_uint>("cuCtxPopCurrent_v2");
            assert_eq!((retain(&mut context, self.ordinal), push(context)), (0, 0));
            let result = calls();
            assert_eq!((pop(&mut context), release(self.ordinal)), (0, 0));
            result
        }
    }

    /// Enqueues a store of the same byte to a range.
    pub(crate) fn fill(&self, stream: &Stream, address: u64, byte: u8, size: usize) {
        type Function = unsafe extern "C" fn(u64, u8, usize, *mut c_void) -> c_uint;
        // SAFETY: the type is the function's. The callers own the memory.
        let code = self
            .with(|| unsafe { self.library.function::<Function>("cuMemsetD8Async")(address, byte, size, raw(stream)) });
        assert_eq!(code, 0);
    }

    /// Enqueues a copy within the device.
    pub(crate) fn copy(&self, stream: &Stream, to: u64, from: u64, size: usize) {
        type Function = unsafe extern "C" fn(u64, u64, usize, *mut c_void) -> c_uint;
        // SAFETY: as above.
        let code = self
            .with(|| unsafe { self.library.function::<Function>("cuMemcpyDtoDAsync_v2")(to, from, size, raw(stream)) });
        assert_eq!(code, 0);
    }

    /// Captures the stream while `work` runs.
    pub(crate) fn capture<T>(&self, stream: &Stream, work: impl FnOnce() -> T) -> T {
        const RELAXED: c_uint = 2;
        let mut graph: *mut c_void = ptr::null_mut();
        // SAFETY: the types are the functions'.
        unsafe {
            let begin =
                self.library.function::<unsafe extern "C" fn(*mut c_void, c_uint) -> c_uint>("cuStreamBeginCapture_v2");
            let end = self
                .library
                .function::<unsafe extern "C" fn(*mut c_void, *mut *mut c_void) -> c_uint>("cuStreamEndCapture");
            assert_eq!(self.with(|| begin(raw(stream), RELAXED)), 0);
            let result = work();
            assert_eq!(self.with(|| end(raw(stream), &mut graph)), 0, "the capture was ended");
            result
        }
    }
}

fn raw(stream: &Stream) -> *mut c_void {
    ptr::without_provenance_mut(stream.number() as usize)
}
