//! Memory that the CPU can access: page-locked memory, windows on mappings, host memory of a NUMA node, and sealed memory.

use crate::support::prelude::*;

const INVALID: u32 = code::INVALID_VALUE;
const DEVICE: Location = Location::Device(0);
const CPU: Location = Location::HostNuma(0);
const ON_HOST: Properties = Properties { location: CPU, ..EXPORTABLE };

cases! {
    on crate::support::Subject; every backend: [
    extent_is_the_containing_mapping,
    page_locked_memory_is_zeroed_and_private,
    page_locked_memory_outlives_its_driver,
    numa_host_memory_is_shared,
    cpu_can_not_access_device_memory,
    window_needs_full_cpu_access,
    open_window_prevents_unmap_and_change,
    a_window_outlives_its_driver,
    seals_are_set_or_the_call_fails,
    ]
}

/// Returns another driver of the same kind. Where possible it shares no state with the first.
fn another(subject: &Subject) -> (Arc<dyn Verbs>, Option<Fake>) {
    match subject.kind {
        Kind::Host => (Arc::new(HostDriver::new().unwrap()), None),
        Kind::Fake => {
            let fake = Copy::new().load();
            (Arc::new(CudaDriver::load_from(fake.path()).unwrap()), Some(fake))
        }
        Kind::Cuda => (Arc::new(CudaDriver::load().unwrap()), None),
    }
}

fn extent_is_the_containing_mapping(mut subject: Subject) {
    subject.alone();
    let (driver, unit) = (&subject.verbs, subject.unit());
    let mapped = Mapped::new(&**driver, &EXPORTABLE, 2);
    let beside = driver.reserve(2 * unit, 0).unwrap();
    for offset in [0, 1, unit, 2 * unit - 1] {
        assert_eq!(driver.extent(0, mapped.address + offset).unwrap(), (mapped.address, 2 * unit));
    }
    assert_eq!(code(driver.extent(99, mapped.address)), code::INVALID_DEVICE);
    let local = 0u8;
    for (what, address) in [("reserved", beside), ("this process's", &raw const local as u64), ("no", u64::MAX)] {
        assert_eq!(code(driver.extent(0, address)), INVALID, "{what} memory");
    }
    driver.free(beside, 2 * unit).unwrap();
    let address = mapped.address;
    mapped.end();
    assert_eq!(code(driver.extent(0, address)), INVALID, "unmapped");
}

// Page-locked memory

fn page_locked_memory_is_zeroed_and_private(subject: Subject) {
    let driver = &subject.verbs;
    let memory = Mapped::new(&**driver, &EXPORTABLE, 1);
    for round in 1..=2 {
        let mut locked = driver.page_lock(0, 100_001).unwrap();
        assert_eq!((locked.size(), locked.len()), (100_001, 100_001));
        assert!(locked.iter().all(|byte| *byte == 0), "what was there before is still there");
        locked.fill(round);
        driver.copy_in(0, memory.address, &locked).unwrap();
        locked.fill(9);
        driver.copy_out(0, memory.address, &mut locked[1..]).unwrap();
        assert_eq!((locked[0], locked[1], locked[100_000]), (9, round, round));
        let count = || subject.fake.as_ref().map_or(1, |fake| fake.live()[6]);
        let before = count();
        drop(locked);
        assert_eq!(count(), before - subject.fake.iter().count() as u64, "it is given back");
    }
    assert_eq!(code(driver.page_lock(0, 0)), INVALID);
    assert_eq!(code(driver.page_lock(99, 4096)), code::INVALID_DEVICE);
    let refused = code(driver.page_lock(0, 1 << 50));
    assert!(refused == code::OUT_OF_MEMORY || subject.kind == Kind::Cuda && refused != 0, "{refused}");
    memory.end();
}

fn page_locked_memory_outlives_its_driver(subject: Subject) {
    let (driver, fake) = another(&subject);
    let mut locked = driver.page_lock(0, 4096).unwrap();
    drop(driver);
    locked[4095] = 1;
    assert_eq!(locked.iter().map(|byte| u64::from(*byte)).sum::<u64>(), 1);
    drop(locked);
    if let Some(fake) = fake {
        assert_eq!(fake.live(), [0; 9], "the context is kept");
    }
}

