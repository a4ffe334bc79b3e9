//! Descriptors in flight: sent, and not read by their receivers. The kernel counts them against the server's user, and refuses all
//! sends beyond the limit of open files (`ETOOMANYREFS`), unless the server has rights that users lack. See unix(7).

use std::{
    collections::HashSet,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
};

use super::{connection::Connection, connections::Connections};
use crate::{broker::server::state::caller::ConnectionId, sys, wire::MAX_FDS};

/// Descriptors in flight, and how many there may be.
#[derive(Debug)]
pub(super) struct Flight {
    /// Connections that have not read descriptors.
    connections: HashSet<ConnectionId>,
    abandoned: Vec<Abandoned>,
    /// The most descriptors that this process may have: also the kernel's bound on descriptors in flight.
    pub(super) limit: usize,
}

/// A connection that was ended while its peer had not read all descriptors: they are in flight until it has, or has closed it.
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

    /// Notes that a connection has not read descriptors.
    pub(super) fn add(&mut self, id: ConnectionId) {
        self.connections.insert(id);
    }

    pub(super) fn remove(&mut self, id: ConnectionId) {
        self.connections.remove(&id);
    }

    /// How many connections were ended and are not closed.
    pub(super) fn abandoned(&self) -> usize {
        self.abandoned.len()
    }

    /// Whether so many descriptors more may be sent to a user: at most half of what the kernel allows in flight and other users leave,
    /// so that there is some left for each. Ending a connection makes no room: what its peer has not read stays in flight. The caller
    /// closes the connections that are added to `read`.
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

    /// How many descriptors may be sent to a user, as counted last.
    pub(super) fn room(&self, connections: &Connections, uid: u32) -> usize {
        let (mut own, mut others) = (0, 0);
        let connected = self.connections.iter().filter_map(|id| connections.get(*id));
        let connected = connected.map(|connection| (connection.uid, connection.unread));
        for (of, count) in connected.chain(self.abandoned.iter().map(|of| (of.uid, of.descriptors))) {
            *if of == uid { &mut own } else { &mut others } += count;
        }
        // The kernel's bound is the limit of open files, for all that processes of the server's user have sent.
        (self.limit.saturating_sub(others) / 2).max(MAX_FDS).saturating_sub(own)
    }

    /// Asks the kernel which connections have read the descriptors that were sent. Returns ended ones, with their users, to be closed.
    pub(super) fn count(&mut self, connections: &mut Connections) -> Vec<(OwnedFd, u32)> {
        let is_unread = |connection: &mut Connection| connection.is_unread() && connection.unread > 0;
        self.connections.retain(|id| connections.get_mut(*id).is_some_and(is_unread));
        let read = |of: &mut Abandoned| !is_unread_socket(of.socket.as_fd());
        self.abandoned.extract_if(.., read).map(|Abandoned { socket, uid, .. }| (socket.into(), uid)).collect()
    }

    /// Keeps the socket of an ended connection until its peer has read the descriptors, or closed it; gives it back if it has.
    pub(super) fn abandon(&mut self, socket: UnixStream, uid: u32, descriptors: usize) -> Option<UnixStream> {
        if descriptors == 0 || !is_unread_socket(socket.as_fd()) {
            return Some(socket);
        }
        let _ = socket.shutdown(std::net::Shutdown::Both);
        self.abandoned.push(Abandoned { socket, uid, descriptors });
        None
    }
}

/// Whether the peer has not read all that was sent on a socket.
fn is_unread_socket(socket: BorrowedFd<'_>) -> bool {
    sys::unread(socket).is_ok_and(|bytes| bytes > 0)
}
