//! Backpressure on users that send memory faster than the worker closes it.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use crate::broker::server::state::caller::ConnectionId;

/// Additional descriptors that each user may send while the worker is behind.
const MAX_WHILE_BEHIND: usize = 64;

/// Connections that are not read until the worker has closed memory.
#[derive(Debug, Default)]
pub(super) struct Backlog {
    suspended: HashMap<ConnectionId, u32>,
    /// Descriptors sent by each user since the worker fell behind.
    sent: HashMap<u32, usize>,
    /// When reading from each user's connections stopped.
    since: HashMap<u32, Instant>,
}

/// Connections to read again, after the worker has caught up.
pub(super) struct Released {
    pub(super) connections: Vec<ConnectionId>,
    /// How long each user's connections were not read.
    pub(super) users: HashMap<u32, Duration>,
}

impl Backlog {
    /// Counts descriptors that a user sent while the worker is behind.
    pub(super) fn count(&mut self, uid: u32, descriptors: usize) {
        *self.sent.entry(uid).or_default() += descriptors;
    }

    /// Whether a user's next descriptors must wait.
    pub(super) fn is_full(&self, uid: u32) -> bool {
        self.sent.get(&uid).is_some_and(|sent| *sent >= MAX_WHILE_BEHIND)
    }

    pub(super) fn suspend(&mut self, id: ConnectionId, uid: u32, now: Instant) {
        self.suspended.insert(id, uid);
        self.since.entry(uid).or_insert(now);
    }

    pub(super) fn any(&self) -> bool {
        !self.suspended.is_empty() || !self.sent.is_empty()
    }

    /// Whether reading from a user's connections has stopped, so that its puts can't progress.
    pub(super) fn is_suspended(&self, uid: u32) -> bool {
        self.since.contains_key(&uid)
    }

    /// Resets after the worker has caught up.
    pub(super) fn release(&mut self, now: Instant) -> Released {
        self.sent.clear();
        let users = self.since.drain().map(|(uid, since)| (uid, now.saturating_duration_since(since))).collect();
        Released { connections: self.suspended.drain().map(|(id, _)| id).collect(), users }
    }
}
