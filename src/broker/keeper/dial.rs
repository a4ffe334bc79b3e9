//! Connects to a keeper that listens at a path.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    path::Path,
    time::{Duration, Instant},
};

use nix::poll::PollFlags;

use super::{
    HANDOVER_TIMEOUT,
    message::{Arrival, Message, receive, send},
    peer::{Process, require_own_user},
};
use crate::{
    channel::{Cancel, Trust, connect_socket},
    error::{Error, Result, SocketError},
};

/// Connects to the keeper at a path. Waits up to `wait` for a listener; `None` if there is none.
pub(super) fn dial_if_there(path: &Path, wait: Duration, cancel: &Cancel) -> Result<Option<(OwnedFd, Process)>> {
    let (socket, peer) = match connect_socket(path, wait, &Trust::default(), cancel) {
        Ok(connected) => connected,
        Err(Error::Socket(SocketError::Absent { .. })) => return Ok(None),
        Err(error) => return Err(error),
    };
    require_own_user(peer).map_err(|why| unreachable(path, io::Error::other(why)))?;
    Ok(Some((socket, Process::of(peer.pid))))
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

/// Asks the keeper at a path to execute its program again in place. Waits for the result.
///
/// # Errors
/// [`Error::System`] if the keeper refuses the program or can't be reached.
pub fn reload(path: &Path, cancel: &Cancel) -> Result<()> {
    let failed = |why: String| Error::system(format!("reload the keeper at {}", path.display()), io::Error::other(why));
    let (socket, _) = dial(path, Duration::ZERO, cancel)?;
    send(&socket, &Message::Reload, &[]).map_err(|error| failed(error.to_string()))?;
    loop {
        match receive(&socket).map_err(|error| failed(error.to_string()))? {
            Arrival::Message(Message::Welcome { .. }, _) => return Ok(()),
            Arrival::Message(Message::Refused(why), _) => return Err(failed(why)),
            Arrival::Nothing => {
                let deadline = Instant::now() + 3 * HANDOVER_TIMEOUT;
                if !cancel.wait(socket.as_fd(), PollFlags::POLLIN, deadline)? {
                    return Err(failed(format!("it did not answer within {:?}", 3 * HANDOVER_TIMEOUT)));
                }
            }
            Arrival::Message(other, _) => return Err(failed(format!("unexpected answer: {other:?}"))),
            Arrival::End => return Err(failed("it exited".to_owned())),
        }
    }
}
