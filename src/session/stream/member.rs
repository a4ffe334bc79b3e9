//! The publisher's side of one connection, from the accept to the exit of its process.

mod leaving;

use std::{
    io,
    os::fd::AsFd,
    sync::Arc,
    time::{Duration, Instant},
};

use nix::sys::epoll::{EpollEvent, EpollFlags};

use self::leaving::GRACE;
use super::{
    connection::Identity,
    event::{Event, SubscriberInfo},
    format::{Format, FormatRecord},
    hub::{Desk, Hub},
    joining::{Progress, unsent},
    options::Policy,
    turns::SubscriberWords,
};
use crate::{
    channel::record::{Arrival, Next, RecordSocket, is_gone, peek, peek_unsigned},
    error::{Error, PeerError, ProtocolError, Result},
    session::{
        link::{unexpected, violation},
        watcher::Token,
    },
    sys::pass_descriptors,
    wire::{Done, End, Leave, MAX_HELD, Message, is_error},
};

/// The most records read in one go, so that no peer occupies the thread or keeps the lock. A correct subscriber queues hardly more.
const MAX_READ: usize = MAX_HELD as usize + 2;

/// The pause after too many descriptors were in flight. EPOLLOUT does not report the change.
const PAUSE: Duration = Duration::from_millis(5);

/// How often the thread looks at words.
pub(super) const POLL: Duration = Duration::from_millis(1);

/// One connection.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) id: u64,
    /// `None` once the connection is closed, while its process may still read buffers.
    pub(super) socket: Option<RecordSocket>,
    pub(super) identity: Identity,
    pub(super) policy: Policy,
    pub(super) stage: Stage,
    socket_token: Option<Token>,
    process_token: Option<Token>,
    /// The events for which the thread watches the socket.
    armed: EpollFlags,
    /// Whether the socket's buffer is full.
    is_blocked: bool,
    /// When to send again, because too many descriptors were in flight.
    retry: Option<Instant>,
    /// Whether records can have descriptors: always on a kernel older than 6.16, otherwise those that were sent before this side refused
    /// them. Closing a received descriptor can block for ever, so such a record is never received.
    may_have_descriptors: bool,
    refuses_descriptors: bool,
    /// Whether records show their sender, until it has subscribed: the connection is a socket pair of this process.
    pub(super) shows_sender: bool,
    /// The records that a former subscriber has sent without giving back a buffer.
    late: usize,
    /// Since when a buffer waits for the subscriber, which has given none back since then.
    stalled: Option<Instant>,
    /// The format that the subscriber knows.
    format: Option<Arc<FormatRecord>>,
    pub(super) words: Option<SubscriberWords>,
    /// Whether the thread looks for buffers that the subscriber's streams have finished with.
    is_polled: bool,
}

#[derive(Debug)]
pub(super) enum Stage {
    /// It has not mapped the pool yet.
    Joining { progress: Progress, deadline: Instant },
    /// It receives buffers.
    Active,
    /// It has received `end`.
    Complete,
    /// It receives nothing more, but may still have buffers.
    Former,
    /// It was sent an `error`, and may still read it.
    Refused { deadline: Instant },
    /// To be removed.
    Gone,
}

impl Member {
    /// # Errors
    /// [`Error::System`].
    pub(super) fn new(id: u64, socket: RecordSocket, identity: Identity, hub: &Hub) -> Result<Self> {
        let deadline = hub.deadline();
        let refuses_descriptors = pass_descriptors(socket.as_fd(), false).is_ok();
        // A socket pair, whose other end may be in another process.
        let is_own = identity.peer.pid == nix::unistd::getpid().as_raw();
        let shows_sender =
            is_own && !identity.is_introduced && rustix::net::sockopt::set_socket_passcred(&socket, true).is_ok();
        let mut member = Self {
            id,
            socket: Some(socket),
            identity,
            policy: Policy::Latest,
            stage: Stage::Joining { progress: Progress::Silent, deadline },
            socket_token: None,
            process_token: None,
            armed: EpollFlags::EPOLLIN | EpollFlags::EPOLLRDHUP,
            is_blocked: false,
            retry: None,
            may_have_descriptors: true,
            refuses_descriptors,
            shows_sender,
            late: 0,
            stalled: None,
            format: None,
            words: None,
            is_polled: false,
        };
        member.watch(hub).inspect_err(|_| member.close(hub))?;
        Ok(member)
    }

