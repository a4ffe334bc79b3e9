//! The users that a peer may run as.

use super::Peer;
use crate::error::{Error, PeerError, Result};

/// The users whose processes may be the peer: this process's user, root, and `uids`.
///
/// ```
/// use vmmfd::{channel::Trust, session::Config};
///
/// let config = Config::default().trust(Trust { uids: vec![1000] });
/// # drop(config);
/// ```
#[derive(Debug, Clone, Default)]
pub struct Trust {
    /// Other trusted users.
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
