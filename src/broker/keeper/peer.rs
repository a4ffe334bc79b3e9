//! The process at the other end of a connection between server and keeper.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    thread,
    time::{Duration, Instant},
};

use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::wait::waitpid,
    unistd::{Pid, geteuid, getppid},
};
use rustix::{
    net::{AddressFamily, SocketFlags, SocketType, socketpair},
    process::{PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};

use crate::{channel::Peer, sys::above_standard};

/// A keeper from the server's view. Dropping this leaves the process running.
#[derive(Debug)]
pub(in crate::broker) struct Process {
    pub(in crate::broker) pid: i32,
    /// `None` if the process is not visible in this PID namespace.
    pidfd: Option<OwnedFd>,
    /// Whether this process started the keeper.
    is_child: bool,
}

impl Process {
    pub(super) fn of_child(pid: i32, pidfd: OwnedFd) -> Self {
        Self { pid, pidfd: Some(pidfd), is_child: true }
    }

    /// The keeper that started this process.
    pub(super) fn of_parent(pidfd: OwnedFd) -> Self {
        Self { pid: getppid().as_raw(), pidfd: Some(pidfd), is_child: false }
    }

    pub(super) fn of(pid: i32) -> Self {
        Self { pid, pidfd: pidfd_of(pid).ok(), is_child: false }
    }

    /// Waits up to `wait` for the process to exit. A process without a pidfd counts as exited.
    pub(in crate::broker) fn exits_within(&self, wait: Duration) -> bool {
        self.pidfd.as_ref().is_none_or(|pidfd| ready(pidfd, PollFlags::POLLIN, wait))
    }

    /// Sends SIGTERM. Returns whether the process exited within `wait`.
    pub(super) fn terminate(&self, wait: Duration) -> bool {
        let Some(pidfd) = &self.pidfd else { return false };
        // Fails if the process has exited.
        let _ = pidfd_send_signal(pidfd, Signal::TERM);
        let has_ended = self.exits_within(wait);
        if has_ended && self.is_child {
            let _ = waitpid(Pid::from_raw(self.pid), None);
        }
        has_ended
    }

    /// Another handle, if this process started the keeper.
    pub(in crate::broker) fn clone_of_child(&self) -> Option<Self> {
        let pidfd = self.pidfd.as_ref().filter(|_| self.is_child)?.try_clone().ok()?;
        Some(Self::of_child(self.pid, pidfd))
    }

    /// Kills the keeper if this process started it.
    pub(super) fn kill_child(self) {
        if self.is_child {
            self.kill();
        }
    }

    /// Kills the process, even if it is stopped. Does not block.
    pub(in crate::broker) fn kill(self) {
        if let Some(pidfd) = &self.pidfd {
            // Fails if the process has exited.
            let _ = pidfd_send_signal(pidfd, Signal::KILL);
        }
        if self.is_child {
            let pid = Pid::from_raw(self.pid);
            // The exit may take as long as a device needs. Without this thread the child would remain a zombie.
            let _ = thread::Builder::new().name("reaper".to_owned()).spawn(move || waitpid(pid, None));
        }
    }
}

/// A connected pair of sockets.
pub(super) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (one, other) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    Ok((above_standard(one)?, above_standard(other)?))
}

pub(super) fn pidfd_of(pid: i32) -> io::Result<OwnedFd> {
    let pid = rustix::process::Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
    above_standard(pidfd_open(pid, PidfdFlags::empty())?)
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

/// Waits up to `wait` until a socket is ready. Returns whether it is.
pub(super) fn ready(socket: &OwnedFd, flags: PollFlags, wait: Duration) -> bool {
    let mut fds = [PollFd::new(socket.as_fd(), flags)];
    poll(&mut fds, PollTimeout::try_from(wait).unwrap_or(PollTimeout::MAX)).is_ok_and(|count| count > 0)
}

/// The time left until `at`.
pub(super) fn until(at: Instant) -> Duration {
    at.saturating_duration_since(Instant::now())
}
