//! Devices, allocations, reservations and mappings own the resources that the driver counts.

use super::*;

cases! {
    on crate::support::Subject; every backend: [
    finds_device_by_ordinal_or_uuid,
    attributes_allow_sharing,
    sizes_round_up_to_granularity,
    impossible_sizes_are_refused,
    out_of_memory_names_both_figures,
    allocation_is_exported_once,
    import_closes_its_descriptor,
    wrong_descriptor_is_closed,
    wrong_size_never_maps,
    unaligned_size_makes_no_call,
    offsets_outside_a_mapping_are_refused,
    offsets_outside_a_reservation_are_refused,
    owners_drop_in_any_order,
    threads_import_the_same_descriptor,
    ]
}

fn finds_device_by_ordinal_or_uuid(subject: Subject) {
    let device = subject.device();
    let by_uuid = Device::find(&subject.driver, Selector::Uuid(device.uuid())).unwrap();
    assert_eq!((by_uuid.ordinal(), by_uuid.uuid()), (device.ordinal(), device.uuid()));
    let pasted: Selector = device.prefixed_uuid().parse().unwrap();
    assert_eq!(pasted, Selector::Uuid(device.uuid()));
    for wanted in [Selector::Ordinal(u32::MAX), "53e9a7d2-1f0c-5b7e-9c55-0123456789ab".parse().unwrap()] {
        match Device::find(&subject.driver, wanted) {
            Err(Error::Device(DeviceError::NotFound { wanted: told, available, .. })) => {
                assert_eq!(told, wanted.to_string());
                assert!(available.contains(device.name()), "{available}");
            }
            other => panic!("{other:?}"),
        }
    }
}

fn attributes_allow_sharing(subject: Subject) {
    let device = subject.device();
    device.require_sharing().unwrap();
    for attribute in [Attribute::FabricHandle, Attribute::GpuDirectRdma, Attribute::ComputeMode] {
        assert!((0..=3).contains(&device.attribute(attribute).unwrap()), "{attribute:?}");
    }
}

fn sizes_round_up_to_granularity(subject: Subject) {
    let (device, unit) = (subject.device(), subject.unit());
    assert_eq!(device.granularity().unwrap(), unit);
    for (size, want) in [(1, unit), (unit - 1, unit), (unit, unit), (unit + 1, 2 * unit)] {
        let allocation = Allocation::create(&device, size).unwrap();
        assert_eq!(allocation.size(), want, "{size} bytes");
        let mapping = Mapping::new(&allocation, ReadWrite).unwrap();
        assert_eq!((mapping.size(), mapping.access(), mapping.address() % unit), (want, ReadWrite, 0));
        mapping.copy_in(want - 1, &[7]).unwrap();
        assert_eq!(read(&mapping, want - 1, 1), [7]);
        assert_eq!(allocation.properties(), EXPORTABLE);
    }
}

fn impossible_sizes_are_refused(subject: Subject) {
    let device = subject.device();
    let largest = u64::MAX - (subject.unit() - 1);
    for size in [0, largest + 1, u64::MAX] {
        match Allocation::create(&device, size) {
            Err(error @ Error::Memory(MemoryError::InvalidSize { .. })) => {
                assert_eq!(error.kind(), ErrorKind::Usage);
                assert!(error.to_string().ends_with("must be between 1 byte and 15.9 EiB"), "{error}");
            }
            other => panic!("{size}: {other:?}"),
        }
    }
}

fn out_of_memory_names_both_figures(subject: Subject) {
    let device = subject.device();
    let total = device.memory_info().unwrap().total;
    match Allocation::create(&device, (4 << 40) - 5) {
        Err(Error::Memory(MemoryError::OutOfMemory { device: named, size, free })) => {
            assert_eq!((named, size), (device.to_string(), 4 << 40));
            assert!(0 < free && free <= total, "{free} of {total}");
        }
        other => panic!("{other:?}"),
    }
}

