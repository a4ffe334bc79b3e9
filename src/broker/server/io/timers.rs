//! What happens when.

use std::{
    collections::{BTreeSet, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{broker::server::state::caller::ConnectionId, channel::deadline_after};

/// What happens at a time.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Timer {
    /// The deadline of a connection passes, unless it was moved.
    Connection(ConnectionId),
    /// A connection's send is tried again.
    Retry(ConnectionId),
    /// The lifetime of a name ends, unless it goes on.
    Name(Arc<str>),
    /// Connections are accepted again after accept(2) failed.
    Accept,
    /// Connections that do not read are looked at.
    Sweep,
    /// Messages to the keeper are sent again.
    Store,
    /// The keeper is checked: does it read what is sent?
    Keeper,
    /// The init learns that this process runs.
    Watchdog,
    /// What no client took up of a server before this one ends.
    Unclaimed,
    /// Repetitions of log lines are logged.
    Repeats,
}

/// All timers.
#[derive(Debug, Default)]
pub(super) struct Timers {
    all: BTreeSet<(Instant, Timer)>,
    /// Those that were set with [`Timers::set_once`].
    once: HashSet<Timer>,
}

impl Timers {
    pub(super) fn set(&mut self, after: Duration, timer: Timer) {
        self.all.insert((deadline_after(after), timer));
    }

    /// Sets a timer unless it is set already.
    pub(super) fn set_once(&mut self, after: Duration, timer: Timer) {
        if self.once.insert(timer.clone()) {
            self.set(after, timer);
        }
    }

    /// Sets a timer in place of the one at another time.
    pub(super) fn set_at(&mut self, at: Instant, timer: Timer, before: Option<Instant>) {
        if let Some(before) = before {
            self.all.remove(&(before, timer.clone()));
        }
        self.all.insert((at, timer));
    }

    /// When the first timer runs.
    pub(super) fn first(&self) -> Option<Instant> {
        self.all.first().map(|(at, _)| *at)
    }

    /// Takes the first timer, if its time has come.
    pub(super) fn pop(&mut self, now: Instant) -> Option<Timer> {
        if self.first().is_none_or(|at| at > now) {
            return None;
        }
        let (_, timer) = self.all.pop_first()?;
        self.once.remove(&timer);
        Some(timer)
    }
}
