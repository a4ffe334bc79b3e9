//! Descriptors in flight: sent, and not read by their receivers. The kernel counts them against the server's user, and refuses all
//! sends beyond the limit of open files (`ETOOMANYREFS`), unless the server has rights that users lack. See unix(7).

use std::{
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd},
        unix::net::UnixStream,
    },
    time::{Duration, Instant},
};

use mio::unix::SourceFd;

use crate::broker::server::{
    ConnectionId,
    io::connection::Connection,
    io::reactor::{Reactor, Timer},
};
use crate::{
    error::{BrokerError, RefusalCode},
    sys,
    wire::MAX_FDS,
};

/// How often a reply is tried again that waits until its user's processes have read some of the descriptors that were sent to them.
const ROOM_PAUSE: Duration = Duration::from_millis(20);

/// How long such a reply waits.
const ROOM_WAIT: Duration = Duration::from_secs(2);

/// A connection that was ended while its peer had not read all descriptors: they are in flight until it has, or has closed it.
pub(crate) struct Abandoned {
    socket: UnixStream,
    uid: u32,
    descriptors: usize,
}

impl Reactor {
    /// Whether descriptors may be sent on a connection: those before must have been read. Else it is ended, since the kernel counts
    /// them against this process.
    pub(crate) fn has_read(&mut self, id: ConnectionId) -> bool {
        let unread = self.connections.get_mut(&id).map_or(0, Connection::unread);
        if unread > 0 {
            self.break_off(id, "a request came before the descriptors of the reply before it were read");
        }
        unread == 0
    }

    /// Whether so many descriptors more may be sent to a user: at most half of what the kernel allows in flight and other users leave,
    /// so that there is some left for each. To end a connection makes no room: what its peer has not read stays in flight.
    pub(crate) fn has_room(&mut self, uid: u32, more: usize) -> bool {
        if self.in_flight.is_empty() && self.abandoned.is_empty() {
            return true;
        }
        if more <= self.room(uid) {
            return true;
        }
        self.count_unread();
        more <= self.room(uid)
    }

    /// How many descriptors may be sent to a user, as counted last.
    fn room(&self, uid: u32) -> usize {
        let (mut own, mut others) = (0, 0);
        let connections = self.in_flight.iter().filter_map(|id| self.connections.get(id));
        let connected = connections.map(|connection| (connection.caller.uid, connection.counted_unread()));
        for (of, count) in connected.chain(self.abandoned.iter().map(|of| (of.uid, of.descriptors))) {
            *if of == uid { &mut own } else { &mut others } += count;
        }
        // The kernel's bound is the limit of open files, for all that processes of the server's user have sent.
        (self.limit.saturating_sub(others) / 2).max(MAX_FDS).saturating_sub(own)
    }

    /// Asks the kernel which connections have read the descriptors that were sent.
    pub(crate) fn count_unread(&mut self) {
        let connections = &mut self.connections;
        self.in_flight.retain(|id| {
            connections.get_mut(id).is_some_and(|connection| connection.is_unread() && connection.counted_unread() > 0)
        });
        let read = |of: &mut Abandoned| !is_unread(of.socket.as_fd());
        for Abandoned { socket, uid, .. } in self.abandoned.extract_if(.., read).collect::<Vec<_>>() {
            self.close_connection(socket.into(), uid);
        }
    }

    /// Tries a reply again later, or takes it back.
    pub(crate) fn wait_for_room(&mut self, id: ConnectionId, uid: u32) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let since = *connection.wants_room_since.get_or_insert_with(Instant::now);
        if since.elapsed() < ROOM_WAIT {
            return self.timer(ROOM_PAUSE, Timer::Retry(id));
        }
        connection.wants_room_since = None;
        let more = connection.queued();
        for token in connection.take_back() {
            self.objects.end_lease(token);
        }
        let room = self.room(uid);
        let message = format!(
            "{more} descriptors are more than the {room} that uid {uid} may be sent while others are unread: its processes must read, \
             or close, what they were sent before"
        );
        self.refuse(id, BrokerError::new(RefusalCode::Full, message));
    }

    /// Closes a connection's socket, or keeps it to see when what its peer has not read is no more in flight. It counts as a connection
    /// of its user until it is closed.
    pub(crate) fn close_socket(&mut self, socket: UnixStream, uid: u32, descriptors: usize) {
        if descriptors > 0 && is_unread(socket.as_fd()) {
            let _ = self.poll.registry().deregister(&mut SourceFd(&socket.as_raw_fd()));
            let _ = socket.shutdown(std::net::Shutdown::Both);
            self.abandoned.push(Abandoned { socket, uid, descriptors });
            self.sweep_later();
        } else {
            self.close_connection(socket.into(), uid);
        }
    }
}

/// Whether the peer has not read all that was sent on a socket.
fn is_unread(socket: BorrowedFd<'_>) -> bool {
    sys::unread(socket).is_ok_and(|bytes| bytes > 0)
}
