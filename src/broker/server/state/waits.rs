//! Gets that wait for an object.

use std::{collections::BTreeSet, time::Instant};

use super::caller::ConnectionId;
use crate::wire::broker::GetHeader;

/// An unanswered get.
#[derive(Debug)]
pub(crate) struct PendingGet {
    pub(crate) get: GetHeader,
    /// `None` before the wait starts.
    pub(crate) deadline: Option<Instant>,
}

/// Clients with waiting gets, by object name, in the order in which they connected.
#[derive(Debug, Default)]
pub(crate) struct Waits(BTreeSet<(String, ConnectionId)>);

impl Waits {
    pub(crate) fn add(&mut self, id: ConnectionId, get: &GetHeader) {
        self.0.extend(get.objects.iter().map(|object| (object.name.clone(), id)));
    }

    pub(crate) fn remove(&mut self, id: ConnectionId, get: &GetHeader) {
        for object in &get.objects {
            self.0.remove(&(object.name.clone(), id));
        }
    }

    /// Clients that wait for a name.
    pub(crate) fn of(&self, name: &str) -> Vec<ConnectionId> {
        let all = (name.to_owned(), ConnectionId(0))..=(name.to_owned(), ConnectionId(u64::MAX));
        self.0.range(all).map(|(_, id)| *id).collect()
    }
}
