//! Calls that reach the driver, and the handling of their results.

use super::*;

/// Runs every step of a handoff in one process. Returns the number of calls of `symbol` before the first release.
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
fn partly_failed_call_frees_its_memory() {
    let (fake, driver) = loaded(Copy::new());
    let pools = driver.pools().unwrap();
    let (pool, imported, data) = exported_pointer(pools);
    let blocks = fake.live()[4];
    fake.set("FAKECUDA_FAIL", "cuStreamSynchronize:1:700");
    assert_eq!(code(pools.allocate(pool, 0, 1)), 700);
    assert_eq!(fake.live()[4], blocks, "after cuMemAllocFromPoolAsync");
    fake.set("FAKECUDA_FAIL", "cuMemGetAddressRange_v2:1:700");
    assert_eq!(code(pools.import_pointer(imported, 0, &data)), 700);
    assert_eq!(fake.live()[4], blocks, "after cuMemPoolImportPointer");
    // Earlier imports remain valid.
    let pointer = pools.import_pointer(imported, 0, &data).unwrap();
    fake.set("FAKECUDA_FAIL", "cuMemGetAddressRange_v2:1:700");
    assert_eq!(code(pools.import_pointer(imported, 0, &data)), 700);
    driver.copy_out(0, pointer, &mut [0]).unwrap();
    // The memory is freed even if the wait for it fails.
    fake.set("FAKECUDA_FAIL", "cuStreamSynchronize:1:700");
    assert_eq!(code(pools.free(0, pointer)), 700);
    assert_eq!(code(pools.free(0, pointer)), code::INVALID_VALUE);
    // A failed free changes nothing.
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
fn access_needs_a_reachable_device() {
    let (fake, driver) = two_devices();
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
fn contexts_are_retained_once() {
    let (fake, driver) = loaded(Copy::new());
    assert_eq!(fake.live()[3], 0, "no context before one is needed: it takes 55 to 95 ms");
    let handle = driver.create(2 << 20, &EXPORTABLE).unwrap();
    driver.release(handle).unwrap();
    assert_eq!(fake.live()[3], 0, "memory needs none");
    driver.activate(0).unwrap();
    driver.memory_info(0).unwrap();
    driver.synchronize(0).unwrap();
    thread::scope(|scope| scope.spawn(|| driver.synchronize(0)).join()).unwrap().unwrap();
    assert_eq!(fake.calls("cuDevicePrimaryCtxRetain"), 1);
    assert_eq!(fake.calls("cuCtxPushCurrent_v2"), fake.calls("cuCtxPopCurrent_v2"), "a thread's own is restored");
    drop(driver);
    assert_eq!(fake.live(), [0; 9]);
}

#[test]
fn failure_of_any_function_leaves_nothing() {
    let fake = Copy::new().load();
    let mut failures = 0;
    for symbol in SYMBOLS.split_whitespace() {
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
fn imported_memory_has_the_importers_ordinal() {
    let (_fake, both) = two_devices();
    assert_ne!(both.device_uuid(0).unwrap(), both.device_uuid(1).unwrap());
    let second = Properties { location: Location::Device(1), ..EXPORTABLE };
    let handle = both.create(2 << 20, &second).unwrap();
    let fd = both.export(handle).unwrap();
    let imported = both.import(fd.as_fd(), 2 << 20).unwrap();
    assert_eq!(both.properties(imported).unwrap().location, Location::Device(1));
    // Another process may use the memory without seeing its device.
    let (_other, one) = loaded(Copy::new());
    let foreign = one.import(fd.as_fd(), 2 << 20).unwrap();
    assert_eq!(one.properties(foreign).unwrap().location, Location::Device(-2));
    let address = one.reserve(2 << 20, 0).unwrap();
    one.map(address, 2 << 20, 0, foreign).unwrap();
    one.set_access(address, 2 << 20, Location::Device(0), Some(ReadWrite)).unwrap();
    one.copy_in(0, address, b"over NVLink").unwrap();
}
