//! The server's state.

use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

use super::{
    caller::{Caller, ConnectionId},
    claims::Claims,
    client::{ClientState, PendingRequest},
    effects::Effects,
    metrics::Metrics,
    objects::{NewVersion, Objects},
    repeats::RepeatLimiter,
    topics::Topics,
    waits::Waits,
    watchers::Watchers,
};
use crate::{
    broker::keeper::Mark,
    wire::broker::{Delete, Restore},
};

pub(crate) struct State {
    /// What the event loop must do, in order.
    pub(crate) effects: Effects,
    pub(crate) objects: Objects,
    pub(crate) clients: HashMap<ConnectionId, ClientState>,
    pub(crate) drafts: Drafts,
    pub(crate) changes: Changes,
    pub(crate) waits: Waits,
    pub(crate) claims: Claims,
    pub(crate) watchers: Watchers,
    pub(crate) topics: Topics,
    /// Clients whose listing continues in the next turn of the event loop.
    pub(crate) listings: VecDeque<ConnectionId>,
    pub(crate) metrics: Metrics,
    pub(crate) repeats: RepeatLimiter,
    /// The keeper's process, if it is visible in this PID namespace.
    pub(crate) keeper_pid: Option<u32>,
    /// Time limit for a client's hello, and for the segments of a put.
    pub(crate) timeout: Duration,
    /// Whether memfds are accepted as GPU memory.
    pub(crate) emulated: bool,
}

/// Changes of names that have begun, or wait for others.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    /// Oldest first. The keeper confirms a change when it has read everything before the mark.
    pub(crate) unconfirmed: VecDeque<(Mark, Unconfirmed)>,
    /// Changes of names that have an unconfirmed put, and puts of reserved names, oldest first.
    pub(crate) waiting: HashMap<String, VecDeque<Change>>,
    /// Whether missing names are reserved for clients that restore objects which the previous broker lost.
    pub(crate) reserves_names: bool,
}

/// Identifies a draft.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct DraftKey {
    pub(crate) name: String,
    pub(crate) group: String,
}

/// The puts of each version that still lacks parts. The terms of the first one apply, and the order of the parts that it announced.
pub(crate) type Drafts = HashMap<DraftKey, Vec<NewVersion>>;

#[cfg(test)]
impl Changes {
    /// Puts that have not begun.
    pub(crate) fn queued_puts(&self) -> impl Iterator<Item = &NewVersion> {
        self.waiting.values().flatten().filter_map(|change| match change {
            Change::Put(put) => Some(&**put),
            Change::Delete(..) => None,
        })
    }
}

/// A change that the keeper has not confirmed.
#[derive(Debug)]
pub(crate) enum Unconfirmed {
    /// The version with this key.
    Put { key: u64, name: String, makers: Vec<ConnectionId>, restore: Option<Restore> },
    /// A client's request whose changes are done.
    Request(ConnectionId),
}

/// A change of a name that has not begun.
#[derive(Debug)]
pub(crate) enum Change {
    Put(Box<NewVersion>),
    Delete(ConnectionId, Delete),
}

impl State {
    pub(crate) fn new(objects: Objects, timeout: Duration, emulated: bool) -> Self {
        let watchers = Watchers::new(objects.events().last_event());
        let metrics = Metrics::new(objects.now.ms);
        Self {
            effects: Effects::default(),
            objects,
            clients: HashMap::new(),
            drafts: Drafts::new(),
            changes: Changes::default(),
            waits: Waits::default(),
            claims: Claims::default(),
            watchers,
            topics: Topics::default(),
            listings: VecDeque::new(),
            metrics,
            repeats: RepeatLimiter::default(),
            keeper_pid: None,
            timeout,
            emulated,
        }
    }

    pub(crate) fn caller(&self, id: ConnectionId) -> Option<&Caller> {
        self.clients.get(&id).map(|client| &client.caller)
    }

    pub(crate) fn set_request(&mut self, id: ConnectionId, request: PendingRequest) {
        if let Some(client) = self.clients.get_mut(&id) {
            client.request = request;
        }
    }

    /// Whether the event loop has work that no event announces.
    pub(crate) fn has_work(&self) -> bool {
        self.objects.has_work() || self.watchers.has_queued() || !self.listings.is_empty()
    }
}
