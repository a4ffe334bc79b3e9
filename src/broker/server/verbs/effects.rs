//! What the event loop does for a request.

use std::{collections::VecDeque, os::fd::OwnedFd, time::Instant};

use crate::{
    broker::{
        catalogue::SegmentId,
        server::state::{caller::ConnectionId, root::State},
    },
    error::{ErrorCode, Result},
    wire::broker::Message,
};

/// Whose descriptors: a user's that may connect, or those of all users that may not.
pub(crate) type Origin = Option<u32>;

/// What the event loop does for a request.
pub(crate) enum Effect {
    /// Sends records: the first now, each other one when the client has acknowledged the one before.
    Send { client: ConnectionId, records: Vec<Outgoing> },
    /// Sends the next record of an answer, if the client received so many segments of its lease as were sent.
    SendNext { client: ConnectionId, received: u64 },
    /// Sends an error, and closes the connection.
    End { client: ConnectionId, code: ErrorCode, message: String, why: &'static str },
    /// Closes the connection.
    Close { client: ConnectionId, why: &'static str },
    /// Calls [`super::connection::deadline_passed`] then.
    Deadline { client: ConnectionId, deadline: Option<Deadline> },
    /// Reads again from a client that was not read from while it waited.
    Listen(ConnectionId),
    /// Runs the work in the worker.
    Work(Work),
    /// Closes descriptors where that may block.
    CloseFds { of: Origin, fds: Vec<OwnedFd> },
    /// Counts a request that was answered.
    Count { verb: &'static str, outcome: String, since: Instant },
    /// Sends the keeper what waits for it, and calls [`super::publish::kept`].
    Store,
}

/// When a client's wait ends.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadline {
    pub(crate) at: Instant,
    /// Whether the client waits for what a user sends: the time does not count while the event loop reads nothing from that user.
    pub(crate) stops: bool,
}

/// What the event loop does, in this order.
#[derive(Default)]
pub(crate) struct Effects(pub(crate) VecDeque<Effect>);

impl Effects {
    pub(crate) fn push(&mut self, effect: Effect) {
        self.0.push_back(effect);
    }

    /// Closes what a client sent and the server did not keep.
    pub(crate) fn close_fds(&mut self, of: Origin, fds: Vec<OwnedFd>) {
        if !fds.is_empty() {
            self.push(Effect::CloseFds { of, fds });
        }
    }

    pub(crate) fn deadline(&mut self, client: ConnectionId, at: Instant) {
        self.push(Effect::Deadline { client, deadline: Some(Deadline { at, stops: false }) });
    }

    /// Sets a deadline that stops while the event loop reads nothing from the user.
    pub(crate) fn deadline_of_uploads(&mut self, client: ConnectionId, at: Instant) {
        self.push(Effect::Deadline { client, deadline: Some(Deadline { at, stops: true }) });
    }

    /// Ends a connection whose peer broke the protocol.
    pub(crate) fn break_off(&mut self, client: ConnectionId, message: impl Into<String>) {
        let (code, message) = (ErrorCode::Protocol, message.into());
        self.push(Effect::End { client, code, message, why: "it broke the protocol" });
    }
}

/// A record, with its descriptors: of segments that stay until it is sent, and of others.
#[derive(Debug)]
pub(crate) struct Outgoing {
    pub(crate) bytes: Vec<u8>,
    pub(crate) fds: Vec<SegmentId>,
    pub(crate) own: Option<OwnedFd>,
    /// If it belongs to a lease: how many of its segments are sent with this and the records before.
    pub(crate) segments: u64,
}

impl Outgoing {
    /// # Errors
    /// [`crate::error::ProtocolError`] if the message is too long.
    pub(crate) fn of(message: &Message, fds: Vec<SegmentId>) -> Result<Self> {
        let mut bytes = Vec::with_capacity(512);
        message.encode_into(&mut bytes)?;
        let segments = match message {
            Message::Lease(lease) => lease.sizes.len() as u64,
            Message::Segments(segments) => segments.first + segments.sizes.len() as u64,
            _ => 0,
        };
        // It may wait for long.
        bytes.shrink_to_fit();
        Ok(Self { bytes, fds, own: None, segments })
    }

    /// How many descriptors go with it.
    pub(crate) fn descriptors(&self) -> usize {
        self.fds.len() + usize::from(self.own.is_some())
    }
}

/// What the event loop does with the result of some work: again a function of the state to effects.
pub(crate) type Outcome = Box<dyn FnOnce(&mut State, &mut Effects) + Send>;

/// A step of some work.
pub(crate) type Job = Box<dyn FnOnce() -> Step + Send>;

/// What a step of some work leads to.
pub(crate) enum Step {
    /// The work goes on with this, after the steps of other users.
    More(Job),
    /// The event loop does this with the result.
    Done(Outcome),
}

/// Work for a request of a client.
pub(crate) struct Work {
    pub(crate) client: ConnectionId,
    pub(crate) uid: u32,
    /// How many descriptors are reserved for its user until it is done.
    pub(crate) reserved: usize,
    pub(crate) job: Job,
}

impl Work {
    /// Runs all steps here.
    pub(super) fn finish(self) -> Outcome {
        let mut next = self.job;
        loop {
            match next() {
                Step::More(job) => next = job,
                Step::Done(outcome) => return outcome,
            }
        }
    }
}

/// Runs some work: here if it is small, else in the worker.
pub(crate) fn work(state: &mut State, effects: &mut Effects, small: bool, work: Work) {
    if !small {
        return effects.push(Effect::Work(work));
    }
    (work.finish())(state, effects);
}
