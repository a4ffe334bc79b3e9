//! The emulated driver library, called as from C: it must be as strict as NVIDIA's, or it proves nothing.

#![allow(unsafe_code, reason = "functions of a loaded library")]

use std::{
    ffi::{c_int, c_uint, c_void},
    ptr,
};

use crate::support::{Copy, Fake, aborts_in_fork, in_fork};

const UNIT: usize = 2 << 20;

#[repr(C)]
#[derive(Clone, Copy)]
struct Properties {
    kind: c_uint,
    handle_types: c_uint,
    location_kind: c_uint,
    location_id: c_int,
    meta_data: usize,
    compression: u8,
    rdma: u8,
    usage: u16,
    reserved: [u8; 4],
}

const PLAIN: Properties = Properties {
    kind: 1,
    handle_types: 1,
    location_kind: 1,
    location_id: 0,
    meta_data: 0,
    compression: 0,
    rdma: 0,
    usage: 0,
    reserved: [0; 4],
};

/// The functions of a loaded copy that this file calls. Each checks its arguments and rejects null.
struct Calls {
    fake: Fake,
}

macro_rules! calls {
    ($($method:ident = $name:ident($($arg:ident: $type:ty),*);)*) => {
        impl Calls {
            $(fn $method(&self, $($arg: $type),*) -> u32 {
                // SAFETY: the type matches the function of this name, and the tests pass valid pointers or null.
                unsafe { self.fake.function::<unsafe extern "C" fn($($type),*) -> c_uint>(stringify!($name))($($arg),*) }
            })*
        }
    };
}

calls! {
    init = cuInit(flags: c_uint);
    count = cuDeviceGetCount(count: *mut c_int);
    retain = cuDevicePrimaryCtxRetain(context: *mut *mut c_void, device: c_int);
    push = cuCtxPushCurrent_v2(context: *mut c_void);
    synchronize = cuCtxSynchronize();
    synchronize_stream = cuStreamSynchronize(stream: *mut c_void);
    create = cuMemCreate(handle: *mut u64, size: usize, properties: *const Properties, flags: u64);
    release = cuMemRelease(handle: u64);
    reserve = cuMemAddressReserve(address: *mut u64, size: usize, alignment: usize, wanted: u64, flags: u64);
    map = cuMemMap(address: u64, size: usize, offset: usize, handle: u64, flags: u64);
    unmap = cuMemUnmap(address: u64, size: usize);
    set_access = cuMemSetAccess(address: u64, size: usize, access: *const [u32; 3], count: usize);
    export = cuMemExportToShareableHandle(fd: *mut c_int, handle: u64, kind: c_uint, flags: u64);
    properties = cuMemGetAllocationPropertiesFromHandle(properties: *mut Properties, handle: u64);
    copy_in = cuMemcpyHtoD_v2(to: u64, from: *const c_void, size: usize);
}

impl Calls {
    fn new() -> Self {
        Self { fake: Copy::new().load() }
    }

    fn initialised() -> Self {
        let calls = Self::new();
        assert_eq!(calls.init(0), 0);
        calls
    }

    fn enter(&self) {
        let mut context = ptr::null_mut();
        assert_eq!((self.init(0), self.retain(&mut context, 0), self.push(context)), (0, 0, 0));
    }

    /// One unit of memory, mapped writable.
    fn mapped(&self) -> u64 {
        let (handle, mut address) = (self.created(), 0);
        assert_eq!(self.reserve(&mut address, UNIT, 0, 0, 0), 0);
        assert_eq!(self.map(address, UNIT, 0, handle, 0), 0);
        assert_eq!(self.set_access(address, UNIT, &[1, 0, 3], 1), 0);
        address
    }

    fn created(&self) -> u64 {
        let mut handle = 0;
        assert_eq!(self.create(&mut handle, UNIT, &PLAIN, 0), 0);
        handle
    }
}

#[test]
fn fork_is_not_initialised() {
    let calls = Calls::initialised();
    in_fork(|| {
        let mut count = 0;
        (calls.count(&mut count), calls.init(0)) == (3, 3)
    });
    let fresh = Calls::new();
    in_fork(|| fresh.init(0) == 0);
}

#[test]
fn dead_handle_ends_the_process() {
    type Use = fn(&Calls, u64) -> u32;
    let uses: [(&str, Use); 3] = [
        ("cuMemMap", |calls, handle| calls.map(0, UNIT, 0, handle, 0)),
        ("cuMemExportToShareableHandle", |calls, handle| calls.export(&mut 0, handle, 1, 0)),
        ("cuMemGetAllocationPropertiesFromHandle", |calls, handle| calls.properties(&mut { PLAIN }, handle)),
    ];
    for (name, use_it) in uses {
        let calls = Calls::new();
        let told = aborts_in_fork(|| {
            assert_eq!(calls.init(0), 0);
            let handle = calls.created();
            assert_eq!(calls.release(handle), 0);
            use_it(&calls, handle);
        });
        assert!(told.starts_with(&format!("fakecuda: {name} of handle ")), "{told}");
    }
}

#[test]
fn unmapping_under_a_copy_aborts() {
    let bytes = [1u8; 16];
    let copied_and_unmapped = |calls: &Calls, wait: &dyn Fn() -> u32| {
        calls.enter();
        let address = calls.mapped();
        assert_eq!(calls.copy_in(address, bytes.as_ptr().cast(), bytes.len()), 0);
        assert_eq!(wait(), 0);
        assert_eq!(calls.unmap(address, UNIT), 0);
    };
    let calls = Calls::new();
    copied_and_unmapped(&calls, &|| calls.synchronize_stream(ptr::null_mut()));
    copied_and_unmapped(&calls, &|| calls.synchronize());
    let calls = Calls::new();
    let told = aborts_in_fork(|| copied_and_unmapped(&calls, &|| 0));
    assert!(told.starts_with("fakecuda: cuMemUnmap under a copy to "), "{told}");
}
