//! Properties of the host backend alone: its memory is a memfd, and another process creates the memfd that it imports.

use std::iter;

use nix::{
    fcntl::{FallocateFlags, FcntlArg, SealFlag, fallocate, fcntl},
    libc,
    sys::{
        resource::{Resource, getrlimit, setrlimit},
        stat::fstat,
    },
    unistd::ftruncate,
};
use vmmfd::{driver::GRANULARITY, internals::Live};

use crate::support::{Inode, prelude::*};

/// The seals that an import requires.
const SEALED: SealFlag = SealFlag::F_SEAL_SHRINK.union(SealFlag::F_SEAL_SEAL);

/// A memfd as another process might create it.
fn memfd(size: u64, seals: SealFlag) -> OwnedFd {
    let memfd = memfd_create(c"peer", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).unwrap();
    ftruncate(&memfd, size as i64).unwrap();
    if size > 0 {
        fallocate(&memfd, FallocateFlags::empty(), 0, size as i64).unwrap();
    }
    fcntl(&memfd, FcntlArg::F_ADD_SEALS(seals)).unwrap();
    memfd
}

/// The error code and reason of a refused import. Asserts that the descriptor is closed.
#[track_caller]
fn refused(fd: OwnedFd, size: u64) -> (u32, String) {
    let subject = Subject::host();
    let inode = Inode::of(&fd);
    let answer = Allocation::import(&subject.device(), fd, size);
    assert_eq!(inode.open_here(), 0, "the descriptor is still open");
    match answer {
        Err(Error::Driver { code, source: Some(reason), .. }) => (code, reason.to_string()),
        Err(Error::Memory(MemoryError::NotImported { reason, source })) => match *source {
            Error::Driver { code, .. } => (code, reason),
            other => panic!("{other:?}"),
        },
        other => panic!("{other:?}"),
    }
}

#[test]
fn memory_has_fixed_size_and_is_committed() {
    let subject = Subject::host();
    let allocation = Allocation::create(&subject.device(), 3 * GRANULARITY).unwrap();
    let fd = allocation.export().unwrap();
    let seals = SealFlag::from_bits_retain(fcntl(fd, FcntlArg::F_GET_SEALS).unwrap());
    assert!(seals.contains(SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW), "{seals:?}");
    for size in [GRANULARITY, 4 * GRANULARITY] {
        ftruncate(fd, size as i64).unwrap_err();
    }
    let stat = fstat(fd).unwrap();
    assert_eq!(stat.st_size as u64, 3 * GRANULARITY);
    assert!(stat.st_blocks as u64 * 512 >= 3 * GRANULARITY, "{} blocks", stat.st_blocks);
}

#[test]
fn started_programs_inherit_no_memory() {
    let subject = Subject::host();
    let device = subject.device();
    let allocation = Allocation::create(&device, 1).unwrap();
    let fd = allocation.export().unwrap().try_clone_to_owned().unwrap();
    let inode = Inode::of(&fd);
    let _imported = Allocation::import(&device, fd, GRANULARITY).unwrap();
    assert_eq!(inode.open_here(), 3, "the exporter's, the exported one, and the importer's");
    assert!(inode.closes_on_exec());
}

#[test]
fn unfit_memory_is_refused() {
    let shrink = SealFlag::F_SEAL_SHRINK;
    let others = SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_WRITE | SealFlag::F_SEAL_SEAL;
    let (shrinkable, open) = ("not sealed against shrinking", "seals are not final (F_SEAL_SEAL)");
    for (seals, words) in [
        (SealFlag::empty(), shrinkable),
        (SealFlag::F_SEAL_GROW, shrinkable),
        (others, shrinkable),
        (shrink, open),
        (shrink | SealFlag::F_SEAL_WRITE, open),
    ] {
        let (code, reason) = refused(memfd(GRANULARITY, seals), GRANULARITY);
        assert!(code == code::UNKNOWN && reason.contains(words), "{seals:?}: {code} {reason}");
    }
    for (actual, claimed) in [
        (GRANULARITY, 2 * GRANULARITY),
        (2 * GRANULARITY, GRANULARITY),
        (GRANULARITY - 1, GRANULARITY),
        (GRANULARITY + 1, GRANULARITY),
        (0, GRANULARITY),
    ] {
        let (code, reason) = refused(memfd(actual, SEALED), claimed);
        assert_eq!(code, code::INVALID_VALUE, "{actual} {claimed}");
        assert!(reason.contains(&format!("{actual} bytes where {claimed} were claimed")), "{reason}");
    }
    // No huge pages need to be available.
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING | MFdFlags::MFD_HUGETLB | MFdFlags::MFD_HUGE_2MB;
    let huge = memfd_create(c"huge", flags).unwrap();
    ftruncate(&huge, GRANULARITY as i64).unwrap();
    fcntl(&huge, FcntlArg::F_ADD_SEALS(SEALED)).unwrap();
    let (code, reason) = refused(huge, GRANULARITY);
    assert!(code == code::UNKNOWN && reason.contains("huge pages"), "{code} {reason}");
}

