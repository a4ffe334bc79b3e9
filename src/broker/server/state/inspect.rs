//! Classifies a received descriptor without waiting for another process.
//!
//! A sender can pass any descriptor, including a file of its own FUSE file system, whose daemon can block fstat(2) or close(2) forever.
//! Seals are therefore queried first: only shared memory has them, and the query does not reach a file system. Then statx(2) reads the
//! kernel's cached attributes (`AT_STATX_DONT_SYNC`), for which FUSE sends no request.

#[cfg(test)]
mod tests;

use std::{io, os::fd::BorrowedFd};

use nix::fcntl::{FcntlArg, fcntl};
use rustix::fs::{AtFlags, FileType, Statx, StatxFlags, statx};

use crate::{driver::Backend, sys::memfd};

/// The major number of NVIDIA's character devices. Exported GPU memory is a descriptor of `/dev/nvidiactl`. Reserved for NVIDIA in
/// the kernel's `Documentation/admin-guide/devices.txt`; `NV_MAJOR_DEVICE_NUMBER` in the driver's `nv-chardev-numbers.h`.
const NVIDIA_MAJOR: u32 = 195;

/// Descriptors by the cost of closing them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Shared memory. The last close frees it, which takes milliseconds per GB.
    Memory,
    /// An NVIDIA device. The last close of GPU memory frees it.
    Device,
    /// Anything else. Another process can make close(2) block forever (FUSE, `SO_LINGER` of a socket), so a separate thread closes it.
    Foreign,
}

/// Checks that a descriptor can be the claimed memory. Does not block, and does not read the memory.
///
/// [`Backend::Host`] requires a memfd that the host backend can map, of exactly `size` bytes, and sealed against writing if `immutable`.
/// [`Backend::Cuda`] requires an NVIDIA device, whose size can't be checked without CUDA; with `emulated` it accepts a memfd too.
///
/// # Errors
/// One sentence with the values. The descriptor stays open.
pub(crate) fn inspect(
    fd: BorrowedFd<'_>,
    backend: Backend,
    size: u64,
    immutable: bool,
    emulated: bool,
) -> Result<(), String> {
    if size == 0 {
        return Err("0 bytes are claimed: memory has at least 1".to_owned());
    }
    let not_nvidia = |found: &str| {
        Err(format!(
            "the descriptor is {found}, but GPU memory is an NVIDIA character device (major number {NVIDIA_MAJOR})"
        ))
    };
    match (backend, kind(fd)) {
        (Backend::Cuda, Kind::Device) => Ok(()),
        (Backend::Cuda, Kind::Memory) if emulated => memory(fd, size, false),
        (Backend::Cuda, Kind::Memory) => not_nvidia("a memfd"),
        (Backend::Cuda, Kind::Foreign) => not_nvidia(&describe(fd)),
        (Backend::Host, _) => memory(fd, size, immutable),
    }
}

/// Classifies a descriptor. Does not block.
pub(crate) fn kind(fd: BorrowedFd<'_>) -> Kind {
    if fcntl(fd, FcntlArg::F_GET_SEALS).is_ok() {
        return Kind::Memory;
    }
    match cached_stat(fd) {
        Ok(stat) if is_nvidia(&stat) && !is_path_only(fd) => Kind::Device,
        _ => Kind::Foreign,
    }
}

/// [`inspect`], and whether [`kind`] is [`Kind::Foreign`]. For the project's tests.
pub(crate) fn inspect_and_classify(
    fd: BorrowedFd<'_>,
    backend: Backend,
    size: u64,
    emulated: bool,
) -> (Result<(), String>, bool) {
    (inspect(fd, backend, size, false, emulated), kind(fd) == Kind::Foreign)
}

fn memory(fd: BorrowedFd<'_>, size: u64, immutable: bool) -> Result<(), String> {
    match memfd::inspect(fd, size) {
        Ok(sealed) if immutable && !sealed => {
            Err("the memory is offered as immutable but not sealed against writing (F_SEAL_WRITE)".to_owned())
        }
        Ok(_) => Ok(()),
        Err((_, error)) => Err(error.to_string()),
    }
}

/// The attributes that the kernel caches for every file.
fn cached_stat(fd: BorrowedFd<'_>) -> io::Result<Statx> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    Ok(statx(fd, c"", flags, StatxFlags::TYPE)?)
}

fn file_type(stat: &Statx) -> FileType {
    FileType::from_raw_mode(stat.stx_mode.into())
}

fn is_nvidia(stat: &Statx) -> bool {
    file_type(stat) == FileType::CharacterDevice && stat.stx_rdev_major == NVIDIA_MAJOR
}

/// Whether the descriptor was opened with `O_PATH`. Then it is not a device, even if its inode looks like one: FUSE can fake that.
fn is_path_only(fd: BorrowedFd<'_>) -> bool {
    rustix::fs::fcntl_getfl(fd).is_ok_and(|flags| flags.contains(rustix::fs::OFlags::PATH))
}

fn describe(fd: BorrowedFd<'_>) -> String {
    let stat = match cached_stat(fd) {
        Ok(stat) => stat,
        Err(error) => return format!("a file that can't be examined ({error})"),
    };
    let name = match file_type(&stat) {
        _ if is_path_only(fd) => "a path (O_PATH)",
        FileType::RegularFile => "a regular file",
        FileType::Directory => "a folder",
        FileType::Fifo => "a pipe",
        FileType::Socket => "a socket",
        FileType::BlockDevice => "a block device",
        FileType::CharacterDevice => {
            return format!("the character device {}:{}", stat.stx_rdev_major, stat.stx_rdev_minor);
        }
        _ => "a file without a type, such as an eventfd",
    };
    name.to_owned()
}
