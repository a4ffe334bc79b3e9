//! Finding and loading the CUDA driver library, and living with what it may answer.

use std::{
    env,
    error::Error as _,
    fs,
    os::fd::AsFd,
    path::Path,
    process::{self, Command},
    sync::Arc,
};

use vmmfd::{
    Error,
    driver::{
        self,
        Access::{ReadOnly, ReadWrite},
        Attribute, Backend, Choice, code,
    },
    error::{DeviceError, ErrorKind, LoadError, MemoryError},
    internals::{self, CudaDriver, Diagnosis, Granularity, LegacyIpc, Location, MadeFor, Pools, Verbs},
    memory::{Allocation, Device, Mapping, Region},
};
use vmmfd_cli::check::pattern::{self, Pattern};

use crate::support::{Copy, EXPORTABLE, Fake, Subject, code, in_child, in_fork};

const PEER_ACCESS_UNSUPPORTED: u32 = 217;

/// Every symbol that the CUDA backend looks for, with what it is looked for as.
const SYMBOLS: [&str; 57] = [
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceGetUuid_v2",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuCtxSynchronize",
    "cuStreamSynchronize",
    "cuMemGetInfo_v2",
    "cuMemGetAllocationGranularity",
    "cuMemCreate",
    "cuMemRelease",
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemSetAccess",
    "cuMemExportToShareableHandle",
    "cuMemImportFromShareableHandle",
    "cuMemGetAllocationPropertiesFromHandle",
    "cuMemcpyHtoD_v2",
    "cuMemcpyDtoH_v2",
    "cuDeviceCanAccessPeer",
    "cuMemGetAddressRange_v2",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuIpcGetMemHandle",
    "cuIpcOpenMemHandle_v2",
    "cuIpcCloseMemHandle",
    "cuMemPoolCreate",
    "cuMemPoolDestroy",
    "cuMemPoolExportToShareableHandle",
    "cuMemPoolImportFromShareableHandle",
    "cuMemPoolSetAccess",
    "cuMemAllocFromPoolAsync",
    "cuMemFreeAsync",
    "cuMemPoolExportPointer",
    "cuMemPoolImportPointer",
    "cuMemGetHandleForAddressRange",
    "cuMemcpyDtoD_v2",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuModuleUnload",
    "cuLaunchKernel",
    "cuEventCreate",
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuEventDestroy_v2",
    "cuIpcGetEventHandle",
    "cuIpcOpenEventHandle",
];

/// What nobody can be told of: it is only called where things are given back.
const UNHEARD: [&str; 1] = ["cuDevicePrimaryCtxRelease_v2"];

/// What one process alone never comes to: a legacy handle is opened in another.
const ELSEWHERE: &str = "cuIpcCloseMemHandle";

/// Calls every verb at least once, all of them after a failure too, and returns what failed.
fn use_everything(driver: &dyn Verbs) -> Vec<Error> {
    let mut errors = Vec::new();
    let mut note = |answer: Result<(), Error>| errors.extend(answer.err());
    note(driver.version().map(drop));
    note(driver.device_count().map(drop));
    note(driver.device_name(0).map(drop));
    note(driver.device_uuid(0).map(drop));
    note(driver.device_attribute(0, Attribute::PosixFileDescriptor).map(drop));
    note(driver.memory_info(0).map(drop));
    note(driver.activate(0));
    note(driver.synchronize(0));
    let unit = 2 << 20;
    note(driver.granularity(&EXPORTABLE, Granularity::Minimum).map(drop));
    let handle = driver.create(unit, &EXPORTABLE);
    let address = driver.reserve(unit, 0);
    if let Ok(handle) = handle {
        note(driver.properties(handle).map(drop));
        match driver.export(handle) {
            Ok(fd) => note(driver.import(fd.as_fd(), unit).and_then(|imported| driver.release(imported))),
            Err(error) => note(Err(error)),
        }
        if let Ok(address) = address {
            note(driver.map(address, unit, 0, handle));
            note(driver.set_access(address, unit, Location::Device(0), Some(ReadWrite)));
            note(driver.copy_in(0, address, &[1; 16]));
            note(driver.copy_out(0, address, &mut [0; 16]));
            note(driver.unmap(address, unit));
            note(driver.free(address, unit));
        }
        note(driver.release(handle));
    }
    note(handle.map(drop));
    note(address.map(drop));
    note(driver.page_lock(0, 1).map(drop));
    if driver.device_count().is_ok_and(|count| count > 1) {
        note(driver.can_access_peer(0, 1).map(drop));
    }
    use_legacy(driver, driver.legacy().unwrap(), &mut note);
    use_pools(driver.pools().unwrap(), &mut note);
    use_diagnosis(driver, driver.diagnosis().unwrap(), &mut note);
    errors
}

