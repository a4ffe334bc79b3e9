//! What a received descriptor is, found without waiting for another process.
//!
//! A descriptor may be of anything that its sender could open: a file of a FUSE file system, too, whose daemon is the sender's and
//! answers fstat(2) or close(2) when it likes. So the seals are asked for first, which only shared memory has and no file system
//! is asked about; then what the kernel remembers of the file (`AT_STATX_DONT_SYNC`), for which FUSE sends no request.

#[cfg(test)]
mod tests;

use std::{io, os::fd::BorrowedFd};

use nix::fcntl::{FcntlArg, fcntl};
use rustix::fs::{AtFlags, FileType, Statx, StatxFlags, statx};

use crate::{driver::Backend, sys::memfd};

/// The major number of NVIDIA's character devices, `/dev/nvidiactl` among them, of which every export of a GPU's memory is.
/// Reserved for NVIDIA in the kernel's `Documentation/admin-guide/devices.txt`, and `NV_MAJOR_DEVICE_NUMBER` in the driver's source
/// (`nv-chardev-numbers.h`).
const NVIDIA_MAJOR: u32 = 195;

/// Why a descriptor is refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unfit {
    /// No memory has this size.
    #[error("0 bytes are claimed: memory has at least 1")]
    Empty,

    /// Not such memory as the host backend maps, or not of the claimed size.
    #[error("{0}")]
    Memory(io::Error),

    /// Offered as immutable.
    #[error("the memory is offered as immutable and is not sealed against writing (F_SEAL_WRITE)")]
    Writable,

    /// The claim is a GPU's memory.
    #[error(
        "the descriptor is of {found}, where a GPU's memory is a character device of NVIDIA's (major number {NVIDIA_MAJOR})"
    )]
    NotNvidia {
        /// `a pipe`, say.
        found: String,
    },
}

/// What a descriptor is, as far as closing it goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Shared memory. The last close of it frees the memory: milliseconds for each GB.
    Memory,
    /// A device of NVIDIA's. The last close of a GPU's memory frees it.
    Device,
    /// All else: to close it may block for as long as another process likes (FUSE, `SO_LINGER` of a socket). It goes to a thread for
    /// such files alone.
    Foreign,
}

/// Checks that a descriptor can be the memory that it is claimed to be. Does not block, and reads none of it.
///
/// With [`Backend::Host`] it is a memfd as the host backend demands, of exactly `size` bytes. With [`Backend::Cuda`] it is a device
/// of NVIDIA's; its size can't be checked without CUDA. With `emulated` a memfd is accepted there too. Host memory that is
/// `immutable` is sealed against writing, since its readers refuse it otherwise.
///
/// # Errors
/// Each is one sentence with the values. The descriptor stays open.
pub(crate) fn inspect(
    fd: BorrowedFd<'_>,
    backend: Backend,
    size: u64,
    immutable: bool,
    emulated: bool,
) -> Result<(), Unfit> {
    if size == 0 {
        return Err(Unfit::Empty);
    }
    match (backend, kind(fd)) {
        (Backend::Cuda, Kind::Device) => Ok(()),
        (Backend::Cuda, Kind::Memory) if emulated => memory(fd, size, false),
        (Backend::Cuda, Kind::Memory) => Err(Unfit::NotNvidia { found: "a memfd".to_owned() }),
        (Backend::Cuda, Kind::Foreign) => Err(Unfit::NotNvidia { found: describe(fd) }),
        (Backend::Host, _) => memory(fd, size, immutable),
    }
}

/// What a descriptor is. Does not block.
pub(crate) fn kind(fd: BorrowedFd<'_>) -> Kind {
    if fcntl(fd, FcntlArg::F_GET_SEALS).is_ok() {
        return Kind::Memory;
    }
    match remembered(fd) {
        Ok(stat) if is_nvidia(&stat) && !by_path_alone(fd) => Kind::Device,
        _ => Kind::Foreign,
    }
}

/// [`inspect`], and whether [`kind`] is [`Kind::Foreign`], for the project's own tests.
pub(crate) fn inspect_and_classify(
    fd: BorrowedFd<'_>,
    backend: Backend,
    size: u64,
    emulated: bool,
) -> (Result<(), String>, bool) {
    let result = inspect(fd, backend, size, false, emulated).map_err(|error| error.to_string());
    (result, kind(fd) == Kind::Foreign)
}

/// What distinguishes the inode of one descriptor from that of another: of shared memory, or of a device. Does not block.
///
/// # Errors
/// See statx(2).
pub(crate) fn inode(fd: BorrowedFd<'_>) -> io::Result<Inode> {
    let stat = remembered(fd)?;
    Ok(Inode { device: (stat.stx_dev_major, stat.stx_dev_minor), number: stat.stx_ino })
}

/// A file on its file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(crate) struct Inode {
    device: (u32, u32),
    number: u64,
}

fn memory(fd: BorrowedFd<'_>, size: u64, immutable: bool) -> Result<(), Unfit> {
    match memfd::inspect(fd, size) {
        Ok(sealed) if immutable && !sealed => Err(Unfit::Writable),
        Ok(_) => Ok(()),
        Err((_, error)) => Err(Unfit::Memory(error)),
    }
}

/// What the kernel remembers of a file, and of that only what it always has.
fn remembered(fd: BorrowedFd<'_>) -> io::Result<Statx> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    Ok(statx(fd, c"", flags, StatxFlags::TYPE | StatxFlags::INO)?)
}

fn file_type(stat: &Statx) -> FileType {
    FileType::from_raw_mode(stat.stx_mode.into())
}

fn is_nvidia(stat: &Statx) -> bool {
    file_type(stat) == FileType::CharacterDevice && stat.stx_rdev_major == NVIDIA_MAJOR
}

/// Whether it was opened with `O_PATH`: then it is no device, whatever its file is, and may be one that a FUSE file system made up.
fn by_path_alone(fd: BorrowedFd<'_>) -> bool {
    rustix::fs::fcntl_getfl(fd).is_ok_and(|flags| flags.contains(rustix::fs::OFlags::PATH))
}

/// What it is, for a person.
fn describe(fd: BorrowedFd<'_>) -> String {
    let stat = match remembered(fd) {
        Ok(stat) => stat,
        Err(error) => return format!("a file that can't be examined ({error})"),
    };
    let name = match file_type(&stat) {
        _ if by_path_alone(fd) => "a path (O_PATH)",
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
