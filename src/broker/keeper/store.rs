//! The server's end of the connection with its keeper: sent and queued messages.

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

/// The kind of keeper that holds the server's descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(in crate::broker) enum Keeper {
    #[default]
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

/// A point in the message queue: [`Store::holds`] returns whether everything before it is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(in crate::broker) struct Mark(u64);

/// A queued message.
#[derive(Debug)]
enum Item {
    Hold(Name, FdSource),
    Remove(String),
    Complete,
    Sync(u64),
    Serving,
    Stopping(String),
}

/// Where to find a descriptor.
#[derive(Debug)]
enum FdSource {
    /// A segment, looked up by number when it is sent. If it is gone, nothing is sent; if another segment has taken its number, that
    /// segment's descriptor is sent twice.
    Segment(SegmentId),
    /// A descriptor in the queue itself.
    Own(OwnedFd),
}

/// The result of a flush.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::broker) enum Flushed {
    All,
    /// The socket or the window is full: try again when the socket is writable or readable.
    Full,
    /// The kernel's limit on descriptors in flight is reached: try again soon.
    InFlight,
    /// No keeper is connected.
    Gone,
}

/// The server's end of the connection. It never blocks: messages wait here until the socket has room.
#[derive(Debug, Default)]
pub(in crate::broker) struct Store {
    keeper: Keeper,
    connection: Option<OwnedFd>,
    /// Whether the keeper accepted this connection.
    greeted: bool,
    /// Whether the keeper announced its exit, and whether any keeper died unannounced.
    keeper_stops: bool,
    keeper_crashed: bool,
    /// The most descriptors that the keeper may hold, and how many it holds.
    allowed: usize,
    used: usize,
    queue: VecDeque<Item>,
    /// How many items were ever queued and sent, and how many this keeper has read.
    queued: u64,
    sent: u64,
    confirmed: u64,
    /// Descriptors sent and not acknowledged.
    in_flight: usize,
}

impl Store {
    /// A store without a keeper: everything counts as held.
    pub(in crate::broker) fn none() -> Self {
        Self::default()
    }

    /// A store on a connection after the handover; `None` if the keeper has died since.
    pub(super) fn over(connection: Option<OwnedFd>, allowed: usize) -> Self {
        Self { keeper: Keeper::Process, greeted: connection.is_some(), connection, allowed, ..Self::default() }
    }

    pub(in crate::broker) fn keeper(&self) -> Keeper {
        self.keeper
    }