fn allocation_is_exported_once(mut subject: Subject) {
    subject.alone();
    let device = subject.device();
    // The driver may open files for the first export and keep them open.
    Allocation::create(&device, 1).unwrap().export().unwrap();
    let allocation = Allocation::create(&device, 1).unwrap();
    subject.faulty.take_verbs();
    let fd = allocation.export().unwrap();
    let number = fd.as_raw_fd();
    assert!(closes_on_exec(fd));
    assert_eq!(allocation.export().unwrap().as_raw_fd(), number);
    let inode = Inode::of(fd);
    // The driver's own descriptors: one memfd on the host backend, many in NVIDIA's driver.
    let open = inode.open_here();
    assert_eq!(allocation.export().unwrap().as_raw_fd(), number);
    assert_eq!(inode.open_here(), open);
    let exports = subject.faulty.take_verbs().into_iter().filter(|verb| *verb == "export").count();
    assert_eq!(exports, 1, "exporting again costs twenty times as much as sending the same again");
    let copy = exported(&allocation);
    drop(allocation);
    match subject.kind {
        Kind::Host | Kind::Fake => assert_eq!(inode.open_here(), 1, "only the copy is left"),
        Kind::Cuda => assert_eq!(inode.open_here(), open, "one closed, and one copy made"),
    }
    drop(copy);
    subject.assert_empty();
}

fn import_closes_its_descriptor(mut subject: Subject) {
    subject.alone();
    let device = subject.device();
    let (allocation, original) = mapped(&subject, 1);
    original.copy_in(0, b"hello").unwrap();
    let fd = exported(&allocation);
    let inode = Inode::of(&fd);
    let open = inode.open_here();
    let imported = Allocation::import(&device, fd, allocation.size()).unwrap();
    let imported_size = imported.size();
    assert_eq!(imported_size, allocation.size());
    match subject.kind {
        // The host backend and the emulated driver keep a duplicate of the memfd.
        Kind::Host | Kind::Fake => assert_eq!(inode.open_here(), open),
        Kind::Cuda => assert_eq!(inode.open_here(), open - 1),
    }
    assert_eq!(code(imported.export()), INVALID);
    let mapping = Mapping::new(&imported, ReadWrite).unwrap();
    assert_eq!(read(&mapping, 0, 5), b"hello");
    // The exporter may release the memory first.
    drop((original, allocation));
    assert_eq!(read(&mapping, 0, 5), b"hello");
    drop((mapping, imported));
    if subject.kind != Kind::Cuda {
        assert_eq!(inode.open_here(), 0);
    }
}

fn wrong_descriptor_is_closed(subject: Subject) {
    let (device, unit) = (subject.device(), subject.unit());
    for (what, fd) in wrong_descriptors(unit) {
        let inode = Inode::of(&fd);
        // While it is open, a file of another test can't get its number.
        let _kept = fd.try_clone().unwrap();
        match Allocation::import(&device, fd, unit) {
            Err(error @ Error::Memory(MemoryError::NotImported { .. })) => {
                let reason = error.to_string();
                assert!(reason.starts_with("the descriptor can't be imported as memory: the "), "{what}: {reason}");
                assert!(!reason.contains("CUDA_ERROR"), "{what}: {reason}");
                let source = std::error::Error::source(&error).map(ToString::to_string);
                assert!(source.is_some_and(|source| source.ends_with("CUDA_ERROR_UNKNOWN (999)")), "{what}: {error:?}");
            }
            other => panic!("{what}: {other:?}"),
        }
        // The write end of the pipe is the same file, and other tests hold /dev/null open.
        if !what.contains("device") {
            assert_eq!(inode.open_here(), 1 + usize::from(what == "a pipe to read"), "{what}");
        }
        subject.assert_empty();
    }
}

fn wrong_size_never_maps(subject: Subject) {
    let (device, unit) = (subject.device(), subject.unit());
    let allocation = Allocation::create(&device, 2 * unit).unwrap();
    for claimed in [unit, 3 * unit, 4 * unit, 1 << 30] {
        let before = subject.live();
        match (subject.kind, Allocation::import(&device, exported(&allocation), claimed)) {
            (Kind::Host, Err(Error::Driver { code: INVALID, source: Some(reason), .. })) => {
                let reason = reason.to_string();
                assert!(reason.contains(&claimed.to_string()) && reason.contains(&(2 * unit).to_string()), "{reason}");
            }
            // A GPU's descriptor does not carry its size, so the mismatch appears only at the map call.
            (Kind::Fake | Kind::Cuda, Ok(imported)) => {
                assert_eq!(code(Mapping::new(&imported, ReadOnly)), UNSUPPORTED, "{claimed}");
            }
            (_, other) => panic!("{claimed}: {other:?}"),
        }
        assert_eq!(subject.live(), before);
    }
    let imported = Allocation::import(&device, exported(&allocation), 2 * unit).unwrap();
    Mapping::new(&imported, ReadOnly).unwrap();
}

