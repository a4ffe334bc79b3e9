//! The process at the other end of a connection between server and keeper, and how a server finds its keeper.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    unistd::geteuid,
};
use rustix::process::{Signal, pidfd_send_signal};

use crate::{
    channel::{Cancel, Peer, Trust, connect_socket},
    error::{Error, Result, SocketError},
    sys::pidfd_of,
};

/// How long a twin may take to listen in its own name after its keeper died.
const TWIN_WAIT: Duration = Duration::from_millis(50);

/// Retry interval while a twin takes over.
const RETRY: Duration = Duration::from_millis(1);

/// A server or a keeper, from the view of the other. Dropping this leaves the process running.
#[derive(Debug)]
pub(in crate::broker) struct Process {
    pub(in crate::broker) pid: i32,
    /// `None` if the process is not visible in this PID namespace.
    pidfd: Option<OwnedFd>,
}

impl Process {
    pub(super) fn of(pid: i32) -> Self {
        Self { pid, pidfd: pidfd_of(pid).ok() }
    }

    /// A process that must be visible.
    ///
    /// # Errors
    /// See pidfd_open(2).
    pub(super) fn visible(pid: i32) -> io::Result<Self> {
        Ok(Self { pid, pidfd: Some(pidfd_of(pid)?) })
    }

    /// Waits until the process has died.
    pub(super) fn wait_for_death(&self) {
        let Some(pidfd) = &self.pidfd else { return };
        let mut fds = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
        while matches!(poll(&mut fds, PollTimeout::NONE), Ok(0) | Err(Errno::EINTR)) {}
    }

    /// Readable once the process has died.
    pub(in crate::broker) fn pidfd(&self) -> Option<BorrowedFd<'_>> {
        self.pidfd.as_ref().map(AsFd::as_fd)
    }

    /// Whether the process is visible and has died.
    pub(in crate::broker) fn is_dead(&self) -> bool {
        self.pid > 0 && self.exits_within(Duration::ZERO)
    }

    /// Waits up to `wait` for the process to exit. A process without a pidfd counts as exited.
    pub(in crate::broker) fn exits_within(&self, wait: Duration) -> bool {
        self.pidfd.as_ref().is_none_or(|pidfd| ready(pidfd, PollFlags::POLLIN, wait))
    }

    /// Kills the process, even if it is stopped. Does not block.
    pub(in crate::broker) fn kill(&self) {
        if let Some(pidfd) = &self.pidfd {
            // Fails if the process has exited.
            let _ = pidfd_send_signal(pidfd, Signal::KILL);
        }
    }
}

/// A connected pair of sockets.
#[cfg(test)]
pub(super) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

/// Checks that the peer runs as this user.
pub(super) fn require_own_user(peer: Peer) -> Result<(), String> {
    let own = geteuid().as_raw();
    if peer.uid == own {
        return Ok(());
    }
    Err(format!(
        "pid {} runs as uid {}, and this process as uid {own}: keeper and server must run as the same user",
        peer.pid, peer.uid
    ))
}

/// Waits up to `wait` until a descriptor is ready. Returns whether it is.
pub(super) fn ready(fd: impl AsFd, flags: PollFlags, wait: Duration) -> bool {
    let mut fds = [PollFd::new(fd.as_fd(), flags)];
    poll(&mut fds, PollTimeout::try_from(wait).unwrap_or(PollTimeout::MAX)).is_ok_and(|count| count > 0)
}

/// The time left until `at`.
pub(super) fn until(at: Instant) -> Duration {
    at.saturating_duration_since(Instant::now())
}

/// Connects to the keeper at a path. Waits up to `wait` for a listener; `None` if there is none.
pub(super) fn dial_if_there(path: &Path, wait: Duration, cancel: &Cancel) -> Result<Option<(OwnedFd, Process)>> {
    let begun = Instant::now();
    loop {
        let (socket, peer) = match connect_socket(path, wait, &Trust::default(), cancel) {
            Ok(connected) => connected,
            Err(Error::Socket(SocketError::Absent { .. })) => return Ok(None),
            Err(error) => return Err(error),
        };
        require_own_user(peer).map_err(|why| unreachable(path, io::Error::other(why)))?;
        let keeper = Process::of(peer.pid);
        // The kernel reports the process that listened first, until its twin listens again.
        if !keeper.is_dead() || begun.elapsed() > wait.max(TWIN_WAIT) {
            return Ok(Some((socket, keeper)));
        }
        cancel.pause(RETRY)?;
    }
}

/// Connects to the keeper at a path. Waits up to `wait` for a listener.
pub(super) fn dial(path: &Path, wait: Duration, cancel: &Cancel) -> Result<(OwnedFd, Process)> {
    dial_if_there(path, wait, cancel)?.ok_or_else(|| {
        unreachable(path, io::Error::other("no keeper listens there; start one with `vmmfd keeper --socket PATH`"))
    })
}

pub(super) fn unreachable(path: &Path, error: io::Error) -> Error {
    Error::system(format!("reach the keeper at {}", path.display()), error)
}

/// Checks that a keeper of this user listens at a path.
///
/// # Errors
/// [`Error::System`] if there is none; [`Error::Socket`] if this user may not connect.
pub fn check_reachable(path: &Path, cancel: &Cancel) -> Result<()> {
    dial(path, Duration::ZERO, cancel).map(drop)
}
