//! The server's end of the connection with its keeper: sent and queued messages.

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use super::{
    VERSION, WINDOW,
    entries::Sending,
    message::{Arrival, MAX_TOGETHER, Message, Role, receive, send},
};
use crate::{
    error::{BrokerError, RefusalCode},
    sys,
};

/// Where the store finds the entries that it sends.
pub(in crate::broker) trait Source {
    /// An entry's manifest as JSON, and the number of its descriptors. `None` if the entry is gone.
    fn manifest(&self, key: u64) -> Option<(Vec<u8>, usize)>;

    /// The descriptors of an entry.
    fn descriptors(&self, key: u64) -> Option<&[OwnedFd]>;
}

/// A point in the message queue: see [`Store::is_safe`] and [`Store::is_confirmed`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(in crate::broker) struct Mark(u64);

/// A queued message. Entries are looked up when they are sent.
#[derive(Debug)]
enum Item {
    /// With `is_update`, only the manifest.
    Entry {
        key: u64,
        is_update: bool,
    },
    Remove(u64),
    Other(Message),
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
    /// Without a keeper, everything counts as held.
    pub(in crate::broker) has_keeper: bool,
    connection: Option<OwnedFd>,
    /// Whether the keeper accepted this connection.
    pub(in crate::broker) greeted: bool,
    /// Whether the keeper announced its exit, and whether a keeper died unannounced since this was last logged.
    pub(in crate::broker) keeper_stops: bool,
    pub(in crate::broker) keeper_crashed: bool,
    /// Whether the keeper that announced its exit needs a successor, which was not started yet.
    pub(in crate::broker) needs_successor: bool,
    /// The most descriptors that the keeper may hold, and how many it holds.
    allowed: usize,
    used: usize,
    queue: VecDeque<Item>,
    /// The entry of which this keeper has got the first records.
    sending: Option<Sending>,
    /// How many items were ever queued and sent, and how many this keeper has read.
    queued: u64,
    pub(in crate::broker) sent: u64,
    confirmed: u64,
    /// The sync after which this keeper has everything; `u64::MAX` before it is queued.
    complete: u64,
    /// Descriptors sent and not acknowledged.
    in_flight: usize,
}

impl Store {
    /// A store on a connection after the handover; `None` if the keeper has died since.
    pub(super) fn over(connection: Option<OwnedFd>, allowed: usize) -> Self {
        Self { has_keeper: true, greeted: connection.is_some(), connection, allowed, ..Self::default() }
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
        // A keeper that has not greeted this server has not told its limit.
        if !self.has_keeper || !self.greeted || used + more <= allowed {
            return Ok(());
        }
        let message = format!(
            "the keeper holds {used} descriptors and has no room for {more} more: its limit is {allowed}; raise its open-file limit \
             (LimitNOFILE= of its unit, ulimit -Hn)"
        );
        Err(BrokerError::new(RefusalCode::Full, message))
    }

    /// Sends an entry with this number of descriptors. It replaces the entry with the same key.
    pub(in crate::broker) fn send(&mut self, key: u64, descriptors: usize) {
        self.used += descriptors;
        // The beginning that the keeper has belongs to the replaced entry.
        self.sending.take_if(|sending| sending.key == key);
        self.push(Item::Entry { key, is_update: false });
    }

    /// Sends an entry with `now` descriptors instead of `before`.
    pub(in crate::broker) fn replace(&mut self, key: u64, before: usize, now: usize) {
        self.used = self.used.saturating_sub(before);
        self.send(key, now);
    }

    /// Sends the new manifest of an entry.
    pub(in crate::broker) fn update(&mut self, key: u64) {
        self.push(Item::Entry { key, is_update: true });
    }

    /// Removes an entry with this number of descriptors.
    pub(in crate::broker) fn remove(&mut self, key: u64, descriptors: usize) {
        self.used = self.used.saturating_sub(descriptors);
        self.push(Item::Remove(key));
    }

    /// Tells the keeper that its set is complete. Nothing is [safe](Store::is_safe) before the keeper has confirmed that.
    pub(in crate::broker) fn complete(&mut self) {
        self.push(Item::Other(Message::Complete(true)));
        self.complete = self.sync().0;
    }

    /// Tells the keeper that the server is ready.
    pub(in crate::broker) fn serving(&mut self) {
        self.push(Item::Other(Message::Serving));
    }

    /// Tells the keeper that the server leaves, with a summary of its objects. A [`Store::sync`] must follow.
    pub(in crate::broker) fn stopping(&mut self, held: String) {
        self.push(Item::Other(Message::Stopping(held)));
    }