#[test]
fn readable_memory_is_imported() {
    let subject = Subject::host();
    let future = SEALED | SealFlag::F_SEAL_FUTURE_WRITE;
    for (seals, read_only, writable) in [(SEALED, false, true), (SEALED, true, false), (future, false, false)] {
        let fd = memfd(GRANULARITY, SealFlag::empty());
        File::from(fd.try_clone().unwrap()).write_all(b"theirs").unwrap();
        fcntl(&fd, FcntlArg::F_ADD_SEALS(seals)).unwrap();
        let fd: OwnedFd = match read_only {
            true => File::open(format!("/proc/self/fd/{}", fd.as_raw_fd())).unwrap().into(),
            false => fd,
        };
        let imported = Allocation::import(&subject.device(), fd, GRANULARITY).unwrap();
        let expected = if writable { 0 } else { code::INVALID_VALUE };
        assert_eq!(code(Mapping::new(&imported, ReadWrite)), expected, "{seals:?}");
        let mapping = Mapping::new(&imported, ReadOnly).unwrap();
        let mut bytes = [0; 6];
        mapping.copy_out(0, &mut bytes).unwrap();
        assert_eq!(&bytes, b"theirs");
        // A process may still write through an older mapping.
        assert!(Mirror::of(&mapping, 0, 6).unwrap().bytes().is_none());
    }
}

#[test]
fn sparse_file_is_refused() {
    // A file larger than this machine's memory, a file without its last page, and a file with a punched page.
    let sparse = |size: u64, holds: &[u8]| {
        let memfd = memfd_create(c"peer", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).unwrap();
        ftruncate(&memfd, size as i64).unwrap();
        File::from(memfd.try_clone().unwrap()).write_all(holds).unwrap();
        memfd
    };
    let punched = memfd(GRANULARITY, SealFlag::empty());
    fallocate(&punched, FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE, 8192, 4096)
        .unwrap();
    let whole = GRANULARITY as usize - 4096;
    for (fd, size, missing) in [
        (sparse(1 << 40, b""), 1 << 40, 1u64 << 40),
        (sparse(GRANULARITY, &vec![1; whole]), GRANULARITY, 4096),
        (punched, GRANULARITY, 4096),
    ] {
        fcntl(&fd, FcntlArg::F_ADD_SEALS(SEALED | SealFlag::F_SEAL_GROW)).unwrap();
        let watched = fd.try_clone().unwrap();
        let blocks = fstat(&watched).unwrap().st_blocks;
        let subject = Subject::host();
        let answer = Allocation::import(&subject.device(), fd, size);
        let Err(Error::Memory(MemoryError::NotImported { reason, .. })) = answer else { panic!("{answer:?}") };
        let expected = format!("{missing} of the memory's {size} bytes are not committed");
        assert!(reason.to_string().contains(&expected), "{reason}");
        assert_eq!(fstat(&watched).unwrap().st_blocks, blocks, "a page was touched");
    }
}

#[test]
fn write_seal_allows_only_reading() {
    let subject = Subject::host();
    let device = subject.device();
    let fd = memfd(GRANULARITY, SealFlag::empty());
    File::from(fd.try_clone().unwrap()).write_all(b"for ever").unwrap();
    fcntl(&fd, FcntlArg::F_ADD_SEALS(SEALED | SealFlag::F_SEAL_WRITE)).unwrap();
    let imported = Allocation::import(&device, fd, GRANULARITY).unwrap();
    assert!(imported.properties().immutable);
    assert_eq!(code(Mapping::new(&imported, ReadWrite)), code::INVALID_VALUE);
    let mapping = Mapping::new(&imported, ReadOnly).unwrap();
    assert!(matches!(mapping.copy_in(0, b"no"), Err(Error::Memory(MemoryError::ReadOnly))));
    // Its pages must not be private copies that this process could write.
    let (address, here) = (mapping.address(), Location::Device(0));
    assert_eq!(code(subject.verbs.set_access(address, GRANULARITY, here, Some(ReadWrite))), code::INVALID_VALUE);
    // The mapping is private: kernels before 6.7 refuse a shared mapping of write-sealed memory.
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let line = maps.lines().find(|line| line.starts_with(&format!("{address:x}-"))).unwrap();
    assert_eq!(line.split_whitespace().nth(1), Some("r--p"), "{line}");
    let window = subject.verbs.window(address, GRANULARITY).unwrap();
    assert_eq!(&window.slice().unwrap()[..8], b"for ever");
    assert_eq!(code(window.write(0, b"no")), code::INVALID_VALUE);
    assert_eq!(window.slice().unwrap().len() as u64, GRANULARITY);
    drop(window);
}

