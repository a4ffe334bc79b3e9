//! Following what happens to names.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use super::{Client, connection::Exchange, records::unexpected};
use crate::{
    channel::deadline_after,
    error::{BrokerError, Error, PeerError, RefusalCode, Result},
    wire::broker::{self, Event, Events, Message, Stop},
};

/// How long the broker is left without a request: one that has stopped answering is found out by the next.
const ASK_AGAIN: Duration = Duration::from_secs(10);

/// Where a watch stands: behind this event of this broker.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct WatchPlace {
    /// The UUID of what the broker holds. It stays over restarts that lose nothing.
    pub instance: String,
    /// The event's number.
    pub seq: u64,
}

impl WatchPlace {
    /// Behind the event of this number.
    pub fn new(instance: impl Into<String>, seq: u64) -> Self {
        Self { instance: instance.into(), seq }
    }
}

/// What [`Watch::next`] returns.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Watched {
    /// Something happened.
    Event(Event),
    /// Something happened that is not known any more: the watch was too far behind, or the broker lost what it held. Compare with
    /// [`Client::list`].
    Lost,
}

/// The events of names with a common prefix, in their order. Made by [`Client::watch`].
///
/// Between calls of [`next`](Watch::next) it asks nothing of the broker, which keeps the newest events for all: a watch that is not
/// read costs nothing and may fall behind. It uses the client's connection only within `next`.
#[derive(Debug)]
pub struct Watch {
    client: Client,
    prefix: String,
    /// What the broker has looked at, up to which the events below are complete; `None` before the first answer.
    seen: Option<WatchPlace>,
    /// The place behind what [`Watch::next`] returned last.
    place: WatchPlace,
    /// What it is to return, each with the place behind it.
    came: VecDeque<(Watched, WatchPlace)>,
}

impl Client {
    /// Follows what happens to names that begin with `prefix` and that this user may read: from now on, or from a place that an
    /// earlier watch had, also of another process. Blocks until the broker has answered once.
    ///
    /// # Errors
    /// [`Error::Broker`] if the broker refuses it; [`Error::Peer`], [`Error::System`], [`Error::Interrupted`].
    pub fn watch(&self, prefix: &str, after: Option<&WatchPlace>) -> Result<Watch> {
        let mut watch = Watch {
            client: self.clone(),
            prefix: prefix.to_owned(),
            seen: after.cloned(),
            place: WatchPlace { instance: String::new(), seq: 0 },
            came: VecDeque::new(),
        };
        watch.ask(Duration::ZERO)?;
        // Behind nothing that it has to return.
        watch.place = match (after, &watch.seen) {
            (Some(after), _) => after.clone(),
            (None, Some(seen)) => seen.clone(),
            (None, None) => watch.place,
        };
        Ok(watch)
    }
}

impl Watch {
    /// The next event, or that some were lost. Blocks until there is one, for at most `timeout`: then `None`. With a timeout of zero
    /// it only fetches what there is. Meanwhile other requests over clones of the client wait.
    ///
    /// If the broker restarts, the client connects again as for any request, and the watch goes on where it was.
    ///
    /// # Errors
    /// [`Error::Broker`] with the code `stopped` after [`Client::stop`]; [`Error::Peer`] if the broker does not answer within the
    /// config's timeout or is gone; [`Error::System`], [`Error::Interrupted`]. The watch is where it was before, and may be asked
    /// again.
    pub fn next(&mut self, timeout: Duration) -> Result<Option<Watched>> {
        let deadline = deadline_after(timeout);
        let stops = self.client.0.stops();
        loop {
            if let Some(watched) = self.take() {
                return Ok(Some(watched));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            self.ask(left.min(ASK_AGAIN))?;
            if self.came.is_empty() && stops != self.client.0.stops() {
                // It may have come when the subscription was ended in any case.
                return Err(BrokerError::new(RefusalCode::Stopped, "the watch was ended").into());
            }
            if self.came.is_empty() && Instant::now() >= deadline {
                return Ok(self.take());
            }
        }
    }

    /// Behind what [`next`](Watch::next) returned last: for [`Client::watch`], to go on there later.
    pub fn place(&self) -> &WatchPlace {
        &self.place
    }

    /// What is there already.
    fn take(&mut self) -> Option<Watched> {
        match (self.came.pop_front(), &self.seen) {
            (Some((watched, place)), _) => {
                self.place = place;
                Some(watched)
            }
            // Events of other names lie behind the last one too.
            (None, Some(seen)) => {
                self.place.clone_from(seen);
                None
            }
            (None, None) => None,
        }
    }

    /// Subscribes behind what is there already, waits for events, and ends the subscription: the connection is free afterwards. If
    /// the connection breaks, it subscribes again behind what has come.
    fn ask(&mut self, wait: Duration) -> Result<()> {
        let (client, until) = (self.client.clone(), deadline_after(wait));
        client.0.request(wait, |exchange, _| self.subscribe(exchange, until))
    }

    fn subscribe(&mut self, exchange: &mut Exchange<'_>, until: Instant) -> Result<()> {
        let request = Message::Watch(broker::Watch {
            prefix: self.prefix.clone(),
            after: self.seen.as_ref().map(|seen| seen.seq),
            instance: self.seen.as_ref().map(|seen| seen.instance.clone()),
        });
        exchange.send_first(&request, &[])?;
        // The first answer comes at once, and may have no events.
        match exchange.receive("for the broker's events")? {
            (Message::Events(events), _) => self.keep(events),
            (other, _) => return Err(unexpected(&other, "events")),
        }
        while self.came.is_empty() {
            match exchange.receive_until(until, "for the broker's events") {
                Ok((Message::Events(events), _)) => self.keep(events),
                Ok((other, _)) => return Err(unexpected(&other, "events")),
                Err(Error::Peer(PeerError::Timeout { .. })) => break,
                Err(error) => return Err(error),
            }
        }
        exchange.send(&Message::Stop(Stop {}), &[])?;
        loop {
            match exchange.receive("for the end of the broker's events") {
                Ok((Message::Events(events), _)) => self.keep(events),
                Ok((other, _)) => return Err(unexpected(&other, "refused")),
                Err(Error::Broker(refusal)) if refusal.code == RefusalCode::Stopped => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }

    /// Keeps what came, and where to go on.
    fn keep(&mut self, came: Events) {
        let Events { instance, lost, events, next } = came;
        let place = |seq| WatchPlace { instance: instance.clone(), seq };
        let other = self.seen.as_ref().is_some_and(|seen| seen.instance != instance);
        if lost || other {
            let first = events.first().map_or(next, |event| event.seq.saturating_sub(1));
            self.came.push_back((Watched::Lost, place(first)));
        }
        self.came.extend(events.into_iter().map(|event| {
            let place = place(event.seq);
            (Watched::Event(event), place)
        }));
        self.seen = Some(place(next));
    }
}
