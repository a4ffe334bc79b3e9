//! Connects to a keeper that listens at a path.

use std::{
    io,
    os::fd::OwnedFd,
    path::Path,
    time::{Duration, Instant},
};

use super::peer::{Process, require_own_user};
use crate::{
    channel::{Cancel, Trust, connect_socket},
    error::{Error, Result, SocketError},
};

/// How long a twin may take to listen in its own name after its keeper died.
const TWIN_WAIT: Duration = Duration::from_millis(50);

/// Retry interval while a twin takes over.
const RETRY: Duration = Duration::from_millis(1);

/// Connects to the keeper at a path. Waits up to `wait` for a listener; `None` if there is none.
pub(super) fn dial_if_there(path: &Path, wait: Duration, cancel: &Cancel) -> Result<Option<(OwnedFd, Process)>> {
    let begun = Instant::now();
    loop {
        let (socket, peer) = match connect_socket(path, wait, &Trust::default(), cancel) {
            Ok(connected) => connected,
            Err(Error::Socket(SocketError::Absent { .. })) => return Ok(None),
            Err(error) => return Err(error),
        };
        require_own_user(peer).map_err(|why| unreachable(path, io::Error::other(why)))?;
        let keeper = Process::of(peer.pid);
        // The kernel reports the process that listened first, until its twin listens again.
        if !keeper.is_dead() || begun.elapsed() > wait.max(TWIN_WAIT) {
            return Ok(Some((socket, keeper)));
        }
        cancel.pause(RETRY)?;
    }
}

/// Connects to the keeper at a path. Waits up to `wait` for a listener.
pub(super) fn dial(path: &Path, wait: Duration, cancel: &Cancel) -> Result<(OwnedFd, Process)> {
    dial_if_there(path, wait, cancel)?.ok_or_else(|| {
        unreachable(path, io::Error::other("no keeper listens there; start one with `vmmfd keeper --socket PATH`"))
    })
}

pub(super) fn unreachable(path: &Path, error: io::Error) -> Error {
    Error::system(format!("reach the keeper at {}", path.display()), error)
}

/// Checks that a keeper of this user listens at a path.
///
/// # Errors
/// [`Error::System`] if there is none; [`Error::Socket`] if this user may not connect.
pub fn check_reachable(path: &Path, cancel: &Cancel) -> Result<()> {
    dial(path, Duration::ZERO, cancel).map(drop)
}
