//! Follows events of names.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use super::{Client, exchange::Exchange, records::unexpected};
use crate::{
    broker::name::check_prefix,
    channel::deadline_after,
    error::{BrokerError, Error, PeerError, RefusalCode, Result},
    wire::broker::{self, Event, Events, Message, Stop},
};

/// The longest time between two requests, if the config's timeout is not shorter: the next request detects a broker that no longer answers.
const POLL_INTERVAL: Duration = Duration::from_secs(10);

/// A position in a broker's event log, after the event `seq`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct WatchPlace {
    /// The UUID of the broker's state. It survives restarts that lose nothing.
    pub instance: String,
    /// The event's sequence number.
    pub seq: u64,
}

impl WatchPlace {
    /// The position after event `seq`.
    pub fn new(instance: impl Into<String>, seq: u64) -> Self {
        Self { instance: instance.into(), seq }
    }
}

/// The result of [`Watch::next`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Watched {
    /// The next event.
    Event(Event),
    /// Events are missing: the watch fell too far behind, or the broker lost its state. Call [`Client::list`] to catch up.
    Lost,
}

/// The events of names with a common prefix, in order: see [`Client::watch`].
///
/// Between calls of [`next`](Watch::next) it does not use the connection or any resource of the broker. The broker keeps only the newest
/// events, so an unread watch may miss some.
///
/// ```
/// # use vmmfd::broker::{Put, PutPart};
/// use std::time::Duration;
/// use vmmfd::broker::Watched;
///
/// # let broker = vmmfd::internals::ExampleBroker::start()?;
/// # let client = &broker.client;
/// let mut watch = client.watch("models/", None)?;
/// # client.put(&Put::new("models/tiny").part(PutPart::of("all", &broker.memory)?))?;
/// match watch.next(Duration::from_secs(10))? {
///     Some(Watched::Event(event)) => println!("{}: {:?}", event.name, event.kind),
///     Some(_) => println!("events are missing: list the objects"),
///     None => println!("nothing changed"),
/// }
/// # Ok::<(), vmmfd::Error>(())
/// ```
#[derive(Debug)]
pub struct Watch {
    client: Client,
    prefix: String,
    /// The position up to which `queue` is complete; `None` before the first answer.
    seen: Option<WatchPlace>,
    /// The position after the last event that [`Watch::next`] returned.
    place: WatchPlace,
    /// Received events, each with the position after it.
    queue: VecDeque<(Watched, WatchPlace)>,
}

impl Client {
    /// Watches events of names that start with `prefix` and that this user may read. Starts now, or at `after`: the position of an
    /// earlier watch, possibly of another process. Blocks until the broker has answered once.
    ///
    /// # Errors
    /// [`Error::Broker`] if the broker refuses the watch, or the prefix has more than 255 bytes; [`Error::Peer`], [`Error::System`],
    /// [`Error::Interrupted`].
    pub fn watch(&self, prefix: &str, after: Option<&WatchPlace>) -> Result<Watch> {
        check_prefix(prefix)?;
        let mut watch = Watch {
            client: self.clone(),
            prefix: prefix.to_owned(),
            seen: after.cloned(),
            place: WatchPlace { instance: String::new(), seq: 0 },
            queue: VecDeque::new(),
        };
        watch.fetch(Duration::ZERO)?;
        // Not `seen`, which is already after the queued events.
        watch.place = match (after, &watch.seen) {
            (Some(after), _) => after.clone(),
            (None, Some(seen)) => seen.clone(),
            (None, None) => watch.place,
        };
        Ok(watch)
    }
}

