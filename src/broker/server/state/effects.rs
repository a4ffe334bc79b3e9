//! Effects: instructions for the event loop.

use std::{collections::VecDeque, os::fd::OwnedFd, time::Instant};

use crate::{
    broker::server::state::{caller::ConnectionId, objects::VersionFd, topics::Meeting},
    error::{ErrorCode, Result},
    wire::broker::Message,
};

pub(crate) enum Effect {
    /// Sends records: the first now, each further one after the client has acknowledged its predecessor.
    Send {
        client: ConnectionId,
        records: Vec<Outgoing>,
    },
    /// Sends the next record of an answer, if the client has received exactly the segments sent so far.
    SendNext {
        client: ConnectionId,
        received: u64,
    },
    /// Sends an error, and closes the connection.
    End {
        client: ConnectionId,
        code: ErrorCode,
        message: String,
        why: &'static str,
    },
    Close {
        client: ConnectionId,
        why: &'static str,
    },
    /// Sets or clears the client's deadline. At the deadline, the loop calls `verbs::connection::deadline_passed`.
    Deadline {
        client: ConnectionId,
        deadline: Option<Instant>,
    },
    /// Resumes reading from a client that waited.
    Listen(ConnectionId),
    /// Closes descriptors where blocking is allowed. They are charged to the user `of`.
    CloseFds {
        of: u32,
        fds: Vec<OwnedFd>,
    },
    Count {
        verb: &'static str,
        outcome: String,
        since: Instant,
    },
    /// Connects two clients: sends each one end of a socket pair.
    Meet(Meeting),
    /// Sends queued messages to the keeper, then calls `verbs::put::complete_safe`.
    Store,
}

/// Instructions for the event loop, in order.
#[derive(Default)]
pub(crate) struct Effects(pub(crate) VecDeque<Effect>);

impl Effects {
    pub(crate) fn push(&mut self, effect: Effect) {
        self.0.push_back(effect);
    }

    /// Closes descriptors that a client sent and the server did not keep.
    pub(crate) fn close_fds(&mut self, of: u32, fds: Vec<OwnedFd>) {
        if !fds.is_empty() {
            self.push(Effect::CloseFds { of, fds });
        }
    }

    pub(crate) fn deadline(&mut self, client: ConnectionId, at: Instant) {
        self.push(Effect::Deadline { client, deadline: Some(at) });
    }

    /// Disconnects a peer that violated the protocol.
    pub(crate) fn protocol_error(&mut self, client: ConnectionId, message: impl Into<String>) {
        let (code, message) = (ErrorCode::Protocol, message.into());
        self.push(Effect::End { client, code, message, why: "protocol violation" });
    }
}

/// A record with its descriptors: `fds` belong to leased versions, `own` are closed after sending.
#[derive(Debug)]
pub(crate) struct Outgoing {
    pub(crate) bytes: Vec<u8>,
    pub(crate) fds: Vec<VersionFd>,
    pub(crate) own: Vec<OwnedFd>,
    /// For a lease: the number of its segments sent up to and including this record.
    pub(crate) segments: u64,
}

impl Outgoing {
    /// # Errors
    /// [`crate::error::ProtocolError`] if the message is too long.
    pub(crate) fn of(message: &Message, fds: Vec<VersionFd>) -> Result<Self> {
        let mut bytes = Vec::with_capacity(512);
        message.encode_into(&mut bytes)?;
        let segments = match message {
            Message::Lease(lease) => lease.sizes.len() as u64,
            Message::Segments(segments) => segments.first + segments.sizes.len() as u64,
            _ => 0,
        };
        // The record may wait for a long time.
        bytes.shrink_to_fit();
        Ok(Self { bytes, fds, own: Vec::new(), segments })
    }

    pub(crate) fn descriptors(&self) -> usize {
        self.fds.len() + self.own.len()
    }
}