    fn watch(&mut self, hub: &Hub) -> Result<()> {
        let failed = |error| Error::system("watch a connection", error);
        let Some(socket) = &self.socket else { return Ok(()) };
        let token = hub.watcher.add(socket.as_fd(), self.armed, hub.source(), Hub::socket_key(self.id));
        self.socket_token = Some(token.map_err(failed)?);
        self.watch_process(hub).map_err(failed)
    }

    /// Replaces the identity: another process sends on the connection.
    pub(super) fn identify(&mut self, identity: Identity, hub: &Hub) -> Result<()> {
        self.forget_process(hub);
        self.identity = identity;
        self.watch_process(hub).map_err(|error| Error::system("watch a process", error))
    }

    fn watch_process(&mut self, hub: &Hub) -> io::Result<()> {
        let Some(process) = &self.identity.process else { return Ok(()) };
        let token = hub.watcher.add(process.as_fd(), EpollFlags::EPOLLIN, hub.source(), Hub::process_key(self.id));
        token.map(|token| self.process_token = Some(token))
    }

    fn forget_process(&mut self, hub: &Hub) {
        if let (Some(token), Some(process)) = (self.process_token.take(), &self.identity.process) {
            hub.watcher.remove(token, process.as_fd());
        }
    }

    /// Closes the connection and stops watching it and its process.
    pub(super) fn close(&mut self, hub: &Hub) {
        self.close_socket(hub);
        self.forget_process(hub);
    }

    fn close_socket(&mut self, hub: &Hub) {
        let Some(socket) = self.socket.take() else { return };
        // Not there before the subscriber has joined.
        let _ = hub.inbox.delete(&socket);
        if let Some(token) = self.socket_token.take() {
            hub.watcher.remove(token, socket.as_fd());
        }
        socket.close();
    }

    pub(super) fn info(&self) -> SubscriberInfo {
        SubscriberInfo { id: self.id, peer: self.identity.peer, policy: self.policy }
    }

    /// Whether it receives buffers, or has received all.
    pub(super) fn is_subscribed(&self) -> bool {
        matches!(self.stage, Stage::Active | Stage::Complete)
    }

    /// Whether it may give buffers back.
    pub(super) fn may_hold(&self) -> bool {
        self.is_subscribed() || matches!(self.stage, Stage::Former)
    }

    /// Reads the records that have arrived; with `until_room` only until the subscriber has room for another buffer. Returns whether no
    /// record is left.
    pub(super) fn drain(&mut self, until_room: bool, desk: &mut Desk, hub: &Hub) -> bool {
        self.take_finished(desk);
        let mut resets = 0;
        for _ in 0..MAX_READ {
            if until_room && desk.ledger.has_room(self.id) {
                return false;
            }
            if !self.may_receive(desk, hub) {
                return true;
            }
            let Some(socket) = &self.socket else { return true };
            let handled = match socket.try_receive(&mut desk.incoming) {
                Ok(Arrival::Record(_)) if matches!(self.stage, Stage::Refused { .. } | Stage::Gone) => continue,
                Ok(Arrival::Record(record)) => decode(&desk.incoming[..record.length], record.fds.len())
                    .and_then(|message| self.handle(message, desk, hub)),
                Ok(Arrival::Broken(error)) => Err(error.into()),
                Ok(Arrival::End) => {
                    self.hang_up(desk, hub);
                    return true;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
                // ECONNRESET is reported once, before queued records.
                Err(error) if is_gone(&error) && resets == 0 => {
                    resets += 1;
                    continue;
                }
                Err(_) => {
                    self.hang_up(desk, hub);
                    return true;
                }
            };
            if let Err(error) = handled {
                self.refuse(&error, desk, hub);
            }
        }
        false
    }

    /// Takes back the buffers that the subscriber's streams have finished with.
    pub(super) fn take_finished(&mut self, desk: &mut Desk) {
        let Some(words) = &self.words else { return };
        if desk.ledger.finished(self.id, |turn| words.is_finished(turn)) {
            desk.has_freed = true;
            self.stalled = self.stalled.map(|_| Instant::now());
            if matches!(self.stage, Stage::Former) && desk.ledger.holds(self.id).0 == 0 {
                self.vanish(desk);
            }
        }
    }

    /// Looks at the next record before it is received.
    fn may_receive(&mut self, desk: &mut Desk, hub: &Hub) -> bool {
        let (true, Some(socket)) = (self.may_have_descriptors || self.shows_sender, &self.socket) else { return true };
        match if self.shows_sender { peek(socket) } else { peek_unsigned(socket) } {
            Ok(Next::Record { descriptors: true, .. }) => {
                let error = violation("a subscriber sends no descriptors");
                tracing::info!(pid = self.identity.peer.pid, error = error.in_full(), "refusing a subscriber");
                self.send_error(&error);
                self.hang_up(desk, hub);
                false
            }
            Ok(Next::Record { sender, .. }) => {
                desk.sender = sender;
                true
            }
            // All records that were sent before the socket refused descriptors are read.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.may_have_descriptors = !self.refuses_descriptors;
                false
            }
            // The receive call reports it.
            Ok(Next::End) | Err(_) => true,
        }
    }

