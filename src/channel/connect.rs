//! Connecting to a socket that another process listens on.

use std::{
    fs,
    os::{
        fd::OwnedFd,
        unix::fs::{FileTypeExt, MetadataExt},
    },
    path::Path,
    time::{Duration, Instant},
};

use nix::unistd::{Gid, Group};
use rustix::{
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with},
};

use super::{Cancel, Channel, Peer, RETRY, Trust, deadline_after, path::closed_folder};
use crate::error::{Error, Result, SocketError};

/// The result of one attempt to connect.
pub(super) enum Attempt {
    Connected(OwnedFd),
    /// There is no socket, or no process listens on it.
    Absent,
    /// The backlog is full.
    Full,
    /// This user may not connect.
    Denied,
}

/// Tries to connect. Does not block.
pub(super) fn attempt(path: &Path) -> Result<Attempt> {
    let address = SocketAddrUnix::new(path);
    let address = address.map_err(|errno| Error::system(format!("address {}", path.display()), errno))?;
    let socket = new_socket()?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) => Ok(Attempt::Connected(socket)),
        Err(Errno::CONNREFUSED) if is_no_socket(path) => Err(Error::Socket(SocketError::Path {
            path: path.to_owned(),
            reason: "a file of that name exists and is not a socket".to_owned(),
        })),
        Err(Errno::NOENT | Errno::CONNREFUSED) => Ok(Attempt::Absent),
        Err(Errno::AGAIN | Errno::INTR) => Ok(Attempt::Full),
        Err(Errno::ACCESS | Errno::PERM) => Ok(Attempt::Denied),
        Err(Errno::PROTOTYPE) => Err(Error::Socket(SocketError::Path {
            path: path.to_owned(),
            reason: "another program listens on it, with another type of socket".to_owned(),
        })),
        Err(errno) => Err(Error::system(format!("connect to {}", path.display()), errno)),
    }
}

/// The group whose members may connect to a socket, if other users may not.
fn group_of(path: &Path) -> Option<String> {
    let metadata = fs::metadata(path).ok()?;
    (metadata.mode() & 0o022 == 0o020).then(|| {
        let group = Group::from_gid(Gid::from_raw(metadata.gid())).ok().flatten();
        group.map_or_else(|| metadata.gid().to_string(), |group| group.name)
    })
}

/// Whether a path is of another kind of file.
fn is_no_socket(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|metadata| !metadata.file_type().is_socket())
}

/// Non-blocking, since a full backlog would block `connect`.
pub(super) fn new_socket() -> Result<OwnedFd> {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)
        .map_err(|errno| Error::system("make a SOCK_SEQPACKET socket", errno))
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
