//! The server's end of the connection: what the keeper was sent, and what waits to be sent.

use std::{
    collections::{HashSet, VecDeque},
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use super::{
    Name, VERSION, WINDOW,
    message::{Arrival, MAX_TOGETHER, Message, receive, send},
};
use crate::{
    broker::catalogue::SegmentId,
    error::{BrokerError, RefusalCode},
    sys,
};

/// Whether a keeper holds what the server has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::broker) enum Keeper {
    None,
    Process,
}

impl Keeper {
    pub(in crate::broker) fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Process => "keeper",
        }
    }
}

/// A point in what was sent to the keeper: [`Store::has_kept`] says whether everything before it is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(in crate::broker) struct Mark(u64);

/// Something to tell the keeper.
#[derive(Debug)]
enum Item {
    Keep(Name, Source),
    Remove(String),
    Complete,
    Sync(u64),
    Serving,
    Stopping(String),
}

/// Where a descriptor is.
#[derive(Debug)]
enum Source {
    /// Among the segments. It is sent under this number whatever segment has the number by then: one that is gone is not sent, and of
    /// one that came instead the descriptor is sent twice.
    Segment(SegmentId),
    /// Here.
    Own(OwnedFd),
}

/// The result of a flush.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::broker) enum Flushed {
    All,
    /// The keeper must read first: the socket becomes writable or readable then.
    Full,
    /// The kernel's bound on descriptors in flight is reached: try again soon.
    InFlight,
    /// No keeper is connected.
    Gone,
}

/// The server's end of the connection. It never blocks: messages that the socket does not take wait here.
#[derive(Debug)]
pub(in crate::broker) struct Store {
    keeper: Keeper,
    connection: Option<OwnedFd>,
    /// Whether the keeper accepted this connection.
    greeted: bool,
    /// Whether the keeper ends because it was asked to, and whether one ended without that.
    keeper_stops: bool,
    keeper_crashed: bool,
    /// The most descriptors that the keeper holds, and how many it has.
    allowed: usize,
    used: usize,
    queue: VecDeque<Item>,
    /// How many items were ever queued, were sent, and were read by this keeper.
    queued: u64,
    sent: u64,
    confirmed: u64,
    /// How many descriptors were sent and not reported as received.
    in_flight: usize,
}

impl Store {
    /// No keeper: everything counts as kept.
    pub(in crate::broker) fn none() -> Self {
        Self {
            keeper: Keeper::None,
            connection: None,
            greeted: false,
            keeper_stops: false,
            keeper_crashed: false,
            allowed: 0,
            used: 0,
            queue: VecDeque::new(),
            queued: 0,
            sent: 0,
            confirmed: 0,
            in_flight: 0,
        }
    }

    /// Over a connection whose keeper has handed over what it held; `None` if that keeper is gone.
    pub(super) fn over(connection: Option<OwnedFd>, allowed: usize) -> Self {
        Self { keeper: Keeper::Process, greeted: connection.is_some(), connection, allowed, ..Self::none() }
    }

    pub(in crate::broker) fn keeper(&self) -> Keeper {
        self.keeper
    }

