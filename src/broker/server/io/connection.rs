//! Client sockets and their send queues, and which of them need attention.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    time::{Duration, Instant},
};

use crate::{
    broker::{
        keeper::Flushed,
        server::{
            admit::{Resource, Users},
            state::{caller::ConnectionId, effects::Outgoing, objects::Objects},
        },
    },
    channel::record::send_raw,
    sys,
};

#[derive(Debug)]
pub(super) struct ClientConnection {
    pub(super) socket: UnixStream,
    pub(super) uid: u32,
    pub(super) pid: i32,
    /// Records that the socket has not accepted yet.
    queue: VecDeque<Outgoing>,
    /// Records of the answer that wait for acknowledgements.
    rest: VecDeque<Outgoing>,
    /// Segments of the lease sent up to the last record.
    sent_segments: u64,
    /// Upper bound of the descriptors that the peer has not read.
    unread: usize,
    /// Unread descriptors and unsent bytes, as counted for the user.
    counted: (u64, u64),
    /// When an answer started to wait for room for its descriptors.
    pub(super) wants_room_since: Option<Instant>,
    /// When the peer stopped reading.
    pub(super) unread_since: Option<Instant>,
    /// Whether it is in the list of possibly readable connections.
    pub(super) listed: bool,
}

impl ClientConnection {
    /// `socket` must be non-blocking.
    pub(super) fn new(socket: OwnedFd, uid: u32, pid: i32) -> Self {
        Self {
            socket: socket.into(),
            uid,
            pid,
            queue: VecDeque::new(),
            rest: VecDeque::new(),
            sent_segments: 0,
            unread: 0,
            counted: (0, 0),
            wants_room_since: None,
            unread_since: None,
            listed: false,
        }
    }

