//! The peer of a connection.

use std::os::fd::AsFd;

use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::socket::{getsockopt, sockopt::PeerCredentials},
};
use rustix::{
    io::Errno,
    process::{PidfdFlags, pidfd_open},
};

use crate::error::{Error, Result};

/// The peer's process, as the kernel recorded it when the connection was made (`SO_PEERCRED`, unix(7)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Process ID, or 0 if it is not visible in this PID namespace.
    pub pid: i32,
    /// Effective user ID, or the overflow uid (65534) if it is not mapped in this user namespace.
    pub uid: u32,
}

impl Peer {
    /// # Errors
    /// [`Error::System`]. See unix(7).
    pub(crate) fn of(socket: &impl AsFd) -> Result<Self> {
        let credentials = getsockopt(&socket.as_fd(), PeerCredentials)
            .map_err(|errno| Error::system("read the peer's credentials", errno))?;
        Ok(Self { pid: credentials.pid(), uid: credentials.uid() })
    }

    /// The process ID if the process is alive, otherwise 0. For a listening socket that another process inherited, the kernel reports the
    /// process that called listen(2) last, which may be gone.
    pub(crate) fn living_pid(self) -> i32 {
        let Some(pid) = rustix::process::Pid::from_raw(self.pid) else { return 0 };
        match pidfd_open(pid, PidfdFlags::empty()) {
            // The descriptor of an exited process is readable.
            Ok(pidfd) if poll(&mut [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)], PollTimeout::ZERO) == Ok(0) => {
                self.pid
            }
            Ok(_) | Err(Errno::SRCH | Errno::INVAL) => 0,
            // The kernel has no pidfds, or this process has no descriptor left.
            Err(_) => self.pid,
        }
    }
}
