//! Handles of shared memory: opened, forwarded, sealed, and forged.

use super::*;

cases! {
    on crate::support::Subject; every backend: [
    chunks_are_one_buffer_everywhere,
    part_is_the_covering_chunks,
    padding_is_cleared_and_unreachable,
    forwarded_handle_outlives_all_others,
    false_description_leaves_nothing,
    unsupported_memory_is_refused,
    sealed_memory_is_read_only,
    failure_at_any_call_leaves_nothing,
    ]
    gpus alone: [
    sealing_gpu_memory_is_an_agreement,
    ]
}

/// Tries to map a file for writing, as any holder of the descriptor can.
fn writable(fd: &OwnedFd, length: u64) -> bool {
    let length = NonZeroUsize::new(length as usize).unwrap();
    let (protection, flags) = (ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_SHARED);
    // SAFETY: the mapping replaces no other mapping, and is unmapped at once.
    match unsafe { mmap(None, length, protection, flags, fd, 0) } {
        Ok(address) => {
            // SAFETY: the address was just mapped.
            unsafe { munmap(address, length.get()) }.unwrap();
            true
        }
        Err(_) => false,
    }
}

/// All operations that a failure could interrupt.
fn everything(subject: &Subject, device: &Device, unit: u64, folder: &Path) -> Result<()> {
    for &mechanism in mechanisms(subject) {
        let shared = match mechanism {
            Mechanism::Vmm => Shared::create(device, spec(2 * unit).chunk(unit).sealed())?,
            _ => Shared::create(device, by(mechanism, 2 * unit))?,
        };
        let source = Source::open(&folder.join("data"))?;
        source.load(&shared, &mut |_| Ok(()))?;
        sealing(|| shared.seal())?;
        let (handle, fds) = ArrayHandle::of(&shared, bytes(2 * unit))?;
        let array = handle.open(&subject.driver, Some(Selector::Ordinal(0)), fds, ReadOnly)?;
        files::read(&**array.memory(), 0, 0..unit, &mut |_| Ok(()))?;
        array.first(2)?;
    }
    Ok(())
}

fn chunks_are_one_buffer_everywhere(subject: Subject) {
    let (device, unit) = (subject.device(), subject.unit());
    // The last chunk is smaller, and its last bytes are padding.
    let size = 7 * unit - 5;
    let shared = Shared::create(&device, spec(size).chunk(2 * unit - 1)).unwrap();
    assert_eq!((shared.size(), shared.mapped_size()), (size, 7 * unit));
    let description = shared.describe().unwrap();
    assert_eq!((description.segments(), description.mapped_size), (4, 7 * unit));
    // Write across all boundaries at once.
    let data: Vec<u8> = (0..size).map(|at| (at / 7) as u8).collect();
    shared.copy_in(0, &data).unwrap();
    let (handle, fds) = ArrayHandle::of(&shared, bytes(size)).unwrap();
    assert_eq!(handle.segments, [2 * unit, 2 * unit, 2 * unit, unit]);
    let files: Vec<Inode> = fds.iter().map(Inode::of).collect();
    let array = handle.open(&subject.driver, None, fds, ReadWrite).unwrap();
    assert!(read(&**array.memory(), 0, size as usize) == data);
    array.memory().copy_in(2 * unit - 2, b"over").unwrap();
    assert_eq!(read(&shared, 2 * unit - 2, 4), b"over");
    if subject.kind != Kind::Cuda {
        // Each chunk has its own file. The mapped memory needs no handles, and the importer no descriptors.
        assert!(files.iter().all(|file| file.open_here() == 1), "{files:?}");
    }
    assert_eq!(subject.live().handles, 0);
}

fn part_is_the_covering_chunks(subject: Subject) {
    let (device, unit) = (subject.device(), subject.unit());
    let shared = Shared::create(&device, spec(5 * unit).chunk(unit)).unwrap();
    for (range, want) in [
        (0..1, (0, 1, 0)),
        (unit - 1..unit + 1, (0, 2, 0)),
        (unit..2 * unit, (1, 1, unit)),
        (0..5 * unit, (0, 5, 0)),
        (3 * unit..5 * unit, (3, 2, 3 * unit)),
        (unit + 1..unit + 1, (0, 0, 0)),
        (5 * unit..5 * unit, (0, 0, 0)),
    ] {
        let (part, chunks) = shared.chunks(range.clone()).unwrap().unwrap();
        assert_eq!((part.first, part.segments, part.offset), want, "{range:?}");
        assert_eq!(part.size, chunks.iter().map(|chunk| chunk.size()).sum::<u64>());
        assert_eq!(part.segments, chunks.len() as u64);
    }
    let reversed = std::ops::Range { start: 5, end: 2 };
    for range in [0..5 * unit + 1, u64::MAX - 1..u64::MAX, reversed] {
        assert!(matches!(shared.chunks(range), Err(Error::Memory(MemoryError::OutOfRange { .. }))));
    }
}