    /// Makes the keeper exit and free everything. The summary is for its log.
    pub(in crate::broker) fn exit(&mut self, held: String) {
        self.push(Item::Other(Message::Exit(held)));
    }

    /// Queues a sync and returns its mark, for [`Store::is_confirmed`].
    pub(in crate::broker) fn sync(&mut self) -> Mark {
        self.push(Item::Other(Message::Sync(self.queued + 1)));
        Mark(self.queued)
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

    /// Whether nothing was queued after a mark.
    pub(in crate::broker) fn is_last(&self, mark: Mark) -> bool {
        self.queued == mark.0
    }

    /// Whether everything before a mark survives this process: the kernel has queued it at the socket of a keeper that has everything else.
    /// That keeper reads its socket to the end before it serves another server or exits. If it is killed, this process still has everything.
    /// Without a keeper, there is nothing to wait for.
    pub(in crate::broker) fn is_safe(&self, mark: Mark) -> bool {
        let has_rest = self.connection.is_some() && self.confirmed >= self.complete;
        !self.has_keeper || has_rest && self.sent >= mark.0
    }

    /// Whether the keeper has read everything before the mark of a [`Store::sync`].
    pub(in crate::broker) fn is_confirmed(&self, mark: Mark) -> bool {
        !self.has_keeper || self.connection.is_some() && self.confirmed >= mark.0
    }

    /// Whether messages wait to be sent.
    pub(in crate::broker) fn has_queued(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Whether the keeper has unread messages.
    pub(in crate::broker) fn is_unread(&self) -> bool {
        self.connection().is_some_and(|socket| sys::unread(socket).is_ok_and(|bytes| bytes > 0))
    }

    /// Sends queued messages. Drops the connection if the keeper is gone.
    pub(in crate::broker) fn flush(&mut self, source: &impl Source) -> Flushed {
        if !self.has_keeper {
            return Flushed::All;
        }
        let Some(connection) = &self.connection else { return Flushed::Gone };
        loop {
            let Some(first) = self.queue.front() else { return Flushed::All };
            let mut fds: Vec<BorrowedFd<'_>> = Vec::new();
            // How many items the message completes.
            let mut items = 1;
            let message = match first {
                &Item::Entry { key, is_update } => {
                    if self.sending.is_none() {
                        // A version that is gone has no descriptors, and its entry follows.
                        let found = source.manifest(key).filter(|(_, descriptors)| !is_update || *descriptors > 0);
                        self.sending = found.map(|(manifest, descriptors)| match is_update {
                            true => Sending::update(key, manifest),
                            false => Sending::new(key, manifest, descriptors),
                        });
                    }
                    // If the entry is gone, its removal follows. The keeper drops the beginning of it.
                    let (Some(sending), Some(all)) = (&mut self.sending, source.descriptors(key)) else {
                        self.sending = None;
                        self.queue.pop_front();
                        self.sent += 1;
                        continue;
                    };
                    let Some((message, at)) = sending.next(WINDOW.saturating_sub(self.in_flight)) else {
                        return Flushed::Full;
                    };
                    fds.extend(all[at].iter().map(AsFd::as_fd));
                    items = 0;
                    message
                }
                Item::Remove(_) => {
                    let key = |item: &Item| match item {
                        Item::Remove(key) => Some(*key),
                        _ => None,
                    };
                    let keys: Vec<u64> = self.queue.iter().take(MAX_TOGETHER).map_while(key).collect();
                    items = keys.len();
                    Message::Remove(keys)
                }
                Item::Other(message) => message.clone(),
            };
            if let Err(error) = send(connection, &message, &fds) {
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
            if let Some(sending) = &mut self.sending
                && sending.sent(&message, fds.len())
            {
                (self.sending, items) = (None, 1);
            }
            self.queue.drain(..items);
            self.sent += items as u64;
        }
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
                Ok(Arrival::Message(Message::Stopping(successor), _)) => {
                    (self.keeper_stops, self.needs_successor) = (true, successor.is_empty());
                }
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
        send(&connection, &Message::Hello { version: VERSION, role: Role::SameServer }, &[])?;
        self.connection = Some(connection);
        self.keeper_stops = false;
        (self.used, self.in_flight, self.sent, self.confirmed) = (0, 0, self.queued, 0);
        self.complete = u64::MAX;
        Ok(())
    }

    /// Drops the connection. Nothing counts as held until another keeper has everything.
    pub(in crate::broker) fn disconnect(&mut self) {
        self.keeper_crashed |= self.greeted && !self.keeper_stops;
        (self.connection, self.greeted, self.sending) = (None, false, None);
        self.queue.clear();
    }
}
