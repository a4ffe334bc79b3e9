//! Failed calls, and forks.

use super::*;

cases! {
    on crate::support::Subject; every backend: [
    unexplained_out_of_memory_keeps_code,
    failed_release_frees_the_rest,
    every_call_fails_in_a_fork,
    ]
}

fn unexplained_out_of_memory_keeps_code(subject: Subject) {
    let device = subject.device();
    // Enough memory is free, so sizes would not explain the failure.
    subject.faulty.fail(Fault::Verb("create"), code::OUT_OF_MEMORY);
    assert_eq!(code(Allocation::create(&device, 1)), code::OUT_OF_MEMORY);
    subject.faulty.mend();
    subject.faulty.fail(Fault::Verb("memory_info"), 4242);
    assert_eq!(code(Allocation::create(&device, 4 << 40)), code::OUT_OF_MEMORY);
}

fn failed_release_frees_the_rest(subject: Subject) {
    let (device, unit) = (subject.device(), subject.unit());
    for verb in ["unmap", "free", "release"] {
        let allocation = Allocation::create(&device, 1).unwrap();
        let reservation = Reservation::new(&device, unit).unwrap();
        let address = reservation.address();
        let mapping = Mapping::at(&reservation, 0, &allocation, ReadWrite).unwrap();
        drop(reservation);
        let before = subject.faulty.take_verbs().len();
        assert!(before > 0);
        subject.faulty.fail(Fault::Verb(verb), 4242);
        drop((mapping, allocation));
        assert_eq!(subject.faulty.mend(), Some(verb));
        assert_eq!(subject.faulty.take_verbs(), ["unmap", "free", "release"], "each is tried once");
        let live = subject.live();
        match verb {
            "unmap" => {
                // The driver keeps the addresses of a mapping.
                assert_eq!((live.handles, live.reservations, live.mappings), (0, 1, 1));
                subject.verbs.unmap(address, unit).unwrap();
                subject.verbs.free(address, unit).unwrap();
            }
            "free" => {
                assert_eq!((live.handles, live.reservations, live.mappings), (0, 1, 0));
                subject.verbs.free(address, unit).unwrap();
            }
            _ => {
                assert_eq!((live.handles, live.reservations, live.mappings), (1, 0, 0));
                subject.faulty.release_all();
            }
        }
        subject.assert_empty();
    }
}

/// The parts of a driver that only some backends have.
type Parts<'a> = (Option<&'a dyn LegacyIpc>, Option<&'a dyn Pools>, Option<&'a dyn Kernels>, Option<&'a dyn Diagnosis>);

fn calls_of_parts(
    parts: &Parts<'_>,
    memory: Handle,
    address: u64,
    unit: u64,
    fd: BorrowedFd<'_>,
) -> Vec<Result<(), Error>> {
    let (legacy, pools, kernels, diagnosis) = *parts;
    let stretch = PatternSpan { address, start: 0, size: 4, salt: 0 };
    let mut answers = Vec::new();
    answers.extend(legacy.into_iter().flat_map(|legacy| {
        let handle = [0; 64];
        [
            legacy.allocate(0, unit).map(drop),
            legacy.deallocate(0, address),
            legacy.handle(0, address).map(drop),
            legacy.open(0, &handle).map(drop),
            legacy.close(0, address),
        ]
    }));
    answers.extend(pools.into_iter().flat_map(|pools| {
        [
            pools.create(0).map(drop),
            pools.import(fd).map(drop),
            pools.free(0, address),
            pools.export_pointer(0, address).map(drop),
        ]
    }));
    answers.extend(kernels.into_iter().flat_map(|kernels| {
        [kernels.load(0), kernels.fill(0, &stretch).map(drop), kernels.verify(0, &stretch).map(drop)]
    }));
    answers.extend(diagnosis.into_iter().flat_map(|diagnosis| {
        [
            diagnosis.library().map(drop),
            diagnosis.create_with(0, unit, MadeFor::Rdma).map(drop),
            diagnosis.export_fabric(memory).map(drop),
            diagnosis.export_dma_buf(0, address, unit).map(drop),
            diagnosis.copy_within(0, address, address, 4).map(drop),
            diagnosis.store(0, address, 0),
            diagnosis.event_create(0).map(drop),
            diagnosis.event_open(0, &[0; 64]).map(drop),
        ]
    }));
    answers
}

