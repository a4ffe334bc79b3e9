//! Descriptors in flight: sent, but not read by their receivers. The kernel counts them for the server's user. Beyond the limit of open
//! files it refuses all sends (`ETOOMANYREFS`), unless the server has privileges. See unix(7).

use std::{
    collections::HashSet,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
};

use super::{connection::ClientConnection, connections::Connections};
use crate::{broker::server::state::caller::ConnectionId, sys, wire::MAX_FDS};

/// Descriptors in flight, and their limit.
#[derive(Debug)]
pub(super) struct Flight {
    /// Connections with unread descriptors.
    connections: HashSet<ConnectionId>,
    abandoned: Vec<Abandoned>,
    /// The open-file limit, which is also the kernel's limit on descriptors in flight.
    pub(super) limit: usize,
}

/// A closed connection whose peer had unread descriptors. They stay in flight until the peer reads them or closes its socket.
#[derive(Debug)]
struct Abandoned {
    socket: UnixStream,
    uid: u32,
    descriptors: usize,
}

impl Flight {
    pub(super) fn new(limit: usize) -> Self {
        Self { connections: HashSet::new(), abandoned: Vec::new(), limit }
    }

    /// Adds a connection with unread descriptors.
    pub(super) fn add(&mut self, id: ConnectionId) {
        self.connections.insert(id);
    }

    pub(super) fn remove(&mut self, id: ConnectionId) {
        self.connections.remove(&id);
    }

    /// The number of abandoned sockets.
    pub(super) fn abandoned(&self) -> usize {
        self.abandoned.len()
    }

    /// Whether `more` descriptors can be sent to a user. A user may have half of the kernel's limit minus other users' descriptors in
    /// flight, so that every user can get some. Closing a connection does not free its share: unread descriptors stay in flight. The caller
    /// closes the sockets added to `read`.
    pub(super) fn has_room(
        &mut self,
        connections: &mut Connections,
        uid: u32,
        more: usize,
        read: &mut Vec<(OwnedFd, u32)>,
    ) -> bool {
        if self.connections.is_empty() && self.abandoned.is_empty() || more <= self.room(connections, uid) {
            return true;
        }
        read.extend(self.count(connections));
        more <= self.room(connections, uid)
    }

    /// The number of descriptors that can be sent to a user, as of the last count.
    pub(super) fn room(&self, connections: &Connections, uid: u32) -> usize {
        let (mut own, mut others) = (0, 0);
        let connected = self.connections.iter().filter_map(|id| connections.get(*id));
        let connected = connected.map(|connection| (connection.uid, connection.unread));
        for (of, count) in connected.chain(self.abandoned.iter().map(|of| (of.uid, of.descriptors))) {
            *if of == uid { &mut own } else { &mut others } += count;
        }
        // The kernel applies the open-file limit to all descriptors sent by processes of the server's user.
        (self.limit.saturating_sub(others) / 2).max(MAX_FDS).saturating_sub(own)
    }

    /// Asks the kernel which connections have read their descriptors. Returns abandoned sockets that can be closed, with their users.
    pub(super) fn count(&mut self, connections: &mut Connections) -> Vec<(OwnedFd, u32)> {
        let is_unread = |connection: &mut ClientConnection| connection.is_unread() && connection.unread > 0;
        self.connections.retain(|id| connections.get_mut(*id).is_some_and(is_unread));
        let read = |of: &mut Abandoned| !is_unread_socket(of.socket.as_fd());
        self.abandoned.extract_if(.., read).map(|Abandoned { socket, uid, .. }| (socket.into(), uid)).collect()
    }

    /// Keeps the socket of a closed connection until its peer has read the descriptors or closed its socket. Returns the socket if it can
    /// be closed now.
    pub(super) fn abandon(&mut self, socket: UnixStream, uid: u32, descriptors: usize) -> Option<UnixStream> {
        if descriptors == 0 || !is_unread_socket(socket.as_fd()) {
            return Some(socket);
        }
        let _ = socket.shutdown(std::net::Shutdown::Both);
        self.abandoned.push(Abandoned { socket, uid, descriptors });
        None
    }
}

/// Whether the peer has unread data on a socket.
fn is_unread_socket(socket: BorrowedFd<'_>) -> bool {
    sys::unread(socket).is_ok_and(|bytes| bytes > 0)
}