impl Watch {
    /// Returns the next event, [`Watched::Lost`] if events are missing, or `None` after `timeout`. Blocks for at most `timeout`, and
    /// for the broker's answer; a timeout of zero only fetches available events.
    ///
    /// If the broker restarts, the client reconnects as for any request, and the watch continues at its position.
    ///
    /// # Errors
    /// [`Error::Broker`] with the code `stopped` after [`Client::stop`]; [`Error::Peer`] if the broker does not answer within the
    /// config's timeout or is gone; [`Error::System`], [`Error::Interrupted`]. The watch keeps its position, and `next` may be called
    /// again.
    pub fn next(&mut self, timeout: Duration) -> Result<Option<Watched>> {
        let deadline = deadline_after(timeout);
        let stops = self.client.0.stops();
        loop {
            if let Some(watched) = self.take() {
                return Ok(Some(watched));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            self.fetch(left.min(POLL_INTERVAL.min(self.client.0.timeout())))?;
            if self.queue.is_empty() && stops != self.client.0.stops() {
                // Without this check, a stop that arrives while the subscription ends would be lost.
                return Err(BrokerError::new(RefusalCode::Stopped, "the watch was stopped").into());
            }
            if self.queue.is_empty() && Instant::now() >= deadline {
                return Ok(self.take());
            }
        }
    }

    /// The position after the last result of [`next`](Watch::next), to continue there later with [`Client::watch`].
    pub fn place(&self) -> &WatchPlace {
        &self.place
    }

    /// Drops the received events.
    pub(super) fn discard(&mut self) {
        self.queue.clear();
        self.take();
    }

    /// Takes the next received event.
    fn take(&mut self) -> Option<Watched> {
        match (self.queue.pop_front(), &self.seen) {
            (Some((watched, place)), _) => {
                self.place = place;
                Some(watched)
            }
            // The last position may be after events of other names.
            (None, Some(seen)) => {
                self.place.clone_from(seen);
                None
            }
            (None, None) => None,
        }
    }

    /// Subscribes at `seen`, waits for events and unsubscribes, so that the connection is free afterwards. If the connection breaks, it
    /// subscribes again at the new position.
    fn fetch(&mut self, wait: Duration) -> Result<()> {
        let client = self.client.clone();
        let until = deadline_after(wait);
        client.0.wait(wait, |exchange, _| self.subscribe(exchange, until))
    }

    fn subscribe(&mut self, exchange: &mut Exchange<'_>, until: Instant) -> Result<()> {
        let request = Message::Watch(broker::WatchHeader {
            prefix: self.prefix.clone(),
            after: self.seen.as_ref().map(|seen| seen.seq),
            instance: self.seen.as_ref().map(|seen| seen.instance.clone()),
            recalls: false,
        });
        exchange.send_first(&request, &[])?;
        // The first answer arrives at once and may be empty.
        match exchange.receive("for the broker's events")? {
            (Message::Events(events), _) => self.enqueue(events),
            (other, _) => return Err(unexpected(&other, "events")),
        }
        while self.queue.is_empty() {
            match exchange.receive_by(Some(until), "for the broker's events") {
                Ok((Message::Events(events), _)) => self.enqueue(events),
                Ok((other, _)) => return Err(unexpected(&other, "events")),
                Err(Error::Peer(PeerError::Timeout { .. })) => break,
                Err(error) => return Err(error),
            }
        }
        exchange.send(&Message::Stop(Stop {}), &[])?;
        loop {
            match exchange.receive("for the end of the broker's events") {
                Ok((Message::Events(events), _)) => self.enqueue(events),
                Ok((other, _)) => return Err(unexpected(&other, "refused")),
                Err(Error::Broker(refusal)) if refusal.code == RefusalCode::Stopped => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }

    /// Queues received events and advances `seen`.
    fn enqueue(&mut self, queue: Events) {
        let Events { instance, lost, events, next } = queue;
        let place = |seq| WatchPlace { instance: instance.clone(), seq };
        let other = self.seen.as_ref().is_some_and(|seen| seen.instance != instance);
        if lost || other {
            let first = events.first().map_or(next, |event| event.seq.saturating_sub(1));
            self.queue.push_back((Watched::Lost, place(first)));
        }
        self.queue.extend(events.into_iter().map(|event| {
            let place = place(event.seq);
            (Watched::Event(event), place)
        }));
        self.seen = Some(place(next));
    }
}
