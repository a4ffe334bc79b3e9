//! memfds: created here, or received from a peer.

use std::{
    ffi::CStr,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use nix::{
    errno::Errno,
    fcntl::{FallocateFlags, FcntlArg, SealFlag, fallocate, fcntl},
    sys::{
        memfd::{MFdFlags, memfd_create},
        resource::{Resource, getrlimit},
        stat::fstat,
        statfs::{HUGETLBFS_MAGIC, fstatfs},
    },
    unistd::ftruncate,
};

use super::steps::must_stop;
use crate::{error::code, sys::above_standard};

/// How many bytes one call commits: about 30 ms.
const STEP: u64 = 64 << 20;

/// Creates an empty, close-on-exec memfd that accepts seals. `name` appears in `/proc/PID/fd`. Does not block.
///
/// # Errors
/// See memfd_create(2).
pub(crate) fn empty(name: &CStr) -> nix::Result<OwnedFd> {
    let close_on_exec = MFdFlags::MFD_CLOEXEC;
    // NOEXEC_SEAL (Linux 6.3) implies sealing, and some systems require it. Older kernels reject it.
    let made = memfd_create(name, close_on_exec | MFdFlags::from_bits_retain(nix::libc::MFD_NOEXEC_SEAL));
    let made = made.or_else(|errno| match errno {
        Errno::EINVAL => memfd_create(name, close_on_exec | MFdFlags::MFD_ALLOW_SEALING),
        other => Err(other),
    });
    // Only the move sets another kind of error than errno.
    above_standard(made?).map_err(|error| error.raw_os_error().map_or(Errno::EIO, Errno::from_raw))
}

/// Creates a memfd of `size` bytes and commits all its pages. `name` appears in `/proc/PID/fd`.
///
/// # Errors
/// EINTR if the program's check stops it: fallocate(2) itself is only interrupted by signals that end the process. See memfd_create(2).
pub(crate) fn create(name: &CStr, size: u64) -> nix::Result<OwnedFd> {
    let memfd = empty(name)?;
    let length = i64::try_from(size).map_err(|_| Errno::ENOMEM)?;
    // Exceeding the limit would raise SIGXFSZ, which kills the process.
    if getrlimit(Resource::RLIMIT_FSIZE)?.0 < size {
        return Err(Errno::EFBIG);
    }
    ftruncate(&memfd, length)?;
    for start in (0..size).step_by(STEP as usize) {
        if start > 0 && must_stop() {
            return Err(Errno::EINTR);
        }
        fallocate(memfd.as_fd(), FallocateFlags::empty(), start as i64, STEP.min(size - start) as i64)?;
    }
    add_seals(&memfd, SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW)?;
    Ok(memfd)
}

pub(crate) fn add_seals(memfd: &OwnedFd, seals: SealFlag) -> nix::Result<()> {
    fcntl(memfd, FcntlArg::F_ADD_SEALS(seals)).map(drop)
}

/// Seals memory permanently against writing. Does not block.
///
/// `F_SEAL_FUTURE_WRITE` exists since Linux 5.1. On an older kernel `F_SEAL_WRITE` alone prevents all writes.
///
/// # Errors
/// EBUSY while a process has a writable mapping; see fcntl(2).
pub(crate) fn seal_content(memfd: &OwnedFd) -> nix::Result<()> {
    let seals = SealFlag::F_SEAL_WRITE | SealFlag::F_SEAL_SEAL;
    match add_seals(memfd, seals | SealFlag::F_SEAL_FUTURE_WRITE) {
        Err(Errno::EINVAL) => add_seals(memfd, seals),
        result => result,
    }
}

/// Seals memory permanently against holes and further writable mappings; those that exist remain. Does not block.
///
/// `F_SEAL_FUTURE_WRITE` exists since Linux 5.1. On an older kernel nothing prevents holes.
///
/// # Errors
/// EPERM if the seals are final; see fcntl(2).
pub(crate) fn seal_mapping(memfd: &OwnedFd) -> nix::Result<()> {
    match add_seals(memfd, SealFlag::F_SEAL_FUTURE_WRITE | SealFlag::F_SEAL_SEAL) {
        Err(Errno::EINVAL) => add_seals(memfd, SealFlag::F_SEAL_SEAL),
        result => result,
    }
}

/// The seals of a memfd.
///
/// # Errors
/// As for [`inspect`].
pub(crate) fn seals(fd: BorrowedFd<'_>) -> Result<SealFlag, (u32, io::Error)> {
    match fcntl(fd, FcntlArg::F_GET_SEALS) {
        Ok(seals) => Ok(SealFlag::from_bits_retain(seals)),
        // EINVAL: a pipe, a socket, a device or a file on disk. EBADF: opened with O_PATH.
        Err(Errno::EINVAL | Errno::EBADF) => Err((code::UNKNOWN, io::Error::other("the descriptor is not of a memfd"))),
        Err(errno) => Err((code::OPERATING_SYSTEM, errno.into())),
    }
}

/// Checks that a descriptor is a memfd of `size` bytes that its owner can no longer shrink. Returns whether it is sealed against writing.
///
/// The seals must be final (`F_SEAL_SEAL`), so that the results of this check stay true. If the owner later added a seal against
/// writing, mmap(2) would fail unexpectedly, and some kernels have already removed the old mapping at that point. mmap(2) of huge pages
/// fails the same way when no huge page is free, so such memory is refused.
///
/// All pages must be committed: reading a hole commits its pages and charges them to this process. The owner can still punch holes
/// later, unless the memory is sealed against writing, but it had to have the memory in the first place.
///
/// # Errors
/// The driver's code and the reason. As in a CUDA driver, `UNKNOWN` if the descriptor is not such memory, and `INVALID_VALUE` if its
/// size differs.
pub(crate) fn inspect(fd: BorrowedFd<'_>, size: u64) -> Result<bool, (u32, io::Error)> {
    let system = |errno: Errno| (code::OPERATING_SYSTEM, io::Error::from(errno));
    let unfit = |reason: String| Err((code::UNKNOWN, io::Error::other(reason)));
    let seals = seals(fd)?;
    if fstatfs(fd).map_err(system)?.filesystem_type() == HUGETLBFS_MAGIC {
        let reason = "the memory has huge pages (MFD_HUGETLB), which are not supported: use ordinary pages";
        return unfit(reason.to_owned());
    }
    if !seals.contains(SealFlag::F_SEAL_SHRINK) {
        let reason = "the memory is not sealed against shrinking: its owner could take it away under this process";
        return unfit(reason.to_owned());
    }
    if !seals.contains(SealFlag::F_SEAL_SEAL) {
        let reason =
            "the memory's seals are not final (F_SEAL_SEAL): a seal that is added later could make mapping fail";
        return unfit(reason.to_owned());
    }
    let stat = fstat(fd).map_err(system)?;
    let actual = u64::try_from(stat.st_size).unwrap_or(0);
    if actual != size {
        let reason = format!("the memory has {actual} bytes where {size} were claimed");
        return Err((code::INVALID_VALUE, io::Error::other(reason)));
    }
    let committed = u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512);
    if committed < size {
        let missing = size - committed;
        return unfit(format!("{missing} of the memory's {size} bytes are not committed: call fallocate"));
    }
    Ok(seals.contains(SealFlag::F_SEAL_WRITE))
}
