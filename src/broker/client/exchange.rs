//! A request on a connection, and its answer.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::{connection::Connection, records::receive_on};
use crate::{
    channel::{
        deadline_after,
        record::{Arrival, Record},
    },
    error::{Error, PeerError, Result},
    wire::broker::{Message, Stop},
};

/// How long to wait for the broker to stop a request, in milliseconds.
const SETTLES_MS: u8 = 100;

/// A request in progress.
#[derive(Debug)]
pub(super) struct Exchange<'a> {
    pub(super) connection: &'a Connection,
    pub(super) incoming: &'a mut Vec<u8>,
    /// How long each answer may take.
    pub(super) answer_timeout: Duration,
    /// If the request is a repetition: the number of stops when it was first sent.
    pub(super) stops: Option<u64>,
    pub(super) finished: bool,
    /// Whether the request waits in the broker, and no part of its answer was received.
    pub(super) waits: bool,
}

impl Exchange<'_> {
    /// Sends the first record of a request.
    pub(super) fn send_first(&mut self, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<()> {
        let sent = self.connection.flush_releases().and_then(|()| self.send(message, fds));
        match sent {
            Ok(()) => {}
            Err(gone @ Error::Peer(PeerError::Gone { .. })) => {
                return Err(match self.receive("for the reason") {
                    // The broker reports the reason before it closes the connection.
                    Err(reported @ Error::Peer(PeerError::Reported { .. })) => reported,
                    _ => gone,
                });
            }
            Err(error) => return Err(error),
        }
        // The request was stopped while the connection was down or another thread had its turn, or another thread wants a turn.
        let stopped = self.stops.is_some_and(|before| before != self.connection.stops());
        match stopped || self.connection.turns.is_wanted() {
            true => self.send(&Message::Stop(Stop {}), &[]),
            false => Ok(()),
        }
    }

    /// Waits for the next message of the answer. A refusal is an error, but leaves the connection usable.
    pub(super) fn receive(&mut self, purpose: &'static str) -> Result<(Message, Vec<OwnedFd>)> {
        self.receive_by(None, purpose)
    }

    /// Waits for the next message until a deadline. After [`PeerError::Timeout`] the request continues and may be waited for again.
    pub(super) fn receive_by(
        &mut self,
        deadline: Option<Instant>,
        purpose: &'static str,
    ) -> Result<(Message, Vec<OwnedFd>)> {
        let deadline = || deadline.unwrap_or_else(|| deadline_after(self.answer_timeout));
        let received = receive_on(&self.connection.socket, self.incoming, deadline, purpose);
        if matches!(received, Err(Error::Broker(_))) {
            self.finished = true;
        }
        self.waits = matches!(received, Err(Error::Interrupted { .. })) && self.waits;
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

    /// Stops the request if it waits in the broker. Returns whether the broker has answered that it is stopped, which it does at once.
    fn settle(&mut self) -> bool {
        if !self.waits || !matches!(self.connection.try_send(&Message::Stop(Stop {})), Ok(true)) {
            return false;
        }
        let mut polled = [PollFd::new(self.connection.socket.as_fd(), PollFlags::POLLIN)];
        if poll(&mut polled, PollTimeout::from(SETTLES_MS)) != Ok(1) {
            return false;
        }
        match self.connection.socket.try_receive(self.incoming) {
            Ok(Arrival::Record(Record { length, fds })) => {
                matches!(Message::decode(&self.incoming[..length], fds.len()), Ok(Message::Refused(_)))
            }
            _ => false,
        }
    }
}

impl Drop for Exchange<'_> {
    fn drop(&mut self) {
        if !self.finished && !self.settle() {
            // The next request would receive the rest of this answer.
            self.connection.abandon();
        }
    }
}
