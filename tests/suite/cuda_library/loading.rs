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
