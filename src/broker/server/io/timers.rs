//! The timer queue.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{broker::server::state::caller::ConnectionId, channel::deadline_after};

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Timer {
    /// A client's deadline.
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
    /// Wakes a stopping server that has waited long enough for its keeper.
    Leave,
    /// Checks that the socket's file still exists.
    SocketFile,
    /// Notifies the init's watchdog.
    Watchdog,
    /// Ends leases of the previous server that no client has resumed.
    Unresumed,
    /// Logs counts of repeated log lines.
    RepeatLimiter,
}

/// Timers, each set at most once.
#[derive(Debug, Default)]
pub(super) struct Timers {
    queue: BTreeSet<(Instant, Timer)>,
    set: BTreeMap<Timer, Instant>,
}

impl Timers {
    /// Sets a timer, or moves it.
    fn set_at(&mut self, at: Instant, timer: Timer) {
        self.cancel(&timer);
        self.set.insert(timer.clone(), at);
        self.queue.insert((at, timer));
    }

    pub(super) fn set(&mut self, after: Duration, timer: Timer) {
        self.set_at(deadline_after(after), timer);
    }

    /// Sets a timer, unless it fires earlier anyway.
    pub(super) fn set_by(&mut self, after: Duration, timer: Timer) {
        let at = deadline_after(after);
        if self.set.get(&timer).is_none_or(|earlier| *earlier > at) {
            self.set_at(at, timer);
        }
    }

    pub(super) fn set_or_cancel(&mut self, at: Option<Instant>, timer: Timer) {
        match at {
            Some(at) => self.set_at(at, timer),
            None => self.cancel(&timer),
        }
    }

    pub(super) fn cancel(&mut self, timer: &Timer) {
        if let Some(at) = self.set.remove(timer) {
            self.queue.remove(&(at, timer.clone()));
        }
    }

    pub(super) fn first(&self) -> Option<Instant> {
        self.queue.first().map(|(at, _)| *at)
    }

    /// Takes the first timer if it is due.
    pub(super) fn pop(&mut self, now: Instant) -> Option<Timer> {
        if self.first().is_none_or(|at| at > now) {
            return None;
        }
        let (_, timer) = self.queue.pop_first()?;
        self.set.remove(&timer);
        Some(timer)
    }
}
