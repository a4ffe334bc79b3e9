//! All connections, and which of them need attention.

use std::{
    collections::{HashMap, HashSet},
    time::{Duration, Instant},
};

use super::connection::ClientConnection;
use crate::broker::server::state::caller::ConnectionId;

#[derive(Debug, Default)]
pub(super) struct Connections {
    all: HashMap<ConnectionId, ClientConnection>,
    /// Connections that may have data to read.
    readable: Vec<ConnectionId>,
    /// Connections whose peers may have unread data.
    unread: HashSet<ConnectionId>,
}

impl Connections {
    pub(super) fn get(&self, id: ConnectionId) -> Option<&ClientConnection> {
        self.all.get(&id)
    }

    pub(super) fn get_mut(&mut self, id: ConnectionId) -> Option<&mut ClientConnection> {
        self.all.get_mut(&id)
    }

    pub(super) fn insert(&mut self, id: ConnectionId, connection: ClientConnection) {
        self.all.insert(id, connection);
    }

    pub(super) fn remove(&mut self, id: ConnectionId) -> Option<ClientConnection> {
        self.unread.remove(&id);
        self.all.remove(&id)
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    pub(super) fn ids(&self) -> Vec<ConnectionId> {
        self.all.keys().copied().collect()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (ConnectionId, &mut ClientConnection)> {
        self.all.iter_mut().map(|(id, connection)| (*id, connection))
    }

    /// Marks a connection as possibly readable.
    pub(super) fn list(&mut self, id: ConnectionId) {
        if let Some(connection) = self.all.get_mut(&id)
            && !connection.listed
        {
            connection.listed = true;
            self.readable.push(id);
        }
    }

    pub(super) fn any_listed(&self) -> bool {
        !self.readable.is_empty()
    }

    /// Takes the connections that may have data to read.
    pub(super) fn take_listed(&mut self) -> Vec<ConnectionId> {
        let mut listed = std::mem::take(&mut self.readable);
        listed.retain(|id| {
            let connection = self.all.get_mut(id);
            connection.map(|connection| connection.listed = false).is_some()
        });
        listed
    }

    /// Marks a connection whose peer may have unread data.
    pub(super) fn note_unread(&mut self, id: ConnectionId) {
        self.unread.insert(id);
    }

    /// Asks the kernel which peers have unread data. Returns connections whose peers have not read for longer than `limit`.
    pub(super) fn stuck(&mut self, now: Instant, max: Duration) -> Vec<ConnectionId> {
        let all = &mut self.all;
        self.unread.retain(|id| all.get_mut(id).is_some_and(ClientConnection::is_unread));
        let is_stuck = |id: &&ConnectionId| {
            let since = self.all.get(*id).and_then(|connection| connection.unread_since);
            since.is_some_and(|since| now.saturating_duration_since(since) > max)
        };
        self.unread.iter().filter(is_stuck).copied().collect()
    }

    /// Whether some peers have unread data.
    pub(super) fn any_unread(&self) -> bool {
        !self.unread.is_empty()
    }
}
