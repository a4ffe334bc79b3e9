//! Single calls of the driver.

use super::*;

cases! {
    on crate::support::Subject; every backend: [
    device_describes_itself,
    unknown_devices_are_refused,
    create_refuses_invalid_sizes,
    reserve_checks_sizes_and_keeps_alignments,
    free_takes_a_whole_unmapped_reservation,
    map_takes_empty_reserved_addresses,
    set_access_takes_whole_mappings,
    unmap_takes_whole_mappings,
    copies_need_access_to_every_byte,
    exportable_memory_alone_is_exported,
    import_returns_another_handle,
    released_handles_are_refused,
    ]
}

/// Reserved addresses and handles for single calls, released on drop.
struct Ground<'a> {
    driver: &'a dyn Verbs,
    unit: u64,
    handles: Vec<Handle>,
    reservations: Vec<(u64, u64)>,
}

impl<'a> Ground<'a> {
    fn new(subject: &'a Subject) -> Self {
        Self { driver: &*subject.verbs, unit: subject.unit(), handles: Vec::new(), reservations: Vec::new() }
    }

    fn create(&mut self, units: u64) -> Handle {
        let handle = self.driver.create(units * self.unit, &EXPORTABLE).unwrap();
        self.handles.push(handle);
        handle
    }

    fn reserve(&mut self, units: u64) -> u64 {
        let size = units * self.unit;
        let address = self.driver.reserve(size, 0).unwrap();
        self.reservations.push((address, size));
        address
    }

    /// Maps new memory at an address, without access.
    fn map(&mut self, address: u64, units: u64) -> Handle {
        let handle = self.create(units);
        self.driver.map(address, units * self.unit, 0, handle).unwrap();
        handle
    }

    fn allow(&self, address: u64, units: u64) {
        self.driver.set_access(address, units * self.unit, Location::Device(0), Some(ReadWrite)).unwrap();
    }

    fn copy_in(&self, address: u64, bytes: &[u8]) -> u32 {
        code(self.driver.copy_in(0, address, bytes))
    }

    fn copy_out(&self, address: u64, length: usize) -> u32 {
        code(self.driver.copy_out(0, address, &mut vec![0; length]))
    }

    fn read<const LENGTH: usize>(&self, address: u64) -> [u8; LENGTH] {
        let mut bytes = [0; LENGTH];
        self.driver.copy_out(0, address, &mut bytes).unwrap();
        bytes
    }
}

impl Drop for Ground<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            return;
        }
        for &(address, size) in &self.reservations {
            self.driver.unmap(address, size).unwrap();
            self.driver.free(address, size).unwrap();
        }
        for &handle in &self.handles {
            self.driver.release(handle).unwrap();
        }
    }
}

fn device_describes_itself(subject: Subject) {
    let devices = Device::all(&subject.driver).unwrap();
    assert_eq!(devices.len(), subject.verbs.device_count().unwrap() as usize);
    assert!(!devices.is_empty());
    for (ordinal, device) in devices.iter().enumerate() {
        assert_eq!(device.ordinal(), ordinal as i32);
        assert_eq!(device.backend(), subject.driver.backend());
        assert_eq!(device.name(), subject.verbs.device_name(device.ordinal()).unwrap());
        assert_eq!(device.uuid(), subject.verbs.device_uuid(device.ordinal()).unwrap());
        assert!(device.to_string().contains(&device.uuid().to_string()));
        assert_eq!(device.name().contains("no GPU"), subject.kind != Kind::Cuda, "{device}");
        device.activate().unwrap();
        subject.verbs.synchronize(device.ordinal()).unwrap();
    }
    let unshared = Properties { exportable: false, ..EXPORTABLE };
    let minimum = subject.unit();
    assert_eq!(subject.verbs.granularity(&unshared, Granularity::Minimum).unwrap(), minimum);
    let recommended = subject.verbs.granularity(&EXPORTABLE, Granularity::Recommended).unwrap();
    assert!(minimum.is_power_of_two() && recommended.is_multiple_of(minimum), "{minimum} {recommended}");
    let version = subject.driver.version().unwrap();
    match subject.kind {
        Kind::Host => assert_eq!((version, minimum), (0, 2 << 20)),
        Kind::Fake => assert_eq!((version, minimum), (13000, 2 << 20)),
        Kind::Cuda => assert!(version >= 11040, "{version}"),
    }
}