fn calls_of_verbs(
    driver: &dyn Verbs,
    handle: Handle,
    address: u64,
    unit: u64,
    fd: BorrowedFd<'_>,
) -> Vec<Result<(), Error>> {
    let mut bytes = [0; 4];
    vec![
        driver.version().map(drop),
        driver.device_count().map(drop),
        driver.device_name(0).map(drop),
        driver.device_uuid(0).map(drop),
        driver.device_attribute(0, Attribute::ComputeMode).map(drop),
        driver.memory_info(0).map(drop),
        driver.activate(0),
        driver.granularity(&EXPORTABLE, Granularity::Minimum).map(drop),
        driver.create(unit, &EXPORTABLE).map(drop),
        driver.release(handle),
        driver.reserve(unit, 0).map(drop),
        driver.free(address, unit),
        driver.map(address, unit, 0, handle),
        driver.unmap(address, unit),
        driver.set_access(address, unit, Location::Device(0), Some(ReadOnly)),
        driver.export(handle).map(drop),
        driver.import(fd, unit).map(drop),
        driver.properties(handle).map(drop),
        driver.copy_in(0, address, &bytes),
        driver.copy_out(0, address, &mut bytes),
        driver.synchronize(0),
    ]
}

fn every_call_fails_in_a_fork(subject: Subject) {
    let (device, unit) = (subject.device(), subject.unit());
    let (allocation, mapping) = mapped(&subject, 1);
    mapping.copy_in(0, b"the parent's").unwrap();
    let fd = exported(&allocation);
    let handle = subject.verbs.create(unit, &EXPORTABLE).unwrap();
    let parent = process::id();
    let calls = || subject.fake.as_ref().map(|fake| fake.calls(""));
    let driver = Arc::clone(&subject.verbs);
    let host = Properties { location: Location::HostNuma(0), ..EXPORTABLE };
    let near = Mapped::new(&*driver, &host, 1).with_access(Location::HostNuma(0));
    let (window, locked) = (driver.window(near.address, near.size).unwrap(), driver.page_lock(0, 4096).unwrap());
    let mut owners = Some((mapping, allocation, window, locked));
    // Resources created before the fork.
    let parts = (driver.legacy().ok(), driver.pools().ok(), driver.kernels().ok(), driver.diagnosis().ok());
    let before = calls();
    in_fork(|| {
        let (mapping, allocation, window, locked) = owners.take().unwrap();
        let address = mapping.address();
        let mut answers = vec![
            driver.can_access_peer(0, 0).map(drop),
            driver.extent(0, address).map(drop),
            driver.seal(handle).map(drop),
            driver.page_lock(0, 1).map(drop),
            driver.window(address, unit).map(drop),
            driver.legacy().map(drop),
            driver.pools().map(drop),
            driver.kernels().map(drop),
            driver.diagnosis().map(drop),
        ];
        answers.extend(calls_of_parts(&parts, handle, address, unit, fd.as_fd()));
        answers.extend(calls_of_verbs(&*driver, handle, address, unit, fd.as_fd()));
        answers.extend([
            window.read(0, &mut [0]),
            window.write(0, b"x"),
            mapping.copy_in(0, b"the child's"),
            allocation.seal().map(drop),
            Allocation::create(&device, 1).map(drop),
            Mapping::new(&allocation, ReadOnly).map(drop),
        ]);
        let told = answers.into_iter().enumerate().all(|(number, answer)| match answer {
            Err(Error::Forked { initialised_by, pid }) => initialised_by == parent && pid == process::id(),
            other => {
                eprintln!("answer {number} in the fork: {other:?}");
                false
            }
        });
        let nothing = window.slice().is_none();
        drop((mapping, allocation, window, locked));
        told && nothing && calls() == before
    });
    let (mapping, allocation, window, locked) = owners.take().unwrap();
    drop((window, locked));
    near.end();
    assert_eq!(read(&mapping, 0, 12), b"the parent's");
    subject.verbs.release(handle).unwrap();
    drop((mapping, allocation));
}