    pub(super) fn is_blocked(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Whether everything was sent, including records that wait for acknowledgements.
    pub(super) fn is_done(&self) -> bool {
        self.queue.is_empty() && self.rest.is_empty()
    }

    /// Queues an answer: the first record now, each further one after its predecessor is acknowledged.
    pub(super) fn answer(&mut self, records: Vec<Outgoing>) {
        let mut records = records.into_iter();
        records.next().into_iter().for_each(|first| self.push(first));
        self.rest.extend(records);
    }

    /// Handles an acknowledgement of `segments` segments: queues the next record.
    ///
    /// # Errors
    /// One sentence if no acknowledgement is due, or the number of segments is wrong.
    pub(super) fn acknowledged(&mut self, segments: u64) -> Result<(), String> {
        let Some(next) = self.rest.pop_front() else {
            return Err("an acknowledgement arrived, but none is due".to_owned());
        };
        if segments != self.sent_segments {
            let sent = self.sent_segments;
            return Err(format!("the client acknowledged {segments} segments of the lease, but {sent} were sent"));
        }
        self.push(next);
        Ok(())
    }

    fn push(&mut self, outgoing: Outgoing) {
        self.sent_segments = outgoing.segments;
        self.queue.push_back(outgoing);
    }

    /// Counts unread descriptors and unsent bytes for the user. Returns whether any bytes are unsent.
    pub(super) fn count(&mut self, users: &mut Users) -> bool {
        let unsent: usize = self.queue.iter().chain(&self.rest).map(|record| record.bytes.len()).sum();
        users.recount(self.uid, Resource::InFlight, &mut self.counted.0, self.unread as u64);
        users.recount(self.uid, Resource::Answers, &mut self.counted.1, unsent as u64);
        unsent > 0
    }

    /// Ends a connection. Returns whether its peer has unread descriptors.
    pub(super) fn close(&mut self, users: &mut Users) -> bool {
        self.queue.clear();
        self.rest.clear();
        let lingers = self.is_unread(users) && self.unread > 0;
        if lingers {
            let _ = self.socket.shutdown(std::net::Shutdown::Both);
        } else {
            self.unread = 0;
        }
        self.count(users);
        lingers
    }

    /// Discards an incompletely sent answer.
    pub(super) fn discard_answer(&mut self) {
        self.queue.retain(|record| record.descriptors() == 0);
        self.rest.clear();
    }

    /// The number of queued descriptors.
    pub(super) fn queued(&self) -> usize {
        self.queue.iter().map(Outgoing::descriptors).sum()
    }

    /// Sends queued records.
    pub(super) fn flush(&mut self, objects: &Objects) -> Flushed {
        while let Some(next) = self.queue.front() {
            let held = next.fds.iter().map(|id| objects.descriptor(*id));
            let fds: Vec<BorrowedFd<'_>> = held.chain(next.own.iter().map(AsFd::as_fd)).collect();
            match send_raw(&self.socket, &next.bytes, &fds) {
                Ok(()) => {
                    if !fds.is_empty() {
                        self.unread += fds.len();
                        self.unread_since.get_or_insert_with(Instant::now);
                    } else if self.unread == 0 {
                        // The peer reads.
                        self.unread_since = None;
                    }
                    self.queue.pop_front();
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.unread_since.get_or_insert_with(Instant::now);
                    return Flushed::Full;
                }
                // Other clients have too many unread descriptors.
                Err(error) if error.raw_os_error() == Some(nix::libc::ETOOMANYREFS) => return Flushed::InFlight,
                Err(_) => return Flushed::Gone,
            }
        }
        Flushed::All
    }

    /// Whether the peer has unread data. Asks the kernel only if it had any.
    pub(super) fn is_unread(&mut self, users: &mut Users) -> bool {
        if self.unread_since.is_some()
            && self.queue.is_empty()
            && sys::unread(self.socket.as_fd()).is_ok_and(|bytes| bytes == 0)
        {
            self.unread = 0;
            self.unread_since = None;
            self.count(users);
        }
        self.unread_since.is_some()
    }

    /// Whether the peer has not read all descriptors.
    pub(super) fn has_unread_descriptors(&mut self, users: &mut Users) -> bool {
        self.is_unread(users);
        self.unread + self.queued() > 0
    }
}

impl AsFd for ClientConnection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// All connections.
#[derive(Debug, Default)]
pub(super) struct Connections {
    pub(super) all: HashMap<ConnectionId, ClientConnection>,
    /// Closed connections whose peers have unread descriptors: these stay in flight until the peer reads them or closes its socket.
    pub(super) lingering: Vec<ClientConnection>,
    /// Connections that may have data to read, in the order in which it arrived.
    pub(super) readable: Vec<ConnectionId>,
    /// Connections whose peers may have unread data.
    pub(super) unread: HashSet<ConnectionId>,
    /// When the kernel was last asked about them.
    asked: Option<Instant>,
    /// Connections of each user that are not read until its memory is closed: see [`Connections::resume`].
    pub(super) suspended: HashMap<u32, Vec<ConnectionId>>,
}

impl Connections {
    pub(super) fn get(&self, id: ConnectionId) -> Option<&ClientConnection> {
        self.all.get(&id)
    }

    pub(super) fn get_mut(&mut self, id: ConnectionId) -> Option<&mut ClientConnection> {
        self.all.get_mut(&id)
    }

    /// Marks a connection as possibly readable.
    pub(super) fn list(&mut self, id: ConnectionId) {
        if let Some(connection) = self.get_mut(id)
            && !std::mem::replace(&mut connection.listed, true)
        {
            self.readable.push(id);
        }
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

    pub(super) fn resume(&mut self, uid: u32) {
        self.suspended.remove(&uid).into_iter().flatten().for_each(|id| self.list(id));
    }

    /// Asks the kernel which peers have unread data, at most once in `interval`. Returns closed connections whose peers have none.
    pub(super) fn settle(&mut self, users: &mut Users, interval: Duration) -> Vec<ClientConnection> {
        if self.asked.is_some_and(|at| at.elapsed() < interval) {
            return Vec::new();
        }
        self.asked = Some(Instant::now());
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
}
