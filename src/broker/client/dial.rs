//! Connects to a broker and does the handshake.

use std::{
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use super::records::{SPIN, answer, is_broken, receive_on, send_on};
use crate::{
    channel::{Cancel, Config, Peer, Trust, connect_socket, deadline_after, record::RecordSocket},
    error::{Error, ErrorCode, PeerError, Result, SocketError},
    wire::{
        Hello,
        broker::{BROKER, Message, NO_BACKEND, Resume, Resumed},
    },
};

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
