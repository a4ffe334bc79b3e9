//! How a server gets to its keeper, and takes over what that holds.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::wait::waitpid,
    unistd::{Pid, geteuid, getppid},
};
use rustix::{
    net::{AddressFamily, SocketFlags, SocketType, socketpair},
    process::{PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};

use super::{
    Inherited, PATIENCE, RECEIVED_EACH, Store, VERSION, image,
    message::{Arrival, Message, receive, send},
};
use crate::{
    channel::{Cancel, Peer, Trust, connect_socket},
    error::{Error, Result, SocketError},
};

/// How a server gets to a keeper.
#[derive(Debug, Clone)]
pub(in crate::broker) enum Link {
    /// It connects to the keeper at a path, which an init restarts.
    Path(PathBuf),
    /// It starts the keeper.
    Child,
}

/// A keeper, as its server sees it. Dropping this leaves the process running.
#[derive(Debug)]
pub(in crate::broker) struct Process {
    pub(in crate::broker) pid: i32,
    /// `None` if this PID namespace does not have it.
    pidfd: Option<OwnedFd>,
    /// Whether this process started it.
    is_child: bool,
}

impl Process {
    pub(super) fn of_child(pid: i32, pidfd: OwnedFd) -> Self {
        Self { pid, pidfd: Some(pidfd), is_child: true }
    }

    /// The keeper that started this process, with this pidfd.
    pub(super) fn of_parent(pidfd: OwnedFd) -> Self {
        Self { pid: getppid().as_raw(), pidfd: Some(pidfd), is_child: false }
    }

    pub(super) fn of(pid: i32) -> Self {
        Self { pid, pidfd: pidfd_of(pid).ok(), is_child: false }
    }

    /// Waits for its end, for so long. An end that can't be seen counts as one.
    pub(in crate::broker) fn ends_within(&self, wait: Duration) -> bool {
        self.pidfd.as_ref().is_none_or(|pidfd| ready(pidfd, PollFlags::POLLIN, wait))
    }

    /// Kills it, also if it is stopped. Does not block.
    pub(in crate::broker) fn kill(self) {
        if let Some(pidfd) = &self.pidfd {
            // Fails if it has ended.
            let _ = pidfd_send_signal(pidfd, Signal::KILL);
        }
        if self.is_child {
            let pid = Pid::from_raw(self.pid);
            // Its end may take as long as a device needs. Without this thread it stays a zombie.
            let _ = thread::Builder::new().name("reaper".to_owned()).spawn(move || waitpid(pid, None));
        }
    }
}

/// The two ends of a connection.
pub(super) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

pub(super) fn pidfd_of(pid: i32) -> io::Result<OwnedFd> {
    let pid = rustix::process::Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(pidfd_open(pid, PidfdFlags::empty())?)
}

/// Checks that the other end is a process of this user.
pub(super) fn require_own_user(peer: Peer) -> std::result::Result<(), String> {
    let own = geteuid().as_raw();
    if peer.uid == own {
        return Ok(());
    }
    Err(format!(
        "pid {} runs as uid {}, and this process as uid {own}: keeper and server must have one user",
        peer.pid, peer.uid
    ))
}

impl Link {
    /// A connection to a keeper, and that process. Does not wait for one that is not there.
    ///
    /// # Errors
    /// If there is no keeper, or if it can't be started.
    pub(in crate::broker) fn connect(&self) -> io::Result<(OwnedFd, Process)> {
        match self {
            Self::Path(path) => {
                let dialled = Cancel::new().and_then(|cancel| dial(path, Duration::ZERO, &cancel));
                dialled.map_err(|error| io::Error::other(error.in_full()))
            }
            Self::Child => image::start_keeper(),
        }
    }
}

/// Connects to the keeper at a path. Waits so long for it to listen.
pub(super) fn dial(path: &Path, wait: Duration, cancel: &Cancel) -> Result<(OwnedFd, Process)> {
    let (socket, peer) = connect_socket(path, wait, &Trust::default(), cancel).map_err(|error| match error {
        Error::Socket(SocketError::Absent { .. }) => {
            unreachable(path, io::Error::other("no keeper listens there; start one with `vmmfd keeper --socket PATH`"))
        }
        error => error,
    })?;
    require_own_user(peer).map_err(|why| unreachable(path, io::Error::other(why)))?;
    Ok((socket, Process::of(peer.pid)))
}

/// Checks that a keeper of this user listens at a path.
///
/// # Errors
/// [`Error::System`] if none does; [`Error::Socket`] if this user may not connect.
pub fn check_reachable(path: &Path, cancel: &Cancel) -> Result<()> {
    dial(path, Duration::ZERO, cancel).map(drop)
}

fn unreachable(path: &Path, error: io::Error) -> Error {
    Error::system(format!("reach the keeper at {}", path.display()), error)
}

/// What a server takes over, and from where.
#[derive(Debug)]
pub(in crate::broker) struct Taken {
    pub(in crate::broker) store: Store,
    pub(in crate::broker) inherited: Inherited,
    /// Whether these are all descriptors that the servers before this one had kept.
    pub(in crate::broker) whole: bool,
    pub(in crate::broker) link: Link,
    pub(in crate::broker) keeper: Process,
}

/// What a keeper holds for a server that starts.
#[derive(Debug)]
pub struct Kept(pub(in crate::broker) Taken);

impl Kept {
    /// What the keeper at a path holds. Waits for the keeper for 10 s at most.
    ///
    /// # Errors
    /// [`Error::System`] if it can't be reached, refuses this server or does not answer: a server that went on would be empty.
    pub fn at(path: &Path, cancel: &Cancel) -> Result<Self> {
        let (socket, keeper) = dial(path, PATIENCE, cancel)?;
        take(socket, keeper, Link::Path(path.to_owned()), cancel).map_err(|error| unreachable(path, error))
    }

    /// What the keeper holds that started this process.
    ///
    /// # Errors
    /// As [`Kept::at`].
    pub fn of_parent(cancel: &Cancel) -> Result<Self> {
        let failed = |error| Error::system("reach the keeper", error);
        let (socket, keeper) = image::passed_by_keeper().map_err(failed)?;
        take(socket, keeper, Link::Child, cancel).map_err(failed)
    }
}

/// Takes over everything that the keeper at the other end holds. Blocks.
pub(super) fn take(socket: OwnedFd, keeper: Process, link: Link, cancel: &Cancel) -> io::Result<Kept> {
    let (mut inherited, mut allowed, mut received, mut unreported) = (Inherited::default(), 0, 0, 0);
    send(&socket, &Message::Hello { version: VERSION, resends: false }, &[])?;
    let taken = |inherited, connection, allowed, whole, keeper| {
        let allowed = usize::try_from(allowed).unwrap_or(usize::MAX);
        Kept(Taken { store: Store::over(connection, allowed), inherited, whole, link, keeper })
    };
    loop {
        match receive(&socket)? {
            Arrival::Message(Message::Welcome { allowed: most, .. }, _) => allowed = most,
            Arrival::Message(Message::Keep(names), fds) => {
                received += names.len();
                unreported += names.len();
                names.into_iter().zip(fds).for_each(|(name, fd)| inherited.add(name, fd));
                if unreported >= RECEIVED_EACH {
                    // Fails if the keeper has ended: the next receive returns the end.
                    let _ = send(&socket, &Message::Received(unreported as u64), &[]);
                    unreported = 0;
                }
            }
            Arrival::Message(Message::Complete(whole), _) => {
                tracing::debug!(descriptors = received, whole, "the keeper handed over what it held");
                return Ok(taken(inherited, Some(socket), allowed, whole, keeper));
            }
            Arrival::Message(Message::Refused(why), _) => return Err(io::Error::other(why)),
            Arrival::Message(message, _) => {
                return Err(io::Error::other(format!("it sent {message:?}, which is no part of a handover")));
            }
            // It has everything still: the next server takes it over, and what came here is dropped.
            Arrival::End if !keeper.ends_within(PATIENCE) => {
                return Err(io::Error::other(
                    "it gave up the handover, because this server did not read: start the server again",
                ));
            }
            // No other process may have what came.
            Arrival::End if inherited.catalogues.iter().any(Option::is_some) => {
                tracing::error!(descriptors = received, "the keeper ended in the middle of the handover");
                return Ok(taken(inherited, None, allowed, false, keeper));
            }
            Arrival::End => return Err(io::Error::other("it ended before it had handed over what it held")),
            Arrival::Nothing => wait(&socket, cancel)?,
        }
    }
}

/// Waits for the keeper's next message.
fn wait(socket: &OwnedFd, cancel: &Cancel) -> io::Result<()> {
    let deadline = Instant::now() + PATIENCE;
    match cancel.wait(socket.as_fd(), PollFlags::POLLIN, deadline) {
        Ok(true) => Ok(()),
        Ok(false) => Err(io::Error::other(format!("it does not answer within {PATIENCE:?}"))),
        Err(error) => Err(io::Error::other(error.in_full())),
    }
}

/// Waits until a socket is ready, for so long. Returns whether it is.
pub(super) fn ready(socket: &OwnedFd, flags: PollFlags, wait: Duration) -> bool {
    let mut fds = [PollFd::new(socket.as_fd(), flags)];
    poll(&mut fds, PollTimeout::try_from(wait).unwrap_or(PollTimeout::MAX)).is_ok_and(|count| count > 0)
}
