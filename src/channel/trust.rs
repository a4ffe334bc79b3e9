//! Which users may be at the other end of a connection.

use super::Peer;
use crate::error::{Error, Result};

/// The users whose processes may be the peer: this process's own, root, and those listed here.
#[derive(Debug, Clone, Default)]
pub struct Trust {
    /// The other users that are allowed.
    pub uids: Vec<u32>,
}

impl Trust {
    /// Checks the peer's user. Does not block.
    ///
    /// # Errors
    /// [`Error::PeerNotAllowed`].
    pub fn check(&self, peer: Peer) -> Result<()> {
        let own = nix::unistd::geteuid().as_raw();
        if peer.uid == own || peer.uid == 0 || self.uids.contains(&peer.uid) {
            return Ok(());
        }
        Err(Error::PeerNotAllowed { pid: peer.pid, uid: peer.uid })
    }
}
