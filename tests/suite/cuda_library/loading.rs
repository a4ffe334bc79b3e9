//! Finding the library and its symbols.

use super::*;

/// Calls every verb at least once, continues after failures, and returns the errors.
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
            note(driver.retain(address).and_then(|retained| driver.release(retained.handle)));
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
    // The exporting process can't open its own handle.
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
            // The exporting process can't open its own handle.
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

#[test]
fn with_every_symbol_nothing_fails() {
    let (fake, driver) = two_devices();
    let errors = use_everything(&driver);
    assert!(errors.is_empty(), "{errors:?}");
    drop(driver);
    // Every symbol in the table is reachable for the test below, and every context was released.
    for symbol in SYMBOLS.split_whitespace() {
        assert!(fake.calls(symbol) > 0 || symbol == ELSEWHERE, "{symbol} is never called");
    }
    assert_eq!(fake.live(), [0; 9]);
}

#[test]
fn missing_symbol_is_named_when_needed() {
    for symbol in SYMBOLS.split_whitespace().filter(|symbol| *symbol != ELSEWHERE) {
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
fn older_uuid_call_is_the_fallback() {
    let (fake, driver) = loaded(Copy::new().without("cuDeviceGetUuid_v2"));
    let (whole, newer) = loaded(Copy::new());
    assert_eq!(driver.device_uuid(0).unwrap(), newer.device_uuid(0).unwrap());
    assert_eq!((fake.calls("cuDeviceGetUuid"), whole.calls("cuDeviceGetUuid_v2")), (1, 1));
    assert_eq!(whole.calls("cuDeviceGetUuid"), 0, "the newer one is preferred");
}

#[test]
fn errors_need_no_names_of_driver() {
    let (_fake, driver) = loaded(Copy::new().without("cuGetErrorName"));
    let error = driver.create(1, &EXPORTABLE).unwrap_err();
    assert_eq!(error.to_string(), "cuMemCreate failed: CUDA_ERROR_INVALID_VALUE (1)");
}

#[test]
fn stub_library_is_recognised() {
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
fn failed_load_reports_the_code() {
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
fn unknown_code_is_shown_as_number() {
    let (fake, driver) = loaded(Copy::new());
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
    // The driver has a name for this code, and this crate has none.
    fake.set("FAKECUDA_FAIL", "cuMemCreate:1:214");
    let error = driver.create(2 << 20, &EXPORTABLE).unwrap_err();
    assert_eq!(error.to_string(), "cuMemCreate failed: CUDA_ERROR_ECC_UNCORRECTABLE (214)");
}
