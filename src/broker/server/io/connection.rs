//! One connection: its socket, what it waits for, and what is still to be sent on it.

use std::{
    collections::{HashSet, VecDeque},
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
        unix::net::UnixStream,
    },
    sync::Arc,
    time::Instant,
};

use rustix::net::SendFlags;
use sendfd::SendWithFd;

use crate::broker::server::{
    state::caller::Caller,
    state::objects::Objects,
    verbs::get::Waiting,
    verbs::put::{DraftKey, Upload},
    verbs::watch::Watching,
};
use crate::{
    broker::catalogue::SegmentId,
    error::Result,
    sys,
    wire::broker::{Message, Token},
};

/// A connection.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) caller: Caller,
    /// Only its descriptor is used: `sendfd` accepts no other type.
    pub(crate) socket: UnixStream,
    /// Whether it has said hello.
    pub(crate) greeted: bool,
    /// The request that is not answered yet.
    pub(crate) request: Request,
    pub(crate) asked: Option<Asked>,
    /// When something must have happened: hello, the end of a wait.
    pub(crate) deadline: Option<Instant>,
    /// When its deadline is looked at next.
    pub(crate) looked_at: Option<Instant>,
    /// The leases that it holds.
    pub(crate) leases: HashSet<Token>,
    /// Those of the last answer: while it is being sent, its segments are theirs.
    pub(crate) sending: Vec<Token>,
    /// The names that it put and that go with it.
    pub(crate) names: HashSet<Arc<str>>,
    /// Records that the socket has not taken yet.
    queue: VecDeque<Outgoing>,
    /// Records of the answer behind the next acknowledgement.
    rest: VecDeque<Outgoing>,
    /// How many segments of its lease were sent with the last record.
    sent_segments: u64,
    /// How many bytes of them are counted for its user.
    counted: u64,
    /// How many descriptors the peer has not read yet, as far as is known.
    pub(crate) unread: usize,
    /// Since when an answer waits for room for its descriptors.
    pub(crate) wants_room_since: Option<Instant>,
    /// Since when the peer has not read what was sent.
    pub(crate) unread_since: Option<Instant>,
    /// Whether it is in the list of those that may have something to read.
    pub(crate) listed: bool,
}

/// A request that is not answered yet.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) verb: &'static str,
    /// When it came.
    pub(crate) since: Instant,
    /// How many bytes of memory are counted for its user.
    pub(crate) bytes: u64,
}

/// What a connection waits for.
#[derive(Debug, Default)]
pub(crate) enum Request {
    /// Nothing.
    #[default]
    None,
    /// The rest of a put's segments.
    Upload(Box<Upload>),
    /// The worker.
    Worker,
    /// The other parts of its put.
    Parts(DraftKey),
    /// An object.
    Object(Box<Waiting>),
    /// The keeper, which must have what it put.
    Storing,
    /// Events.
    Watch(Box<Watching>),
}

/// A record, with its descriptors: of segments that stay until it is sent, and of others.
#[derive(Debug)]
pub(crate) struct Outgoing {
    bytes: Vec<u8>,
    fds: Vec<SegmentId>,
    own: Option<OwnedFd>,
    /// If it belongs to a lease: how many of its segments are sent with this and the records before.
    segments: u64,
}

impl Outgoing {
    /// # Errors
    /// [`crate::error::ProtocolError`] if the message is too long.
    pub(crate) fn of(message: &Message, fds: Vec<SegmentId>) -> Result<Self> {
        let mut bytes = Vec::with_capacity(512);
        message.encode_into(&mut bytes)?;
        let segments = match message {
            Message::Lease(lease) => lease.sizes.len() as u64,
            Message::Segments(segments) => segments.first + segments.sizes.len() as u64,
            _ => 0,
        };
        // It may wait for long.
        bytes.shrink_to_fit();
        Ok(Self { bytes, fds, own: None, segments })
    }

    /// With a descriptor of its own behind the others.
    pub(crate) fn with(self, own: Option<OwnedFd>) -> Self {
        Self { own, ..self }
    }

