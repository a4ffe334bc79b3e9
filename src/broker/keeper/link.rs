//! Finds or starts a server's keeper, and takes over its descriptors.

use std::{
    fs, io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use nix::poll::PollFlags;

use super::{
    HANDOVER_TIMEOUT, Inherited, RECEIVED_EACH, Store, VERSION,
    dial::{dial, dial_if_there, unreachable},
    image::Image,
    message::{Arrival, Message, receive, send},
    passed::passed_by_keeper,
    peer::Process,
};
use crate::{
    channel::{Cancel, private_socket_path},
    error::{Error, Result},
};

/// The keeper of a [`Server`](crate::broker::Server): a process that also holds the server's descriptors, so that objects outlive the
/// server's process.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum KeeperPath {
    /// The path of the `vmmfd` program. The server runs it as `vmmfd keeper`, unless the keeper of an earlier server at the same path still
    /// runs, and starts another if it dies. The keeper listens in the folder `PATH.keeper` beside the broker's socket `PATH`. It is not a
    /// child that the program must wait for. It exits when a server exits on request without any version. Otherwise it holds the versions
    /// for the next server, without a time limit; SIGTERM ends it and frees them.
    Program(PathBuf),
    /// The socket of a `vmmfd keeper` that an init starts and restarts.
    Socket(PathBuf),
}

/// How a server gets its next keeper.
#[derive(Debug, Clone)]
pub(in crate::broker) enum Link {
    /// Connects to the keeper at a path. An init restarts that keeper.
    Path(PathBuf),
    /// Starts the keeper, which listens at `socket` and outlives the server.
    Program { image: Image, socket: PathBuf },
    /// Starts the keeper, which starts the next server.
    Pair(Image),
}

impl Link {
    /// Connects to a keeper, or starts one. Does not wait for a listener.
    ///
    /// # Errors
    /// If no keeper listens, or if it can't be started.
    pub(in crate::broker) fn connect(&self) -> io::Result<(OwnedFd, Process)> {
        match self {
            Self::Path(path) => {
                let dialled = Cancel::new().and_then(|cancel| dial(path, Duration::ZERO, &cancel));
                dialled.map_err(|error| io::Error::other(error.in_full()))
            }
            Self::Program { image, .. } | Self::Pair(image) => image.start_keeper(),
        }
    }

    /// Whether this process starts the keeper.
    pub(in crate::broker) fn starts_keeper(&self) -> bool {
        !matches!(self, Self::Path(_))
    }

    /// Whether the keeper survives a server that exits on request.
    pub(in crate::broker) fn keeper_stays(&self) -> bool {
        !matches!(self, Self::Pair(_))
    }

    /// Ends a keeper that holds no version, if servers start it. Returns whether it has exited, so that the next server starts another.
    pub(in crate::broker) fn end_unused(&self, keeper: &Process) -> bool {
        let Self::Program { socket, .. } = self else { return false };
        if !keeper.terminate(HANDOVER_TIMEOUT) {
            return false;
        }
        // Fails if the folder has other files.
        let _ = socket.parent().map(fs::remove_dir);
        true
    }
}

/// The state that a starting server takes over.
#[derive(Debug)]
pub(in crate::broker) struct Takeover {
    pub(in crate::broker) store: Store,
    pub(in crate::broker) inherited: Inherited,
    /// Whether the set of descriptors is complete.
    pub(in crate::broker) whole: bool,
    pub(in crate::broker) link: Link,
    pub(in crate::broker) keeper: Process,
}

impl Takeover {
    /// Takes over from the keeper of the broker at a path. Waits up to `wait` for a separate keeper to listen.
    ///
    /// # Errors
    /// [`Error::System`] if the keeper can't be reached or started, refuses this server or does not answer: without its descriptors, the
    /// server would start without objects.
    pub(in crate::broker) fn of(keeper: &KeeperPath, broker: &Path, wait: Duration, cancel: &Cancel) -> Result<Self> {
        match keeper {
            KeeperPath::Socket(path) => {
                let (socket, keeper) = dial(path, wait, cancel)?;
                take_over(socket, keeper, Link::Path(path.clone()), cancel).map_err(|error| unreachable(path, error))
            }
            KeeperPath::Program(path) => Self::of_program(path, broker, cancel),
        }
    }

    fn of_program(program: &Path, broker: &Path, cancel: &Cancel) -> Result<Self> {
        let failed = |error| Error::system(format!("start the keeper {}", program.display()), error);
        let absolute = |path: &Path| std::path::absolute(path).map_err(failed);
        let mut folder = absolute(broker)?.into_os_string();
        folder.push(".keeper");
        let socket = private_socket_path(&PathBuf::from(folder).join("keeper.sock"))?;
        let image = Image::of_keeper(&absolute(program)?, &socket);
        let running = dial_if_there(&socket, Duration::ZERO, cancel)?;
        let is_new = running.is_none();
        let (connection, keeper) = match running {
            Some(running) => running,
            None => require_other_program(program).and_then(|()| image.start_keeper()).map_err(failed)?,
        };
        let taken = take_over(connection, keeper, Link::Program { image, socket: socket.clone() }, cancel);
        taken.map_err(|error| if is_new { failed(error) } else { unreachable(&socket, error) })
    }