fn unknown_devices_are_refused(subject: Subject) {
    let driver = &subject.verbs;
    for ordinal in [-1, 99, i32::MAX] {
        let nowhere = Properties { location: Location::Device(ordinal), ..EXPORTABLE };
        for answer in [
            code(driver.device_name(ordinal)),
            code(driver.device_uuid(ordinal)),
            code(driver.device_attribute(ordinal, Attribute::VirtualMemoryManagement)),
            code(driver.memory_info(ordinal)),
            code(driver.activate(ordinal)),
            code(driver.synchronize(ordinal)),
            code(driver.granularity(&nowhere, Granularity::Minimum)),
            code(driver.create(subject.unit(), &nowhere)),
        ] {
            assert_eq!(answer, code::INVALID_DEVICE, "device {ordinal}");
        }
    }
}

fn create_refuses_invalid_sizes(subject: Subject) {
    let (driver, unit) = (&subject.verbs, subject.unit());
    for size in [0, 1, 4096, unit / 2, unit + 1, unit + 4096] {
        assert_eq!(code(driver.create(size, &EXPORTABLE)), INVALID, "{size} bytes");
    }
    assert_eq!(code(driver.create(4 << 40, &EXPORTABLE)), code::OUT_OF_MEMORY);
}

fn reserve_checks_sizes_and_keeps_alignments(subject: Subject) {
    let (driver, unit) = (&subject.verbs, subject.unit());
    for (size, alignment) in [(0, 0), (1, 0), (4096, 0), (unit + 4096, 0), (unit, 3)] {
        assert_eq!(code(driver.reserve(size, alignment)), INVALID, "{size} bytes, alignment {alignment}");
    }
    for alignment in [0, 4096, unit, 64 << 20] {
        let address = driver.reserve(unit, alignment).unwrap();
        assert_eq!(address % alignment.max(unit), 0, "alignment {alignment}");
        driver.free(address, unit).unwrap();
    }
}

fn free_takes_a_whole_unmapped_reservation(mut subject: Subject) {
    // A parallel test could reserve the freed addresses.
    subject.alone();
    let mut ground = Ground::new(&subject);
    let (driver, unit) = (&subject.verbs, ground.unit);
    let address = driver.reserve(2 * unit, 0).unwrap();
    for (start, size) in [(address, unit), (address, 3 * unit), (address, 0), (address + unit, unit), (4096, 2 * unit)]
    {
        assert_eq!(code(driver.free(start, size)), INVALID, "{start:#x} {size}");
    }
    ground.map(address + unit, 1);
    assert_eq!(code(driver.free(address, 2 * unit)), INVALID, "while mapped");
    driver.unmap(address + unit, unit).unwrap();
    driver.free(address, 2 * unit).unwrap();
    assert_eq!(code(driver.free(address, 2 * unit)), INVALID, "twice");
}

fn map_takes_empty_reserved_addresses(mut subject: Subject) {
    // A parallel test could reserve the freed addresses.
    subject.alone();
    let mut ground = Ground::new(&subject);
    let (driver, unit) = (&subject.verbs, ground.unit);
    let (one, two) = (ground.create(1), ground.create(2));
    let address = ground.reserve(6);
    let elsewhere = driver.reserve(unit, 0).unwrap();
    driver.free(elsewhere, unit).unwrap();
    for (what, start, size, offset, handle, want) in [
        ("nothing", address, 0, 0, one, INVALID),
        ("unreserved addresses", elsewhere, unit, 0, one, INVALID),
        ("the null address", 0, unit, 0, one, INVALID),
        ("an unaligned address", address + 4096, unit, 0, one, INVALID),
        ("half a unit on", address + unit / 2, unit, 0, one, INVALID),
        ("over the end", address + 5 * unit, 2 * unit, 0, two, INVALID),
        ("an offset", address, unit, unit, two, UNSUPPORTED),
        ("half of an allocation", address, unit, 0, two, UNSUPPORTED),
        ("twice an allocation", address, 4 * unit, 0, two, UNSUPPORTED),
    ] {
        assert_eq!(code(driver.map(start, size, offset, handle)), want, "{what}");
    }
    driver.map(address + unit, 2 * unit, 0, two).unwrap();
    for at in [1, 2] {
        assert_eq!(code(driver.map(address + at * unit, unit, 0, one)), INVALID, "over a mapping");
    }
    assert_eq!(code(driver.map(address + 2 * unit, 2 * unit, 0, two)), INVALID, "over the end of a mapping");
    assert_eq!(code(driver.map(address, 2 * unit, 0, two)), INVALID, "over the start of a mapping");
    // The addresses directly before and after the mapping are free.
    driver.map(address, unit, 0, one).unwrap();
    driver.map(address + 3 * unit, unit, 0, one).unwrap();
}