fn use_legacy(driver: &dyn Verbs, legacy: &dyn LegacyIpc, note: &mut impl FnMut(Result<(), Error>)) {
    let Ok(address) = legacy.allocate(0, 1).map_err(|error| note(Err(error))) else { return };
    note(driver.extent(0, address).map(drop));
    note(legacy.handle(0, address).map(drop));
    // Where it is from it can't be opened.
    note(legacy.open(0, &[0; 64]).map(drop).or_else(|error| match error {
        Error::Driver { code: code::INVALID_VALUE, .. } => Ok(()),
        other => Err(other),
    }));
    note(legacy.deallocate(0, address));
}

fn use_pools(pools: &dyn Pools, note: &mut impl FnMut(Result<(), Error>)) {
    let Ok(pool) = pools.create(0).map_err(|error| note(Err(error))) else { return };
    let imported = pools.export(pool).and_then(|fd| pools.import(fd.as_fd()));
    note(pools.allow(pool, 0));
    let allocated = pools.allocate(pool, 0, 1);
    if let Ok(address) = allocated {
        let data = pools.export_pointer(0, address);
        if let (Ok(imported), Ok(data)) = (&imported, &data) {
            let pointer = pools.import_pointer(*imported, 0, data);
            note(pointer.and_then(|pointer| pools.free(0, pointer)));
        }
        note(data.map(drop));
        note(pools.free(0, address));
    }
    note(allocated.map(drop));
    note(imported.and_then(|imported| pools.destroy(imported)));
    note(pools.destroy(pool));
}

fn use_diagnosis(driver: &dyn Verbs, diagnosis: &dyn Diagnosis, note: &mut impl FnMut(Result<(), Error>)) {
    note(diagnosis.library().map(drop));
    let (unit, mut told) = (2 << 20, Vec::new());
    let handle = diagnosis.create_with(0, unit, MadeFor::Rdma);
    if let (Ok(handle), Ok(address)) = (&handle, driver.reserve(unit, 0)) {
        told.push(driver.map(address, unit, 0, *handle));
        told.push(driver.set_access(address, unit, Location::Device(0), Some(ReadWrite)));
        if told.iter().all(Result::is_ok) {
            told.push(diagnosis.export_dma_buf(0, address, unit).map(drop));
            told.push(diagnosis.copy_within(0, address, address + 64, 64).map(drop));
            told.push(diagnosis.store(0, address, 1));
        }
        told.push(driver.unmap(address, unit));
        told.push(driver.free(address, unit));
    }
    told.push(handle.and_then(|handle| driver.release(handle)));
    match diagnosis.event_create(0) {
        Ok(event) => {
            told.push(diagnosis.event_record(0, event));
            told.push(diagnosis.event_wait(0, event));
            let exported = diagnosis.event_export(0, event);
            // Where it is from it can't be opened.
            told.push(exported.and_then(|exported| match diagnosis.event_open(0, &exported) {
                Err(Error::Driver { code: code::INVALID_CONTEXT, .. }) => Ok(()),
                other => other.map(drop),
            }));
            told.push(diagnosis.event_destroy(0, event));
        }
        Err(error) => told.push(Err(error)),
    }
    told.into_iter().for_each(note);
}

fn two_devices() -> Fake {
    let fake = Copy::new().load();
    fake.set("FAKECUDA_DEVICES", "2");
    fake
}

#[test]
fn with_every_symbol_nothing_fails() {
    let fake = two_devices();
    let driver = CudaDriver::load_from(fake.path()).unwrap();
    let errors = use_everything(&driver);
    assert!(errors.is_empty(), "{errors:?}");
    drop(driver);
    // So no symbol of the table is missing in the loop below, and every context was released.
    for symbol in SYMBOLS {
        assert!(fake.calls(symbol) > 0 || symbol == ELSEWHERE, "{symbol} is never called");
    }
    assert_eq!(fake.live(), [0; 9]);
}

#[test]
fn a_missing_symbol_is_an_error_that_names_it_when_it_is_needed() {
    for symbol in SYMBOLS.into_iter().filter(|symbol| *symbol != ELSEWHERE) {
        let mut copy = Copy::new().without(symbol);
        if symbol == "cuDeviceGetUuid_v2" {
            copy = copy.without("cuDeviceGetUuid");
        }
        let fake = copy.load();
        fake.set("FAKECUDA_DEVICES", "2");
        let errors = match CudaDriver::load_from(fake.path()) {
            Ok(driver) => use_everything(&driver),
            Err(error) => vec![error],
        };
        let missing: Vec<_> = errors
            .iter()
            .filter_map(|error| match error {
                Error::Load(LoadError::MissingSymbol { symbol, library }) => {
                    assert_eq!(Path::new(library), fake.path());
                    assert_eq!(error.kind(), ErrorKind::Unsupported);
                    assert!(vmmfd_cli::error::hint(error).unwrap().contains("update the driver"));
                    Some(*symbol)
                }
                _ => None,
            })
            .collect();
        if UNHEARD.contains(&symbol) {
            assert!(errors.is_empty(), "{errors:?}");
        } else {
            assert!(missing.contains(&symbol), "{symbol}: {errors:?}");
            assert!(missing.iter().all(|name| *name == symbol), "{symbol}: {missing:?}");
        }
    }
}

