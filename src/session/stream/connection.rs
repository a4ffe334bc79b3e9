//! The identity of a peer: its process, and a descriptor that shows its exit.

use std::os::fd::{AsFd, OwnedFd};

use crate::{
    channel::{Peer, record::check_type},
    error::Result,
    sys::{peer_pidfd, pidfd_of},
};

/// A peer, as the kernel or the process that introduced it reports it.
#[derive(Debug)]
pub(crate) struct Identity {
    pub(crate) peer: Peer,
    /// Readable when the process has exited. `None` if the kernel can't provide it: then the close of the connection counts.
    pub(crate) process: Option<OwnedFd>,
}

impl Identity {
    /// The process that connected or listened.
    ///
    /// # Errors
    /// [`Error::Socket`](crate::Error::Socket) if it is not a socket of type `SOCK_SEQPACKET`; [`Error::System`](crate::Error::System).
    /// See `SO_PEERCRED` in unix(7).
    pub(crate) fn of(socket: &impl AsFd) -> Result<Self> {
        check_type(socket)?;
        let peer = Peer::of(socket)?;
        let process = peer_pidfd(socket.as_fd()).or_else(|_| pidfd_of(peer.pid)).ok();
        Ok(Self { peer, process })
    }

    /// A process that has sent a record on the connection.
    pub(crate) fn of_sender(peer: Peer) -> Self {
        Self { peer, process: pidfd_of(peer.pid).ok() }
    }
}
