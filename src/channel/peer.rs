//! The process at the other end of a connection.

use std::os::fd::AsFd;

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};

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
}
