//! The socket of one client, and the records that wait for it.

use std::{
    collections::VecDeque,
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
        unix::net::UnixStream,
    },
    time::Instant,
};

use rustix::net::SendFlags;
use sendfd::SendWithFd;

use crate::{
    broker::server::{
        state::objects::Objects,
        verbs::effects::{Deadline, Outgoing},
    },
    sys,
};

/// The socket of a client.
#[derive(Debug)]
pub(super) struct Connection {
    /// Only its descriptor is used: `sendfd` accepts no other type.
    pub(super) socket: UnixStream,
    pub(super) uid: u32,
    pub(super) pid: i32,
    pub(super) deadline: Option<Deadline>,
    /// When the timer of its deadline runs.
    pub(super) timer: Option<Instant>,
    /// Records that the socket has not taken yet.
    queue: VecDeque<Outgoing>,
    /// Records of the answer behind the next acknowledgement.
    rest: VecDeque<Outgoing>,
    /// How many segments of its lease were sent with the last record.
    sent_segments: u64,
    /// How many bytes of answers are counted for its user.
    counted: u64,
    /// How many descriptors the peer has not read yet, as far as is known.
    pub(super) unread: usize,
    /// Since when an answer waits for room for its descriptors.
    pub(super) wants_room_since: Option<Instant>,
    /// Since when the peer has not read what was sent.
    pub(super) unread_since: Option<Instant>,
    /// Whether it is among those that may have something to read.
    pub(super) listed: bool,
}

/// The result of a send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sent {
    /// Everything was sent.
    All,
    /// The socket is full.
    Full,
    /// The kernel's bound on descriptors in flight is reached: try again soon.
    InFlight,
    /// The peer is gone: the connection must end.
    Gone,
}

/// Bytes of answers that a connection has not sent: as counted before, and now.
#[derive(Debug, Clone, Copy)]
pub(super) struct Unsent {
    pub(super) before: u64,
    pub(super) now: u64,
}

impl Connection {
    /// The connection of a client; its socket is non-blocking.
    pub(super) fn new(socket: OwnedFd, uid: u32, pid: i32) -> Self {
        Self {
            socket: socket.into(),
            uid,
            pid,
            deadline: None,
            timer: None,
            queue: VecDeque::new(),
            rest: VecDeque::new(),
            sent_segments: 0,
            counted: 0,
            unread: 0,
            wants_room_since: None,
            unread_since: None,
            listed: false,
        }
    }

    /// Whether records wait for the socket.
    pub(super) fn is_blocked(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Whether all records were sent, those behind acknowledgements included.
    pub(super) fn is_done(&self) -> bool {
        self.queue.is_empty() && self.rest.is_empty()
    }

    /// Queues an answer: the first record now, each other one when the one before is acknowledged.
    pub(super) fn answer(&mut self, records: Vec<Outgoing>) {
        let mut records = records.into_iter();
        records.next().into_iter().for_each(|first| self.push(first));
        self.rest.extend(records);
    }

    /// The peer acknowledged a record, with so many segments of its lease: queues the next one.
    ///
    /// # Errors
    /// One sentence if there was nothing to acknowledge, or another number of segments.
    pub(super) fn acknowledged(&mut self, segments: u64) -> Result<(), String> {
        let Some(next) = self.rest.pop_front() else {
            return Err("received came where nothing is to be acknowledged".to_owned());
        };
        if segments != self.sent_segments {
            let sent = self.sent_segments;
            return Err(format!("received says that {segments} segments of the lease came, and {sent} were sent"));
        }
        self.push(next);
        Ok(())
    }

    fn push(&mut self, outgoing: Outgoing) {
        self.sent_segments = outgoing.segments;
        self.queue.push_back(outgoing);
    }

    /// Counts the bytes of answers that are not sent.
    pub(super) fn count_unsent(&mut self) -> Unsent {
        let now = self.queue.iter().chain(&self.rest).map(|record| record.bytes.len() as u64).sum();
        Unsent { before: std::mem::replace(&mut self.counted, now), now }
    }

    /// How many bytes of answers are counted for its user.
    pub(super) fn counted_unsent(&self) -> u64 {
        self.counted
    }

    /// Takes an answer back that is not sent whole.
    pub(super) fn take_back(&mut self) {
        self.queue.retain(|record| record.descriptors() == 0);
        self.rest.clear();
    }

    /// How many descriptors wait for the socket.
    pub(super) fn queued(&self) -> usize {
        self.queue.iter().map(Outgoing::descriptors).sum()
    }

    /// Sends the records that wait.
    pub(super) fn flush(&mut self, objects: &Objects) -> Sent {
        while let Some(next) = self.queue.front() {
            let kept = next.fds.iter().map(|id| objects.segment(*id).as_raw_fd());
            let fds: Vec<RawFd> = kept.chain(next.own.as_ref().map(AsRawFd::as_raw_fd)).collect();
            let sent = if fds.is_empty() {
                rustix::net::send(&self.socket, &next.bytes, SendFlags::NOSIGNAL).map_err(io::Error::from)
            } else {
                self.socket.send_with_fd(&next.bytes, &fds)
            };
            match sent {
                Ok(_) => {
                    if !fds.is_empty() {
                        self.unread += fds.len();
                        self.unread_since.get_or_insert_with(Instant::now);
                    } else if self.unread == 0 {
                        // It reads.
                        self.unread_since = None;
                    }
                    self.queue.pop_front();
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.unread_since.get_or_insert_with(Instant::now);
                    return Sent::Full;
                }
                // Other clients leave descriptors unread.
                Err(error) if error.raw_os_error() == Some(nix::libc::ETOOMANYREFS) => return Sent::InFlight,
                Err(_) => return Sent::Gone,
            }
        }
        Sent::All
    }

    /// How many descriptors the peer has not read yet, those included that wait for the socket. It asks the kernel only if there were
    /// any.
    pub(super) fn unread(&mut self) -> usize {
        if self.unread_since.is_some()
            && self.queue.is_empty()
            && sys::unread(self.socket.as_fd()).is_ok_and(|bytes| bytes == 0)
        {
            self.unread = 0;
            self.unread_since = None;
        }
        self.unread + self.queued()
    }

    /// Whether the peer has not read all that was sent. Asks the kernel.
    pub(super) fn is_unread(&mut self) -> bool {
        self.unread();
        self.unread_since.is_some()
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
