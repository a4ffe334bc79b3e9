//! Connects to a listening socket.

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

/// The group whose members may connect to a socket, if others may not.
fn group_of(path: &Path) -> Option<String> {
    let metadata = fs::metadata(path).ok()?;
    (metadata.mode() & 0o022 == 0o020).then(|| {
        let group = Group::from_gid(Gid::from_raw(metadata.gid())).ok().flatten();
        group.map_or_else(|| metadata.gid().to_string(), |group| group.name)
    })
}

/// Connects to the producer at `path`. Waits up to `timeout` until a process listens and accepts; the channel has the same timeout.
///
/// # Errors
/// [`SocketError::Absent`] if no process listens in time; [`SocketError::NotAccepted`] if the backlog remains full;
/// [`SocketError::Denied`] if this user may not connect; [`SocketError::ClosedFolder`] if this user may not enter a folder of the path;
/// [`PeerError::NotAllowed`](crate::error::PeerError::NotAllowed) if the listener's user is not trusted; [`SocketError::Path`],
/// [`Error::Interrupted`], [`Error::System`].
///
/// See connect(2), unix(7).
pub fn connect(path: &Path, timeout: Duration, trust: &Trust, cancel: &Cancel) -> Result<Channel> {
    let (socket, peer) = connect_socket(path, timeout, trust, cancel)?;
    Channel::over(socket, peer, timeout, cancel)
}

/// Like [`connect`], but returns the socket and its peer.
///
/// # Errors
/// The errors of [`connect`].
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
            // The file may be left over from a process that is gone. A producer that trusts this user then replaces it.
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
