//! Gets that wait for an object.

use std::{
    collections::{BTreeSet, HashMap},
    time::Instant,
};

use super::caller::ConnectionId;
use crate::wire::broker::GetHeader;

/// An unanswered get.
#[derive(Debug)]
pub(crate) struct PendingGet {
    pub(crate) get: GetHeader,
    /// `None` before the wait starts.
    pub(crate) deadline: Option<Instant>,
}

/// Clients with waiting gets, by object name.
#[derive(Debug, Default)]
pub(crate) struct Waits {
    /// In the order in which the clients connected.
    names: HashMap<String, BTreeSet<ConnectionId>>,
    clients: HashMap<ConnectionId, Vec<String>>,
}

impl Waits {
    pub(crate) fn add(&mut self, id: ConnectionId, get: &GetHeader) {
        if self.clients.contains_key(&id) {
            return;
        }
        let names: Vec<String> = get.objects.iter().map(|object| object.name.clone()).collect();
        for name in &names {
            self.names.entry(name.clone()).or_default().insert(id);
        }
        self.clients.insert(id, names);
    }

    pub(crate) fn remove(&mut self, id: ConnectionId) {
        for name in self.clients.remove(&id).unwrap_or_default() {
            if let Some(ids) = self.names.get_mut(&name) {
                ids.remove(&id);
                if ids.is_empty() {
                    self.names.remove(&name);
                }
            }
        }
    }

    /// Clients that wait for a name, in the order in which they connected.
    pub(crate) fn of(&self, name: &str) -> Vec<ConnectionId> {
        self.names.get(name).map_or_else(Vec::new, |ids| ids.iter().copied().collect())
    }
}