#[test]
fn slice_needs_sealed_memory() {
    let subject = Subject::host();
    let driver = &subject.verbs;
    let handles = [(); 2].map(|()| driver.create(GRANULARITY, &EXPORTABLE).unwrap());
    driver.seal(handles[1]).unwrap();
    let address = driver.reserve(2 * GRANULARITY, 0).unwrap();
    for (at, handle) in (0..).zip(handles) {
        driver.map(address + at * GRANULARITY, GRANULARITY, 0, handle).unwrap();
    }
    let both = driver.set_access(address, 2 * GRANULARITY, Location::Device(0), Some(ReadWrite));
    assert_eq!(code(both), code::INVALID_VALUE, "one that is sealed is enough");
    driver.set_access(address, 2 * GRANULARITY, Location::Device(0), Some(ReadOnly)).unwrap();
    assert!(driver.window(address, 2 * GRANULARITY).unwrap().slice().is_none());
    assert!(driver.window(address + GRANULARITY, GRANULARITY).unwrap().slice().is_some());
    driver.unmap(address, 2 * GRANULARITY).unwrap();
    driver.free(address, 2 * GRANULARITY).unwrap();
    handles.into_iter().for_each(|handle| driver.release(handle).unwrap());
}

#[test]
fn shared_memory_is_not_sealed() {
    let subject = Subject::host();
    let driver = &subject.verbs;
    let handle = driver.create(GRANULARITY, &EXPORTABLE).unwrap();
    let fd = driver.export(handle).unwrap();
    let imported = driver.import(fd.as_fd(), GRANULARITY).unwrap();
    for holder in [handle, imported] {
        assert_eq!(code(driver.seal(holder)), code::INVALID_VALUE);
        assert!(!driver.properties(holder).unwrap().immutable);
    }
    // The fd refuses these seals too: a consumer could lock its producer out.
    for seal in [SealFlag::F_SEAL_WRITE, SealFlag::F_SEAL_FUTURE_WRITE] {
        fcntl(&fd, FcntlArg::F_ADD_SEALS(seal)).unwrap_err();
    }
    driver.release(handle).unwrap();
    driver.release(imported).unwrap();
    // Only the peer can seal its own memory.
    let own = memfd(GRANULARITY, SEALED);
    let imported = driver.import(own.as_fd(), GRANULARITY).unwrap();
    assert_eq!(code(driver.seal(imported)), code::INVALID_VALUE);
    driver.release(imported).unwrap();
}

#[test]
fn memory_is_replaced_in_one_step() {
    let subject = Subject::host();
    let (verbs, unit) = (&subject.verbs, GRANULARITY);
    let make = |size: u64, value: u8| {
        let handle = verbs.create(size, &EXPORTABLE).unwrap();
        let address = verbs.reserve(size, 0).unwrap();
        verbs.map(address, size, 0, handle).unwrap();
        verbs.set_access(address, size, Location::Device(0), Some(ReadWrite)).unwrap();
        verbs.copy_in(0, address, &vec![value; size as usize]).unwrap();
        verbs.unmap(address, size).unwrap();
        verbs.free(address, size).unwrap();
        handle
    };
    let [one, two, large] = [(unit, 1), (unit, 2), (2 * unit, 3)].map(|(size, value)| make(size, value));
    let address = verbs.reserve(3 * unit, 0).unwrap();
    verbs.map(address + unit, unit, 0, one).unwrap();
    let byte = || {
        let mut byte = [0];
        verbs.copy_out(0, address + unit, &mut byte).map(|()| byte[0])
    };
    // Replacing inaccessible memory grants no access.
    verbs.replace(address + unit, unit, two).unwrap();
    assert_eq!(code(byte()), code::INVALID_VALUE);
    verbs.set_access(address + unit, unit, Location::Device(0), Some(ReadOnly)).unwrap();
    assert_eq!(byte().unwrap(), 2);
    verbs.replace(address + unit, unit, one).unwrap();
    assert_eq!((byte().unwrap(), subject.live().mappings), (1, 1));
    assert_eq!(code(verbs.copy_in(0, address + unit, &[9])), code::INVALID_VALUE, "it is read-only");
    // The range must be a whole mapping, and the new memory must be unused and of the same size.
    for (at, size, handle, expected) in [
        (address, unit, two, code::INVALID_VALUE),
        (address + unit, 2 * unit, large, code::INVALID_VALUE),
        (address, 2 * unit, large, code::INVALID_VALUE),
        (address + unit, unit, large, code::NOT_SUPPORTED),
        (address + 8 * unit, unit, two, code::INVALID_VALUE),
    ] {
        assert_eq!(code(verbs.replace(at, size, handle)), expected, "{size} bytes at {}", at - address);
    }
    let window = verbs.window(address + unit, 1).unwrap();
    assert_eq!(code(verbs.replace(address + unit, unit, two)), code::INVALID_VALUE, "a window is open");
    drop(window);
    assert_eq!((byte().unwrap(), subject.live().mappings), (1, 1));
    verbs.set_access(address + unit, unit, Location::Device(0), Some(ReadWrite)).unwrap();
    verbs.replace(address + unit, unit, two).unwrap();
    verbs.copy_in(0, address + unit, &[4]).unwrap();
    verbs.replace(address + unit, unit, one).unwrap();
    // Sealed memory cannot replace a writable mapping.
    assert!(verbs.seal(two).unwrap());
    assert_eq!(code(verbs.replace(address + unit, unit, two)), code::INVALID_VALUE);
    verbs.set_access(address + unit, unit, Location::Device(0), Some(ReadOnly)).unwrap();
    verbs.replace(address + unit, unit, two).unwrap();
    assert_eq!(byte().unwrap(), 4);
    assert_eq!(code(verbs.set_access(address + unit, unit, Location::Device(0), Some(ReadWrite))), code::INVALID_VALUE);
    verbs.release(one).unwrap();
    assert_eq!(code(verbs.replace(address + unit, unit, one)), code::INVALID_VALUE, "a handle that was released");
    verbs.unmap(address, 3 * unit).unwrap();
    verbs.free(address, 3 * unit).unwrap();
    [two, large].into_iter().for_each(|handle| verbs.release(handle).unwrap());
}

