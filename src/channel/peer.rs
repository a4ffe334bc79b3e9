//! The process at the other end of a connection.

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

/// The process at the other end, as the kernel recorded it when the connection was made (`SO_PEERCRED`, unix(7)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Its process, or 0 if this PID namespace does not see it.
    pub pid: i32,
    /// Its effective user; the overflow uid (65534) if this user namespace does not map it.
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

    /// The process of this peer if it lives, else 0: of a listening socket that another process holds meanwhile, the kernel names the
    /// process that listened last.
    pub(crate) fn living_pid(self) -> i32 {
        let Some(pid) = rustix::process::Pid::from_raw(self.pid) else { return 0 };
        match pidfd_open(pid, PidfdFlags::empty()) {
            // The descriptor of a process that has ended is readable.
            Ok(pidfd) if poll(&mut [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)], PollTimeout::ZERO) == Ok(0) => {
                self.pid
            }
            Ok(_) | Err(Errno::SRCH | Errno::INVAL) => 0,
            // A kernel without such descriptors, or a process without room for one.
            Err(_) => self.pid,
        }
    }
}
