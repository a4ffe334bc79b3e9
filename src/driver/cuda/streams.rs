//! Streams and registered host memory with the CUDA driver.

use std::{
    ffi::{c_int, c_uint, c_void},
    ptr::{self, NonNull},
};

use super::{Core, ffi::MemoryOperation};
use crate::{
    driver::{Operation, Streams, code},
    error::{Error, Result},
};

/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: c_uint = 1;

/// `CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP`.
const PORTABLE_AND_MAPPED: c_uint = 3;

/// `CU_STREAM_LEGACY` and `CU_STREAM_PER_THREAD`, after null.
const LAST_DEFAULT_STREAM: u64 = 2;

/// A batch has fewer operations than 256.
const MAX_OPERATIONS: usize = 255;

fn raw(stream: u64) -> *mut c_void {
    ptr::without_provenance_mut(stream as usize)
}

impl Core {
    /// The context is current, and the stream exists.
    fn captures(&self, stream: u64) -> Result<bool> {
        let mut status: c_uint = 0;
        // SAFETY: the pointer is valid for one write.
        match unsafe { self.functions.stream_is_capturing(raw(stream), &mut status) } {
            Ok(()) => Ok(status != 0),
            // The default stream, while another stream that is ordered with it is captured.
            Err(Error::Driver { code: code::STREAM_CAPTURE_IMPLICIT, .. }) => Ok(true),
            Err(error) => Err(error),
        }
    }
}

impl Streams for Core {
    fn create(&self, ordinal: i32) -> Result<u64> {
        self.in_context(ordinal, || {
            let mut stream = ptr::null_mut();
            // SAFETY: the pointer is valid for one write.
            unsafe { self.functions.stream_create(&mut stream, NON_BLOCKING) }?;
            Ok(stream.addr() as u64)
        })
    }

    unsafe fn destroy(&self, ordinal: i32, stream: u64) -> Result<()> {
        // SAFETY: upheld by the caller. As in all functions below.
        self.in_context(ordinal, || unsafe { self.functions.stream_destroy(raw(stream)) })
    }

    unsafe fn device(&self, ordinal: i32, stream: u64) -> Result<i32> {
        self.device(ordinal)?;
        if stream <= LAST_DEFAULT_STREAM {
            return Ok(ordinal);
        }
        let (mut context, mut popped, mut device) = (ptr::null_mut(), ptr::null_mut(), 0);
        // SAFETY: the pointer is valid for one write.
        unsafe { self.functions.stream_get_ctx(raw(stream), &mut context) }?;
        // SAFETY: the context of an existing stream exists.
        unsafe { self.functions.ctx_push_current(context) }?;
        // SAFETY: the pointers are valid for one write.
        let found = unsafe { self.functions.ctx_get_device(&mut device) };
        // SAFETY: as above.
        unsafe { self.functions.ctx_pop_current(&mut popped) }?;
        found?;
        let mut count: c_int = 0;
        // SAFETY: the pointer is valid for one write.
        unsafe { self.functions.device_get_count(&mut count) }?;
        let ordinal = (0..count).find(|&ordinal| self.device(ordinal).is_ok_and(|found| found == device));
        ordinal.ok_or_else(|| crate::driver::failure("cuCtxGetDevice", code::INVALID_VALUE))
    }

    unsafe fn is_capturing(&self, ordinal: i32, stream: u64) -> Result<bool> {
        self.in_context(ordinal, || self.captures(stream))
    }

    unsafe fn is_idle(&self, ordinal: i32, stream: u64) -> Result<bool> {
        let query = || {
            // SAFETY: upheld by the caller.
            match unsafe { self.functions.stream_query(raw(stream)) } {
                Ok(()) => Ok(true),
                Err(Error::Driver { code: code::NOT_READY, .. }) => Ok(false),
                Err(error) => Err(error),
            }
        };
        self.in_context(ordinal, || self.with_relaxed_capture(query))
    }

    unsafe fn synchronize(&self, ordinal: i32, stream: u64) -> Result<()> {
        // SAFETY: upheld by the caller.
        let synchronize = || unsafe { self.functions.stream_synchronize(raw(stream)) };
        self.in_context(ordinal, || self.with_relaxed_capture(synchronize))
    }

    unsafe fn register(&self, ordinal: i32, start: NonNull<u8>, size: usize) -> Result<u64> {
        let start = start.as_ptr().cast::<c_void>();
        let register = || {
            // SAFETY: upheld by the caller.
            unsafe { self.functions.mem_host_register(start, size, PORTABLE_AND_MAPPED) }?;
            let mut address = 0;
            // SAFETY: the pointer is valid for one write, and the memory is registered.
            unsafe { self.functions.mem_host_get_device_pointer(&mut address, start, 0) }.inspect_err(|_| {
                // SAFETY: it was just registered.
                let _ = unsafe { self.functions.mem_host_unregister(start) };
            })?;
            Ok(address)
        };
        self.in_context(ordinal, || self.with_relaxed_capture(register))
    }

    unsafe fn unregister(&self, ordinal: i32, start: NonNull<u8>) -> Result<()> {
        // SAFETY: upheld by the caller.
        let unregister = || unsafe { self.functions.mem_host_unregister(start.as_ptr().cast()) };
        self.in_context(ordinal, || self.with_relaxed_capture(unregister))
    }

    unsafe fn enqueue(&self, ordinal: i32, stream: u64, operations: &[Operation]) -> Result<bool> {
        self.in_context(ordinal, || {
            if self.captures(stream)? {
                return Ok(false);
            }
            let enqueued = operations.chunks(MAX_OPERATIONS).try_for_each(|operations| {
                let mut raw_operations: Vec<_> = operations.iter().map(MemoryOperation::from).collect();
                let count = raw_operations.len() as c_uint;
                // SAFETY: the pointer is valid for `count` operations. The rest is upheld by the caller.
                unsafe { self.functions.stream_batch_mem_op(raw(stream), count, raw_operations.as_mut_ptr(), 0) }
            });
            enqueued.map(|()| true)
        })
    }
}
