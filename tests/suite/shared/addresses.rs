//! Memory that other code of this process allocated, shared by its address.

use vmmfd::memory::Neighbours;

use super::*;

cases! {
    on crate::support::Subject; gpus alone: [
    addresses_are_shared_without_a_copy,
    neighbours_need_permission,
    unusable_addresses_are_refused,
    failed_sharing_retains_nothing,
    ]
}

/// Memory as another library has it: allocations side by side, whose handles it holds.
struct Theirs {
    allocations: Vec<Arc<Allocation>>,
    mapping: Mapping,
}

impl Theirs {
    fn new(subject: &Subject, units: u64) -> Self {
        let (device, unit) = (subject.device(), subject.unit());
        let allocations: Vec<_> = (0..units).map(|_| Allocation::create(&device, unit).unwrap()).collect();
        // Behind the mapping, nothing of another test is mapped.
        let reservation = Reservation::new(&device, (units + 1) * unit).unwrap();
        let mapping = Mapping::side_by_side(&reservation, 0, &allocations, &device, ReadWrite).unwrap();
        Self { allocations, mapping }
    }
}

fn addresses_are_shared_without_a_copy(subject: Subject) {
    let (device, unit) = (subject.device(), subject.unit());
    let theirs = Theirs::new(&subject, 4);
    let before = subject.live();
    let start = theirs.mapping.address();
    theirs.mapping.copy_in(2 * unit - 2, b"abcd").unwrap();
    // The second range begins in the allocation where the first one ends. Nothing is in the first allocation.
    let ranges = [(start + 2 * unit - 2, 4), (start + 2 * unit + 100, 10), (start, 0)];
    let (shared, offsets) = Shared::from_addresses(&device, &ranges, Neighbours::Expose).unwrap();
    assert_eq!((shared.mapped_size(), offsets), (2 * unit, vec![unit - 2, unit + 100, 0]));
    assert_eq!((shared.access(), subject.live().handles), (ReadOnly, before.handles));
    assert_eq!(read(&shared, unit - 2, 4), b"abcd");
    assert!(matches!(shared.make_read_only(), Err(Error::Device(DeviceError::Unsupported { .. }))));
    assert!(matches!(shared.seal(), Err(Error::Misuse { .. })));
    let (again, _) = Shared::from_addresses(&device, &ranges, Neighbours::Expose).unwrap();
    drop(again);
    let opened = open(&subject, &shared, ReadWrite);
    opened.memory().copy_in(unit, b"XY").unwrap();
    let mut seen = [0; 4];
    theirs.mapping.copy_out(2 * unit - 2, &mut seen).unwrap();
    assert_eq!(&seen, b"abXY", "one memory");
    // The owner's end changes nothing for the others.
    drop(theirs);
    assert_eq!(
        (read(&shared, unit - 2, 4), read(&**opened.memory(), unit - 2, 4)),
        (b"abXY".to_vec(), b"abXY".to_vec())
    );
    drop((shared, opened));
}

fn neighbours_need_permission(subject: Subject) {
    let (device, unit) = (subject.device(), subject.unit());
    let theirs = Theirs::new(&subject, 3);
    let start = theirs.mapping.address();
    let halves = [(start, unit / 2), (start + unit / 2, unit / 2 + unit)];
    let (shared, offsets) = Shared::from_addresses(&device, &halves, Neighbours::Refuse).unwrap();
    assert_eq!((shared.size(), offsets), (2 * unit, vec![0, unit / 2]));
    match Shared::from_addresses(&device, &[(start, unit + 1), (start + 5, 10)], Neighbours::Refuse) {
        Err(error @ Error::Memory(MemoryError::Neighbours { .. })) => {
            assert!(
                matches!(error, Error::Memory(MemoryError::Neighbours { size, exposed }) if (size, exposed) == (unit + 1, unit - 1))
            );
            assert_eq!(error.kind(), ErrorKind::Usage);
        }
        other => panic!("{other:?}"),
    }
    drop(theirs.allocations);
}

fn unusable_addresses_are_refused(subject: Subject) {
    let (device, unit) = (subject.device(), subject.unit());
    let theirs = Theirs::new(&subject, 1);
    let start = theirs.mapping.address();
    let shared = |ranges: &[(u64, u64)]| Shared::from_addresses(&device, ranges, Neighbours::Expose).unwrap_err();
    let legacy = LegacyMemory::allocate(&device, unit).unwrap();
    for (range, at, reason) in [
        ((start + 1, unit), start + unit, "it is not mapped GPU memory"),
        ((4096, 1), 4096, "it is not mapped GPU memory"),
        ((legacy.address() + 7, 1), legacy.address() + 7, "its allocator does not use cuMemCreate"),
    ] {
        match shared(&[range]) {
            error @ Error::Memory(MemoryError::NotShareable { .. }) => {
                assert_eq!(error.to_string(), format!("the memory at {at:#x} can't be shared: {reason}"));
                assert!(error.hint().unwrap().contains("expandable_segments"));
            }
            other => panic!("{range:?}: {other:?}"),
        }
    }
    assert!(matches!(shared(&[(u64::MAX, 2)]), Error::Memory(MemoryError::OutOfRange { .. })));
    for none in [&[][..], &[(start, 0)]] {
        assert!(matches!(shared(none), Error::Memory(MemoryError::InvalidSize { size: 0, .. })));
    }
    let imported = Shared::create(&device, spec(unit)).unwrap();
    let imported = open(&subject, &imported, ReadOnly);
    assert!(matches!(shared(&[(imported.memory().address(), 1)]), Error::Memory(MemoryError::NotShareable { .. })));
}

fn failed_sharing_retains_nothing(subject: Subject) {
    let (device, unit) = (subject.device(), subject.unit());
    let failed = subject.fail_each_call(|| {
        let allocations = [Allocation::create(&device, unit)?, Allocation::create(&device, unit)?];
        let reservation = Reservation::new(&device, 2 * unit)?;
        let theirs = Mapping::side_by_side(&reservation, 0, &allocations, &device, ReadWrite)?;
        Shared::from_addresses(&device, &[(theirs.address(), theirs.size())], Neighbours::Refuse).map(drop)
    });
    assert_eq!(failed.iter().filter(|verb| **verb == "retain").count(), 2, "{failed:?}");
}
