//! Memory as a descriptor: made here, or by a peer.

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

use crate::error::code;

/// An empty memfd to which seals can be added, close-on-exec. `name` is for people, in `/proc/PID/fd`. Does not block.
///
/// # Errors
/// See memfd_create(2).
pub(crate) fn empty(name: &CStr) -> nix::Result<OwnedFd> {
    let close_on_exec = MFdFlags::MFD_CLOEXEC;
    // NOEXEC_SEAL (Linux 6.3) implies sealing, and some systems demand it; older kernels know nothing of it.
    memfd_create(name, close_on_exec | MFdFlags::from_bits_retain(nix::libc::MFD_NOEXEC_SEAL)).or_else(|errno| {
        match errno {
            Errno::EINVAL => memfd_create(name, close_on_exec | MFdFlags::MFD_ALLOW_SEALING),
            other => Err(other),
        }
    })
}

/// A memfd of `size` bytes, every page of it committed.
pub(crate) fn create(size: u64) -> nix::Result<OwnedFd> {
    let memfd = empty(c"vmmfd")?;
    let length = i64::try_from(size).map_err(|_| Errno::ENOMEM)?;
    // To go beyond it is not an error first but a signal, which ends the process.
    if getrlimit(Resource::RLIMIT_FSIZE)?.0 < size {
        return Err(Errno::EFBIG);
    }
    ftruncate(&memfd, length)?;
    fallocate(memfd.as_fd(), FallocateFlags::empty(), 0, length)?;
    add_seals(&memfd, SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW)?;
    Ok(memfd)
}

pub(crate) fn add_seals(memfd: &OwnedFd, seals: SealFlag) -> nix::Result<()> {
    fcntl(memfd, FcntlArg::F_ADD_SEALS(seals)).map(drop)
}

/// Seals memory against writing, for good. Does not block.
///
/// `F_SEAL_FUTURE_WRITE` is of Linux 5.1. An older kernel knows no such seal, and `F_SEAL_WRITE` alone lets no process write.
///
/// # Errors
/// EBUSY while a process has it mapped to write; see fcntl(2).
pub(crate) fn seal_content(memfd: &OwnedFd) -> nix::Result<()> {
    let seals = SealFlag::F_SEAL_WRITE | SealFlag::F_SEAL_SEAL;
    match add_seals(memfd, seals | SealFlag::F_SEAL_FUTURE_WRITE) {
        Err(Errno::EINVAL) => add_seals(memfd, seals),
        result => result,
    }
}

/// Checks that a descriptor is memory of `size` bytes that its owner can no longer take away. Returns whether it is sealed against
/// writing.
///
/// The seals must be final (`F_SEAL_SEAL`): what holds here then holds for good. A seal against writing that comes later makes
/// mmap(2) fail, which was promised to work, and some kernels have unmapped by then what was to be replaced. Memory of huge
/// pages fails like that whenever there is none left, whatever its seals are.
///
/// All of it must be committed: reading a hole commits its pages, on this process's account. Its owner may still punch holes
/// later, unless it is sealed against writing; by then it has had to have the memory.
///
/// # Errors
/// The driver's code, and the reason: as a CUDA driver `UNKNOWN` where the descriptor is not such memory, and `INVALID_VALUE` where
/// it has another size.
pub(crate) fn inspect(fd: BorrowedFd<'_>, size: u64) -> Result<bool, (u32, io::Error)> {
    let system = |errno: Errno| (code::OPERATING_SYSTEM, io::Error::from(errno));
    let unfit = |reason: String| Err((code::UNKNOWN, io::Error::other(reason)));
    let seals = match fcntl(fd, FcntlArg::F_GET_SEALS) {
        Ok(seals) => SealFlag::from_bits_retain(seals),
        // A pipe, a socket, a device, a file of a disk; or one that is open by its path alone.
        Err(Errno::EINVAL | Errno::EBADF) => return unfit("the descriptor is not of a memfd".to_owned()),
        Err(errno) => return Err(system(errno)),
    };
    if fstatfs(fd).map_err(system)?.filesystem_type() == HUGETLBFS_MAGIC {
        let reason = "the memory is of huge pages (MFD_HUGETLB), which are not supported: use ordinary ones";
        return unfit(reason.to_owned());
    }
    if !seals.contains(SealFlag::F_SEAL_SHRINK) {
        let reason = "the memory is not sealed against shrinking: its owner could take it away under this process";
        return unfit(reason.to_owned());
    }
    if !seals.contains(SealFlag::F_SEAL_SEAL) {
        let reason =
            "the memory's seals are not final (F_SEAL_SEAL): one that is added later could make mapping it fail";
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
