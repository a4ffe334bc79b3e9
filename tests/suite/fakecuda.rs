//! The emulated driver library itself, called as C calls it: it must be as strict as NVIDIA's, or it proves nothing.

#![allow(unsafe_code, reason = "functions of a loaded library")]

use std::{
    env,
    ffi::{c_char, c_int, c_uint, c_void},
    fs,
    os::fd::{FromRawFd, OwnedFd},
    process::{self, Command},
    ptr,
    time::{Duration, Instant},
};

use crate::support::{Copy, Fake, aborts_in_fork, in_child, in_fork};

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

/// The functions of a copy of the library that this file calls. All of them check what they are given, and refuse null.
struct Calls {
    fake: Fake,
}

macro_rules! calls {
    ($($method:ident = $name:ident($($arg:ident: $type:ty),*);)*) => {
        impl Calls {
            $(fn $method(&self, $($arg: $type),*) -> u32 {
                // SAFETY: the type is that of the function of this name, and the tests pass good pointers or null.
                unsafe { self.fake.function::<unsafe extern "C" fn($($type),*) -> c_uint>(stringify!($name))($($arg),*) }
            })*
        }
    };
}

calls! {
    init = cuInit(flags: c_uint);
    version = cuDriverGetVersion(version: *mut c_int);
    error_name = cuGetErrorName(code: c_uint, name: *mut *const c_char);
    count = cuDeviceGetCount(count: *mut c_int);
    name = cuDeviceGetName(name: *mut c_char, length: c_int, device: c_int);
    retain = cuDevicePrimaryCtxRetain(context: *mut *mut c_void, device: c_int);
    release_context = cuDevicePrimaryCtxRelease_v2(device: c_int);
    push = cuCtxPushCurrent_v2(context: *mut c_void);
    pop = cuCtxPopCurrent_v2(context: *mut *mut c_void);
    synchronize = cuCtxSynchronize();
    synchronize_stream = cuStreamSynchronize(stream: *mut c_void);
    info = cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    granularity = cuMemGetAllocationGranularity(granularity: *mut usize, properties: *const Properties, option: c_uint);
    create = cuMemCreate(handle: *mut u64, size: usize, properties: *const Properties, flags: u64);
    release = cuMemRelease(handle: u64);
    reserve = cuMemAddressReserve(address: *mut u64, size: usize, alignment: usize, wanted: u64, flags: u64);
    map = cuMemMap(address: u64, size: usize, offset: usize, handle: u64, flags: u64);
    unmap = cuMemUnmap(address: u64, size: usize);
    set_access = cuMemSetAccess(address: u64, size: usize, access: *const [u32; 3], count: usize);
    export = cuMemExportToShareableHandle(fd: *mut c_int, handle: u64, kind: c_uint, flags: u64);
    import = cuMemImportFromShareableHandle(handle: *mut u64, fd: *mut c_void, kind: c_uint);
    properties = cuMemGetAllocationPropertiesFromHandle(properties: *mut Properties, handle: u64);
    copy_in = cuMemcpyHtoD_v2(to: u64, from: *const c_void, size: usize);
    copy_out = cuMemcpyDtoH_v2(to: *mut c_void, from: u64, size: usize);
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

    fn created(&self) -> u64 {
        let mut handle = 0;
        assert_eq!(self.create(&mut handle, UNIT, &PLAIN, 0), 0);
        handle
    }
}

#[test]
fn nothing_but_its_version_is_told_before_init() {
    let calls = Calls::new();
    let (mut version, mut count, mut handle, mut name) = (0, 0, 0, ptr::null());
    assert_eq!(calls.version(&mut version), 0);
    assert_eq!(calls.error_name(1, &mut name), 0);
    assert_eq!(calls.count(&mut count), 3);
    assert_eq!(calls.create(&mut handle, UNIT, &PLAIN, 0), 3);
    assert_eq!(calls.synchronize(), 3);
    assert_eq!((calls.init(1), calls.count(&mut count)), (1, 3));
    assert_eq!((calls.init(0), calls.init(0), calls.count(&mut count)), (0, 0, 0));
}

#[test]
fn a_fork_is_not_initialised() {
    let calls = Calls::initialised();
    in_fork(|| {
        let mut count = 0;
        (calls.count(&mut count), calls.init(0)) == (3, 3)
    });
    let fresh = Calls::new();
    in_fork(|| fresh.init(0) == 0);
}

#[test]
fn an_unknown_code_has_no_name() {
    let calls = Calls::new();
    let mut name = ptr::dangling();
    assert_eq!((calls.error_name(4242, &mut name), name), (1, ptr::null()));
}

#[test]
fn a_name_is_cut_to_its_room() {
    let calls = Calls::initialised();
    let mut name = [0x55 as c_char; 16];
    assert_eq!(calls.name(name.as_mut_ptr(), 9, 0), 0);
    assert_eq!(name[..10].iter().map(|byte| *byte as u8).collect::<Vec<_>>(), b"fakecuda\0\x55");
    assert_eq!(calls.name(name.as_mut_ptr(), 0, 0), 1);
    assert_eq!(calls.name(ptr::null_mut(), 9, 0), 1);
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
    assert_eq!((handle, calls.fake.live()), (0, [0; 7]), "something was made");
}

