//! New connections to a listening keeper, up to their first message.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use super::{
    HANDOVER_TIMEOUT,
    message::{Arrival, Message, receive, send},
    peer::require_own_user,
};
use crate::{
    channel::{Cancel, Config, Listener, Peer, private_socket_path},
    error::{Error, Result},
};

/// The most connections that wait for their first message.
const MAX_WAITING: usize = 16;

/// A connection without its first message.
#[derive(Debug)]
struct Newcomer {
    socket: OwnedFd,
    pid: i32,
    deadline: Instant,
}

/// The request of a new connection.
#[derive(Debug)]
pub(super) enum NewcomerRequest {
    /// A server wants to be served.
    Serve { socket: OwnedFd, pid: i32, version: u32, resends: bool },
    /// A command asks for a reload.
    Reload(OwnedFd),
}

/// The listening socket and its new connections.
#[derive(Debug)]
pub(super) struct Newcomers {
    listener: Listener,
    pub(super) path: PathBuf,
    waiting: Vec<Newcomer>,
}

impl Newcomers {
    /// Listens at a path, or continues with the socket of the keeper that executed this program.
    ///
    /// # Errors
    /// All errors of [`Listener::bind`] and [`private_socket_path`].
    pub(super) fn at(path: &Path, inherited: Option<OwnedFd>, cancel: &Cancel) -> Result<Self> {
        let listener = match inherited {
            // Its folder may have been removed.
            Some(listener) => Listener::inherited(listener, path)?,
            None => {
                let config = Config::default().timeout(HANDOVER_TIMEOUT).cancel(cancel);
                Listener::bind(&private_socket_path(path)?, &config)?
            }
        };
        // accept(2) must not block if a pending connection closes.
        rustix::io::ioctl_fionbio(&listener, true)
            .map_err(|errno| Error::system("start the keeper", io::Error::from(errno)))?;
        Ok(Self { listener, path: path.to_owned(), waiting: Vec::new() })
    }

    pub(super) fn listener(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
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

    /// Accepts connections of this user and reads their first messages. Does not block.
    pub(super) fn requests(&mut self) -> Vec<NewcomerRequest> {
        self.accept();
        let mut requests = Vec::new();
        for newcomer in std::mem::take(&mut self.waiting) {
            let Newcomer { socket, pid, deadline } = newcomer;
            match receive(&socket) {
                Ok(Arrival::Nothing) if deadline > Instant::now() => {
                    self.waiting.push(Newcomer { socket, pid, deadline });
                }
                Ok(Arrival::Message(Message::Hello { version, resends }, _)) => {
                    requests.push(NewcomerRequest::Serve { socket, pid, version, resends });
                }
                Ok(Arrival::Message(Message::Reload, _)) => requests.push(NewcomerRequest::Reload(socket)),
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

/// Sends an answer. The connection may be closed already.
pub(super) fn answer(socket: &OwnedFd, message: &Message) {
    if let Err(error) = send(socket, message, &[]) {
        tracing::debug!(%error, "cannot answer a connection");
    }
}
