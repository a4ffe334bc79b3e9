//! Sockets to a broker: connects, does the handshake, and exchanges records.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use super::connection::Connection;
use crate::{
    channel::{
        Cancel, Config, Peer, Trust, connect_socket, deadline_after,
        record::{Arrival, RecordSocket},
    },
    error::{BrokerError, Error, ErrorCode, PeerError, ProtocolError, Result, SocketError},
    sys::inherited::ClosedInForks,
    wire::{
        HEADER_LENGTH, Hello, MAX_BODY,
        broker::{BROKER, Events, Message, NO_BACKEND, Resume, Resumed, WatchHeader},
    },
};

/// How long to poll for an answer before the thread sleeps. A broker that has to wake up answers within some microseconds; sleeping here
/// would cost a second wake-up.
pub(super) const SPIN: Duration = Duration::from_micros(150);

pub(super) fn send_on(socket: &RecordSocket, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<()> {
    let kind = message.name();
    let want = message.fd_count();
    let got = fds.len();
    if want != got {
        return Err(ProtocolError::FdCount { kind, want, claimed: want as u32, got }.into());
    }
    let mut record = Vec::with_capacity(512);
    message.encode_into(&mut record)?;
    tracing::debug!(kind, fds = got, "to the broker");
    socket.send(kind, &record, fds)
}

/// Waits for a message. Refusals and errors reported by the broker become errors.
pub(super) fn receive_on(
    socket: &RecordSocket,
    incoming: &mut [u8],
    deadline: impl Fn() -> Instant,
    purpose: &'static str,
) -> Result<(Message, Vec<OwnedFd>)> {
    loop {
        let record = socket.receive_by(incoming, deadline(), purpose)?;
        let message = Message::decode(&incoming[..record.length], record.fds.len())?;
        tracing::debug!(kind = message.name(), fds = record.fds.len(), "from the broker");
        match message {
            Message::Busy(_) => {}
            Message::Refused(refusal) => {
                return Err(BrokerError { code: refusal.code, message: refusal.message }.into());
            }
            Message::Error(failure) => {
                return Err(Error::Peer(PeerError::Reported { code: failure.code, message: failure.message }));
            }
            message => return Ok((message, record.fds)),
        }
    }
}

/// A receive buffer, one byte longer than the longest record, so that longer records are detected.
pub(super) fn buffer() -> Vec<u8> {
    vec![0; HEADER_LENGTH + MAX_BODY + 1]
}

/// Whether an error means that the broker is gone or about to exit, so that another may take its place.
pub(super) fn is_broken(error: &Error) -> bool {
    matches!(error, Error::Peer(PeerError::Gone { .. } | PeerError::Reported { code: ErrorCode::Interrupted, .. }))
}

/// The body of an answer of this kind, and its descriptors. Fails for another kind.
macro_rules! answer {
    ($answer:expr, $kind:ident, $name:literal) => {
        match $answer {
            (Message::$kind(body), fds) => (body, fds),
            (other, _) => return Err($crate::broker::client::socket::unexpected(&other, $name)),
        }
    };
}

pub(super) use answer;

/// The error for an unexpected answer.
pub(super) fn unexpected(got: &Message, want: &'static str) -> Error {
    ProtocolError::Unexpected { got: got.name(), want }.into()
}

/// A request in progress.
#[derive(Debug)]
pub(super) struct Exchange<'a> {
    pub(super) connection: &'a Connection,
    pub(super) incoming: &'a mut Vec<u8>,
    /// How long each answer may take.
    pub(super) answer_timeout: Duration,
    pub(super) finished: bool,
}