#[test]
fn addresses_and_mappings_take_no_flags() {
    let calls = Calls::initialised();
    let handle = calls.created();
    let mut address = 0;
    assert_eq!(calls.reserve(&mut address, UNIT, 0, 0, 1), 1);
    assert_eq!(calls.reserve(&mut address, UNIT, 0, 4096, 0), 1, "a wished address");
    assert_eq!(calls.reserve(ptr::null_mut(), UNIT, 0, 0, 0), 1);
    assert_eq!(calls.reserve(&mut address, UNIT, 0, 0, 0), 0);
    assert_eq!(calls.map(address, UNIT, 0, handle, 1), 1);
    assert_eq!(calls.map(address, UNIT, 0, handle, 0), 0);
    // Kind of location, device, flags.
    for (access, count, want) in [
        ([1, 0, 2], 1, 1),
        ([1, 0, 4], 1, 1),
        ([2, 0, 3], 1, 1),
        ([1, 1, 3], 1, 101),
        ([1, 0, 3], 0, 1),
        ([1, 0, 3], 2, 1),
        ([1, 0, 3], 1, 0),
    ] {
        assert_eq!(calls.set_access(address, UNIT, &access, count), want, "{access:?} {count}");
    }
    assert_eq!(calls.set_access(address, UNIT, ptr::null(), 1), 1);
}

#[test]
fn export_and_import_are_of_descriptors_alone() {
    let calls = Calls::initialised();
    let handle = calls.created();
    let mut fd = -1;
    for (kind, flags) in [(0, 0), (2, 0), (8, 0), (1, 1)] {
        assert_eq!(calls.export(&mut fd, handle, kind, flags), 1, "{kind} {flags}");
    }
    assert_eq!(calls.export(ptr::null_mut(), handle, 1, 0), 1);
    assert_eq!((fd, calls.export(&mut fd, handle, 1, 0)), (-1, 0));
    // SAFETY: the call gave it out just now.
    let _owned = unsafe { OwnedFd::from_raw_fd(fd) };
    let shareable = ptr::without_provenance_mut(fd as usize);
    let mut imported = 0;
    assert_eq!(calls.import(&mut imported, shareable, 8), 1);
    assert_eq!(calls.import(ptr::null_mut(), shareable, 1), 1);
    for wrong in [-1isize as usize, 1 << 20] {
        assert_eq!(calls.import(&mut imported, ptr::without_provenance_mut(wrong), 1), 999);
    }
    assert_eq!(calls.import(&mut imported, shareable, 1), 0);
    let mut properties = Properties { kind: 77, handle_types: 77, location_kind: 77, ..PLAIN };
    assert_eq!(calls.properties(&mut properties, imported), 0);
    let seen = (properties.kind, properties.handle_types, properties.location_kind, properties.location_id);
    assert_eq!(seen, (1, 0, 1, 0));
    assert_eq!(calls.export(&mut fd, imported, 1, 0), 1, "exported again");
    assert_eq!((calls.release(imported), calls.release(imported)), (0, 1));
}

#[test]
fn copies_need_a_current_context_that_is_retained() {
    let calls = Calls::initialised();
    let mut bytes = [0u8; 4];
    let (mut free, mut total, mut context) = (0, 0, ptr::null_mut());
    let answers = |calls: &Calls, bytes: &mut [u8; 4], free: &mut usize, total: &mut usize| {
        [
            calls.synchronize(),
            calls.info(free, total),
            calls.copy_in(0, bytes.as_ptr().cast(), 0),
            calls.copy_out(bytes.as_mut_ptr().cast(), 0, 0),
        ]
    };
    assert_eq!(answers(&calls, &mut bytes, &mut free, &mut total), [201; 4]);
    assert_eq!(calls.push(ptr::null_mut()), 201);
    assert_eq!(calls.pop(&mut context), 201);
    assert_eq!(calls.retain(&mut context, 1), 101);
    assert_eq!(calls.retain(&mut context, 0), 0);
    assert_eq!(answers(&calls, &mut bytes, &mut free, &mut total), [201; 4], "retained, but not current");
    assert_eq!(calls.push(context), 0);
    assert_eq!(answers(&calls, &mut bytes, &mut free, &mut total), [0; 4]);
    assert_eq!((calls.info(ptr::null_mut(), &mut total), calls.copy_in(0, ptr::null(), 4)), (1, 1));
    let other_thread = std::thread::scope(|scope| scope.spawn(|| Calls::synchronize(&calls)).join());
    assert_eq!(other_thread.unwrap(), 201, "a thread has its own");
    assert_eq!((calls.release_context(0), calls.release_context(0)), (0, 201));
    assert_eq!(calls.synchronize(), 709, "released while current");
    let mut popped = ptr::null_mut();
    assert_eq!((calls.pop(&mut popped), popped), (0, context));
    assert_eq!(calls.push(context), 201);
}