fn padding_is_cleared_and_unreachable(subject: Subject) {
    let unit = subject.unit();
    let memory = Shared::create(&subject.device(), spec(unit + 1)).unwrap();
    assert_eq!((memory.size(), memory.mapped_size()), (unit + 1, 2 * unit));
    assert!(matches!(memory.copy_in(unit, b"xy"), Err(Error::Memory(MemoryError::OutOfRange { .. }))));
    // Fill the padding with old data.
    let (handle, fds) = ArrayHandle::of(&memory, bytes(unit + 1)).unwrap();
    let allocations: Vec<_> = fds
        .iter()
        .map(|fd| Allocation::import(&subject.device(), fd.try_clone().unwrap(), handle.segments[0]).unwrap())
        .collect();
    let whole = Mapping::new(&allocations[0], ReadWrite).unwrap();
    whole.copy_in(0, &vec![7; 2 * unit as usize]).unwrap();
    let buffer = Buffer::new(memory, Unchecked, None).unwrap();
    let (ours, theirs) = Channel::socket_pair().unwrap();
    let config = Config::default();
    thread::scope(|scope| {
        let producer = scope.spawn(|| serve_connection(ours, &buffer, &ServeOptions::default(), &config, &|_| {}));
        let mut consumer = Consumer::over(theirs, &subject.driver, None, &config, &|_| {}).unwrap();
        let object = consumer.request(&Request::default()).unwrap();
        assert_eq!((object.size(), object.mapped_size()), (unit + 1, 2 * unit));
        assert!(object.copy_out(unit, &mut [0; 2]).is_err());
        consumer.report(&object, &Verdict::unchecked(true)).unwrap();
        consumer.close();
        assert!(producer.join().unwrap().unwrap().error.is_none());
    });
    assert_eq!(read(&whole, unit, 3), [7, 0, 0], "the data stays, and zeros are behind it");
    assert_eq!(read(&whole, 2 * unit - 1, 1), [0]);
}

fn forwarded_handle_outlives_all_others(subject: Subject) {
    let unit = subject.unit();
    let shared = Shared::create(&subject.device(), spec(2 * unit).chunk(unit)).unwrap();
    shared.copy_in(unit - 2, b"from A").unwrap();
    let (handle, fds) = ArrayHandle::of(&shared, bytes(2 * unit)).unwrap();
    // B forwards the descriptors that it received: imported memory cannot be exported.
    let passed_on: Vec<OwnedFd> = fds.iter().map(|fd| fd.try_clone().unwrap()).collect();
    let b = handle.open(&subject.driver, None, fds, ReadWrite).unwrap();
    drop(shared);
    b.memory().copy_in(unit + 4, b"B").unwrap();
    drop(b);
    let c = handle.open(&subject.driver, None, passed_on, ReadOnly).unwrap();
    assert_eq!(read(&**c.memory(), unit - 2, 7), b"from AB");
}

fn false_description_leaves_nothing(subject: Subject) {
    let unit = subject.unit();
    for &mechanism in mechanisms(&subject) {
        let shared = Shared::create(&subject.device(), by(mechanism, unit)).unwrap();
        let (sound, _) = ArrayHandle::of(&shared, bytes(1)).unwrap();
        let mut lies = Vec::new();
        let mut lie = |change: &dyn Fn(&mut ArrayHandle)| {
            let mut handle = sound.clone();
            change(&mut handle);
            lies.push(handle);
        };
        // A hundred times the real size.
        lie(&|handle| {
            handle.memory.mapped_size *= 100;
            handle.segments.iter_mut().for_each(|size| *size *= 100);
        });
        lie(&|handle| handle.memory.size = handle.memory.mapped_size + 1);
        lie(&|handle| handle.array.shape = vec![unit + 1]);
        match mechanism {
            Mechanism::Vmm => {
                lie(&|handle| handle.segments.clear());
                lie(&|handle| handle.segments.push(unit));
                lie(&|handle| handle.segments[0] += 4096);
                lie(&|handle| {
                    handle.memory.sharing = Sharing::Vmm { placement: handle.memory.placement(), segments: 0 };
                });
                lie(&|handle| handle.memory.mapped_size = u64::MAX);
            }
            _ => {
                let pointer = sound.memory.pointer().unwrap();
                let pool = |pointer, offset| Sharing::Pool { pool: 1, pointer, offset };
                lie(&|handle| handle.memory.sharing = pool(Pointer([0; 64]), 0));
                lie(&|handle| handle.memory.sharing = pool(pointer, 1));
                lie(&|handle| handle.memory.sharing = pool(pointer, u64::MAX));
            }
        }
        for handle in lies {
            let (_, fds) = ArrayHandle::of(&shared, bytes(1)).unwrap();
            let files: Vec<(Inode, usize)> = fds.iter().map(|fd| (Inode::of(fd), Inode::of(fd).open_here())).collect();
            let before = subject.live();
            let refused = handle.open(&subject.driver, None, fds, ReadOnly);
            assert!(refused.is_err(), "{handle:?}");
            assert_eq!(subject.live(), before, "{handle:?}");
            if subject.kind != Kind::Cuda {
                let closed = files.iter().all(|(file, open)| file.open_here() < *open);
                assert!(closed, "{handle:?} leaves descriptors open");
            }
        }
        let (_, mut fds) = ArrayHandle::of(&shared, bytes(1)).unwrap();
        fds.push(fds[0].try_clone().unwrap());
        assert!(sound.open(&subject.driver, None, fds, ReadOnly).is_err(), "one descriptor too many");
        assert!(sound.open(&subject.driver, None, Vec::new(), ReadOnly).is_err(), "none");
        let wrong = File::open("/dev/null").unwrap().into();
        assert!(sound.open(&subject.driver, None, vec![wrong], ReadOnly).is_err(), "of something else");
    }
}