#[test]
fn the_older_uuid_call_serves_where_the_newer_one_is_missing() {
    let fake = Copy::new().without("cuDeviceGetUuid_v2").load();
    let driver = CudaDriver::load_from(fake.path()).unwrap();
    let whole = Copy::new().load();
    assert_eq!(
        driver.device_uuid(0).unwrap(),
        CudaDriver::load_from(whole.path()).unwrap().device_uuid(0).unwrap(),
        "the device is another one by the other name"
    );
    assert_eq!((fake.calls("cuDeviceGetUuid"), whole.calls("cuDeviceGetUuid_v2")), (1, 1));
    assert_eq!(whole.calls("cuDeviceGetUuid"), 0, "the newer one is preferred");
}

#[test]
fn without_error_names_the_number_is_still_told() {
    let fake = Copy::new().without("cuGetErrorName").load();
    let driver = CudaDriver::load_from(fake.path()).unwrap();
    let error = driver.create(1, &EXPORTABLE).unwrap_err();
    assert_eq!(error.to_string(), "cuMemCreate failed: CUDA_ERROR_INVALID_VALUE (1)");
}

#[test]
fn a_file_that_is_no_library_is_no_driver() {
    let folder = tempfile::tempdir().unwrap();
    for (name, content) in [("empty.so", &b""[..]), ("text.so", &b"not a library, and long enough to be looked at"[..])]
    {
        let path = folder.path().join(name);
        fs::write(&path, content).unwrap();
        match CudaDriver::load_from(&path) {
            Err(error @ Error::Load(LoadError::NoLibrary { .. })) => {
                assert!(error.to_string().contains(name), "{error}")
            }
            other => panic!("{other:?}"),
        }
    }
    let absent = CudaDriver::load_from(&folder.path().join("absent.so"));
    assert!(
        matches!(&absent, Err(Error::Load(LoadError::NoLibrary { tried })) if tried.contains("absent.so")),
        "{absent:?}"
    );
}