    fn handle(&mut self, message: Message, desk: &mut Desk, hub: &Hub) -> Result<()> {
        match (&self.stage, message) {
            (Stage::Joining { .. }, message) => self.join(message, desk, hub),
            (_, Message::Done(Done { number, done_at })) if done_at.is_none() || self.words.is_some() => {
                let is_former = matches!(self.stage, Stage::Former);
                if !desk.ledger.give_back(self.id, number, done_at) {
                    let error = violation(format!("buffer {number} is given back, but is not out"));
                    // Its `leave` may have given the buffer back already.
                    return if is_former { self.count_late() } else { Err(error) };
                }
                self.stalled = self.stalled.map(|_| Instant::now());
                self.take_finished(desk);
                if is_former && desk.ledger.holds(self.id).0 == 0 {
                    self.vanish(desk);
                }
                Ok(())
            }
            (_, Message::Leave(Leave { held })) => {
                self.count_late()?;
                self.retire(true, |number, is_finishing| is_finishing || held.contains(&number), desk);
                Ok(())
            }
            // It can still read its buffers, and give them back.
            (_, Message::Error(_)) => {
                self.count_late()?;
                self.retire(false, |_, _| true, desk);
                Ok(())
            }
            (_, Message::Done(_)) => Err(violation("`done` has `done_at`, which the two sides did not agree on")),
            (_, other) => Err(unexpected(&other, "done or leave")),
        }
    }

    /// Sends waiting buffers while the subscriber has room. The rest waits, as far as the policy allows.
    pub(super) fn flush(&mut self, desk: &mut Desk, hub: &Hub) {
        if matches!(self.stage, Stage::Active) {
            if self.send_waiting(desk, hub).is_err() {
                // Its last records may be unread, and its close behind them.
                self.drain(false, desk, hub);
                if self.is_subscribed() {
                    self.hang_up(desk, hub);
                }
            }
            if desk.ledger.trim(self.id) {
                let polls = desk.ledger.is_finishing(self.id) && !std::mem::replace(&mut self.is_polled, true);
                let is_new = self.stalled.is_none();
                if is_new {
                    self.stalled = Some(Instant::now());
                }
                if polls || is_new && self.policy == Policy::Every {
                    hub.watcher.wake();
                }
            } else {
                self.stalled = None;
                if desk.is_finished && matches!(self.stage, Stage::Active) {
                    self.complete(desk);
                }
            }
        }
        self.arm(desk, hub);
    }

    fn send_waiting(&mut self, desk: &mut Desk, hub: &Hub) -> Result<()> {
        let Some(socket) = &self.socket else { return Ok(()) };
        (self.is_blocked, self.retry) = (false, None);
        while let Some(slot) = desk.ledger.next(self.id) {
            let publication = desk.ledger.data(slot);
            if let (Some(turn), Some(words), Some(own)) = (publication.turn, &self.words, &hub.turns)
                && !words.covers(turn, own)
            {
                // The subscriber can't hurry the publisher's streams.
                self.stalled = None;
                self.retry = Some(Instant::now() + POLL);
                hub.watcher.wake();
                return Ok(());
            }
            if let Some(format) = &publication.format
                && self.format.as_ref().is_none_or(|known| !Arc::ptr_eq(known, format))
            {
                match format.send(socket.stream()) {
                    Ok(()) => self.format = Some(Arc::clone(format)),
                    Err(error) if error.raw_os_error() == Some(nix::libc::ETOOMANYREFS) => {
                        self.retry = Some(Instant::now() + PAUSE);
                        hub.watcher.wake();
                        return Ok(());
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        self.is_blocked = true;
                        return Ok(());
                    }
                    Err(error) => return Err(Error::system("send a format", error)),
                }
            }
            if !socket.try_send("a buffer", &publication.record)? {
                self.is_blocked = true;
                return Ok(());
            }
            desk.ledger.sent(self.id);
        }
        Ok(())
    }