impl Exchange<'_> {
    /// Sends the first record of a request.
    pub(super) fn send_first(&mut self, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<()> {
        match self.send(message, fds) {
            Err(gone @ Error::Peer(PeerError::Gone { .. })) => {
                // The broker reports the reason before it closes the connection.
                match self.receive("for the reason") {
                    Err(reported @ Error::Peer(PeerError::Reported { .. })) => Err(reported),
                    _ => Err(gone),
                }
            }
            sent => sent,
        }
    }

    /// Waits for the next message of the answer. A refusal is an error, but leaves the connection usable.
    pub(super) fn receive(&mut self, purpose: &'static str) -> Result<(Message, Vec<OwnedFd>)> {
        let deadline = || deadline_after(self.answer_timeout);
        let received = receive_on(&self.connection.socket, self.incoming, deadline, purpose);
        if matches!(received, Err(Error::Broker(_))) {
            self.finished = true;
        }
        received
    }

    /// Sends a further record of the request, or an acknowledgement.
    pub(super) fn send(&self, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<()> {
        self.connection.send(message, fds)
    }

    /// Marks the answer as complete.
    pub(super) fn finish(mut self) {
        self.finished = true;
    }
}

impl Drop for Exchange<'_> {
    fn drop(&mut self) {
        if !self.finished {
            // The next request would receive the rest of this answer.
            self.connection.abandon();
        }
    }
}

/// The longest pause between attempts to connect.
const MAX_PAUSE: Duration = Duration::from_millis(256);

/// The settings of each attempt to connect.
#[derive(Debug)]
pub(super) struct Dialler {
    path: PathBuf,
    pub(super) timeout: Duration,
    trust: Trust,
    cancel: Cancel,
}

/// A connection after the handshake.
#[derive(Debug)]
pub(super) struct Dialled {
    pub(super) socket: RecordSocket,
    pub(super) peer: Peer,
    /// The UUID of the broker's state.
    pub(super) instance: String,
}

impl Dialler {
    pub(super) fn new(path: &Path, config: &Config, cancel: Cancel) -> Self {
        Self { path: path.to_owned(), timeout: config.timeout, trust: config.trust.clone(), cancel }
    }

    /// The same settings with another request that cancels waits.
    pub(super) fn with_cancel(&self, cancel: &Cancel) -> Self {
        let (path, timeout, trust) = (self.path.clone(), self.timeout, self.trust.clone());
        Self { path, timeout, trust, cancel: cancel.clone() }
    }

    /// Connects and does the handshake. Waits until `deadline` for a listener, and up to the timeout for each of its answers.
    pub(super) fn dial(&self, deadline: Instant, incoming: &mut [u8]) -> Result<Dialled> {
        let left = deadline.saturating_duration_since(Instant::now());
        let (socket, peer) = connect_socket(&self.path, left, &self.trust, &self.cancel)?;
        Dialled::handshake(socket, peer, self.timeout, &self.cancel, incoming)
    }

    /// Dials until the deadline while connections break. `tries` is the number of earlier failures.
    pub(super) fn dial_until(&self, deadline: Instant, mut tries: u32, incoming: &mut [u8]) -> Result<Dialled> {
        loop {
            match self.dial(deadline, incoming) {
                Err(error) if is_broken(&error) && Instant::now() < deadline => {}
                dialled => return dialled,
            }
            tries += 1;
            self.pause(tries)?;
        }
    }

    /// Waits before the next attempt, exponentially longer.
    pub(super) fn pause(&self, tries: u32) -> Result<()> {
        let pause = Duration::from_millis(1 << tries.min(8));
        self.cancel.pause(pause.min(MAX_PAUSE))
    }
}

impl Dialled {
    /// Exchanges hellos and asks for the instance, in one round trip.
    pub(super) fn handshake(
        socket: OwnedFd,
        peer: Peer,
        timeout: Duration,
        cancel: &Cancel,
        incoming: &mut [u8],
    ) -> Result<Self> {
        let socket = RecordSocket::new(socket, timeout, cancel)?.spinning(SPIN);
        let hello = Message::Hello(Hello::new(&[BROKER], NO_BACKEND, timeout));
        let sent =
            send_on(&socket, &hello, &[]).and_then(|()| send_on(&socket, &Message::Resume(Resume::default()), &[]));
        match sent {
            // The broker reports the reason before it closes the connection.
            Ok(()) | Err(Error::Peer(PeerError::Gone { .. })) => {}
            Err(error) => return Err(error),
        }
        let mut receive = |purpose| receive_on(&socket, incoming, || deadline_after(timeout), purpose);
        let (hello, _) = answer!(receive("for the broker's hello")?, Hello, "hello");
        if !hello.capabilities.iter().any(|named| named == BROKER) {
            let message = "the listener is not a broker: its hello lacks the capability `broker`";
            return Err(Error::Peer(PeerError::Mismatch { code: ErrorCode::Object, message: message.to_owned() }));
        }
        let (Resumed { instance, .. }, _) = answer!(receive("for the broker's instance")?, Resumed, "resumed");
        Ok(Self { socket, peer, instance })
    }
}