fn unaligned_size_makes_no_call(subject: Subject) {
    let (device, unit) = (subject.device(), subject.unit());
    let allocation = Allocation::create(&device, 1).unwrap();
    for claimed in [0, 1, unit - 1, unit + 4096, u64::MAX] {
        let fd = exported(&allocation);
        subject.faulty.take_verbs();
        match Allocation::import(&device, fd, claimed) {
            Err(Error::Memory(MemoryError::Unaligned { size, granularity })) => {
                assert_eq!((size, granularity), (claimed, unit))
            }
            other => panic!("{claimed}: {other:?}"),
        }
        assert_eq!(subject.faulty.take_verbs(), [""; 0], "{claimed}");
    }
}

fn offsets_outside_a_mapping_are_refused(subject: Subject) {
    let unit = subject.unit();
    let (_allocation, mapping) = mapped(&subject, 1);
    subject.faulty.take_verbs();
    for (offset, length) in [(unit, 1), (unit - 4, 5), (0, unit + 1), (u64::MAX, 1), (u64::MAX - 3, 8)] {
        let mut bytes = vec![0; length as usize];
        for answer in [mapping.copy_in(offset, &bytes), mapping.copy_out(offset, &mut bytes)] {
            match answer {
                Err(Error::Memory(MemoryError::OutOfRange { offset: told_offset, length: told_length, size })) => {
                    assert_eq!((told_offset, told_length, size), (offset, length, unit));
                }
                other => panic!("{offset} {length}: {other:?}"),
            }
        }
    }
    assert!(subject.faulty.take_verbs().is_empty());
    mapping.copy_in(unit - 4, b"last").unwrap();
    assert_eq!(read(&mapping, unit - 4, 4), b"last");
    mapping.copy_in(unit, &[]).unwrap();
}

fn offsets_outside_a_reservation_are_refused(subject: Subject) {
    let (device, unit) = (subject.device(), subject.unit());
    let reservation = Reservation::new(&device, 2 * unit).unwrap();
    let allocation = Allocation::create(&device, unit).unwrap();
    for offset in [2 * unit, unit + 4096, u64::MAX, u64::MAX - unit + 1] {
        match Mapping::at(&reservation, offset, &allocation, ReadWrite) {
            Err(Error::Memory(MemoryError::OutOfRange { .. })) => {}
            other => panic!("{offset}: {other:?}"),
        }
    }
    assert_eq!(code(Mapping::at(&reservation, 4096, &allocation, ReadWrite)), INVALID, "an unaligned offset");
    assert_eq!(code(Reservation::new(&device, unit + 1)), INVALID);
}

fn owners_drop_in_any_order(subject: Subject) {
    let (device, unit) = (subject.device(), subject.unit());
    for order in 0..24 {
        let allocation = Allocation::create(&device, 1).unwrap();
        let reservation = Reservation::new(&device, 2 * unit).unwrap();
        let mapping = Mapping::at(&reservation, unit, &allocation, ReadWrite).unwrap();
        let imported = Allocation::import(&device, exported(&allocation), unit).unwrap();
        let view = Mapping::at(&reservation, 0, &imported, ReadOnly).unwrap();
        mapping.copy_in(0, b"there").unwrap();
        assert_eq!(read(&view, 0, 5), b"there");
        let mut owners: Vec<Box<dyn Any>> =
            vec![Box::new(allocation), Box::new(reservation), Box::new((mapping, imported)), Box::new(view)];
        let mut number = order;
        while !owners.is_empty() {
            drop(owners.remove(number % owners.len()));
            number /= owners.len() + 1;
        }
        subject.assert_empty();
    }
}

fn threads_import_the_same_descriptor(subject: Subject) {
    let device = subject.device();
    let (allocation, mapping) = mapped(&subject, 1);
    fill(&mapping, mapping.size(), 4);
    let fd = allocation.export().unwrap();
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..8 {
                    let fd = fd.try_clone_to_owned().unwrap();
                    let imported = Allocation::import(&device, fd, mapping.size()).unwrap();
                    let view = Mapping::new(&imported, ReadOnly).unwrap();
                    let found = verify(&view, view.size(), 4);
                    assert!(found.passed(), "{found:?}");
                }
            });
        }
    });
}