fn set_access_takes_whole_mappings(subject: Subject) {
    let mut ground = Ground::new(&subject);
    let (driver, unit) = (&subject.verbs, ground.unit);
    let address = ground.reserve(6);
    ground.map(address, 2);
    ground.map(address + 2 * unit, 1);
    for (what, start, size) in [
        ("half a unit", address, unit / 2),
        ("the first half of a mapping", address, unit),
        ("the second half of a mapping", address + unit, unit),
        ("one mapping and a half", address + unit, 2 * unit),
        ("more than is mapped", address, 4 * unit),
        ("what is not mapped", address + 3 * unit, unit),
        ("an unaligned address", address + 4096, 2 * unit),
        ("nothing", address, 0),
    ] {
        assert_eq!(code(driver.set_access(start, size, Location::Device(0), Some(ReadWrite))), INVALID, "{what}");
    }
    assert_ne!(code(driver.set_access(address, 2 * unit, Location::Device(99), Some(ReadWrite))), OK, "for no device");
    assert_eq!(ground.copy_in(address, b"early"), INVALID, "what failed gave access");
    driver.set_access(address, 3 * unit, Location::Device(0), Some(ReadWrite)).unwrap();
    for at in 0..3 {
        assert_eq!(ground.copy_in(address + at * unit, b"now"), OK);
    }
}

fn unmap_takes_whole_mappings(subject: Subject) {
    let mut ground = Ground::new(&subject);
    let (driver, unit) = (&subject.verbs, ground.unit);
    let address = ground.reserve(6);
    ground.map(address, 2);
    ground.map(address + 2 * unit, 2);
    ground.allow(address, 4);
    for (what, start, size) in [
        ("the first half", address, unit),
        ("the second half", address + unit, unit),
        ("one and a half", address, 3 * unit),
        ("nothing", address, 0),
    ] {
        assert_eq!(code(driver.unmap(start, size)), INVALID, "{what}");
    }
    assert_eq!(ground.copy_in(address, b"still there"), OK);
    driver.unmap(address, 4 * unit).unwrap();
    assert_eq!(subject.live().mappings, 0);
    assert_eq!(ground.copy_in(address, b"gone"), INVALID);
    assert_eq!(code(driver.unmap(address, 4 * unit)), OK, "again");
    assert_eq!(code(driver.unmap(address + 4 * unit, unit)), OK, "never mapped");
    ground.map(address + unit, 1);
    assert_eq!(code(driver.unmap(address, 6 * unit)), OK, "wider than what is mapped");
    assert_eq!(subject.live().mappings, 0);
}