#[test]
fn a_dead_handle_ends_the_process_as_it_would_with_nvidias_driver() {
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
fn unmapping_under_a_copy_that_may_still_arrive_ends_the_process_as_it_would_ruin_a_gpus_context() {
    let bytes = [1u8; 16];
    let copied_and_unmapped = |calls: &Calls, wait: &dyn Fn() -> u32| {
        let (mut context, mut address, handle) = (ptr::null_mut(), 0, calls.created());
        assert_eq!((calls.retain(&mut context, 0), calls.push(context)), (0, 0));
        assert_eq!(calls.reserve(&mut address, UNIT, 0, 0, 0), 0);
        assert_eq!(calls.map(address, UNIT, 0, handle, 0), 0);
        assert_eq!(calls.set_access(address, UNIT, &[1, 0, 3], 1), 0);
        assert_eq!(calls.copy_in(address, bytes.as_ptr().cast(), bytes.len()), 0);
        assert_eq!(wait(), 0);
        assert_eq!(calls.unmap(address, UNIT), 0);
    };
    let calls = Calls::initialised();
    copied_and_unmapped(&calls, &|| calls.synchronize_stream(ptr::null_mut()));
    copied_and_unmapped(&calls, &|| calls.synchronize());
    let calls = Calls::new();
    let told = aborts_in_fork(|| {
        assert_eq!(calls.init(0), 0);
        copied_and_unmapped(&calls, &|| 0);
    });
    assert!(told.starts_with("fakecuda: cuMemUnmap under a copy to "), "{told}");
}

// The settings

#[test]
fn a_fault_fails_the_call_that_it_names_and_does_nothing() {
    let calls = Calls::initialised();
    calls.fake.set("FAKECUDA_FAIL", "cuMemCreate:2:801,cuMemCreate:3:2,cuMemRelease:1:999");
    let mut handles = [0; 4];
    let answers = handles.each_mut().map(|handle| calls.create(handle, UNIT, &PLAIN, 0));
    assert_eq!(answers, [0, 801, 2, 0]);
    assert_eq!((handles[1], handles[2], calls.fake.live()[0]), (0, 0, 2));
    assert_eq!((calls.release(handles[0]), calls.release(handles[0])), (999, 0));
    assert_eq!((calls.fake.calls("cuMemCreate"), calls.fake.calls("cuMemMap"), calls.fake.calls("")), (4, 0, 7));
}

#[test]
fn the_log_tells_every_call_in_order_with_its_process() {
    let copy = Copy::new();
    let log = copy.folder().join("log");
    let calls = Calls { fake: copy.load() };
    calls.fake.set("FAKECUDA_LOG", log.to_str().unwrap());
    calls.init(0);
    calls.synchronize();
    let pid = process::id();
    assert_eq!(fs::read_to_string(&log).unwrap(), format!("{pid} cuInit\n{pid} cuCtxSynchronize\n"));
}

#[test]
fn a_slow_call_takes_its_time() {
    let calls = Calls::new();
    calls.fake.set("FAKECUDA_SLOW", "cuInit:60");
    let started = Instant::now();
    assert_eq!(calls.init(0), 0);
    assert!(started.elapsed() >= Duration::from_millis(60));
}

#[test]
fn settings_of_the_environment_are_obeyed() {
    let copy = Copy::new();
    let path = copy.write("libfakecuda.so");
    let prepare = |command: &mut Command| {
        command.env("FAKECUDA_DEVICES", "3").env("FAKECUDA_FAIL", "cuDeviceGetCount:1:46").env("LIBRARY", &path);
        command.env_remove("CUDA_VISIBLE_DEVICES");
    };
    let answer = in_child("fakecuda::settings_of_the_environment_are_obeyed", prepare, || {
        let calls = Calls { fake: Fake::load(env::var_os("LIBRARY").unwrap().into()) };
        let mut count = 0;
        format!("{} {} {} {count}", calls.init(0), calls.count(&mut count), calls.count(&mut count))
    });
    assert_eq!(answer, "0 46 0 3");
}

#[test]
fn settings_that_make_no_sense_end_the_process() {
    for (name, value) in [
        ("FAKECUDA_FAIL", "cuInit"),
        ("FAKECUDA_FAIL", "cuInit:0:1"),
        ("FAKECUDA_SLOW", "cuInit:soon"),
        ("FAKECUDA_ATTRIBUTE", "102"),
        ("FAKECUDA_DEVICES", "17"),
        ("FAKECUDA_FREE", "-1"),
        ("FAKECUDA_LOG", "/nowhere/at/all"),
        ("FAKECUDA_SPEED", "1"),
    ] {
        let fake = Copy::new().load();
        assert_eq!(aborts_in_fork(|| fake.set(name, value)), format!("fakecuda: {name}={value} makes no sense here\n"));
    }
}
