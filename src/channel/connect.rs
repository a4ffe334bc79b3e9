//! Connecting to a socket that another process listens on.

use std::{
    fs,
    os::{fd::OwnedFd, unix::fs::MetadataExt},
    path::Path,
    time::{Duration, Instant},
};

use nix::unistd::{Gid, Group};

use super::{
    Cancel, Channel, Peer, RETRY, Trust,
    attempt::{Attempt, attempt},
    deadline_after,
    path::closed_folder,
};
use crate::error::{Error, Result, SocketError};

/// The group whose members may connect to a socket, if other users may not.
fn group_of(path: &Path) -> Option<String> {
    let metadata = fs::metadata(path).ok()?;
    (metadata.mode() & 0o022 == 0o020).then(|| {
        let group = Group::from_gid(Gid::from_raw(metadata.gid())).ok().flatten();
        group.map_or_else(|| metadata.gid().to_string(), |group| group.name)
    })
}

/// Connects to the producer at a path. Waits up to `timeout` for one to listen and to have room; the channel's own waits have
/// the same timeout.
///
/// # Errors
/// [`SocketError::Absent`] if no process listens in time; [`SocketError::NotAccepted`] if its backlog stays full;
/// [`SocketError::Denied`] if
/// this user may not connect, [`SocketError::ClosedFolder`] if it may not enter a folder on the way; [`PeerError::NotAllowed`](crate::error::PeerError::NotAllowed) if the listener's user is not
/// trusted; [`SocketError::Path`],
/// [`Error::Interrupted`], [`Error::System`].
///
/// See connect(2), unix(7).
pub fn connect(path: &Path, timeout: Duration, trust: &Trust, cancel: &Cancel) -> Result<Channel> {
    let (socket, peer) = connect_socket(path, timeout, trust, cancel)?;
    Channel::over(socket, peer, timeout, cancel)
}

/// As [`connect`], for the socket itself and its peer.
///
/// # Errors
/// As [`connect`].
pub fn connect_socket(path: &Path, timeout: Duration, trust: &Trust, cancel: &Cancel) -> Result<(OwnedFd, Peer)> {
    let deadline = deadline_after(timeout);
    loop {
        let path = || path.to_owned();
        let failed = match attempt(&path())? {
            Attempt::Connected(socket) => {
                let peer = Peer::of(&socket)?;
                trust.check(peer)?;
                return Ok((socket, peer));
            }
            // The file may be left from a process that has ended; a producer that admits this user then replaces it.
            Attempt::Denied => Error::Socket(match closed_folder(&path()) {
                Some(folder) => SocketError::ClosedFolder { path: path(), folder },
                None => SocketError::Denied { path: path(), group: group_of(&path()) },
            }),
            Attempt::Absent => Error::Socket(SocketError::Absent { path: path(), waited: timeout }),
            Attempt::Full => Error::Socket(SocketError::NotAccepted { path: path(), waited: timeout }),
        };
        if Instant::now() >= deadline {
            return Err(failed);
        }
        cancel.pause(RETRY)?;
    }
}
