//! The server's state.

use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

use super::{
    caller::{Caller, ConnectionId},
    claims::Claims,
    client::{ClientState, PendingRequest},
    drafts::Drafts,
    history::History,
    metrics::Metrics,
    objects::{Objects, Staged, Terms},
    repeats::RepeatLimiter,
    waits::Waits,
    watchers::Watchers,
};

pub(crate) struct State {
    pub(crate) objects: Objects,
    pub(crate) clients: HashMap<ConnectionId, ClientState>,
    pub(crate) drafts: Drafts,
    pub(crate) pending_versions: PendingVersions,
    pub(crate) waits: Waits,
    pub(crate) claims: Claims,
    pub(crate) watchers: Watchers,
    /// Clients whose listing continues in the next turn of the event loop.
    pub(crate) listings: VecDeque<ConnectionId>,
    pub(crate) history: History,
    pub(crate) metrics: Metrics,
    pub(crate) repeats: RepeatLimiter,
    /// The keeper's process, if it is visible in this PID namespace.
    pub(crate) keeper_pid: Option<u32>,
    /// Time limit for a client's hello, and for the segments of a put.
    pub(crate) timeout: Duration,
    /// Whether memfds are accepted as GPU memory.
    pub(crate) emulated: bool,
}

/// Versions whose descriptors the keeper has not confirmed.
#[derive(Debug, Default)]
pub(crate) struct PendingVersions {
    /// Oldest first.
    pub(crate) queue: VecDeque<PendingVersion>,
    /// Whether missing names are reserved for clients that restore objects which the previous broker lost.
    pub(crate) reserves_names: bool,
    /// Versions under reserved names. They are published when the reservation expires.
    pub(crate) reserved: Vec<PendingVersion>,
}

/// A version whose descriptors the keeper has not confirmed.
#[derive(Debug)]
pub(crate) struct PendingVersion {
    pub(crate) makers: Vec<ConnectionId>,
    pub(crate) terms: Terms,
    pub(crate) staged: Staged,
}

impl State {
    pub(crate) fn new(objects: Objects, timeout: Duration, emulated: bool) -> Self {
        let watchers = Watchers::new(objects.journal().last_event());
        let metrics = Metrics::new(objects.now.ms);
        Self {
            objects,
            clients: HashMap::new(),
            drafts: Drafts::new(),
            pending_versions: PendingVersions::default(),
            waits: Waits::default(),
            claims: Claims::default(),
            watchers,
            listings: VecDeque::new(),
            history: History::default(),
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
