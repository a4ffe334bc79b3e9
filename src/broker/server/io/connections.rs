//! All connections, and which of them need attention.

use std::{
    collections::{HashMap, HashSet},
    time::{Duration, Instant},
};

use super::connection::ClientConnection;
use crate::broker::server::{admit::Users, state::caller::ConnectionId};

#[derive(Debug)]
pub(super) struct Connections {
    all: HashMap<ConnectionId, ClientConnection>,
    /// Closed connections whose peers have unread descriptors: these stay in flight until the peer reads them or closes its socket.
    lingering: Vec<ClientConnection>,
    /// Connections that may have data to read, in the order in which it arrived.
    readable: Vec<ConnectionId>,
    /// Connections whose peers may have unread data.
    unread: HashSet<ConnectionId>,
    /// When the kernel was last asked about them.
    asked: Instant,
    /// Connections of each user that are not read until its memory is closed.
    suspended: HashMap<u32, Vec<ConnectionId>>,
}

impl Connections {
    pub(super) fn new() -> Self {
        Self {
            all: HashMap::new(),
            lingering: Vec::new(),
            readable: Vec::new(),
            unread: HashSet::new(),
            asked: Instant::now(),
            suspended: HashMap::new(),
        }
    }

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
        self.all.remove(&id)
    }

    /// Keeps a closed connection until its peer has read the descriptors.
    pub(super) fn linger(&mut self, connection: ClientConnection) {
        self.lingering.push(connection);
    }

    pub(super) fn ids(&self) -> Vec<ConnectionId> {
        self.all.keys().copied().collect()
    }

    /// Marks a connection as possibly readable.
    pub(super) fn list(&mut self, id: ConnectionId) {
        if let Some(connection) = self.get_mut(id)
            && !std::mem::replace(&mut connection.listed, true)
        {
            self.readable.push(id);
        }
    }

    pub(super) fn any_listed(&self) -> bool {
        !self.readable.is_empty()
    }

    /// Takes the connections that may have data to read.
    pub(super) fn take_listed(&mut self) -> Vec<ConnectionId> {
        let listed = std::mem::take(&mut self.readable);
        for id in &listed {
            if let Some(connection) = self.all.get_mut(id) {
                connection.listed = false;
            }
        }
        listed
    }

    /// Reads from a connection again only after [`Connections::resume`] for its user.
    pub(super) fn suspend(&mut self, id: ConnectionId, uid: u32) {
        self.suspended.entry(uid).or_default().push(id);
    }

    pub(super) fn resume(&mut self, uid: u32) {
        self.suspended.remove(&uid).into_iter().flatten().for_each(|id| self.list(id));
    }

    /// Marks a connection whose peer may have unread data.
    pub(super) fn note_unread(&mut self, id: ConnectionId) {
        self.unread.insert(id);
    }

    /// Asks the kernel which peers have unread data, at most once in `interval`. Returns closed connections whose peers have none.
    pub(super) fn settle(&mut self, users: &mut Users, interval: Duration) -> Vec<ClientConnection> {
        if self.asked.elapsed() < interval {
            return Vec::new();
        }
        self.asked = Instant::now();
        let all = &mut self.all;
        self.unread.retain(|id| all.get_mut(id).is_some_and(|connection| connection.is_unread(users)));
        self.lingering.extract_if(.., |connection| !connection.is_unread(users)).collect()
    }

    /// Connections whose peers have not read for longer than `max`.
    pub(super) fn stuck(&self, now: Instant, max: Duration) -> Vec<ConnectionId> {
        let is_stuck = |id: &&ConnectionId| {
            let since = self.get(**id).and_then(|connection| connection.unread_since);
            since.is_some_and(|since| now.saturating_duration_since(since) > max)
        };
        self.unread.iter().filter(is_stuck).copied().collect()
    }

    /// Whether some peers have unread data.
    pub(super) fn any_unread(&self) -> bool {
        !self.unread.is_empty() || !self.lingering.is_empty()
    }
}
