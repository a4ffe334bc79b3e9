//! What only the host backend promises: its memory is a memfd, and another process made the one that it imports.

use std::{
    io::{Seek, SeekFrom, Write},
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};

use nix::{
    fcntl::{FcntlArg, SealFlag, fcntl},
    sys::{
        memfd::{MFdFlags, memfd_create},
        resource::{Resource, setrlimit},
        stat::fstat,
    },
    unistd::ftruncate,
};
use vmmfd::{
    Error,
    driver::{
        Access::{ReadOnly, ReadWrite},
        Driver, Location, Properties, code,
        host::{GRANULARITY, HostDriver, Live},
    },
    memory::{Allocation, Device, Mapping},
};

use crate::support::{EXPORTABLE, Inode, Subject, code, in_fork};

/// A memfd as another process might have made it.
fn memfd(size: u64, seals: SealFlag) -> OwnedFd {
    let memfd = memfd_create(c"peer", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).unwrap();
    ftruncate(&memfd, size as i64).unwrap();
    fcntl(&memfd, FcntlArg::F_ADD_SEALS(seals)).unwrap();
    memfd
}

/// The code and the reason that an import is refused with. Nothing is left of it.
#[track_caller]
fn refused(fd: OwnedFd, size: u64) -> (u32, String) {
    let subject = Subject::host();
    let inode = Inode::of(&fd);
    let answer = Allocation::import(&subject.device(), fd, size);
    assert_eq!(inode.open_here(), 0, "the descriptor is still open");
    match answer {
        Err(Error::Driver { code, source: Some(reason), .. }) => (code, reason.to_string()),
        other => panic!("{other:?}"),
    }
}

#[test]
fn memory_is_sealed_against_changes_of_size_and_committed() {
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
fn no_program_that_is_started_inherits_memory() {
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
fn memory_that_its_owner_could_shrink_is_refused() {
    for seals in [SealFlag::empty(), SealFlag::F_SEAL_GROW, SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_WRITE] {
        let (code, reason) = refused(memfd(GRANULARITY, seals), GRANULARITY);
        assert_eq!(code, code::UNKNOWN, "{seals:?}");
        assert!(reason.contains("not sealed against shrinking"), "{reason}");
    }
}

#[test]
fn memory_of_another_size_than_claimed_is_refused_with_both() {
    for (actual, claimed) in [
        (GRANULARITY, 2 * GRANULARITY),
        (2 * GRANULARITY, GRANULARITY),
        (GRANULARITY - 1, GRANULARITY),
        (GRANULARITY + 1, GRANULARITY),
        (0, GRANULARITY),
    ] {
        let (code, reason) = refused(memfd(actual, SealFlag::F_SEAL_SHRINK), claimed);
        assert_eq!(code, code::INVALID_VALUE, "{actual} {claimed}");
        assert!(reason.contains(&format!("{actual} bytes where {claimed} were claimed")), "{reason}");
    }
}

#[test]
fn a_hole_larger_than_what_is_free_is_refused_before_it_is_touched() {
    let size = 1 << 40;
    let (code, reason) = refused(memfd(size, SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW), size);
    assert_eq!(code, code::OUT_OF_MEMORY);
    assert!(reason.contains("not committed"), "{reason}");
}

#[test]
fn memory_that_only_its_owner_sealed_against_shrinking_is_taken() {
    let subject = Subject::host();
    let fd = memfd(GRANULARITY, SealFlag::F_SEAL_SHRINK);
    let mut file = std::fs::File::from(fd.try_clone().unwrap());
    file.seek(SeekFrom::Start(5)).unwrap();
    file.write_all(b"from a peer").unwrap();
    let imported = Allocation::import(&subject.device(), fd, GRANULARITY).unwrap();
    let mapping = Mapping::new(&imported, ReadWrite).unwrap();
    let mut bytes = [0; 11];
    mapping.copy_out(5, &mut bytes).unwrap();
    assert_eq!(&bytes, b"from a peer");
}

#[test]
fn memory_sealed_against_writing_is_refused_for_writing_and_nothing_is_left() {
    let subject = Subject::host();
    let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_WRITE;
    let imported = Allocation::import(&subject.device(), memfd(GRANULARITY, seals), GRANULARITY).unwrap();
    assert_eq!(code(Mapping::new(&imported, ReadWrite)), code::INVALID_VALUE);
    // Whether a shared mapping for reading is allowed depends on the kernel: newer ones do.
    let answer = code(Mapping::new(&imported, ReadOnly));
    assert!([0, code::INVALID_VALUE].contains(&answer), "{answer}");
}

#[test]
fn more_than_what_is_free_is_refused_and_not_begun() {
    // In a process that may make no large file, lest a driver that does not refuse fill this machine.
    in_fork(|| {
        setrlimit(Resource::RLIMIT_FSIZE, 64 << 20, 64 << 20).unwrap();
        let driver: Arc<dyn Driver> = Arc::new(HostDriver::new());
        let device = Device::all(&driver).unwrap().remove(0);
        let size = (device.memory_info().unwrap().free + (4 << 30)).next_multiple_of(GRANULARITY);
        matches!(
            Allocation::create(&device, size),
            Err(Error::OutOfMemory { size: told, free, .. }) if told == size && free < size
        )
    });
}

#[test]
fn there_is_one_device() {
    let driver = HostDriver::new();
    assert_eq!(driver.device_count().unwrap(), 1);
    assert_eq!(code(driver.device_name(1)), code::INVALID_DEVICE);
    assert_eq!(
        code(driver.create(GRANULARITY, &Properties { location: Location::Device(1), ..EXPORTABLE })),
        code::INVALID_DEVICE
    );
}

#[test]
fn each_object_counts_its_own_and_frees_what_was_forgotten() {
    let (one, two) = (HostDriver::new(), HostDriver::new());
    assert_eq!(one.device_uuid(0).unwrap(), two.device_uuid(0).unwrap());
    let handle = one.create(GRANULARITY, &EXPORTABLE).unwrap();
    let fd = one.export(handle).unwrap();
    let inode = Inode::of(&fd);
    let address = one.reserve(GRANULARITY, 0).unwrap();
    one.map(address, GRANULARITY, 0, handle).unwrap();
    assert_eq!(one.live(), Live { handles: 1, reservations: 1, mappings: 1 });
    assert_eq!(two.live(), Live::default());
    // What is another object's is nothing to this one.
    assert_eq!(code(two.release(handle)), code::INVALID_VALUE);
    assert_eq!(code(two.unmap(address, GRANULARITY)), code::INVALID_VALUE);
    assert_eq!(code(two.free(address, GRANULARITY)), code::INVALID_VALUE);
    assert_eq!(code(two.copy_out(0, address, &mut [0])), code::INVALID_VALUE);
    let imported = two.import(fd.as_fd(), GRANULARITY).unwrap();
    assert!(inode.mapped_here());
    drop((one, fd));
    assert!(!inode.mapped_here(), "what was forgotten is still mapped");
    assert_eq!(inode.open_here(), 1, "only the importer's is left");
    two.release(imported).unwrap();
    assert_eq!(inode.open_here(), 0);
}