    pub(in crate::broker) fn connection(&self) -> Option<BorrowedFd<'_>> {
        self.connection.as_ref().map(AsFd::as_fd)
    }

    /// How many descriptors the keeper has, and may have.
    pub(in crate::broker) fn room(&self) -> (usize, usize) {
        (self.used, self.allowed)
    }

    /// Counts descriptors that the keeper has already.
    pub(in crate::broker) fn count(&mut self, descriptors: usize) {
        self.used += descriptors;
    }

    /// Refuses so many more descriptors if the keeper may not hold them.
    pub(in crate::broker) fn require_room(&self, more: usize) -> Result<(), BrokerError> {
        let (used, allowed) = self.room();
        if self.keeper == Keeper::None || used + more <= allowed {
            return Ok(());
        }
        let message = format!(
            "the keeper has {used} descriptors, and {more} more are asked for: it may have {allowed}; raise its limit of open files \
             (LimitNOFILE= of its unit, ulimit -Hn)"
        );
        Err(BrokerError::new(RefusalCode::Full, message))
    }

    /// Has a segment kept.
    pub(in crate::broker) fn keep(&mut self, id: SegmentId) {
        self.used += 1;
        self.push(Item::Keep(Name::Segment(id), Source::Segment(id)));
    }

    /// Has another descriptor kept.
    pub(in crate::broker) fn keep_own(&mut self, name: Name, fd: OwnedFd) {
        self.used += 1;
        self.replace(name, fd);
    }

    /// Has a descriptor kept in place of the one that has this name.
    pub(in crate::broker) fn replace(&mut self, name: Name, fd: OwnedFd) {
        self.push(Item::Keep(name, Source::Own(fd)));
    }

    /// Has a descriptor removed.
    pub(in crate::broker) fn remove(&mut self, name: Name) {
        self.used = self.used.saturating_sub(1);
        self.push(Item::Remove(name.to_string()));
    }

    /// Has a descriptor removed that the server does not know.
    pub(in crate::broker) fn remove_other(&mut self, name: String) {
        self.push(Item::Remove(name));
    }

    /// Reports that the keeper has everything.
    pub(in crate::broker) fn complete(&mut self) {
        self.push(Item::Complete);
    }

    /// Reports that the server serves.
    pub(in crate::broker) fn serving(&mut self) {
        self.push(Item::Serving);
    }

    /// Reports that the server ends because it was asked to, and what it held.
    pub(in crate::broker) fn stopping(&mut self, held: String) {
        self.push(Item::Stopping(held));
    }

    /// Asks the keeper to confirm what is before a new mark: see [`Store::is_confirmed`].
    pub(in crate::broker) fn sync(&mut self) -> Mark {
        self.push(Item::Sync(self.queued + 1));
        self.mark()
    }

    fn push(&mut self, item: Item) {
        // Without a connection nothing waits: the next keeper is sent everything.
        if self.connection.is_some() {
            self.queue.push_back(item);
        }
        self.queued += 1;
    }

    /// The point behind everything that was queued so far.
    pub(in crate::broker) fn mark(&self) -> Mark {
        Mark(self.queued)
    }

    /// Whether everything before a point is kept. A keeper that accepted the connection reads all that was sent, also after the death of
    /// this process.
    pub(in crate::broker) fn has_kept(&self, mark: Mark) -> bool {
        self.keeper == Keeper::None || self.greeted && self.sent >= mark.0
    }

    /// Whether this keeper has read everything before a point.
    pub(in crate::broker) fn is_confirmed(&self, mark: Mark) -> bool {
        self.connection.is_some() && self.confirmed >= mark.0
    }

    /// How many items were sent.
    pub(in crate::broker) fn sent(&self) -> u64 {
        self.sent
    }

    /// Whether the keeper accepted the connection.
    pub(in crate::broker) fn is_greeted(&self) -> bool {
        self.greeted
    }

    /// Whether a keeper that had accepted the connection has crashed since the last call.
    pub(in crate::broker) fn take_crash(&mut self) -> bool {
        std::mem::take(&mut self.keeper_crashed)
    }

    /// Whether the keeper has not received everything that was sent.
    pub(in crate::broker) fn is_unread(&self) -> bool {
        self.connection().is_some_and(|socket| sys::unread(socket).is_ok_and(|bytes| bytes > 0))
    }

    /// The segments that were not sent to this keeper yet; `None` if that are all.
    pub(in crate::broker) fn unsent(&self) -> Option<HashSet<SegmentId>> {
        let waiting = |item: &Item| match item {
            Item::Keep(_, Source::Segment(id)) => Some(*id),
            _ => None,
        };
        self.greeted.then(|| self.queue.iter().filter_map(waiting).collect())
    }

    /// Sends what waits. Once the keeper is gone the connection is forgotten.
    pub(in crate::broker) fn flush<'a>(&mut self, segment: impl Fn(SegmentId) -> Option<BorrowedFd<'a>>) -> Flushed {
        if self.keeper == Keeper::None {
            return Flushed::All;
        }
        let Some(connection) = &self.connection else { return Flushed::Gone };
        while let Some(first) = self.queue.front() {
            let mut fds: Vec<BorrowedFd<'_>> = Vec::new();
            let (message, items) = match first {
                Item::Keep(..) => {
                    let room = MAX_TOGETHER.min(WINDOW.saturating_sub(self.in_flight));
                    if room == 0 {
                        return Flushed::Full;
                    }
                    let (mut names, mut items) = (Vec::new(), 0);
                    for item in self.queue.iter().take(room) {
                        let Item::Keep(name, source) = item else { break };
                        let fd = match source {
                            Source::Segment(id) => segment(*id),
                            Source::Own(fd) => Some(fd.as_fd()),
                        };
                        if let Some(fd) = fd {
                            names.push(name.to_string());
                            fds.push(fd);
                        }
                        items += 1;
                    }
                    (Message::Keep(names), items)
                }
                Item::Remove(_) => {
                    let name = |item: &Item| match item {
                        Item::Remove(name) => Some(name.clone()),
                        _ => None,
                    };
                    let names: Vec<String> = self.queue.iter().take(MAX_TOGETHER).map_while(name).collect();
                    let items = names.len();
                    (Message::Remove(names), items)
                }
                Item::Complete => (Message::Complete(true), 1),
                Item::Sync(number) => (Message::Sync(*number), 1),
                Item::Serving => (Message::Serving, 1),
                Item::Stopping(held) => (Message::Stopping(held.clone()), 1),
            };
            if !matches!(&message, Message::Keep(names) if names.is_empty())
                && let Err(error) = send(connection, &message, &fds)
            {
                return match error.raw_os_error() {
                    Some(nix::libc::EAGAIN) => Flushed::Full,
                    Some(nix::libc::ECONNRESET | nix::libc::ENOTCONN | nix::libc::EPIPE) => {
                        // Its last message may say that it was asked to end.
                        self.read();
                        self.disconnect();
                        Flushed::Gone
                    }
                    // ETOOMANYREFS, ENOBUFS, ENOMEM: no event announces the end of that.
                    _ => Flushed::InFlight,
                };
            }
            self.in_flight += fds.len();
            self.queue.drain(..items);
            self.sent += items as u64;
        }
        Flushed::All
    }

    /// Reads the keeper's messages. Once it is gone the connection is forgotten.
    pub(in crate::broker) fn read(&mut self) {
        while let Some(connection) = &self.connection {
            match receive(connection) {
                Ok(Arrival::Nothing) => return,
                Ok(Arrival::Message(Message::Received(count), _)) => {
                    self.in_flight = self.in_flight.saturating_sub(usize::try_from(count).unwrap_or(usize::MAX));
                }
                Ok(Arrival::Message(Message::Synced(number), _)) => self.confirmed = self.confirmed.max(number),
                Ok(Arrival::Message(Message::Welcome { allowed, .. }, _)) => {
                    (self.greeted, self.allowed) = (true, usize::try_from(allowed).unwrap_or(usize::MAX));
                }
                Ok(Arrival::Message(Message::Stopping(_), _)) => self.keeper_stops = true,
                Ok(Arrival::Message(Message::Refused(why), _)) => {
                    tracing::error!(why, "the keeper refuses this server");
                    self.disconnect();
                }
                Ok(Arrival::Message(message, _)) => {
                    tracing::error!(?message, "the keeper sent a message that only servers send");
                    self.disconnect();
                }
                Ok(Arrival::End) => self.disconnect(),
                Err(error) => {
                    tracing::error!(%error, "the keeper's messages can't be read");
                    self.disconnect();
                }
            }
        }
    }

    /// Connects to another keeper, which is to be sent everything anew: call this, then `keep` everything, then [`Store::complete`].
    ///
    /// # Errors
    /// Those of sendmsg(2).
    pub(in crate::broker) fn begin_anew(&mut self, connection: OwnedFd) -> io::Result<()> {
        self.disconnect();
        send(&connection, &Message::Hello { version: VERSION, resends: true }, &[])?;
        self.connection = Some(connection);
        self.keeper_stops = false;
        (self.used, self.in_flight, self.sent, self.confirmed) = (0, 0, self.queued, 0);
        Ok(())
    }

    /// Forgets the connection. Nothing counts as kept until another keeper has everything.
    pub(in crate::broker) fn disconnect(&mut self) {
        self.keeper_crashed |= self.greeted && !self.keeper_stops;
        (self.connection, self.greeted) = (None, false);
        self.queue.clear();
    }
}