// Host memory

fn numa_host_memory_is_shared(subject: Subject) {
    let (driver, unit) = (&subject.verbs, subject.unit());
    assert_eq!(driver.device_attribute(0, Attribute::HostNumaVirtualMemoryManagement).unwrap(), 1);
    assert!(driver.device_attribute(0, Attribute::HostNumaId).unwrap() >= 0);
    let mapped = Mapped::new(&**driver, &ON_HOST, 1).with_access(CPU);
    assert_eq!(mapped.size, unit);
    let location = if subject.kind == Kind::Host { DEVICE } else { CPU };
    assert_eq!(driver.properties(mapped.handle).unwrap(), Properties { location, ..EXPORTABLE });
    let fd = driver.export(mapped.handle).unwrap();
    let imported = driver.import(fd.as_fd(), unit).unwrap();
    let told = driver.properties(imported).unwrap();
    assert_eq!(told, Properties { location, exportable: false, ..EXPORTABLE });
    let address = driver.reserve(2 * unit, 0).unwrap();
    assert_eq!(code(driver.map(address, 2 * unit, 0, imported)), code::NOT_SUPPORTED, "another size");
    driver.map(address, unit, 0, imported).unwrap();
    driver.set_access(address, unit, CPU, Some(ReadWrite)).unwrap();
    driver.set_access(address, unit, DEVICE, Some(ReadOnly)).unwrap();
    let window = driver.window(address, unit).unwrap();
    driver.copy_in(0, mapped.address, b"by the device").unwrap();
    let mut bytes = [0; 13];
    window.read(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"by the device");
    if subject.kind != Kind::Host {
        // On the host backend the CPU is the device, so both have the same access.
        assert_eq!(code(driver.copy_in(0, address, b"no")), INVALID, "the device may only read there");
        window.write(0, b"by the CPU").unwrap();
        assert_eq!(&mapped.read(0), b"by the CPU");
    }
    drop(window);
    driver.unmap(address, unit).unwrap();
    driver.free(address, 2 * unit).unwrap();
    driver.release(imported).unwrap();
    mapped.end();
}

fn cpu_can_not_access_device_memory(subject: Subject) {
    let driver = &subject.verbs;
    let nowhere = Properties { location: Location::HostNuma(99), ..EXPORTABLE };
    assert_eq!(code(driver.create(subject.unit(), &nowhere)), INVALID);
    let mapped = Mapped::new(&**driver, &EXPORTABLE, 1);
    let given = code(driver.set_access(mapped.address, mapped.size, CPU, Some(ReadWrite)));
    let window = driver.window(mapped.address, mapped.size);
    match subject.kind {
        Kind::Host => assert_eq!((given, code(window)), (0, 0)),
        Kind::Fake | Kind::Cuda => assert_eq!((given, code(window)), (code::NOT_SUPPORTED, INVALID)),
    }
    mapped.end();
}

// Windows

