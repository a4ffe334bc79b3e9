//! The emulated driver library, called as from C: it must be as strict as NVIDIA's, or it proves nothing.

#![allow(unsafe_code, reason = "functions of a loaded library")]

use std::{
    ffi::{CStr, CString, c_char, c_int, c_uint, c_void},
    os::fd::FromRawFd,
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

/// An event handle, passed by value.
#[repr(C)]
struct Bytes([u8; 64]);

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
    version = cuDriverGetVersion(version: *mut c_int);
    error_name = cuGetErrorName(code: c_uint, name: *mut *const c_char);
    count = cuDeviceGetCount(count: *mut c_int);
    name = cuDeviceGetName(name: *mut c_char, length: c_int, device: c_int);
    retain = cuDevicePrimaryCtxRetain(context: *mut *mut c_void, device: c_int);
    release_context = cuDevicePrimaryCtxRelease_v2(device: c_int);
    push = cuCtxPushCurrent_v2(context: *mut c_void);
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
    alloc = cuMemAlloc_v2(address: *mut u64, size: usize);
    copy_within = cuMemcpyDtoD_v2(to: u64, from: u64, size: usize);
    load = cuModuleLoadData(module: *mut usize, text: *const c_char);
    function = cuModuleGetFunction(function: *mut usize, module: usize, name: *const c_char);
    unload = cuModuleUnload(module: usize);
    launch = cuLaunchKernel(function: usize, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint,
        shared: c_uint, stream: usize, arguments: *const *const c_void, extra: usize);
    event_create = cuEventCreate(event: *mut usize, flags: c_uint);
    event_get = cuIpcGetEventHandle(handle: *mut [u8; 64], event: usize);
    event_open = cuIpcOpenEventHandle(event: *mut usize, handle: Bytes);
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
    fn ready() -> Self {
        let calls = Self::new();
        calls.enter();
        calls
    }

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
fn only_the_version_precedes_init() {
    let calls = Calls::new();
    let mut version = 0;
    let mut count = 0;
    let mut handle = 0;
    let mut name = ptr::null();
    assert_eq!(calls.version(&mut version), 0);
    assert_eq!(calls.error_name(1, &mut name), 0);
    assert_eq!(calls.count(&mut count), 3);
    assert_eq!(calls.create(&mut handle, UNIT, &PLAIN, 0), 3);
    assert_eq!(calls.synchronize(), 3);
    assert_eq!((calls.init(1), calls.count(&mut count)), (1, 3));
    assert_eq!((calls.init(0), calls.init(0), calls.count(&mut count)), (0, 0, 0));
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
fn unknown_code_has_no_name() {
    let calls = Calls::new();
    let mut name = ptr::dangling();
    assert_eq!((calls.error_name(4242, &mut name), name), (1, ptr::null()));
}

#[test]
fn name_is_cut_to_its_room() {
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
    assert_eq!((handle, calls.fake.live()), (0, [0; 9]), "something was made");
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
    // Location type, device, flags.
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
fn export_and_import_need_descriptors() {
    let calls = Calls::initialised();
    let handle = calls.created();
    let mut fd = -1;
    for (kind, flags) in [(0, 0), (2, 0), (8, 0), (1, 1)] {
        assert_eq!(calls.export(&mut fd, handle, kind, flags), 1, "{kind} {flags}");
    }
    assert_eq!(calls.export(ptr::null_mut(), handle, 1, 0), 1);
    assert_eq!((fd, calls.export(&mut fd, handle, 1, 0)), (-1, 0));
    // SAFETY: the call returned this new descriptor.
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

/// Asserts that each call fails with this code.
#[track_caller]
fn refused<const COUNT: usize>(code: u32, answers: [u32; COUNT]) {
    assert_eq!(answers, [code; COUNT]);
}

/// The shortest PTX by which the library recognizes this kernel.
const KERNEL: &CStr = c"\
.version 6.0
.target sm_50
.address_size 64
.visible .entry vmmfd_store(.param .u64 vmmfd_to, .param .u32 vmmfd_value)
{ ret; }";

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

    fn kernel(&self) -> usize {
        let (mut module, mut function) = (0, 0);
        assert_eq!(self.load(&mut module, KERNEL.as_ptr()), 0);
        assert_eq!(self.function(&mut function, module, c"vmmfd_store".as_ptr()), 0);
        function
    }

    fn store(&self, function: usize, to: u64, value: u32) -> u32 {
        let arguments = [(&raw const to).cast(), (&raw const value).cast()];
        self.launch(function, 1, 1, 1, 1, 1, 1, 0, 0, arguments.as_ptr(), 0)
    }
}

#[test]
fn kernel_runs_as_one_thread() {
    let calls = Calls::ready();
    let (mut module, mut function) = (0, 0);
    let text = KERNEL.to_str().unwrap();
    for (what, text) in [
        ("empty", String::new()),
        ("another version", text.replace("6.0", "9.9")),
        ("no size of addresses", text.replace(".address_size 64", "")),
        ("other arguments", text.replace(".u32", ".u64")),
        ("another name", text.replace("vmmfd_store", "vmmfd_stare")),
    ] {
        let text = CString::new(text).unwrap();
        assert_eq!(calls.load(&mut module, text.as_ptr()), 218, "{what}");
    }
    refused(1, [calls.load(&mut module, ptr::null()), calls.load(ptr::null_mut(), KERNEL.as_ptr())]);
    assert_eq!((module, calls.load(&mut module, KERNEL.as_ptr())), (0, 0));
    assert_eq!(calls.function(&mut function, module, c"vmmfd".as_ptr()), 500);
    assert_eq!(calls.function(&mut function, module + 1, c"vmmfd_store".as_ptr()), 400);
    assert_eq!((function, calls.function(&mut function, module, c"vmmfd_store".as_ptr())), (0, 0));
    let (address, value) = (calls.mapped(&PLAIN, 3), 5u32);
    let arguments = [(&raw const address).cast(), (&raw const value).cast()];
    let good = arguments.as_ptr();
    refused(
        1,
        [
            calls.launch(function, 2, 1, 1, 1, 1, 1, 0, 0, good, 0),
            calls.launch(function, 1, 1, 1, 1, 1, 32, 0, 0, good, 0),
            calls.launch(function, 1, 1, 1, 1, 1, 1, 1, 0, good, 0),
            calls.launch(function, 1, 1, 1, 1, 1, 1, 0, 0, good, 8),
            calls.launch(function, 1, 1, 1, 1, 1, 1, 0, 0, ptr::null(), 0),
        ],
    );
    refused(400, [calls.launch(function, 1, 1, 1, 1, 1, 1, 0, 8, good, 0), calls.store(module, address, 5)]);
    let mut seen = 0u32;
    assert_eq!((calls.store(function, address, 5), calls.synchronize()), (0, 0));
    assert_eq!((calls.copy_out((&raw mut seen).cast(), address, 4), seen), (0, 5));
    assert_eq!((calls.unload(module), calls.unload(module), calls.store(function, address, 5)), (0, 400, 400));
}

#[test]
fn faulting_store_ruins_the_context() {
    for (access, offset) in [(1, 0), (3, 2), (3, UNIT as u64)] {
        let calls = Calls::new();
        calls.fake.set("FAKECUDA_DEVICES", "2");
        let mut contexts = [ptr::null_mut(); 2];
        assert_eq!((calls.init(0), calls.retain(&mut contexts[0], 0), calls.push(contexts[0])), (0, 0, 0));
        let (address, function) = (calls.mapped(&PLAIN, access), calls.kernel());
        assert_eq!(calls.store(function, address + offset, 5), 0, "too early to tell");
        let mut free = 0;
        let mut total = 0;
        let mut byte = 0u8;
        let mut number = 0;
        refused(
            700,
            [
                calls.synchronize(),
                calls.synchronize_stream(ptr::null_mut()),
                calls.info(&mut free, &mut total),
                calls.copy_out((&raw mut byte).cast(), address, 1),
                calls.copy_within(address, address, 1),
                calls.alloc(&mut 0, 1),
                calls.load(&mut number, KERNEL.as_ptr()),
                calls.store(function, address, 5),
                calls.event_create(&mut number, 6),
            ],
        );
        assert_eq!((calls.release_context(0), calls.retain(&mut contexts[0], 0), calls.synchronize()), (0, 0, 700));
        assert_eq!((calls.retain(&mut contexts[1], 1), calls.push(contexts[1]), calls.synchronize()), (0, 0, 0));
        assert_eq!(calls.unmap(address, UNIT), 0, "nothing arrives any more");
    }
}

mod root {
    use super::*;

    #[test]
    #[ignore = "needs root: make test-all runs it as root"]
    fn foreign_users_event_is_not_mapped() {
        assert!(nix::unistd::geteuid().is_root(), "this test changes users: run it as root");
        let owner = Calls::ready();
        let same = Calls::new();
        let other = Calls::new();
        let (mut event, mut handle) = (0, [0; 64]);
        assert_eq!((owner.event_create(&mut event, 6), owner.event_get(&mut handle, event)), (0, 0));
        let opened = |calls: &Calls| {
            calls.enter();
            calls.event_open(&mut { 0 }, Bytes(handle))
        };
        in_fork(|| opened(&same) == 0);
        in_fork(|| {
            nix::unistd::setuid(nix::unistd::Uid::from_raw(12345)).unwrap();
            opened(&other) == 205
        });
    }
}

#[test]
fn fault_fails_the_named_call() {
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
fn log_lists_every_call_in_order() {
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
fn slow_call_takes_its_time() {
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