    /// Takes over from the keeper that started this process.
    ///
    /// # Errors
    /// As [`Takeover::of`].
    pub(in crate::broker) fn of_parent(cancel: &Cancel) -> Result<Self> {
        let failed = |error| Error::system("reach the keeper", error);
        let (socket, keeper) = passed_by_keeper().map_err(failed)?;
        let link = Link::Pair(Image::of_this_process().map_err(failed)?);
        take_over(socket, keeper, link, cancel).map_err(failed)
    }
}

/// Rejects this process's own program as its keeper: it would start itself endlessly.
fn require_other_program(program: &Path) -> io::Result<()> {
    let file = |path: &Path| fs::metadata(path).map(|metadata| (metadata.dev(), metadata.ino()));
    if file(program)? == file(Path::new("/proc/self/exe"))? {
        return Err(io::Error::other("it is this program itself: give the path of the `vmmfd` program"));
    }
    Ok(())
}

/// Receives everything that the keeper holds. Blocks. On failure, kills a keeper that this process started.
pub(super) fn take_over(socket: OwnedFd, keeper: Process, link: Link, cancel: &Cancel) -> io::Result<Takeover> {
    match receive_all(&socket, &keeper, cancel) {
        Ok(Handover { inherited, allowed, is_whole }) => {
            let connection = allowed.map(|_| socket);
            let allowed = allowed.map_or(0, |allowed| usize::try_from(allowed).unwrap_or(usize::MAX));
            let store = Store::over(connection, allowed);
            Ok(Takeover { store, inherited, whole: is_whole, link, keeper })
        }
        Err(error) => {
            keeper.kill_child();
            Err(error)
        }
    }
}

/// The received state.
struct Handover {
    inherited: Inherited,
    /// The most descriptors that the keeper may hold; `None` if it has exited.
    allowed: Option<u64>,
    is_whole: bool,
}

fn receive_all(socket: &OwnedFd, keeper: &Process, cancel: &Cancel) -> io::Result<Handover> {
    let mut inherited = Inherited::default();
    let mut allowed = 0;
    let mut received = 0;
    let mut unacknowledged = 0;
    match send(socket, &Message::Hello { version: VERSION, resends: false }, &[]) {
        // The keeper has exited: the next receive reports it.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
        sent => sent?,
    }
    loop {
        match receive(socket)? {
            Arrival::Message(Message::Welcome { allowed: limit, .. }, _) => allowed = limit,
            Arrival::Message(Message::Hold(names), fds) => {
                received += names.len();
                unacknowledged += names.len();
                names.into_iter().zip(fds).for_each(|(name, fd)| inherited.add(name, fd));
                if unacknowledged >= RECEIVED_EACH {
                    // Fails if the keeper has exited: the next receive reports it.
                    let _ = send(socket, &Message::Received(unacknowledged as u64), &[]);
                    unacknowledged = 0;
                }
            }
            Arrival::Message(Message::Complete(is_whole), _) => {
                tracing::debug!(descriptors = received, is_whole, "received the keeper's descriptors");
                return Ok(Handover { inherited, allowed: Some(allowed), is_whole });
            }
            Arrival::Message(Message::Refused(why), _) => return Err(io::Error::other(why)),
            Arrival::Message(message, _) => {
                return Err(io::Error::other(format!("it sent {message:?} during the handover")));
            }
            // It still holds everything. This process drops its copies, and the next server takes over.
            Arrival::End if !keeper.exits_within(HANDOVER_TIMEOUT) => {
                return Err(io::Error::other(
                    "it aborted the handover because this server did not read: start the server again",
                ));
            }
            // These may be the last copies of the descriptors.
            Arrival::End if inherited.catalogues.iter().any(Option::is_some) => {
                tracing::error!(descriptors = received, "the keeper died during the handover");
                return Ok(Handover { inherited, allowed: None, is_whole: false });
            }
            Arrival::End => return Err(io::Error::other("it died before it sent its descriptors")),
            Arrival::Nothing => wait(socket, cancel)?,
        }
    }
}

/// Waits for the keeper's next message.
fn wait(socket: &OwnedFd, cancel: &Cancel) -> io::Result<()> {
    let deadline = Instant::now() + HANDOVER_TIMEOUT;
    match cancel.wait(socket.as_fd(), PollFlags::POLLIN, deadline) {
        Ok(true) => Ok(()),
        Ok(false) => Err(io::Error::other(format!("it did not answer within {HANDOVER_TIMEOUT:?}"))),
        Err(error) => Err(io::Error::other(error.in_full())),
    }
}