#[test]
fn descriptor_limit_is_no_driver_error() {
    in_fork(|| {
        let driver = HostDriver::new().unwrap();
        let uuid = HostDriver::new().unwrap().device_uuid(0).unwrap();
        let handle = driver.create(GRANULARITY, &EXPORTABLE).unwrap();
        let exported = driver.export(handle).unwrap();
        let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        setrlimit(Resource::RLIMIT_NOFILE, 64, hard).unwrap();
        let all: Vec<_> = iter::from_fn(|| exported.try_clone().ok()).collect();
        let errors = [
            HostDriver::new().map(drop).unwrap_err(),
            driver.create(GRANULARITY, &EXPORTABLE).unwrap_err(),
            driver.export(handle).unwrap_err(),
            driver.import(exported.as_fd(), GRANULARITY).unwrap_err(),
        ];
        drop(all);
        setrlimit(Resource::RLIMIT_NOFILE, soft, hard).unwrap();
        let is_limit = |error: &Error| matches!(error, Error::System { source, .. } if source.raw_os_error() == Some(libc::EMFILE));
        assert!(errors.iter().all(is_limit), "{errors:?}");
        HostDriver::new().unwrap().device_uuid(0).unwrap() == uuid
    });
}

#[test]
fn excess_allocation_is_refused_early() {
    // The file size limit keeps a driver that fails this test from filling this machine's memory.
    in_fork(|| {
        setrlimit(Resource::RLIMIT_FSIZE, 64 << 20, 64 << 20).unwrap();
        let driver: Arc<dyn Verbs> = Arc::new(HostDriver::new().unwrap());
        let device = Device::all(&internals::driver(driver)).unwrap().remove(0);
        let size = (device.memory_info().unwrap().free + (4 << 30)).next_multiple_of(GRANULARITY);
        matches!(
            Allocation::create(&device, size),
            Err(Error::Memory(MemoryError::OutOfMemory { size: told, free, .. })) if told == size && free < size
        )
    });
}

#[test]
fn forgotten_memory_is_freed() {
    let one = HostDriver::new().unwrap();
    let two = HostDriver::new().unwrap();
    assert_eq!(one.device_uuid(0).unwrap(), two.device_uuid(0).unwrap());
    let handle = one.create(GRANULARITY, &EXPORTABLE).unwrap();
    let fd = one.export(handle).unwrap();
    let inode = Inode::of(&fd);
    let address = one.reserve(GRANULARITY, 0).unwrap();
    one.map(address, GRANULARITY, 0, handle).unwrap();
    assert_eq!(one.live(), Live { handles: 1, reservations: 1, mappings: 1 });
    assert_eq!(two.live(), Live::default());
    let imported = two.import(fd.as_fd(), GRANULARITY).unwrap();
    assert!(inode.mapped_here());
    drop((one, fd));
    assert!(!inode.mapped_here(), "what was forgotten is still mapped");
    assert_eq!(inode.open_here(), 1, "only the importer's is left");
    two.release(imported).unwrap();
    assert_eq!(inode.open_here(), 0);
}
