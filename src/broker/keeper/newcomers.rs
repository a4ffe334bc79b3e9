//! New connections to a keeper, up to their first message.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use super::{
    HANDOVER_TIMEOUT,
    link::require_own_user,
    message::{Arrival, Message, Role, receive, send},
};
use crate::{
    channel::{Cancel, Config, Listener, Peer, created_socket_path},
    error::{Error, Result},
};

/// The most connections that wait for their first message.
const MAX_WAITING: usize = 16;

/// The length of the accept queue.
const BACKLOG: i32 = 128;

/// A connection without its first message.
#[derive(Debug)]
pub(super) struct Newcomer {
    socket: OwnedFd,
    pid: i32,
    deadline: Instant,
}

/// The listening socket and its new connections.
#[derive(Debug)]
pub(super) struct Newcomers {
    listener: Listener,
    path: PathBuf,
    pub(super) waiting: Vec<Newcomer>,
}

impl Newcomers {
    /// Listens at a path.
    ///
    /// # Errors
    /// All errors of [`Listener::bind`] and [`created_socket_path`].
    pub(super) fn at(path: &Path, cancel: &Cancel) -> Result<Self> {
        Self::over(bind(path, cancel)?, path)
    }

    /// Continues with the socket of the previous keeper. If its file is gone, listens at the path again.
    ///
    /// # Errors
    /// All errors of [`Listener::take_over`] and [`Newcomers::at`].
    pub(super) fn inherited(listener: OwnedFd, path: &Path, cancel: &Cancel) -> Result<Self> {
        match Listener::take_over(listener, path)? {
            Some(listener) => {
                let newcomers = Self::over(listener, path)?;
                newcomers.listen_again().map_err(|error| Error::system("listen", error))?;
                Ok(newcomers)
            }
            None => Self::at(path, cancel),
        }
    }

    fn over(listener: Listener, path: &Path) -> Result<Self> {
        // accept(2) must not block if a pending connection closes.
        rustix::io::ioctl_fionbio(&listener, true)
            .map_err(|errno| Error::system("start the keeper", io::Error::from(errno)))?;
        Ok(Self { listener, path: path.to_owned(), waiting: Vec::new() })
    }

    /// Makes the kernel report this process to connecting servers, instead of the keeper that listened first. See `SO_PEERCRED` in unix(7).
    pub(super) fn listen_again(&self) -> io::Result<()> {
        rustix::net::listen(&self.listener, BACKLOG)?;
        // The peers of queued connections would take the other keeper's exit for the end of this one. They connect again.
        while let Ok(Some(_)) = self.listener.accept() {}
        Ok(())
    }

    /// Listens at the path again if the socket's file was removed: the next server would not find this keeper.
    ///
    /// # Errors
    /// As for [`Newcomers::inherited`].
    pub(super) fn restore_file(&mut self, cancel: &Cancel) -> Result<()> {
        let failed = |error| Error::system("duplicate a descriptor", error);
        let own = self.listener.as_fd().try_clone_to_owned().map_err(failed)?;
        if Listener::take_over(own, &self.path)?.is_none() {
            tracing::warn!(path = %self.path.display(), "the keeper's socket was removed: listening at its path again");
            self.listener = Self::at(&self.path, cancel)?.listener;
        }
        Ok(())
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn listener(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    /// Leaves the socket and its file to another process.
    pub(super) fn leave(self) {
        drop(self.listener.leave_file());
    }

    /// The descriptors to poll for [`Newcomers::requests`].
    pub(super) fn watched(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let listener = (self.waiting.len() < MAX_WAITING).then(|| self.listener.as_fd());
        listener.into_iter().chain(self.waiting.iter().map(|newcomer| newcomer.socket.as_fd()))
    }

    /// When the next silent connection times out.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.waiting.iter().map(|newcomer| newcomer.deadline).min()
    }

    /// Accepts connections of this user and reads their hellos. Returns each with its process, version and role. Does not block.
    pub(super) fn requests(&mut self) -> Vec<(OwnedFd, i32, u32, Role)> {
        self.accept();
        let mut requests = Vec::new();
        for newcomer in std::mem::take(&mut self.waiting) {
            let Newcomer { socket, pid, deadline } = newcomer;
            match receive(&socket) {
                Ok(Arrival::Nothing) if deadline > Instant::now() => {
                    self.waiting.push(Newcomer { socket, pid, deadline });
                }
                Ok(Arrival::Message(Message::Hello { version, role }, _)) => {
                    requests.push((socket, pid, version, role))
                }
                // Close the connection: it timed out, closed or sent another message.
                _ => {}
            }
        }
        requests
    }

    fn accept(&mut self) {
        while self.waiting.len() < MAX_WAITING {
            let socket = match self.listener.accept() {
                Ok(Some(socket)) => socket,
                Ok(None) => return,
                Err(error) => {
                    tracing::warn!("cannot accept a connection: {}", error.in_full());
                    return thread::sleep(Duration::from_millis(10));
                }
            };
            let peer = match Peer::of(&socket) {
                Ok(peer) => peer,
                Err(error) => {
                    tracing::warn!("{}", error.in_full());
                    continue;
                }
            };
            match require_own_user(peer) {
                Ok(()) => {
                    let deadline = Instant::now() + HANDOVER_TIMEOUT;
                    self.waiting.push(Newcomer { socket, pid: peer.pid, deadline });
                }
                Err(why) => {
                    tracing::warn!("refused a connection: {why}");
                    answer(&socket, &Message::Refused(why));
                }
            }
        }
    }
}

/// Listens at a path, whose folder is created if absent.
fn bind(path: &Path, cancel: &Cancel) -> Result<Listener> {
    let config = Config::default().timeout(HANDOVER_TIMEOUT).cancel(cancel);
    Listener::bind(&created_socket_path(path)?, &config)
}

/// Sends an answer. The connection may be closed already.
pub(super) fn answer(socket: &OwnedFd, message: &Message) {
    if let Err(error) = send(socket, message, &[]) {
        tracing::debug!(%error, "cannot answer a connection");
    }
}
