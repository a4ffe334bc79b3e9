//! A single attempt to connect to a socket.

use std::{
    fs, io,
    os::{fd::OwnedFd, unix::fs::FileTypeExt},
    path::Path,
};

use rustix::{
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with},
};

use crate::{
    error::{Error, Result, SocketError},
    sys::above_standard,
};

/// The result of an attempt.
pub(super) enum Attempt {
    Connected(OwnedFd),
    /// The socket does not exist, or no process listens on it.
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
        Err(Errno::CONNREFUSED) if is_not_socket(path) => Err(Error::Socket(SocketError::Path {
            path: path.to_owned(),
            reason: "a file of that name exists and is not a socket".to_owned(),
        })),
        Err(Errno::NOENT | Errno::CONNREFUSED) => Ok(Attempt::Absent),
        Err(Errno::AGAIN | Errno::INTR) => Ok(Attempt::Full),
        Err(Errno::ACCESS | Errno::PERM) => Ok(Attempt::Denied),
        Err(Errno::PROTOTYPE) => Err(Error::Socket(SocketError::Path {
            path: path.to_owned(),
            reason: "another program listens on it with another type of socket".to_owned(),
        })),
        Err(errno) => Err(Error::system(format!("connect to {}", path.display()), errno)),
    }
}

/// Whether a path is a file of another kind.
fn is_not_socket(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|metadata| !metadata.file_type().is_socket())
}

/// Creates a non-blocking socket: on a blocking one, a full backlog would block `connect`.
pub(super) fn new_socket() -> Result<OwnedFd> {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)
        .map_err(io::Error::from)
        .and_then(above_standard)
        .map_err(|error| Error::system("create a SOCK_SEQPACKET socket", error))
}
