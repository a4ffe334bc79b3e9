//! Follows events of names.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    Client,
    connection::Connection,
    socket::{Subscription, is_broken},
};
use crate::{
    broker::request::check_prefix,
    channel::deadline_after,
    error::Result,
    wire::broker::{Event, Events, WatchHeader},
};

/// How long a watch waits for events, if the config's timeout is not shorter, before it subscribes again.
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
/// A watch has a connection of its own. If it is not read for a long time, the broker closes the connection, and the next call of
/// [`next`](Watch::next) opens another. The broker keeps only the newest events, so an unread watch may miss some.
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
    connection: Arc<Connection>,
    /// `None` if it broke.
    subscription: Option<Subscription>,
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
    /// [`Error::Broker`](crate::Error::Broker) if the broker refuses the watch, or the prefix has more than 255 bytes; `Error::Misuse` for a
    /// client [without a path](Client::over) and in a fork; `Error::Peer`, `Error::System`, `Error::Interrupted`.
    pub fn watch(&self, prefix: &str, after: Option<&WatchPlace>) -> Result<Watch> {
        check_prefix(prefix)?;
        self.0.check_fork()?;
        let mut watch = Watch {
            connection: Arc::clone(&self.0),
            subscription: None,
            prefix: prefix.to_owned(),
            seen: after.cloned(),
            place: WatchPlace { instance: String::new(), seq: 0 },
            queue: VecDeque::new(),
        };
        watch.subscribe()?;
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
    /// Returns the next event, [`Watched::Lost`] if events are missing, or `None` after `timeout`. Blocks for at most `timeout`; a timeout
    /// of zero takes only events that have arrived. While the broker restarts, blocks longer, up to the config's timeout, and continues at
    /// the watch's position.
    ///
    /// # Errors
    /// [`Error::Broker`](crate::Error::Broker) with the code `stopped` after [`Client::stop`]; `Error::Peer` if the broker does not answer within the
    /// config's timeout or is gone; `Error::System`, `Error::Interrupted`. The watch keeps its position, and `next` may be called
    /// again.
    pub fn next(&mut self, timeout: Duration) -> Result<Option<Watched>> {
        self.connection.check_fork()?;
        let deadline = deadline_after(timeout);
        let stops = self.connection.waits.stops();
        loop {
            if let Some(watched) = self.take() {
                return Ok(Some(watched));
            }
            self.fetch(deadline, stops)?;
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

    /// Receives a record of events until the deadline, or subscribes.
    fn fetch(&mut self, deadline: Instant, stops: u64) -> Result<()> {
        let Self { connection, subscription, .. } = self;
        let Some(current) = subscription else { return self.subscribe() };
        let until = deadline.min(deadline_after(connection.timeout().min(POLL_INTERVAL)));
        let waiting = connection.waits.add(current.socket.shared(), stops)?;
        let received = current.receive(until);
        drop(waiting);
        match received {
            Ok(Some(events)) => self.enqueue(events),
            Ok(None) if until == deadline => {}
            // Another subscription detects a broker that no longer answers.
            Ok(None) => *subscription = None,
            Err(error) => {
                *subscription = None;
                connection.waits.check(stops)?;
                if !is_broken(&error) {
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Opens a connection and subscribes at `seen`.
    fn subscribe(&mut self) -> Result<()> {
        let watch = WatchHeader {
            prefix: self.prefix.clone(),
            after: self.seen.as_ref().map(|seen| seen.seq),
            instance: self.seen.as_ref().map(|seen| seen.instance.clone()),
            recalls: false,
        };
        let dialler = self.connection.second_connection("watches")?;
        let (subscription, events) = Subscription::watch(dialler, deadline_after(dialler.timeout), watch)?;
        self.subscription = Some(subscription);
        self.enqueue(events);
        Ok(())
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