    pub(in crate::broker) fn connection(&self) -> Option<BorrowedFd<'_>> {
        self.connection.as_ref().map(AsFd::as_fd)
    }

    /// How many descriptors the keeper holds, and the most that it may hold.
    pub(in crate::broker) fn room(&self) -> (usize, usize) {
        (self.used, self.allowed)
    }

    /// Counts descriptors that the keeper holds already.
    pub(in crate::broker) fn count(&mut self, descriptors: usize) {
        self.used += descriptors;
    }

    /// Fails if the keeper has no room for `more` descriptors.
    pub(in crate::broker) fn require_room(&self, more: usize) -> Result<(), BrokerError> {
        let (used, allowed) = self.room();
        if self.keeper == Keeper::None || used + more <= allowed {
            return Ok(());
        }
        let message = format!(
            "the keeper holds {used} descriptors and has no room for {more} more: its limit is {allowed}; raise its open-file limit \
             (LimitNOFILE= of its unit, ulimit -Hn)"
        );
        Err(BrokerError::new(RefusalCode::Full, message))
    }

    /// Sends a segment.
    pub(in crate::broker) fn hold(&mut self, id: SegmentId) {
        self.used += 1;
        self.push(Item::Hold(Name::Segment(id), FdSource::Segment(id)));
    }

    /// Sends any other descriptor.
    pub(in crate::broker) fn keep_own(&mut self, name: Name, fd: OwnedFd) {
        self.used += 1;
        self.replace(name, fd);
    }

    /// Sends a descriptor that replaces the one with the same name.
    pub(in crate::broker) fn replace(&mut self, name: Name, fd: OwnedFd) {
        self.push(Item::Hold(name, FdSource::Own(fd)));
    }

    /// Removes a descriptor.
    pub(in crate::broker) fn remove(&mut self, name: Name) {
        self.used = self.used.saturating_sub(1);
        self.push(Item::Remove(name.to_string()));
    }

    /// Removes a descriptor that the server does not know.
    pub(in crate::broker) fn remove_other(&mut self, name: String) {
        self.push(Item::Remove(name));
    }

    /// Tells the keeper that its set is complete.
    pub(in crate::broker) fn complete(&mut self) {
        self.push(Item::Complete);
    }

    /// Tells the keeper that the server is ready.
    pub(in crate::broker) fn serving(&mut self) {
        self.push(Item::Serving);
    }

    /// Tells the keeper that the server exits on request, with a summary of its objects.
    pub(in crate::broker) fn stopping(&mut self, held: String) {
        self.push(Item::Stopping(held));
    }

    /// Queues a sync and returns its mark, for [`Store::is_confirmed`].
    pub(in crate::broker) fn sync(&mut self) -> Mark {
        self.push(Item::Sync(self.queued + 1));
        self.mark()
    }

    fn push(&mut self, item: Item) {
        // Without a connection, drop the item: the next keeper gets everything.
        if self.connection.is_some() {
            self.queue.push_back(item);
        }
        self.queued += 1;
    }

    /// The mark after everything queued so far.
    pub(in crate::broker) fn mark(&self) -> Mark {
        Mark(self.queued)
    }

    /// Whether everything before a mark is held: sent to a keeper that accepted the connection. That keeper reads all sent messages, even
    /// if this process dies.
    pub(in crate::broker) fn holds(&self, mark: Mark) -> bool {
        self.keeper == Keeper::None || self.greeted && self.sent >= mark.0
    }

    /// Whether the keeper has read everything before a mark.
    pub(in crate::broker) fn is_confirmed(&self, mark: Mark) -> bool {
        self.connection.is_some() && self.confirmed >= mark.0
    }

    /// How many items have been sent.
    pub(in crate::broker) fn sent(&self) -> u64 {
        self.sent
    }

    /// Whether the keeper has accepted the connection.
    pub(in crate::broker) fn is_greeted(&self) -> bool {
        self.greeted
    }

    /// Whether a keeper has crashed since the last call.
    pub(in crate::broker) fn take_crash(&mut self) -> bool {
        std::mem::take(&mut self.keeper_crashed)
    }

    /// Whether the keeper has unread messages.
    pub(in crate::broker) fn is_unread(&self) -> bool {
        self.connection().is_some_and(|socket| sys::unread(socket).is_ok_and(|bytes| bytes > 0))
    }

    /// The segments not yet sent to this keeper; `None` means all.
    pub(in crate::broker) fn unsent(&self) -> Option<HashSet<SegmentId>> {
        let waiting = |item: &Item| match item {
            Item::Hold(_, FdSource::Segment(id)) => Some(*id),
            _ => None,
        };
        self.greeted.then(|| self.queue.iter().filter_map(waiting).collect())
    }

    /// Sends queued messages. Drops the connection if the keeper is gone.
    pub(in crate::broker) fn flush<'a>(&mut self, segment: impl Fn(SegmentId) -> Option<BorrowedFd<'a>>) -> Flushed {
        if self.keeper == Keeper::None {
            return Flushed::All;
        }
        let Some(connection) = &self.connection else { return Flushed::Gone };
        while let Some(first) = self.queue.front() {
            let mut fds: Vec<BorrowedFd<'_>> = Vec::new();
            let (message, items) = match first {
                Item::Hold(..) => {
                    let room = MAX_TOGETHER.min(WINDOW.saturating_sub(self.in_flight));
                    if room == 0 {
                        return Flushed::Full;
                    }
                    let (mut names, mut items) = (Vec::new(), 0);
                    for item in self.queue.iter().take(room) {
                        let Item::Hold(name, source) = item else { break };
                        let fd = match source {
                            FdSource::Segment(id) => segment(*id),
                            FdSource::Own(fd) => Some(fd.as_fd()),
                        };
                        if let Some(fd) = fd {
                            names.push(name.to_string());
                            fds.push(fd);
                        }
                        items += 1;
                    }
                    (Message::Hold(names), items)
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
            if !matches!(&message, Message::Hold(names) if names.is_empty())
                && let Err(error) = send(connection, &message, &fds)
            {
                return match error.raw_os_error() {
                    Some(nix::libc::EAGAIN) => Flushed::Full,
                    Some(nix::libc::ECONNRESET | nix::libc::ENOTCONN | nix::libc::EPIPE) => {
                        // The keeper's last message may announce its exit.
                        self.read();
                        self.disconnect();
                        Flushed::Gone
                    }
                    // ETOOMANYREFS, ENOBUFS, ENOMEM: the kernel sends no event when they clear.
                    _ => Flushed::InFlight,
                };
            }
            self.in_flight += fds.len();
            self.queue.drain(..items);
            self.sent += items as u64;
        }
        Flushed::All
    }

    /// Reads the keeper's messages. Drops the connection if the keeper is gone.
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
                    tracing::error!(%error, "cannot read the keeper's messages");
                    self.disconnect();
                }
            }
        }
    }

    /// Starts over with another keeper. Afterwards `keep` everything, then call [`Store::complete`].
    ///
    /// # Errors
    /// All errors of sendmsg(2).
    pub(in crate::broker) fn start_over(&mut self, connection: OwnedFd) -> io::Result<()> {
        self.disconnect();
        send(&connection, &Message::Hello { version: VERSION, resends: true }, &[])?;
        self.connection = Some(connection);
        self.keeper_stops = false;
        (self.used, self.in_flight, self.sent, self.confirmed) = (0, 0, self.queued, 0);
        Ok(())
    }

    /// Drops the connection. Nothing counts as held until another keeper has everything.
    pub(in crate::broker) fn disconnect(&mut self) {
        self.keeper_crashed |= self.greeted && !self.keeper_stops;
        (self.connection, self.greeted) = (None, false);
        self.queue.clear();
    }
}
