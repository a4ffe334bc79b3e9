//! The emulated driver library, called as from C: it must be as strict as NVIDIA's, or it proves nothing.

#![allow(unsafe_code, reason = "functions of a loaded library")]

use std::{
    ffi::{c_int, c_uint, c_void},
    ptr,
};

use crate::support::{aborts_in_fork, prelude::*};

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
            $(#[allow(clippy::too_many_arguments, reason = "the driver's own")]
            fn $method(&self, $($arg: $type),*) -> u32 {
                // SAFETY: the type matches the function of this name, and the tests pass valid pointers or null.
                unsafe { self.fake.function::<unsafe extern "C" fn($($type),*) -> c_uint>(stringify!($name))($($arg),*) }
            })*
        }
    };
}

calls! {
    init = cuInit(flags: c_uint);
    retain = cuDevicePrimaryCtxRetain(context: *mut *mut c_void, device: c_int);
    push = cuCtxPushCurrent_v2(context: *mut c_void);
    synchronize = cuCtxSynchronize();
    synchronize_stream = cuStreamSynchronize(stream: *mut c_void);
    granularity = cuMemGetAllocationGranularity(granularity: *mut usize, properties: *const Properties, option: c_uint);
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

    /// Makes a device's context current.
    fn enter(&self) {
        let mut context = ptr::null_mut();
        assert_eq!((self.init(0), self.retain(&mut context, 0), self.push(context)), (0, 0, 0));
    }

    fn created(&self) -> u64 {
        let mut handle = 0;
        assert_eq!(self.create(&mut handle, UNIT, &PLAIN, 0), 0);
        handle
    }
}

#[test]
fn properties_are_checked_field_by_field() {
    let calls = Calls::initialised();
    let (mut handle, mut granularity) = (0, 0);
    for (what, properties, want) in [
        ("kind", Properties { kind: 0, ..PLAIN }, 1),
        ("handle types", Properties { handle_types: 2, ..PLAIN }, 1),
        ("location", Properties { location_kind: 2, ..PLAIN }, 1),
        ("device", Properties { location_id: 1, ..PLAIN }, 101),
        ("meta data", Properties { meta_data: 8, ..PLAIN }, 1),
        ("compression", Properties { compression: 1, ..PLAIN }, 1),
        ("rdma", Properties { rdma: 2, ..PLAIN }, 1),
        ("usage", Properties { usage: 1, ..PLAIN }, 1),
        ("reserved", Properties { reserved: [0, 0, 0, 1], ..PLAIN }, 1),
    ] {
        assert_eq!(calls.create(&mut handle, UNIT, &properties, 0), want, "{what}");
        assert_eq!(calls.granularity(&mut granularity, &properties, 0), want, "{what}");
    }
    assert_eq!(calls.create(&mut handle, UNIT, &Properties { handle_types: 8, ..PLAIN }, 0), 800, "fabric");
    assert_eq!(calls.granularity(&mut granularity, &Properties { handle_types: 8, ..PLAIN }, 0), 0, "fabric");
    assert_eq!(calls.create(&mut handle, UNIT, &PLAIN, 1), 1, "flags");
    assert_eq!(calls.create(&mut handle, UNIT, ptr::null(), 0), 1);
    assert_eq!(calls.create(ptr::null_mut(), UNIT, &PLAIN, 0), 1);
    assert_eq!(calls.granularity(&mut granularity, &PLAIN, 2), 1, "option");
    assert_eq!((handle, calls.fake.live()), (0, [0; 9]), "something was made");
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
        let address = calls.mapped(&PLAIN, 3);
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

impl Calls {
    /// One unit of memory, mapped with these access flags.
    fn mapped(&self, properties: &Properties, access: u32) -> u64 {
        let (mut handle, mut address) = (0, 0);
        assert_eq!(self.create(&mut handle, UNIT, properties, 0), 0);
        assert_eq!(self.reserve(&mut address, UNIT, 0, 0, 0), 0);
        assert_eq!(self.map(address, UNIT, 0, handle, 0), 0);
        assert_eq!(self.set_access(address, UNIT, &[1, 0, access], 1), 0);
        address
    }
}

#[test]
fn invalid_settings_end_the_process() {
    for (name, value) in [
        ("FAKECUDA_FAIL", "cuInit"),
        ("FAKECUDA_FAIL", "cuInit:0:1"),
        ("FAKECUDA_SLOW", "cuInit:soon"),
        ("FAKECUDA_ATTRIBUTE", "102"),
        ("FAKECUDA_DEVICES", "17"),
        ("FAKECUDA_FREE", "-1"),
        ("FAKECUDA_LOG", "/nowhere/at/all"),
        ("FAKECUDA_GRANULARITY", "3000000"),
        ("FAKECUDA_GRANULARITY", "2048"),
        ("FAKECUDA_PEERS", "2"),
        ("FAKECUDA_FABRIC", "yes"),
        ("FAKECUDA_EVENTS_FAIL", ""),
        ("FAKECUDA_SPEED", "1"),
    ] {
        let fake = Copy::new().load();
        assert_eq!(
            aborts_in_fork(|| fake.set(name, value)),
            format!("fakecuda: {name}={value} is not a valid setting\n")
        );
    }
}
