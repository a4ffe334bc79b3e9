//! Finding the library and its symbols.

use super::*;

/// A call for one function of the library, of each part of the driver.
type Call = fn(&CudaDriver) -> Result<(), Error>;

#[test]
fn missing_symbol_is_named_when_needed() {
    let calls: [(&str, Call); 6] = [
        ("cuDeviceGetName", |driver| driver.device_name(0).map(drop)),
        ("cuMemCreate", |driver| driver.create(2 << 20, &EXPORTABLE).map(drop)),
        ("cuMemHostAlloc", |driver| driver.page_lock(0, 1).map(drop)),
        ("cuMemAlloc_v2", |driver| driver.legacy()?.allocate(0, 1).map(drop)),
        ("cuMemPoolCreate", |driver| driver.pools()?.create(0).map(drop)),
        ("cuEventCreate", |driver| driver.diagnosis()?.event_create(0).map(drop)),
    ];
    for (missing, call) in calls {
        let (fake, driver) = loaded(Copy::new().without(missing));
        match call(&driver) {
            Err(ref error @ Error::Load(LoadError::MissingSymbol { symbol, ref library })) => {
                assert_eq!((symbol, Path::new(library)), (missing, fake.path()));
                assert_eq!(error.kind(), ErrorKind::Unsupported);
                assert!(vmmfd_cli::error::hint(error).unwrap().contains("update the driver"));
            }
            other => panic!("{missing}: {other:?}"),
        }
        // Other functions work.
        assert_eq!(driver.granularity(&EXPORTABLE, Granularity::Minimum).unwrap(), 2 << 20);
    }
    let none = Copy::new().without("cuInit").load();
    let refused = CudaDriver::load_from(none.path());
    assert!(matches!(refused, Err(Error::Load(LoadError::MissingSymbol { symbol: "cuInit", .. }))), "{refused:?}");
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