#[test]
fn the_stub_library_is_told_from_a_driver() {
    let fake = Copy::new().load();
    fake.set("FAKECUDA_FAIL", "cuInit:1:34");
    match CudaDriver::load_from(fake.path()) {
        Err(error @ Error::Load(LoadError::Stub { .. })) => {
            assert!(error.to_string().contains(fake.path().to_str().unwrap()), "{error}");
            assert!(vmmfd_cli::error::hint(&error).unwrap().contains("LD_LIBRARY_PATH"));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_driver_without_a_device_says_so() {
    for (setting, value) in [("FAKECUDA_DEVICES", "0"), ("FAKECUDA_FAIL", "cuInit:1:100")] {
        let fake = Copy::new().load();
        fake.set(setting, value);
        let answer = CudaDriver::load_from(fake.path());
        assert!(matches!(answer, Err(Error::Load(LoadError::NoDevice))), "{answer:?}");
    }
}

#[test]
fn a_driver_that_fails_is_an_error_with_its_code() {
    let fake = Copy::new().load();
    for (fault, call, code, name) in [
        ("cuInit:1:999", "cuInit", 999, "CUDA_ERROR_UNKNOWN"),
        ("cuInit:1:803", "cuInit", 803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
        ("cuDeviceGetCount:1:100", "cuDeviceGetCount", 100, "CUDA_ERROR_NO_DEVICE"),
    ] {
        fake.set("FAKECUDA_FAIL", fault);
        match CudaDriver::load_from(fake.path()) {
            Err(Error::Driver { call: told_call, code: told_code, name: told_name, source: None }) => {
                assert_eq!((told_call, told_code, &*told_name), (call, code, name));
            }
            other => panic!("{fault}: {other:?}"),
        }
    }
    CudaDriver::load_from(fake.path()).unwrap();
}

#[test]
fn a_code_that_nobody_knows_is_told_as_a_number() {
    let fake = Copy::new().load();
    let driver = CudaDriver::load_from(fake.path()).unwrap();
    for unknown in [4242, u32::MAX] {
        fake.set("FAKECUDA_FAIL", &format!("cuMemCreate:1:{unknown}"));
        let error = driver.create(2 << 20, &EXPORTABLE).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("cuMemCreate failed: an error that this build does not know ({unknown})")
        );
        assert_eq!(error.kind(), ErrorKind::System);
        assert!(error.source().is_none());
    }
    // One that this crate has no name for, but the driver has.
    fake.set("FAKECUDA_FAIL", "cuMemCreate:1:214");
    let error = driver.create(2 << 20, &EXPORTABLE).unwrap_err();
    assert_eq!(error.to_string(), "cuMemCreate failed: CUDA_ERROR_ECC_UNCORRECTABLE (214)");
}

#[test]
fn a_device_that_can_not_share_is_told_what_it_lacks() {
    for (attribute, lacks) in [(102, "cuMemCreate"), (103, "file descriptor")] {
        let fake = Copy::new().load();
        fake.set("FAKECUDA_ATTRIBUTE", &format!("{attribute}:0"));
        let subject = Subject::of(fake);
        match subject.device().require_sharing() {
            Err(Error::Device(DeviceError::Unsupported { device, feature })) => {
                assert_eq!(device, subject.device().to_string());
                assert!(feature.contains(lacks), "{feature}");
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn what_the_driver_might_not_survive_never_reaches_it() {
    let fake = Copy::new().load();
    let driver = CudaDriver::load_from(fake.path()).unwrap();
    let unit = 2 << 20;
    let address = driver.reserve(3 * unit, 0).unwrap();
    let handles = [0, 1].map(|at| {
        let handle = driver.create(unit, &EXPORTABLE).unwrap();
        driver.map(address + at * unit, unit, 0, handle).unwrap();
        handle
    });
    driver.set_access(address, 2 * unit, Location::Device(0), Some(ReadWrite)).unwrap();
    let copies = || fake.calls("cuMemcpyHtoD_v2") + fake.calls("cuMemcpyDtoH_v2");
    let local = 7u8;
    let mut wild = vec![address - 1, address + 2 * unit, &raw const local as u64, 4096, u64::MAX];
    driver.unmap(address, 3 * unit).unwrap();
    wild.extend([address, address + unit]);
    for start in wild {
        assert_eq!(code(driver.copy_in(0, start, b"xx")), code::INVALID_VALUE, "{start:#x}");
        assert_eq!(code(driver.copy_out(0, start, &mut [0; 2])), code::INVALID_VALUE, "{start:#x}");
        assert_eq!(copies(), 0, "a copy at {start:#x} reached the driver");
    }
    for handle in handles {
        driver.release(handle).unwrap();
        let before = fake.calls("");
        assert_eq!(code(driver.release(handle)), code::INVALID_VALUE);
        assert_eq!(code(driver.map(address, unit, 0, handle)), code::INVALID_VALUE);
        assert_eq!(code(driver.export(handle)), code::INVALID_VALUE);
        assert_eq!(code(driver.properties(handle)), code::INVALID_VALUE);
        assert_eq!(fake.calls(""), before, "a released handle reached the driver");
    }
    driver.free(address, 3 * unit).unwrap();
}

#[test]
fn addresses_and_pools_that_were_not_given_out_never_reach_the_driver() {
    let fake = two_devices();
    let driver = CudaDriver::load_from(fake.path()).unwrap();
    let (legacy, pools) = (driver.legacy().unwrap(), driver.pools().unwrap());
    let allocated = legacy.allocate(0, 4096).unwrap();
    let pool = pools.create(0).unwrap();
    let pooled = pools.allocate(pool, 0, 4096).unwrap();
    let imported = pools.import(pools.export(pool).unwrap().as_fd()).unwrap();
    let data = pools.export_pointer(0, pooled).unwrap();
    let pointer = pools.import_pointer(imported, 0, &data).unwrap();
    let gone = pools.create(0).unwrap();
    pools.destroy(gone).unwrap();
    let [was_allocated, was_pooled] = [legacy.allocate(0, 8192).unwrap(), pools.allocate(pool, 0, 8192).unwrap()];
    legacy.deallocate(0, was_allocated).unwrap();
    pools.free(0, was_pooled).unwrap();
    let local = 0u8;
    let wild = [0, 4096, u64::MAX, &raw const local as u64, was_allocated, was_pooled];
    let before = fake.calls("");
    for at in wild.into_iter().chain([allocated + 1, pooled, pointer]) {
        assert_eq!(code(legacy.deallocate(0, at)), code::INVALID_VALUE, "{at:#x}");
    }
    for at in wild.into_iter().chain([pooled, pointer]) {
        assert_eq!(code(legacy.handle(0, at)), code::INVALID_VALUE, "{at:#x}");
    }
    for at in wild.into_iter().chain([allocated, pooled, pointer]) {
        assert_eq!(code(legacy.close(0, at)), code::INVALID_VALUE, "{at:#x}");
    }
    for at in wild.into_iter().chain([allocated, pooled + 1, pointer + 1]) {
        assert_eq!(code(pools.free(0, at)), code::INVALID_VALUE, "{at:#x}");
    }
    for at in wild.into_iter().chain([allocated, pooled + 1, pointer]) {
        assert_eq!(code(pools.export_pointer(0, at)), code::INVALID_VALUE, "{at:#x}");
    }
    // What was taken on one device is not given back on another.
    for answer in [legacy.deallocate(1, allocated), pools.free(1, pooled), pools.free(1, pointer)] {
        assert_eq!(code(answer), code::INVALID_VALUE);
    }
    for answer in [
        code(pools.destroy(gone)),
        code(pools.export(gone)),
        code(pools.allow(gone, 0)),
        code(pools.allocate(gone, 0, 1)),
        code(pools.allocate(imported, 0, 1)),
        code(pools.allocate(pool, 0, 0)),
        code(pools.export(imported)),
        code(pools.import_pointer(gone, 0, &data)),
        code(pools.import_pointer(pool, 0, &data)),
        code(pools.destroy(pool)),
        code(pools.destroy(imported)),
    ] {
        assert_eq!(answer, code::INVALID_VALUE);
    }
    assert_eq!(fake.calls(""), before, "something reached the driver");
    for at in wild.into_iter().chain([allocated + 4095, pooled + 4095, pointer + 4095]) {
        assert_eq!(code(driver.copy_in(0, at, b"xx")), code::INVALID_VALUE, "{at:#x}");
        assert_eq!(code(driver.copy_out(0, at, &mut [0; 2])), code::INVALID_VALUE, "{at:#x}");
    }
    assert_eq!(fake.calls(""), before, "a copy reached the driver");
    for at in wild {
        assert_eq!(code(driver.extent(0, at)), code::INVALID_VALUE, "{at:#x}");
    }
    assert_eq!(code(driver.page_lock(0, 0)), code::INVALID_VALUE);
    // What was allocated was freed once, which waits.
    assert_eq!((fake.calls("cuMemGetAddressRange_v2"), fake.calls("cuMemHostAlloc")), (1, 1));
}

#[test]
fn a_pointer_imported_twice_is_freed_once() {
    let fake = Copy::new().load();
    let driver = CudaDriver::load_from(fake.path()).unwrap();
    let pools = driver.pools().unwrap();
    let pool = pools.create(0).unwrap();
    let imported = pools.import(pools.export(pool).unwrap().as_fd()).unwrap();
    let address = pools.allocate(pool, 0, 1).unwrap();
    let data = pools.export_pointer(0, address).unwrap();
    let pointer = [(); 3].map(|()| pools.import_pointer(imported, 0, &data).unwrap())[0];
    for freed in [0, 0, 1] {
        pools.free(0, pointer).unwrap();
        assert_eq!(fake.calls("cuMemFreeAsync"), freed);
    }
}

#[test]
fn what_was_taken_is_given_back_where_the_rest_of_the_call_fails() {
    let fake = Copy::new().load();
    let driver = CudaDriver::load_from(fake.path()).unwrap();
    let pools = driver.pools().unwrap();
    let pool = pools.create(0).unwrap();
    let imported = pools.import(pools.export(pool).unwrap().as_fd()).unwrap();
    let address = pools.allocate(pool, 0, 1).unwrap();
    let data = pools.export_pointer(0, address).unwrap();
    let blocks = fake.live()[4];
    fake.set("FAKECUDA_FAIL", "cuStreamSynchronize:1:700");
    assert_eq!(code(pools.allocate(pool, 0, 1)), 700);
    assert_eq!(fake.live()[4], blocks, "after cuMemAllocFromPoolAsync");
    fake.set("FAKECUDA_FAIL", "cuMemGetAddressRange_v2:1:700");
    assert_eq!(code(pools.import_pointer(imported, 0, &data)), 700);
    assert_eq!(fake.live()[4], blocks, "after cuMemPoolImportPointer");
    // But what was imported before stays.
    let pointer = pools.import_pointer(imported, 0, &data).unwrap();
    fake.set("FAKECUDA_FAIL", "cuMemGetAddressRange_v2:1:700");
    assert_eq!(code(pools.import_pointer(imported, 0, &data)), 700);
    driver.copy_out(0, pointer, &mut [0]).unwrap();
    // Freed is freed, whatever comes of waiting for it.
    fake.set("FAKECUDA_FAIL", "cuStreamSynchronize:1:700");
    assert_eq!(code(pools.free(0, pointer)), 700);
    assert_eq!(code(pools.free(0, pointer)), code::INVALID_VALUE);
    // A failure to free changes nothing.
    let allocated = driver.legacy().unwrap().allocate(0, 1).unwrap();
    for fault in ["cuMemFreeHost:1:700", "cuMemFree_v2:1:700"] {
        fake.set("FAKECUDA_FAIL", fault);
        assert_eq!(code(driver.legacy().unwrap().deallocate(0, allocated)), 700, "{fault}");
        driver.copy_in(0, allocated, &[1]).unwrap();
    }
    driver.legacy().unwrap().deallocate(0, allocated).unwrap();
    assert_eq!(fake.calls("cuMemFree_v2"), 2, "nothing is freed where work may still be going on");
}

#[test]
fn a_device_that_reaches_no_other_is_refused_its_memory() {
    let fake = two_devices();
    let driver = CudaDriver::load_from(fake.path()).unwrap();
    let handle = driver.create(2 << 20, &EXPORTABLE).unwrap();
    let address = driver.reserve(2 << 20, 0).unwrap();
    driver.map(address, 2 << 20, 0, handle).unwrap();
    let pool = driver.pools().unwrap().create(0).unwrap();
    for (setting, can, answer) in [("0", false, PEER_ACCESS_UNSUPPORTED), ("1", true, 0)] {
        fake.set("FAKECUDA_PEERS", setting);
        for (ordinal, peer) in [(0, 1), (1, 0)] {
            assert_eq!(driver.can_access_peer(ordinal, peer).unwrap(), can);
        }
        assert!(driver.can_access_peer(1, 1).unwrap(), "itself");
        assert_eq!(code(driver.set_access(address, 2 << 20, Location::Device(1), Some(ReadWrite))), answer);
        assert_eq!(code(driver.set_access(address, 2 << 20, Location::Device(0), Some(ReadWrite))), 0);
        assert_eq!(code(driver.pools().unwrap().allow(pool, 1)), answer);
        assert_eq!(code(driver.pools().unwrap().allow(pool, 0)), 0);
    }
    assert_eq!(fake.calls("cuDeviceCanAccessPeer"), 4, "none for a device and itself");
}

#[test]
fn pool_memory_is_for_the_devices_that_were_allowed() {
    let fake = two_devices();
    let driver = CudaDriver::load_from(fake.path()).unwrap();
    let pools = driver.pools().unwrap();
    let pool = pools.create(0).unwrap();
    let address = pools.allocate(pool, 0, 100).unwrap();
    driver.copy_in(0, address, b"mine").unwrap();
    assert_eq!(code(driver.copy_out(1, address, &mut [0; 4])), code::INVALID_VALUE);
    pools.allow(pool, 1).unwrap();
    let mut bytes = [0; 4];
    driver.copy_out(1, address, &mut bytes).unwrap();
    assert_eq!(&bytes, b"mine");
}

#[test]
fn a_program_can_be_tried_on_another_granularity() {
    let fake = Copy::new().load();
    fake.set("FAKECUDA_GRANULARITY", "4194304");
    let subject = Subject::of(fake);
    assert_eq!(subject.unit(), 4 << 20);
    assert_eq!(code(subject.verbs.create(2 << 20, &EXPORTABLE)), code::INVALID_VALUE);
    assert_eq!(code(subject.verbs.reserve(2 << 20, 0)), code::INVALID_VALUE);
    let allocation = Allocation::create(&subject.device(), 1).unwrap();
    assert_eq!(allocation.size(), 4 << 20);
    let mapping = Mapping::new(&allocation, ReadWrite).unwrap();
    assert_eq!(mapping.address() % (4 << 20), 0);
    mapping.copy_in((4 << 20) - 1, &[1]).unwrap();
}

#[test]
fn contexts_are_retained_once_and_released_with_the_driver() {
    let fake = Copy::new().load();
    let driver = CudaDriver::load_from(fake.path()).unwrap();
    assert_eq!(fake.live()[3], 0, "no context before one is needed: it takes 55 to 95 ms");
    let handle = driver.create(2 << 20, &EXPORTABLE).unwrap();
    driver.release(handle).unwrap();
    assert_eq!(fake.live()[3], 0, "memory needs none");
    driver.activate(0).unwrap();
    driver.memory_info(0).unwrap();
    driver.synchronize(0).unwrap();
    std::thread::scope(|scope| scope.spawn(|| driver.synchronize(0)).join()).unwrap().unwrap();
    assert_eq!(fake.calls("cuDevicePrimaryCtxRetain"), 1);
    assert_eq!(fake.calls("cuCtxPushCurrent_v2"), fake.calls("cuCtxPopCurrent_v2"), "a thread's own is restored");
    drop(driver);
    assert_eq!(fake.live(), [0; 9]);
}

/// Everything that a handoff does, in one process. Returns how often `symbol` was called before anything was given back.
fn handoff(fake: &Fake, symbol: &str) -> Result<u64, Error> {
    let before = fake.calls(symbol);
    let driver: Arc<dyn Verbs> = Arc::new(CudaDriver::load_from(fake.path())?);
    let device = Device::all(&internals::driver(driver))?.remove(0);
    device.require_sharing()?;
    let allocation = Allocation::create(&device, 1)?;
    let fd = allocation.export()?.try_clone_to_owned().unwrap();
    let mapping = Mapping::new(&allocation, ReadWrite)?;
    pattern::fill(&mapping, 0..mapping.size(), Pattern::new(9), &mut |_| Ok(()))?;
    let imported = Allocation::import(&device, fd, allocation.size())?;
    let view = Mapping::new(&imported, ReadOnly)?;
    assert!(pattern::verify(&view, 0, 0..view.size(), Pattern::new(9), &mut |_| Ok(()))?.passed());
    Ok(fake.calls(symbol) - before)
}

#[test]
fn a_failure_of_any_function_at_any_call_is_told_and_leaves_nothing() {
    let fake = Copy::new().load();
    let mut failures = 0;
    for symbol in SYMBOLS {
        let gives_back =
            ["cuDevicePrimaryCtxRelease_v2", "cuMemRelease", "cuMemUnmap", "cuMemAddressFree"].contains(&symbol);
        if gives_back || symbol == "cuDriverGetVersion" || symbol == "cuMemGetAllocationPropertiesFromHandle" {
            continue;
        }
        for n in 1..=handoff(&fake, symbol).unwrap() {
            fake.set("FAKECUDA_FAIL", &format!("{symbol}:{n}:700"));
            match handoff(&fake, symbol) {
                Err(Error::Driver { call, code: 700, name, .. }) => {
                    assert_eq!((call, &*name), (symbol, "CUDA_ERROR_ILLEGAL_ADDRESS"));
                }
                other => panic!("call {n} of {symbol}: {other:?}"),
            }
            assert_eq!(fake.live(), [0; 9], "left after the failure of call {n} of {symbol}");
            failures += 1;
        }
    }
    assert!(failures >= 30, "{failures}");
    handoff(&fake, "").unwrap();
}

#[test]
fn less_memory_than_asked_for_is_told_with_both_figures() {
    let fake = Copy::new().load();
    fake.set("FAKECUDA_FREE", &(6u64 << 20).to_string());
    let subject = Subject::of(fake);
    let device = subject.device();
    let held = Allocation::create(&device, 4 << 20).unwrap();
    match Allocation::create(&device, (2 << 20) + 1) {
        Err(Error::Memory(MemoryError::OutOfMemory { size, free, .. })) => assert_eq!((size, free), (4 << 20, 2 << 20)),
        other => panic!("{other:?}"),
    }
    drop(held);
    Allocation::create(&device, (2 << 20) + 1).unwrap();
    // Of whatever kind it is.
    let legacy = subject.verbs.legacy().unwrap();
    let address = legacy.allocate(0, 4 << 20).unwrap();
    assert_eq!(code(legacy.allocate(0, 4 << 20)), code::OUT_OF_MEMORY);
    let answer = Allocation::create(&device, 4 << 20);
    assert!(
        matches!(answer, Err(Error::Memory(MemoryError::OutOfMemory { free, .. })) if free == 2 << 20),
        "{answer:?}"
    );
    legacy.deallocate(0, address).unwrap();
    Allocation::create(&device, 4 << 20).unwrap();
}

#[test]
fn memory_of_another_device_is_told_by_the_importers_own_ordinal() {
    let fake = Copy::new().load();
    fake.set("FAKECUDA_DEVICES", "2");
    let both = CudaDriver::load_from(fake.path()).unwrap();
    assert_ne!(both.device_uuid(0).unwrap(), both.device_uuid(1).unwrap());
    let second = internals::Properties { location: Location::Device(1), ..EXPORTABLE };
    let handle = both.create(2 << 20, &second).unwrap();
    let fd = both.export(handle).unwrap();
    let imported = both.import(fd.as_fd(), 2 << 20).unwrap();
    assert_eq!(both.properties(imported).unwrap().location, Location::Device(1));
    // Another process may not see the owner, and use its memory all the same.
    let other = Copy::new().load();
    let one = CudaDriver::load_from(other.path()).unwrap();
    let foreign = one.import(fd.as_fd(), 2 << 20).unwrap();
    assert_eq!(one.properties(foreign).unwrap().location, Location::Device(-2));
    let address = one.reserve(2 << 20, 0).unwrap();
    one.map(address, 2 << 20, 0, foreign).unwrap();
    one.set_access(address, 2 << 20, Location::Device(0), Some(ReadWrite)).unwrap();
    one.copy_in(0, address, b"over NVLink").unwrap();
}

#[test]
fn access_is_for_the_device_that_it_was_set_for() {
    let fake = Copy::new().load();
    fake.set("FAKECUDA_DEVICES", "2");
    let driver = CudaDriver::load_from(fake.path()).unwrap();
    let handle = driver.create(2 << 20, &EXPORTABLE).unwrap();
    let address = driver.reserve(2 << 20, 0).unwrap();
    driver.map(address, 2 << 20, 0, handle).unwrap();
    driver.set_access(address, 2 << 20, Location::Device(1), Some(ReadWrite)).unwrap();
    assert_eq!(code(driver.copy_in(0, address, b"no")), code::INVALID_VALUE);
    driver.copy_in(1, address, b"yes").unwrap();
    driver.set_access(address, 2 << 20, Location::Device(0), Some(ReadOnly)).unwrap();
    let mut bytes = [0; 3];
    driver.copy_out(0, address, &mut bytes).unwrap();
    assert_eq!(&bytes, b"yes");
    assert_eq!(code(driver.copy_in(0, address, b"no")), code::INVALID_VALUE);
    driver.copy_in(1, address, b"and").unwrap();
}

#[test]
fn a_fork_can_not_load_the_driver_that_its_parent_initialised() {
    let fake = Copy::new().load();
    let driver = CudaDriver::load_from(fake.path()).unwrap();
    driver.activate(0).unwrap();
    let (parent, before) = (process::id(), fake.calls(""));
    let mut driver = Some(driver);
    in_fork(|| {
        let again = CudaDriver::load_from(fake.path());
        let told = matches!(again, Err(Error::Forked { initialised_by, pid })
            if initialised_by == parent && pid == process::id());
        drop(driver.take());
        told && fake.calls("") == before
    });
    driver.unwrap().synchronize(0).unwrap();
}

// What the loader finds by itself. It reads LD_LIBRARY_PATH when a program starts, so these need a process of their own.

/// What a child process finds when it opens a driver, with these files on its library path.
fn opened(test: &str, choice: Choice, library_path: &Path, environment: &[(&str, &str)]) -> String {
    let prepare = |command: &mut Command| {
        // Whatever this machine has, the child is to see what the test gives it.
        let inherited = env::vars_os().map(|(name, _)| name);
        let steering = inherited.filter(|name| {
            let name = name.to_string_lossy();
            name == "CUDA_VISIBLE_DEVICES" || name.starts_with("FAKECUDA_")
        });
        steering.for_each(|name| {
            command.env_remove(name);
        });
        command.env("LD_LIBRARY_PATH", library_path).envs(environment.iter().copied());
    };
    in_child(&format!("cuda_library::{test}"), prepare, || match driver::open(choice) {
        Ok(opened) => {
            let device = Device::find(&opened.driver, vmmfd::memory::Selector::default()).unwrap().name().to_owned();
            let fallback = opened.fallback.map_or("no fallback".to_owned(), |reason| format!("fallback: {reason}"));
            format!("{} {} | {fallback}", opened.driver.backend(), device.trim())
        }
        Err(error) => format!("error: {error}"),
    })
}

const CUDA: Choice = Choice::Only(Backend::Cuda);

#[test]
fn the_drivers_own_name_comes_before_the_one_that_stubs_have() {
    let stub = Copy::new().with_device_name("a stub");
    stub.write("libcuda.so");
    fs::copy(Copy::new().with_device_name("the driver").write("libcuda.so.1"), stub.folder().join("libcuda.so.1"))
        .unwrap();
    let found = opened("the_drivers_own_name_comes_before_the_one_that_stubs_have", CUDA, stub.folder(), &[]);
    assert_eq!(found, "cuda the driver | no fallback");
}

#[test]
fn the_name_without_a_version_serves_where_the_other_does_not_load() {
    let copy = Copy::new().with_device_name("the second");
    copy.write("libcuda.so");
    // Found first, so that a driver of this machine is not.
    fs::write(copy.folder().join("libcuda.so.1"), "no library").unwrap();
    let found = opened("the_name_without_a_version_serves_where_the_other_does_not_load", CUDA, copy.folder(), &[]);
    assert_eq!(found, "cuda the second | no fallback");
}

fn folder_without_a_driver() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in ["libcuda.so.1", "libcuda.so"] {
        fs::write(folder.path().join(name), "no library").unwrap();
    }
    folder
}

#[test]
fn where_no_library_loads_both_names_are_told() {
    let folder = folder_without_a_driver();
    let found = opened("where_no_library_loads_both_names_are_told", CUDA, folder.path(), &[]);
    assert!(found.starts_with("error: no CUDA driver library loads"), "{found}");
    assert!(found.contains("libcuda.so.1: ") && found.contains("libcuda.so: "), "{found}");
}

#[test]
fn auto_does_not_fall_back_from_a_driver_that_fails() {
    let copy = Copy::new();
    copy.write("libcuda.so.1");
    let test = "auto_does_not_fall_back_from_a_driver_that_fails";
    let found = opened(test, Choice::Auto, copy.folder(), &[("FAKECUDA_FAIL", "cuInit:1:999")]);
    assert_eq!(found, "error: cuInit failed: CUDA_ERROR_UNKNOWN (999)");
}

#[test]
fn auto_does_not_fall_back_from_a_stub() {
    let copy = Copy::new();
    copy.write("libcuda.so.1");
    let test = "auto_does_not_fall_back_from_a_stub";
    let found = opened(test, Choice::Auto, copy.folder(), &[("FAKECUDA_FAIL", "cuInit:1:34")]);
    assert_eq!(found, "error: libcuda.so.1 is the CUDA toolkit's stub library, not a driver");
}

#[test]
fn auto_does_not_fall_back_from_a_driver_that_is_too_old() {
    let copy = Copy::new().without("cuInit");
    copy.write("libcuda.so.1");
    let test = "auto_does_not_fall_back_from_a_driver_that_is_too_old";
    let found = opened(test, Choice::Auto, copy.folder(), &[]);
    assert_eq!(found, "error: the driver library libcuda.so.1 has no cuInit: the driver is too old for this");
}
