use std::{
    fs::{self, File},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
};

use nix::{
    fcntl::{FallocateFlags, OFlag, SealFlag, fallocate, open},
    sys::{
        eventfd::EventFd,
        stat::{Mode, SFlag, makedev, mknod},
    },
    unistd::{geteuid, pipe},
};

use super::*;

/// Two pages, even with 64 KiB pages.
const SIZE: u64 = 128 << 10;

/// Shared memory of `SIZE` bytes, committed up to `committed`, with these seals.
fn memory(committed: u64, seals: SealFlag) -> OwnedFd {
    let file = File::from(memfd::empty(c"test").unwrap());
    fallocate(file.as_fd(), FallocateFlags::empty(), 0, committed as i64).unwrap();
    file.set_len(SIZE).unwrap();
    fcntl(&file, FcntlArg::F_ADD_SEALS(seals)).unwrap();
    file.into()
}

fn good() -> OwnedFd {
    memory(SIZE, SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL)
}

fn by_path(path: &str) -> OwnedFd {
    open(path, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty()).unwrap()
}

/// Other kinds of descriptors, with their descriptions.
fn others() -> Vec<(OwnedFd, &'static str)> {
    let file = tempfile::tempfile().unwrap();
    file.set_len(SIZE).unwrap();
    vec![
        (file.into(), "a regular file"),
        (File::open("/").unwrap().into(), "a folder"),
        (pipe().unwrap().0, "a pipe"),
        (UnixStream::pair().unwrap().0.into(), "a socket"),
        (File::open("/dev/null").unwrap().into(), "the character device 1:3"),
        (EventFd::new().unwrap().into(), "a file without a type, such as an eventfd"),
        (by_path("/dev/null"), "a path (O_PATH)"),
    ]
}

/// The other requirements of host memory are those of a consumer: see the suite's `host_memory`.
#[test]
fn immutable_memory_is_sealed_against_writing() {
    let immutable = |fd: &OwnedFd| inspect(fd.as_fd(), Backend::Host, SIZE, true, false);
    let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_SEAL | SealFlag::F_SEAL_WRITE;
    assert_eq!(immutable(&memory(SIZE, seals)), Ok(()));
    assert!(immutable(&good()).unwrap_err().contains("F_SEAL_WRITE"));
    assert_eq!(inspect(good().as_fd(), Backend::Host, SIZE, false, false), Ok(()));
    for (other, _) in others() {
        let refused = inspect(other.as_fd(), Backend::Host, SIZE, false, false);
        assert_eq!(refused, Err("the descriptor is not of a memfd".to_owned()));
    }
}

#[test]
fn only_nvidia_devices_are_gpu_memory() {
    let refused = |fd: &OwnedFd, emulated, what: &str| {
        let want = format!("the descriptor is {what}, but GPU memory is an NVIDIA character device (major number 195)");
        assert_eq!(inspect(fd.as_fd(), Backend::Cuda, SIZE, false, emulated), Err(want));
    };
    for (other, what) in others() {
        refused(&other, false, what);
        refused(&other, true, what);
    }
    refused(&good(), false, "a memfd");
    assert!(inspect(good().as_fd(), Backend::Cuda, 0, false, true).is_err());
}

#[test]
fn memfds_are_memory_others_foreign() {
    assert_eq!(kind(good().as_fd()), Kind::Memory);
    assert_eq!(kind(memory(SIZE / 2, SealFlag::empty()).as_fd()), Kind::Memory);
    for (other, what) in others() {
        assert_eq!(kind(other.as_fd()), Kind::Foreign, "{what}");
    }
}

#[test]
fn path_only_device_is_foreign() {
    if !geteuid().is_root() {
        // Only root can create device nodes.
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let node = folder.path().join("nvidiactl");
    mknod(&node, SFlag::S_IFCHR, Mode::from_bits_retain(0o600), makedev(195, 255)).unwrap();
    let fd = by_path(node.to_str().unwrap());
    assert!(is_nvidia(&cached_stat(fd.as_fd()).unwrap()));
    assert_eq!(kind(fd.as_fd()), Kind::Foreign);
    assert!(inspect(fd.as_fd(), Backend::Cuda, SIZE, false, true).is_err());
    fs::remove_file(node).unwrap();
}
