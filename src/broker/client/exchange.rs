//! A request on a connection, and its answer.

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    time::Duration,
};

use super::{connection::Connection, records::receive_on};
use crate::{
    channel::deadline_after,
    error::{Error, PeerError, Result},
    wire::broker::Message,
};

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