    /// How many descriptors go with it.
    fn descriptors(&self) -> usize {
        self.fds.len() + usize::from(self.own.is_some())
    }
}

/// What became of what was to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sent {
    /// It is sent.
    All,
    /// The socket is full: it is to be watched.
    Full,
    /// The kernel's bound on descriptors in flight is reached: it is to be tried again soon.
    InFlight,
    /// The connection must end: the peer is gone.
    Gone,
}

impl Connection {
    /// A connection that was accepted; its socket is non-blocking.
    pub(crate) fn new(caller: Caller, socket: OwnedFd, deadline: Instant) -> Self {
        Self {
            caller,
            socket: socket.into(),
            greeted: false,
            request: Request::None,
            asked: None,
            deadline: Some(deadline),
            looked_at: None,
            leases: HashSet::new(),
            sending: Vec::new(),
            names: HashSet::new(),
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

    /// Whether a request is under way.
    pub(crate) fn is_busy(&self) -> bool {
        !matches!(self.request, Request::None) || !self.rest.is_empty()
    }

    /// Whether records wait for the socket.
    pub(crate) fn is_blocked(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Takes an answer to be sent: the first record now, each other one when the one before is acknowledged.
    pub(crate) fn answer(&mut self, records: impl IntoIterator<Item = Outgoing>) {
        let mut records = records.into_iter();
        records.next().into_iter().for_each(|first| self.push(first));
        self.rest.extend(records);
    }

    /// The peer has acknowledged a record, with so many segments of its lease: takes the next one to be sent.
    ///
    /// # Errors
    /// One sentence if nothing was to be acknowledged, or another number of segments.
    pub(crate) fn acknowledged(&mut self, segments: u64) -> Result<(), String> {
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

    /// Takes a record to be sent.
    pub(crate) fn push(&mut self, outgoing: Outgoing) {
        self.sent_segments = outgoing.segments;
        self.queue.push_back(outgoing);
    }

    /// How many bytes of answers it has not sent, and how many of them were counted before.
    pub(crate) fn count_unsent(&mut self) -> (u64, u64) {
        let unsent = self.queue.iter().chain(&self.rest).map(|record| record.bytes.len() as u64).sum();
        (std::mem::replace(&mut self.counted, unsent), unsent)
    }

    /// How many bytes of answers are counted for its user.
    pub(crate) fn counted_unsent(&self) -> u64 {
        self.counted
    }

    /// Whether a lease is one of which records are still to be sent.
    pub(crate) fn is_sending(&self, token: Token) -> bool {
        (self.is_blocked() || !self.rest.is_empty()) && self.sending.contains(&token)
    }

    /// Takes an answer back that is not sent whole. Returns its leases.
    pub(crate) fn take_back(&mut self) -> Vec<Token> {
        self.queue.retain(|record| record.descriptors() == 0);
        self.rest.clear();
        let mut tokens = std::mem::take(&mut self.sending);
        tokens.retain(|token| self.leases.remove(token));
        tokens
    }

    /// How many descriptors wait for the socket.
    pub(crate) fn queued(&self) -> usize {
        self.queue.iter().map(Outgoing::descriptors).sum()
    }

    /// Sends what waits.
    pub(crate) fn flush(&mut self, objects: &Objects) -> Sent {
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
                // Those who leave descriptors unread are others.
                Err(error) if error.raw_os_error() == Some(nix::libc::ETOOMANYREFS) => return Sent::InFlight,
                Err(_) => return Sent::Gone,
            }
        }
        if self.rest.is_empty() {
            self.sending.clear();
        }
        Sent::All
    }

    /// How many descriptors the peer has not read yet, those included that wait for the socket. It asks the kernel only if there were
    /// any.
    pub(crate) fn unread(&mut self) -> usize {
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
    pub(crate) fn is_unread(&mut self) -> bool {
        self.unread();
        self.unread_since.is_some()
    }

    /// How many descriptors were counted last that were sent and not read.
    pub(crate) fn counted_unread(&self) -> usize {
        self.unread
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
