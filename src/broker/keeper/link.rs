//! How a server finds or starts its keeper, and takes over what that holds.

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

/// The keeper of a [`Server`](crate::broker::Server): a process that holds the server's descriptors too, so that the objects outlive the
/// server's process.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum KeeperPath {
    /// The `vmmfd` program. The server starts it as `vmmfd keeper`, unless the keeper of an earlier server at the same path still runs,
    /// and starts another if that dies. It listens in the folder `PATH.keeper` beside the broker's socket `PATH`, and is no child that
    /// the program must wait for. It ends when a server ends that was asked to and has no versions; otherwise it stays and holds them
    /// for the next server, also if none comes: SIGTERM ends it and frees them.
    Program(PathBuf),
    /// The socket of a `vmmfd keeper` that an init starts and restarts.
    Socket(PathBuf),
}

/// How a server gets its next keeper.
#[derive(Debug, Clone)]
pub(in crate::broker) enum Link {
    /// It connects to the keeper at a path, which an init restarts.
    Path(PathBuf),
    /// It starts the keeper, which listens at `socket` and outlives it.
    Program { image: Image, socket: PathBuf },
    /// It starts the keeper, which starts the next server.
    Pair(Image),
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
            Self::Program { image, .. } | Self::Pair(image) => image.start_keeper(),
        }
    }

    /// Whether this process starts the keeper.
    pub(in crate::broker) fn starts_keeper(&self) -> bool {
        !matches!(self, Self::Path(_))
    }

    /// Whether the keeper stays when the server was asked to end.
    pub(in crate::broker) fn keeper_stays(&self) -> bool {
        !matches!(self, Self::Pair(_))
    }

    /// Ends a keeper that the program started, and that holds no version. Returns whether it has ended: then the next server starts
    /// another.
    pub(in crate::broker) fn end_unused(&self, keeper: &Process) -> bool {
        let Self::Program { socket, .. } = self else { return false };
        if !keeper.terminate(HANDOVER_TIMEOUT) {
            return false;
        }
        // Fails if it has another file.
        let _ = socket.parent().map(fs::remove_dir);
        true
    }
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
pub(in crate::broker) struct Kept(pub(in crate::broker) Taken);

impl Kept {
    /// What the keeper of the broker at a path holds.
    ///
    /// # Errors
    /// [`Error::System`] if the keeper can't be reached or started, refuses this server or does not answer: a server that went on would
    /// be empty.
    pub(in crate::broker) fn of(keeper: &KeeperPath, broker: &Path, cancel: &Cancel) -> Result<Self> {
        match keeper {
            KeeperPath::Socket(path) => {
                let (socket, keeper) = dial(path, HANDOVER_TIMEOUT, cancel)?;
                take(socket, keeper, Link::Path(path.clone()), cancel).map_err(|error| unreachable(path, error))
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
        let taken = take(connection, keeper, Link::Program { image, socket: socket.clone() }, cancel);
        taken.map_err(|error| if is_new { failed(error) } else { unreachable(&socket, error) })
    }

    /// What the keeper holds that started this process.
    ///
    /// # Errors
    /// As [`Kept::of`].
    pub(in crate::broker) fn of_parent(cancel: &Cancel) -> Result<Self> {
        let failed = |error| Error::system("reach the keeper", error);
        let (socket, keeper) = passed_by_keeper().map_err(failed)?;
        let link = Link::Pair(Image::of_this_process().map_err(failed)?);
        take(socket, keeper, link, cancel).map_err(failed)
    }
}

/// Refuses this process's own program as its keeper: it would start itself again and again.
fn require_other_program(program: &Path) -> io::Result<()> {
    let file = |path: &Path| fs::metadata(path).map(|metadata| (metadata.dev(), metadata.ino()));
    if file(program)? == file(Path::new("/proc/self/exe"))? {
        return Err(io::Error::other("it is this program itself: name the `vmmfd` program"));
    }
    Ok(())
}

/// Takes over everything that the keeper at the other end holds. Blocks. Kills a keeper that this process started if that fails.
pub(super) fn take(socket: OwnedFd, keeper: Process, link: Link, cancel: &Cancel) -> io::Result<Kept> {
    match receive_all(&socket, &keeper, cancel) {
        Ok(Handover { inherited, allowed, is_whole }) => {
            let connection = allowed.map(|_| socket);
            let allowed = allowed.map_or(0, |allowed| usize::try_from(allowed).unwrap_or(usize::MAX));
            let store = Store::over(connection, allowed);
            Ok(Kept(Taken { store, inherited, whole: is_whole, link, keeper }))
        }
        Err(error) => {
            keeper.kill_child();
            Err(error)
        }
    }
}

/// What came from a keeper.
struct Handover {
    inherited: Inherited,
    /// How many descriptors the keeper may hold; `None` if it has ended.
    allowed: Option<u64>,
    is_whole: bool,
}

fn receive_all(socket: &OwnedFd, keeper: &Process, cancel: &Cancel) -> io::Result<Handover> {
    let (mut inherited, mut allowed, mut received, mut unreported) = (Inherited::default(), 0, 0, 0);
    match send(socket, &Message::Hello { version: VERSION, resends: false }, &[]) {
        // It has ended: the next receive returns the end.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
        sent => sent?,
    }
    loop {
        match receive(socket)? {
            Arrival::Message(Message::Welcome { allowed: most, .. }, _) => allowed = most,
            Arrival::Message(Message::Keep(names), fds) => {
                received += names.len();
                unreported += names.len();
                names.into_iter().zip(fds).for_each(|(name, fd)| inherited.add(name, fd));
                if unreported >= RECEIVED_EACH {
                    // Fails if the keeper has ended: the next receive returns the end.
                    let _ = send(socket, &Message::Received(unreported as u64), &[]);
                    unreported = 0;
                }
            }
            Arrival::Message(Message::Complete(is_whole), _) => {
                tracing::debug!(descriptors = received, is_whole, "the keeper handed over what it held");
                return Ok(Handover { inherited, allowed: Some(allowed), is_whole });
            }
            Arrival::Message(Message::Refused(why), _) => return Err(io::Error::other(why)),
            Arrival::Message(message, _) => {
                return Err(io::Error::other(format!("it sent {message:?}, which is no part of a handover")));
            }
            // It still has everything: the next server takes it over, and this process drops its part.
            Arrival::End if !keeper.ends_within(HANDOVER_TIMEOUT) => {
                return Err(io::Error::other(
                    "it gave up the handover, because this server did not read: start the server again",
                ));
            }
            // Perhaps no other process has the descriptors that came.
            Arrival::End if inherited.catalogues.iter().any(Option::is_some) => {
                tracing::error!(descriptors = received, "the keeper ended in the middle of the handover");
                return Ok(Handover { inherited, allowed: None, is_whole: false });
            }
            Arrival::End => return Err(io::Error::other("it ended before it had handed over what it held")),
            Arrival::Nothing => wait(socket, cancel)?,
        }
    }
}

/// Waits for the keeper's next message.
fn wait(socket: &OwnedFd, cancel: &Cancel) -> io::Result<()> {
    let deadline = Instant::now() + HANDOVER_TIMEOUT;
    match cancel.wait(socket.as_fd(), PollFlags::POLLIN, deadline) {
        Ok(true) => Ok(()),
        Ok(false) => Err(io::Error::other(format!("it does not answer within {HANDOVER_TIMEOUT:?}"))),
        Err(error) => Err(io::Error::other(error.in_full())),
    }
}
