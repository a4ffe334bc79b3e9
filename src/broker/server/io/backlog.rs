//! Users that send memory faster than the worker closes it.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use crate::broker::server::state::caller::ConnectionId;

/// How many more descriptors each user may send while the worker is behind.
const MOST_WHILE_BEHIND: usize = 64;

/// The connections that are not read from until the worker has closed memory.
#[derive(Debug, Default)]
pub(super) struct Backlog {
    held_up: HashMap<ConnectionId, u32>,
    /// How many descriptors each user has sent since the worker is behind.
    sent: HashMap<u32, usize>,
    /// Since when each user's connections are held up.
    since: HashMap<u32, Instant>,
}

/// What waited until the worker has closed memory.
pub(super) struct Released {
    pub(super) connections: Vec<ConnectionId>,
    /// How long each user was held up.
    pub(super) users: HashMap<u32, Duration>,
}

impl Backlog {
    /// A user has sent descriptors while the worker is behind.
    pub(super) fn count(&mut self, uid: u32, descriptors: usize) {
        *self.sent.entry(uid).or_default() += descriptors;
    }

    /// Whether a user has sent so much that its next descriptors wait.
    pub(super) fn is_full(&self, uid: u32) -> bool {
        self.sent.get(&uid).is_some_and(|sent| *sent >= MOST_WHILE_BEHIND)
    }

    pub(super) fn hold_up(&mut self, id: ConnectionId, uid: u32, now: Instant) {
        self.held_up.insert(id, uid);
        self.since.entry(uid).or_insert(now);
    }

    /// Whether something waits, or was counted, until memory is closed.
    pub(super) fn any(&self) -> bool {
        !self.held_up.is_empty() || !self.sent.is_empty()
    }

    /// Whether connections of a user are held up: then its puts can't go on.
    pub(super) fn holds_up(&self, uid: u32) -> bool {
        self.since.contains_key(&uid)
    }

    /// The worker has closed enough.
    pub(super) fn release(&mut self, now: Instant) -> Released {
        self.sent.clear();
        let users = self.since.drain().map(|(uid, since)| (uid, now.saturating_duration_since(since))).collect();
        Released { connections: self.held_up.drain().map(|(id, _)| id).collect(), users }
    }
}