fn unsupported_memory_is_refused(subject: Subject) {
    let (device, unit) = (subject.device(), subject.unit());
    for spec in [Spec::pool(1), Spec::legacy(1)] {
        match Shared::create(&device, spec) {
            Ok(_) => assert_ne!(subject.kind, Kind::Host),
            Err(error) => {
                assert!(
                    matches!(error, Error::Device(DeviceError::Unsupported { .. })) && subject.kind == Kind::Host,
                    "{error:?}"
                )
            }
        }
    }
    for mechanism in mechanisms(&subject) {
        let nothing = Shared::create(&device, by(*mechanism, 0));
        assert!(matches!(nothing, Err(Error::Memory(MemoryError::InvalidSize { .. }))), "{nothing:?}");
    }
    let huge = Shared::create(&device, spec(1 << 62).chunk(unit));
    assert!(matches!(huge, Err(Error::Memory(MemoryError::TooManyDescriptors { .. }))), "{huge:?}");
}

fn sealed_memory_is_read_only(subject: Subject) {
    let unit = subject.unit();
    for chunk in [None, Some(unit)] {
        let spec = chunk.map_or(spec(2 * unit), |chunk| spec(2 * unit).chunk(chunk)).sealed();
        let shared = Shared::create(&subject.device(), spec).unwrap();
        shared.copy_in(unit - 2, b"final").unwrap();
        let address = shared.address();
        // Memory that will be sealed has no descriptors before the seal.
        let early = ArrayHandle::of(&shared, bytes(1));
        assert!(matches!(early, Err(Error::Misuse { .. })), "{early:?}");
        // An open mirror of the memory itself prevents sealing.
        if subject.kind == Kind::Host {
            let mirror = Mirror::of(&shared, 0, 1).unwrap();
            assert_eq!(code(shared.seal()), code::INVALID_VALUE);
            drop(mirror);
            assert_eq!((shared.access(), read(&shared, unit - 2, 5)), (ReadWrite, b"final".into()));
        }
        let enforced = sealing(|| shared.seal()).unwrap();
        assert_eq!(shared.seal().unwrap(), enforced, "a second time there is nothing to do");
        assert_eq!(enforced, subject.kind == Kind::Host);
        assert_eq!((shared.access(), shared.address()), (ReadOnly, address));
        assert_eq!(read(&shared, unit - 2, 5), b"final");
        assert!(matches!(shared.copy_in(0, b"more"), Err(Error::Memory(MemoryError::ReadOnly))));
        assert!(shared.describe().unwrap().immutable);

        let (handle, fds) = ArrayHandle::of(&shared, bytes(2 * unit)).unwrap();
        if enforced {
            for fd in &fds {
                assert!(!writable(fd, unit), "a sealed file is mapped for writing");
                let file = File::from(fd.try_clone().unwrap());
                assert!(file.write_at(b"x", 0).is_err() && file.set_len(0).is_err());
            }
            let again = fds.iter().map(|fd| fd.try_clone().unwrap()).collect();
            assert!(handle.open(&subject.driver, None, again, ReadWrite).is_err());
        }
        let array = handle.open(&subject.driver, None, fds, ReadOnly).unwrap();
        assert_eq!(read(&**array.memory(), unit - 2, 5), b"final");
        // Only immutable memory is a slice without a copy.
        let mirror = Mirror::of(&**array.memory(), unit, 3).unwrap();
        assert_eq!((mirror.bytes(), mirror.is_direct()), (Some(&b"nal"[..]), enforced));
    }
}

fn failure_at_any_call_leaves_nothing(subject: Subject) {
    let device = subject.device();
    let unit = subject.unit();
    let folder = tempfile::tempdir().unwrap();
    File::create(folder.path().join("data")).unwrap().write_all(b"data").unwrap();
    everything(&subject, &device, unit, folder.path()).unwrap();
    let failed = subject.fail_each_call(|| everything(&subject, &device, unit, folder.path()));
    assert!(failed.len() > 20, "{failed:?}");
}

fn sealing_gpu_memory_is_an_agreement(subject: Subject) {
    for mechanism in MECHANISMS {
        let shared = Shared::create(&subject.device(), by(mechanism, 100).sealed()).unwrap();
        shared.copy_in(0, b"final").unwrap();
        assert!(!shared.seal().unwrap());
        assert!(shared.copy_in(0, b"mine?").is_err(), "this side keeps to it");
        // The descriptor still conveys full rights: only the protocol stops a peer.
        open(&subject, &shared, ReadWrite).memory().copy_in(0, b"yours").unwrap();
        assert_eq!(read(&shared, 0, 5), b"yours");
    }
}