/// Turns the error of a socket without a listener into an error about a broker: of a first connection, or of an existing one.
pub(super) fn no_broker(error: Error, waited: Duration, existing: bool) -> Error {
    match error {
        Error::Socket(SocketError::Absent { path, .. }) if existing => {
            Error::Peer(PeerError::BrokerGone { path, waited })
        }
        Error::Socket(SocketError::Absent { path, .. }) => {
            Error::Socket(SocketError::NoBroker { path, waited, otherwise: None })
        }
        other => other,
    }
}

/// The error of a wait for events.
const PURPOSE: &str = "for the broker's events";

/// A connection of one request, whose answers go on: events, or introductions.
#[derive(Debug)]
pub(super) struct Subscription {
    pub(super) socket: RecordSocket,
    _closed_in_forks: ClosedInForks,
    incoming: Vec<u8>,
}

impl Subscription {
    /// Connects and makes the request. Waits until `deadline` for a listener. Returns the first answer too.
    pub(super) fn open(dialler: &Dialler, deadline: Instant, request: &Message) -> Result<(Self, Message)> {
        let mut incoming = buffer();
        let mut tries = 0;
        loop {
            let dialled = dialler.dial_until(deadline, tries, &mut incoming);
            let socket = dialled.map_err(|error| no_broker(error, dialler.timeout, true))?.socket;
            let limit = || deadline_after(dialler.timeout);
            let asked = send_on(&socket, request, &[])
                .and_then(|()| receive_on(&socket, &mut incoming, limit, "for the broker's answer"));
            match asked {
                Ok((answer, _)) => {
                    let _closed_in_forks = ClosedInForks::new(socket.as_fd());
                    return Ok((Self { socket, _closed_in_forks, incoming }, answer));
                }
                Err(error) if is_broken(&error) && Instant::now() < deadline => {}
                Err(error) => return Err(error),
            }
            tries += 1;
            dialler.pause(tries)?;
        }
    }

    /// As [`Subscription::open`], for a watch. Returns the events up to now too.
    pub(super) fn watch(dialler: &Dialler, deadline: Instant, watch: WatchHeader) -> Result<(Self, Events)> {
        match Self::open(dialler, deadline, &Message::Watch(watch))? {
            (subscription, Message::Events(events)) => Ok((subscription, events)),
            (_, other) => Err(unexpected(&other, "events")),
        }
    }

    /// Waits for the next message until `deadline`.
    pub(super) fn next(&mut self, deadline: Instant, purpose: &'static str) -> Result<(Message, Vec<OwnedFd>)> {
        receive_on(&self.socket, &mut self.incoming, || deadline, purpose)
    }

    /// Waits for events until `deadline`. Returns `None` after it.
    pub(super) fn receive(&mut self, deadline: Instant) -> Result<Option<Events>> {
        match self.next(deadline, PURPOSE) {
            Ok((Message::Events(events), _)) => Ok(Some(events)),
            Ok((other, _)) => Err(unexpected(&other, "events")),
            Err(Error::Peer(PeerError::Timeout { .. })) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Takes received events, even if the program has cancelled its waits. Returns `None` if there are none.
    pub(super) fn try_receive(&mut self) -> Result<Option<Events>> {
        match self.socket.try_receive(&mut self.incoming) {
            Ok(Arrival::Record(record)) => match Message::decode(&self.incoming[..record.length], record.fds.len())? {
                Message::Events(events) => Ok(Some(events)),
                other => Err(unexpected(&other, "events")),
            },
            Ok(Arrival::Broken(error)) => Err(error.into()),
            Ok(Arrival::End) => Err(PeerError::Gone { pid: 0, purpose: PURPOSE }.into()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(Error::system("receive events", error)),
        }
    }
}

impl AsFd for Subscription {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
