//! Forks, passed descriptors, and the start time of a process.

use std::{
    io,
    os::fd::{FromRawFd, OwnedFd, RawFd},
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, SystemTime},
};

use nix::{
    libc,
    time::{ClockId, clock_gettime},
};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::above_standard;

/// The start time of a process, in milliseconds since 1970, with a resolution of 10 ms. `None` if the process does not exist in this PID
/// namespace. See `starttime` in proc_pid_stat(5).
pub(crate) fn started_ms(pid: u32) -> Option<u64> {
    // /proc counts in this unit on every architecture.
    const TICK_MS: u64 = 10;
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command in parentheses may itself contain parentheses and spaces. The third field follows it.
    let ticks: u64 = stat.rsplit_once(") ")?.1.split(' ').nth(22 - 3)?.parse().ok()?;
    // Read the real-time clock first: a delay before the second clock makes the result earlier, so that a process never seems younger
    // than its children.
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).ok()?;
    let since_boot = Duration::from(clock_gettime(ClockId::CLOCK_BOOTTIME).ok()?);
    let age = u64::try_from(since_boot.as_millis()).ok()?.saturating_sub(ticks * TICK_MS);
    Some(u64::try_from(now.as_millis()).ok()?.saturating_sub(age))
}

/// A pidfd of a process, above the standard descriptors.
///
/// # Errors
/// `InvalidInput` for 0, which stands for a process that is not visible in this PID namespace; all errors of pidfd_open(2).
pub(crate) fn pidfd_of(pid: i32) -> io::Result<OwnedFd> {
    let pid = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
    above_standard(pidfd_open(pid, PidfdFlags::empty())?)
}

/// A pidfd of a process. `None` if the process is not visible here or gone, or the kernel or a filter does not have the call.
///
/// # Errors
/// `EMFILE`, `ENFILE` and `ENOMEM`.
pub(crate) fn process_of(pid: i32) -> io::Result<Option<OwnedFd>> {
    unless_short(pidfd_of(pid))
}

/// Only the lack of room in this process or the kernel remains an error.
pub(super) fn unless_short(found: io::Result<OwnedFd>) -> io::Result<Option<OwnedFd>> {
    match found {
        Err(error) if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM)) => Err(error),
        found => Ok(found.ok()),
    }
}

/// The time of `CLOCK_MONOTONIC`, which all processes of this machine share. Not by rustix, which looks for the vDSO itself and crashes under
/// valgrind.
pub(crate) fn monotonic() -> Duration {
    clock_gettime(ClockId::CLOCK_MONOTONIC).map(Duration::from).unwrap_or_default()
}

/// The first passed descriptor, `SD_LISTEN_FDS_START` of sd_listen_fds(3).
const FIRST: RawFd = 3;

/// Takes the descriptors that were passed to this program, with their names, and makes them close-on-exec.
///
/// `LISTEN_FDS` and `LISTEN_FDNAMES` describe them, if `LISTEN_PID` is this process. Only the first call returns them.
///
/// # Errors
/// EBADF if a descriptor is not open, and then none is taken; `InvalidInput` if a variable is malformed. See sd_listen_fds(3), fcntl(2).
pub fn take_passed() -> io::Result<Vec<(String, OwnedFd)>> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u32>().ok());
    if number("LISTEN_PID") != Some(std::process::id()) || TAKEN.swap(true, Ordering::AcqRel) {
        return Ok(Vec::new());
    }
    let end = number("LISTEN_FDS").and_then(|count| RawFd::try_from(count).ok()).and_then(|n| FIRST.checked_add(n));
    let end = end.ok_or(io::ErrorKind::InvalidInput)?;
    for fd in FIRST..end {
        // SAFETY: the arguments are integers; no memory is read or written.
        if unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
    let names = names.split(':').chain(std::iter::repeat("unknown"));
    // SAFETY: fcntl succeeded, so they are open. The parent passed them for the code that asks for them by this convention, and `TAKEN`
    // ensures that they are taken once.
    let take = |(fd, name): (RawFd, &str)| (name.to_owned(), unsafe { OwnedFd::from_raw_fd(fd) });
    Ok((FIRST..end).zip(names).map(take).collect())
}

/// Forks. Returns the child's pid, or `None` in the child. For a process whose other threads hold no lock that the child takes.
///
/// # Errors
/// See fork(2).
pub(crate) fn fork_process() -> io::Result<Option<libc::pid_t>> {
    // SAFETY: the C library keeps its own locks usable in the child. The caller has no other thread than the writer of standard error,
    // whose queue the child replaces.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(None),
        child => Ok(Some(child)),
    }
}
