//! The identity of a peer: its process, and a descriptor that shows its exit.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
};

use crate::{
    channel::{Peer, record::check_type},
    error::{Error, Result},
    sys::{peer_process, process_of},
};

/// A peer, as the kernel or the process that introduced it reports it.
#[derive(Debug)]
pub(crate) struct Identity {
    pub(crate) peer: Peer,
    /// Readable when the process has exited. `None` if the kernel can't provide it: then the close of the connection counts.
    pub(crate) process: Option<OwnedFd>,
    /// Whether another process vouches for it, instead of the socket.
    pub(crate) is_introduced: bool,
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
        Self::with(peer, peer_process(socket.as_fd(), peer.pid))
    }

    /// A process that has sent a record on the connection.
    ///
    /// # Errors
    /// [`Error::System`](crate::Error::System).
    pub(crate) fn of_sender(peer: Peer) -> Result<Self> {
        Self::with(peer, process_of(peer.pid))
    }

    fn with(peer: Peer, process: io::Result<Option<OwnedFd>>) -> Result<Self> {
        let process = process.map_err(|error| Error::system("open a peer's pidfd", error))?;
        Ok(Self { peer, process, is_introduced: false })
    }

    /// A process for which another process vouches.
    pub(crate) fn introduced(peer: Peer, process: Option<OwnedFd>) -> Self {
        Self { peer, process, is_introduced: true }
    }
}
