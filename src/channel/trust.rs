//! Which users may be at the other end of a connection.

use super::Peer;
use crate::error::{Error, PeerError, Result};

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
    /// [`PeerError::NotAllowed`].
    pub fn check(&self, peer: Peer) -> Result<()> {
        let own = nix::unistd::geteuid().as_raw();
        if peer.uid == own || peer.uid == 0 || self.uids.contains(&peer.uid) {
            return Ok(());
        }
        Err(Error::Peer(PeerError::NotAllowed { pid: peer.pid, uid: peer.uid }))
    }
}
