//! Sends and receives the broker's records: a request and its answer.

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use super::connection::Connection;
use crate::{
    channel::{deadline_after, record::RecordSocket},
    error::{BrokerError, Error, ErrorCode, PeerError, ProtocolError, Result},
    wire::{HEADER_LENGTH, MAX_BODY, broker::Message},
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
            (other, _) => return Err($crate::broker::client::records::unexpected(&other, $name)),
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
        let sent = self.connection.flush_releases().and_then(|()| self.send(message, fds));
        match sent {
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
