//! Connections between two processes: records with descriptors, to a peer whose user is known.
//!
//! A send to a peer that is gone returns an error and raises no SIGPIPE, whatever the program does with that signal. Received descriptors
//! are owned at once and close-on-exec, and truncation is an error.

mod attempt;
pub(crate) mod cancel;
mod config;
pub(crate) mod connect;
mod listener;
mod lock;
pub(crate) mod path;
mod peer;
pub(crate) mod record;
mod trust;

use std::{
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use self::record::{Arrival, RecordSocket, check_type, is_gone};
pub use self::{
    cancel::{Cancel, CancelReason},
    config::Config,
    connect::connect,
    listener::Listener,
    path::{BrokerPath, broker_socket_path, socket_path},
    peer::Peer,
    trust::Trust,
};
pub(crate) use self::{
    cancel::{call_no_checks, deadline_after},
    connect::connect_socket,
    listener::SocketName,
    path::created_socket_path,
};
pub use crate::wire::Message;
use crate::{
    error::{Error, PeerError, Result},
    sys::above_standard,
    wire::{HEADER_LENGTH, MAX_BODY, ProtocolError, is_error},
};

/// How long a receiver polls its socket before it sleeps, about the time of a wakeup. Answers that arrive at once, and records sent back
/// to back, avoid that cost.
const SPIN: Duration = Duration::from_micros(20);

/// The pause before a retry where no event announces the change: a missing socket, a held lock, a full backlog.
const RETRY: Duration = Duration::from_millis(2);

/// The number of records searched for the error of a peer that has closed the connection; more may be queued.
const MAX_LAST_RECORDS: usize = 64;

/// A connection that carries the messages of [`crate::wire`]. Every wait is limited by the timeout, and can be cancelled.
#[derive(Debug)]
pub struct Channel {
    socket: RecordSocket,
    peer: Peer,
    /// When the last record was sent, or the connection was made.
    sent: Instant,
    /// The last received record.
    incoming: Vec<u8>,
    /// The last sent record.
    outgoing: Vec<u8>,
}

impl Channel {
    /// Creates a channel from a connected `SOCK_SEQPACKET` socket, which becomes non-blocking.
    ///
    /// # Errors
    /// [`SocketError::Unfit`](crate::error::SocketError::Unfit) for any other descriptor; [`Error::System`].
    pub fn new(socket: OwnedFd, timeout: Duration, cancel: &Cancel) -> Result<Self> {
        check_type(&socket)?;
        let peer = Peer::of(&socket)?;
        Self::over(socket, peer, timeout, cancel)
    }

    fn over(socket: OwnedFd, peer: Peer, timeout: Duration, cancel: &Cancel) -> Result<Self> {
        let socket = RecordSocket::new(socket, timeout, cancel)?.spinning(SPIN);
        // One byte longer than the longest record, to detect longer records.
        let incoming = vec![0; HEADER_LENGTH + MAX_BODY + 1];
        Ok(Self { socket, peer, sent: Instant::now(), incoming, outgoing: Vec::new() })
    }

    /// Creates two connected sockets of the type that sessions need: for two threads, or for this process and a child.
    ///
    /// # Errors
    /// [`Error::System`]. See socketpair(2).
    pub fn socket_pair() -> Result<(OwnedFd, OwnedFd)> {
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let pair = pair.map_err(io::Error::from);
        pair.and_then(|(one, other)| Ok((above_standard(one)?, above_standard(other)?)))
            .map_err(|error| Error::system("create a socket pair", error))
    }

    /// The peer's process.
    pub fn peer(&self) -> Peer {
        self.peer
    }

    /// The limit of each wait.
    pub(crate) fn timeout(&self) -> Duration {
        self.socket.timeout()
    }

    /// Lets the exit of the peer's process, by its pidfd, count as the end of the connection.
    pub(crate) fn watch_process(&mut self, process: Option<OwnedFd>) {
        self.socket.watch_process(process);
    }

    /// The request that cancels the channel's waits.
    pub fn cancel(&self) -> &Cancel {
        self.socket.cancel()
    }

    /// Sends a message with its descriptors, which the caller keeps. Blocks while the peer's queue is full, up to the timeout.
    ///
    /// # Errors
    /// [`PeerError::Protocol`] if the message is too large, or the number of descriptors does not match it: nothing is sent;
    /// [`PeerError::Reported`] if the peer has sent an error; [`PeerError::Gone`], [`PeerError::Timeout`],
    /// [`Error::Interrupted`], [`Error::System`].
    ///
    /// See sendmsg(2), unix(7).
    pub fn send(&mut self, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<()> {
        let kind = message.name();
        let want = message.fd_count();
        let got = fds.len();
        if want != got {
            return Err(ProtocolError::FdCount { kind, want, claimed: want as u32, got }.into());
        }
        message.encode_into(&mut self.outgoing)?;
        match self.socket.send(kind, &self.outgoing, fds) {
            Ok(()) => {
                tracing::debug!(kind, fds = got, pid = self.peer.pid, "sent");
                self.sent = Instant::now();
                Ok(())
            }
            Err(Error::Peer(PeerError::Gone { purpose, .. })) => {
                Err(self.last_error().unwrap_or_else(|| self.gone(purpose)))
            }
            Err(error) => Err(error),
        }
    }

    /// Receives a message with its descriptors. Blocks up to the timeout. `purpose` completes the error's sentence "waiting ...".
    ///
    /// # Errors
    /// [`PeerError::Timeout`] after the channel's timeout; [`PeerError::Gone`], also for an empty record;
    /// [`PeerError::Protocol`] for a record that violates the protocol;
    /// [`MemoryError::TooManyDescriptors`](crate::error::MemoryError::TooManyDescriptors) if this process's limit truncated the
    /// descriptors; [`Error::Interrupted`], [`Error::System`]. After any error, all received descriptors are closed.
    ///
    /// See recvmsg(2), unix(7).
    pub fn receive(&mut self, purpose: &'static str) -> Result<(Message, Vec<OwnedFd>)> {
        self.receive_by(deadline_after(self.timeout()), purpose)
    }

    /// Like [`Channel::receive`], with a deadline.
    ///
    /// # Errors
    /// The errors of [`Channel::receive`].
    pub(crate) fn receive_by(&mut self, deadline: Instant, purpose: &'static str) -> Result<(Message, Vec<OwnedFd>)> {
        let received = self.socket.receive_by(&mut self.incoming, deadline, purpose).and_then(|record| {
            let message = Message::decode(&self.incoming[..record.length], record.fds.len())?;
            Ok((message, record))
        });
        let (message, record) = received.map_err(|error| match error {
            Error::Peer(PeerError::Protocol(source)) if is_error(&self.incoming) => {
                ProtocolError::UnreadableError { source: Box::new(source) }.into()
            }
            Error::Peer(PeerError::Gone { purpose, .. }) => self.gone(purpose),
            error => error,
        })?;
        tracing::debug!(kind = message.name(), fds = record.fds.len(), pid = self.peer.pid, "received");
        Ok((message, record.fds))
    }

    /// Closes the connection so that the last record arrives: shuts down writing, then reads until the peer has closed its side. Waits
    /// up to the channel's timeout after the last sent record, or up to `limit` if that is shorter. Returns whether the peer has closed.
    ///
    /// See shutdown(2): closing with unread records would reset the connection.
    pub fn finish(mut self, limit: Duration) -> bool {
        self.wait_for_close(limit)
    }

    /// Shuts down writing.
    pub(crate) fn shut_down_writing(&mut self) {
        // Fails if the peer has closed.
        let _ = self.socket.shut_down_writing();
    }

    /// Receives and discards one record, if any. Does not block. Returns whether the peer has closed the connection.
    pub(crate) fn discard(&mut self) -> bool {
        use io::ErrorKind::{Interrupted, WouldBlock};
        match self.socket.try_receive(&mut self.incoming) {
            Ok(Arrival::Record(_) | Arrival::Broken(_)) => false,
            Ok(Arrival::End) => true,
            Err(error) => !matches!(error.kind(), Interrupted | WouldBlock),
        }
    }

    /// Like [`Channel::finish`], without consuming the channel.
    pub(crate) fn wait_for_close(&mut self, limit: Duration) -> bool {
        if self.socket.shut_down_writing().is_err() {
            return true;
        }
        let timeout = self.timeout();
        let deadline = self.sent.checked_add(timeout.min(limit)).unwrap_or_else(|| deadline_after(timeout));
        self.socket.drain_until(&mut self.incoming, deadline)
    }

    /// The socket, to shut it down from another thread.
    pub(crate) fn socket(&self) -> Arc<UnixStream> {
        self.socket.shared()
    }

    fn gone(&self, purpose: &'static str) -> Error {
        Error::Peer(PeerError::Gone { pid: self.peer.pid, purpose })
    }

    /// The error that the peer may have sent before it closed the connection.
    fn last_error(&mut self) -> Option<Error> {
        for _ in 0..MAX_LAST_RECORDS {
            match self.socket.try_receive(&mut self.incoming) {
                Ok(Arrival::Record(record)) => {
                    let message = Message::decode(&self.incoming[..record.length], record.fds.len());
                    if let Ok(Message::Error(failure)) = message {
                        return Some(Error::Peer(PeerError::Reported { code: failure.code, message: failure.message }));
                    }
                }
                Ok(Arrival::Broken(_)) => {}
                // ECONNRESET is reported once, before queued records.
                Err(error) if is_gone(&error) => {}
                Ok(Arrival::End) | Err(_) => return None,
            }
        }
        None
    }
}

impl AsFd for Channel {
    /// Readable if a record has arrived, or the peer has closed the connection.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