fn window_needs_full_cpu_access(subject: Subject) {
    let (driver, unit) = (&subject.verbs, subject.unit());
    let address = driver.reserve(3 * unit, 0).unwrap();
    let handles = [0, 1].map(|at| {
        let handle = driver.create(unit, &ON_HOST).unwrap();
        driver.map(address + at * unit, unit, 0, handle).unwrap();
        handle
    });
    driver.set_access(address, unit, CPU, Some(ReadWrite)).unwrap();
    for (what, start, size) in [
        ("nothing", address, 0),
        ("what is not accessible", address + unit, unit),
        ("more than is accessible", address, unit + 1),
        ("more than is mapped", address, 3 * unit),
        ("what is not mapped", address + 2 * unit, 1),
        ("what is before", address - 1, 2),
        ("around the end of addresses", u64::MAX - 1, 4),
    ] {
        assert_eq!(code(driver.window(start, size)), INVALID, "{what}");
    }
    driver.set_access(address + unit, unit, CPU, Some(ReadOnly)).unwrap();
    let both = driver.window(address + unit - 3, 6).unwrap();
    both.read(0, &mut [0; 6]).unwrap();
    assert_eq!(code(both.write(0, b"x")), INVALID, "one byte that is only read is enough");
    assert_eq!(code(driver.unmap(address + unit, unit)), INVALID, "what a window ends in");
    driver.window(address, unit).unwrap().write(0, b"x").unwrap();
    drop(both);
    if subject.kind != Kind::Host {
        driver.set_access(address, 2 * unit, DEVICE, Some(ReadWrite)).unwrap();
        driver.set_access(address, 2 * unit, CPU, None).unwrap();
        assert_eq!(code(driver.window(address, unit)), INVALID, "the device's access is not the CPU's");
    }
    driver.unmap(address, 3 * unit).unwrap();
    assert_eq!(code(driver.window(address, unit)), INVALID, "unmapped");
    driver.free(address, 3 * unit).unwrap();
    handles.into_iter().for_each(|handle| driver.release(handle).unwrap());
}

fn open_window_prevents_unmap_and_change(subject: Subject) {
    let (driver, unit) = (&subject.verbs, subject.unit());
    let mapped = Mapped::new(&**driver, &ON_HOST, 2).with_access(CPU);
    let beside = Mapped::new(&**driver, &ON_HOST, 1).with_access(CPU);
    let windows = [(unit, 1), (unit, 1), (2 * unit - 1, 1)].map(|(at, size)| driver.window(mapped.address + at, size));
    let mut windows: Vec<_> = windows.into_iter().map(Result::unwrap).collect();
    while !windows.is_empty() {
        let before = subject.fake.as_ref().map(|fake| fake.calls(""));
        assert_eq!(code(driver.unmap(mapped.address, mapped.size)), INVALID);
        for (location, access) in [(DEVICE, None), (DEVICE, Some(ReadWrite)), (CPU, Some(ReadOnly)), (CPU, None)] {
            assert_eq!(code(driver.set_access(mapped.address, mapped.size, location, access)), INVALID);
        }
        assert_eq!(code(driver.free(mapped.address, mapped.size)), INVALID);
        assert_eq!(subject.fake.as_ref().map(|fake| fake.calls("")), before, "none of it reached the driver");
        driver.set_access(beside.address, unit, CPU, Some(ReadOnly)).unwrap();
        windows.pop().unwrap().write(0, b"x").unwrap();
    }
    driver.set_access(mapped.address, mapped.size, CPU, Some(ReadOnly)).unwrap();
    mapped.end();
    beside.end();
}

fn a_window_outlives_its_driver(subject: Subject) {
    let (driver, _fake) = another(&subject);
    let mapped = Mapped::new(&*driver, &ON_HOST, 1).with_access(CPU);
    let (window, other) = (driver.window(mapped.address, 4096).unwrap(), driver.window(mapped.address, 1).unwrap());
    drop(driver);
    for window in [other, window] {
        window.write(0, b"!").unwrap();
        let mut byte = [0];
        window.read(0, &mut byte).unwrap();
        assert_eq!(&byte, b"!");
    }
}

// Sealed memory

fn seals_are_set_or_the_call_fails(subject: Subject) {
    let (driver, unit) = (&subject.verbs, subject.unit());
    assert_eq!(code(driver.create(unit, &Properties { immutable: true, ..EXPORTABLE })), INVALID);
    let handle = driver.create(unit, &EXPORTABLE).unwrap();
    assert!(!driver.properties(handle).unwrap().immutable);
    let enforced = driver.seal(handle).unwrap();
    assert_eq!(enforced, subject.kind == Kind::Host);
    assert_eq!(driver.properties(handle).unwrap(), Properties { immutable: enforced, ..EXPORTABLE });
    assert_eq!(driver.seal(handle).unwrap(), enforced, "again");
    driver.release(handle).unwrap();
    assert_eq!(code(driver.seal(handle)), INVALID, "released");
}
