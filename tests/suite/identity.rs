//! Every resource belongs to one driver object; other driver objects reject it.

#![allow(unsafe_code, reason = "the verbs are reached by an unsafe function")]

use super::support::{Copy, EXPORTABLE, code, in_fork};
use crate::support::prelude::*;

/// Pairs of drivers whose handles have equal numbers.
fn pairs() -> Vec<[Arc<dyn Verbs>; 2]> {
    let host = || Arc::new(HostDriver::new().unwrap()) as Arc<dyn Verbs>;
    let fake = || Arc::new(CudaDriver::load_from(Copy::new().load().path()).unwrap()) as Arc<dyn Verbs>;
    let same = Copy::new().load();
    let again = || Arc::new(CudaDriver::load_from(same.path()).unwrap()) as Arc<dyn Verbs>;
    vec![[host(), host()], [fake(), fake()], [again(), again()], [host(), fake()]]
}

fn device(driver: &Driver) -> Device {
    Device::find(driver, Selector::Ordinal(0)).unwrap()
}

#[test]
fn foreign_handle_with_equal_number_is_refused() {
    const SIZE: u64 = 2 << 20;
    for [one, two] in pairs() {
        let [first, second] = [&one, &two].map(|driver| driver.create(SIZE, &EXPORTABLE).unwrap());
        let address = two.reserve(SIZE, 0).unwrap();
        assert_eq!(code(two.release(first)), 1, "{two:?}");
        assert_eq!(code(two.export(first)), 1);
        assert_eq!(code(two.properties(first)), 1);
        assert_eq!(code(two.map(address, SIZE, 0, first)), 1);
        // The resources of both drivers are still valid.
        two.map(address, SIZE, 0, second).unwrap();
        two.unmap(address, SIZE).unwrap();
        two.free(address, SIZE).unwrap();
        one.release(first).unwrap();
        two.release(second).unwrap();
    }
}

#[test]
fn foreign_memory_is_not_mapped() {
    for pair in pairs() {
        let [one, two] = pair.map(internals::driver);
        let (here, there) = (device(&one), device(&two));
        let [own, other] = [&here, &there].map(|device| Allocation::create(device, 1).unwrap());
        let [addresses, elsewhere] = [&here, &there].map(|device| Reservation::new(device, own.size()).unwrap());
        for refused in [
            Mapping::at(&addresses, 0, &other, ReadWrite),
            Mapping::at(&elsewhere, 0, &own, ReadWrite),
            Mapping::side_by_side(&addresses, 0, std::slice::from_ref(&other), &here, ReadWrite),
            Mapping::side_by_side(&addresses, 0, std::slice::from_ref(&own), &there, ReadWrite),
        ] {
            assert!(matches!(&refused, Err(Error::Misuse { .. })), "{refused:?}");
        }
        assert!(matches!(here.can_access(&there), Err(Error::Misuse { .. })));
        // Each pair still works with its own driver.
        for (allocation, addresses) in [(&own, &addresses), (&other, &elsewhere)] {
            let mapping = Mapping::at(addresses, 0, allocation, ReadWrite).unwrap();
            mapping.copy_in(0, b"own").unwrap();
        }
    }
}

#[test]
fn backend_opens_once() {
    let host = || open(Choice::Only(Backend::Host)).unwrap().driver;
    let (one, two) = (host(), host());
    assert_eq!(one, two);
    assert_ne!(one, internals::driver(Arc::new(HostDriver::new().unwrap())));
    // Memory and addresses from both calls can be combined.
    let allocation = Allocation::create(&device(&one), 1).unwrap();
    let addresses = Reservation::new(&device(&two), allocation.size()).unwrap();
    Mapping::at(&addresses, 0, &allocation, ReadWrite).unwrap();
    in_fork(move || {
        let fork = open(Choice::Only(Backend::Host)).unwrap().driver;
        fork != one && fork.version().is_ok() && matches!(one.version(), Err(Error::Forked { .. }))
    });
}
