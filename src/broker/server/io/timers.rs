//! The timer queue.

use std::{
    collections::{BTreeSet, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{broker::server::state::caller::ConnectionId, channel::deadline_after};

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Timer {
    /// Checks a connection's deadline, which may have moved.
    Connection(ConnectionId),
    /// Retries a connection's send.
    Retry(ConnectionId),
    /// Checks whether a name has expired.
    Name(Arc<str>),
    /// Accepts connections again after accept(2) failed.
    Accept,
    /// Checks for clients that do not read.
    Sweep,
    /// Sends messages to the keeper again.
    Store,
    /// Checks whether the keeper reads its messages.
    Keeper,
    /// Checks that the socket's file still exists.
    SocketFile,
    /// Notifies the init's watchdog.
    Watchdog,
    /// Ends leases of the previous server that no client has resumed.
    Unresumed,
    /// Logs counts of repeated log lines.
    RepeatLimiter,
}

#[derive(Debug, Default)]
pub(super) struct Timers {
    all: BTreeSet<(Instant, Timer)>,
    /// Timers set by [`Timers::set_once`].
    once: HashSet<Timer>,
}

impl Timers {
    pub(super) fn set(&mut self, after: Duration, timer: Timer) {
        self.all.insert((deadline_after(after), timer));
    }

    /// Sets a timer unless it is already set.
    pub(super) fn set_once(&mut self, after: Duration, timer: Timer) {
        if self.once.insert(timer.clone()) {
            self.set(after, timer);
        }
    }

    /// Moves a timer from `before` to `at`.
    pub(super) fn set_at(&mut self, at: Instant, timer: Timer, before: Option<Instant>) {
        if let Some(before) = before {
            self.all.remove(&(before, timer.clone()));
        }
        self.all.insert((at, timer));
    }

    pub(super) fn first(&self) -> Option<Instant> {
        self.all.first().map(|(at, _)| *at)
    }

    /// Takes the first timer if it is due.
    pub(super) fn pop(&mut self, now: Instant) -> Option<Timer> {
        if self.first().is_none_or(|at| at > now) {
            return None;
        }
        let (_, timer) = self.all.pop_first()?;
        self.once.remove(&timer);
        Some(timer)
    }
}