fn copies_need_access_to_every_byte(subject: Subject) {
    let mut ground = Ground::new(&subject);
    let (driver, unit) = (&subject.verbs, ground.unit);
    // unit 0: unmapped; 1 and 2: mapped with access; 3: mapped without access; 4: unmapped
    let reserved = ground.reserve(5);
    let address = reserved + unit;
    for at in 0..3 {
        ground.map(address + at * unit, 1);
    }
    assert_eq!((ground.copy_in(address, &[1]), ground.copy_out(address, 1)), (INVALID, INVALID), "before set_access");
    ground.allow(address, 2);
    let local = 0u64;
    for (what, start, length) in [
        ("reserved only", reserved, 8),
        ("over the start", address - 4, 8),
        ("over the end of access", address + 2 * unit - 4, 8),
        ("without access", address + 2 * unit, 8),
        ("over the end of all", address + 3 * unit - 4, 8),
        ("behind the end", address + 3 * unit, 8),
        ("across everything", reserved, 5 * unit as usize),
        ("unreserved addresses", 4096, 8),
        ("this process's own memory", &raw const local as u64, 8),
        ("around the end of addresses", u64::MAX - 3, 8),
    ] {
        assert_eq!(ground.copy_in(start, &vec![0xAB; length]), INVALID, "into: {what}");
        assert_eq!(ground.copy_out(start, length), INVALID, "out of: {what}");
    }
    assert_eq!(local, 0);
    let seam = address + unit - 3;
    assert_eq!(ground.copy_in(seam, b"across"), OK);
    assert_eq!(&ground.read(seam), b"across");
    assert_eq!(&ground.read(address + unit), b"oss");
    let read = (INVALID, OK);
    let none = (INVALID, INVALID);
    let write = (OK, OK);
    for (access, want) in [(Some(ReadOnly), read), (None, none), (Some(ReadOnly), read), (Some(ReadWrite), write)] {
        driver.set_access(address, 2 * unit, Location::Device(0), access).unwrap();
        assert_eq!((ground.copy_in(address, b"some"), ground.copy_out(address, 4)), want, "{access:?}");
    }
    // A single read-only byte in the range fails the copy.
    driver.set_access(address + unit, unit, Location::Device(0), Some(ReadOnly)).unwrap();
    assert_eq!(ground.copy_in(seam, b"ACROSS"), INVALID);
    assert_eq!(&ground.read(seam), b"across");
    for start in [address, address + 2 * unit, address + 3 * unit, 0, 4096, u64::MAX] {
        assert_eq!((ground.copy_in(start, &[]), ground.copy_out(start, 0)), (OK, OK), "nothing at {start:#x}");
    }
}

fn exportable_memory_alone_is_exported(subject: Subject) {
    let (driver, unit) = (&subject.verbs, subject.unit());
    for exportable in [false, true] {
        let properties = Properties { exportable, ..EXPORTABLE };
        let handle = driver.create(unit, &properties).unwrap();
        assert_eq!(driver.properties(handle).unwrap(), properties);
        let exports = [(); 2].map(|()| driver.export(handle));
        if exportable {
            let fds = exports.map(Result::unwrap);
            assert_ne!(fds[0].as_raw_fd(), fds[1].as_raw_fd());
            assert!(fds.iter().all(|fd| closes_on_exec(fd.as_fd())));
        } else {
            assert_eq!(exports.map(code), [INVALID; 2]);
        }
        driver.release(handle).unwrap();
    }
}

fn import_returns_another_handle(subject: Subject) {
    let mut ground = Ground::new(&subject);
    let (driver, unit) = (&subject.verbs, ground.unit);
    let address = ground.reserve(2);
    let handle = ground.map(address, 1);
    let fd = driver.export(handle).unwrap();
    let imported = driver.import(fd.as_fd(), unit).unwrap();
    ground.handles.push(imported);
    assert_ne!(imported, handle);
    assert_eq!(driver.properties(imported).unwrap(), Properties { exportable: false, ..EXPORTABLE });
    assert_eq!(code(driver.export(imported)), INVALID, "exported again");
    driver.map(address + unit, unit, 0, imported).unwrap();
    ground.allow(address, 2);
    assert_eq!(ground.copy_in(address, b"one memory"), OK);
    assert_eq!(&ground.read(address + unit), b"one memory");
}

fn released_handles_are_refused(subject: Subject) {
    let mut ground = Ground::new(&subject);
    let (driver, unit) = (&subject.verbs, ground.unit);
    let address = ground.reserve(1);
    let created = driver.create(unit, &EXPORTABLE).unwrap();
    let fd = driver.export(created).unwrap();
    let imported = driver.import(fd.as_fd(), unit).unwrap();
    for handle in [created, imported] {
        driver.release(handle).unwrap();
        // NVIDIA's driver crashes on some of these calls, so the backend must reject them first.
        assert_eq!(code(driver.map(address, unit, 0, handle)), INVALID, "map");
        assert_eq!(code(driver.export(handle)), INVALID, "export");
        assert_eq!(code(driver.properties(handle)), INVALID, "properties");
        assert_eq!(code(driver.release(handle)), INVALID, "release");
    }
}