    /// Tells the subscriber that the stream is complete.
    pub(super) fn complete(&mut self, desk: &mut Desk) {
        let end = Message::End(End { published: desk.ledger.published() });
        match self.send(&end) {
            true => self.stage = Stage::Complete,
            false => self.is_blocked = true,
        }
    }

    /// Sends a message without descriptors. Returns whether it was sent.
    pub(super) fn send(&self, message: &Message) -> bool {
        let (Some(socket), Ok(record)) = (&self.socket, message.encode()) else { return false };
        socket.try_send(message.name(), &record).unwrap_or(false)
    }

    /// Lets the thread watch the socket for what matters now. It sleeps while a subscriber's buffers come and go.
    pub(super) fn arm(&mut self, desk: &Desk, hub: &Hub) {
        let mut flags = EpollFlags::EPOLLRDHUP;
        flags.set(EpollFlags::EPOLLIN, !self.is_subscribed() || desk.ledger.has_waiting(self.id));
        flags.set(EpollFlags::EPOLLOUT, self.is_blocked);
        if flags != self.armed
            && let (Some(token), Some(socket)) = (self.socket_token, &self.socket)
        {
            hub.watcher.modify(token, socket.as_fd(), flags);
            self.armed = flags;
        }
    }

    /// Starts the subscription.
    pub(super) fn activate(&mut self, history: usize, desk: &mut Desk, hub: &Hub) -> Result<()> {
        let Some(socket) = &self.socket else { return Ok(()) };
        let added = hub.inbox.add(socket, EpollEvent::new(EpollFlags::EPOLLIN, self.id));
        added.map_err(|errno| Error::system("watch a subscriber", errno))?;
        let format = desk.format.clone().map_or_else(|| FormatRecord::of(&Format::default()), Ok)?;
        format.send(socket.stream()).map_err(|_| unsent())?;
        self.format = Some(format);
        self.stage = Stage::Active;
        desk.ledger.activate(self.id, history);
        desk.report(Event::Joined(self.info()));
        self.flush(desk, hub);
        Ok(())
    }

    /// Acts on a deadline that has passed. Returns the next.
    pub(super) fn tick(&mut self, now: Instant, desk: &mut Desk, hub: &Hub) -> Option<Instant> {
        match self.stage {
            Stage::Joining { deadline, .. } if deadline <= now => {
                let (purpose, waited) = ("for a subscriber to join", hub.timeout());
                self.refuse(&Error::Peer(PeerError::Timeout { purpose, waited }), desk, hub);
                Some(now + GRACE)
            }
            Stage::Refused { deadline } if deadline <= now => {
                self.vanish(desk);
                None
            }
            Stage::Joining { deadline, .. } | Stage::Refused { deadline } => Some(deadline),
            Stage::Active => {
                // A stream that finishes with a buffer wakes nobody.
                if self.is_polled {
                    self.take_finished(desk);
                    self.flush(desk, hub);
                    self.is_polled = desk.ledger.is_finishing(self.id) && desk.ledger.has_waiting(self.id);
                }
                let due = |at: Option<Instant>| at.is_some_and(|at| at <= now);
                if due(self.retry) || due(self.eviction(hub)) {
                    // Its records may be unread.
                    self.drain(false, desk, hub);
                    self.flush(desk, hub);
                }
                if let Some(granted) = hub.options.every.filter(|_| self.is_subscribed() && due(self.eviction(hub))) {
                    self.evict(&Error::Peer(PeerError::TurnTooLong { granted }), desk, hub);
                }
                let poll = self.is_polled.then(|| now + POLL);
                self.retry.into_iter().chain(self.eviction(hub)).chain(poll).min()
            }
            Stage::Complete | Stage::Former if desk.ledger.is_finishing(self.id) => {
                self.take_finished(desk);
                Some(now + POLL)
            }
            Stage::Complete | Stage::Former | Stage::Gone => None,
        }
    }

    /// When this subscriber is evicted if it gives no buffer back.
    fn eviction(&self, hub: &Hub) -> Option<Instant> {
        let granted = hub.options.every.filter(|_| self.policy == Policy::Every && matches!(self.stage, Stage::Active));
        self.stalled?.checked_add(granted?)
    }
}

/// An unreadable `error` is not answered with another.
fn decode(record: &[u8], fds: usize) -> Result<Message> {
    Message::decode(record, fds).map_err(|error| match is_error(record) {
        true => ProtocolError::UnreadableError { source: Box::new(error) }.into(),
        false => error.into(),
    })
}
