//! What is told to those who look on: events, and figures of the server itself.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use super::{ConnectionId, caller::Right, connection::Request, objects::now_ms, reactor::Reactor};
use crate::wire::broker::{Durations, Event, Events, Measured, Message, RequestCount, Room, StoreRoom, Watch};

/// The upper bounds of the classes of durations, in microseconds.
const BOUNDS: [u64; 12] = [25, 50, 100, 250, 500, 1_000, 2_500, 10_000, 100_000, 1_000_000, 10_000_000, 60_000_000];

/// How many events are looked at for one record: the others wait until it is sent.
const EVENTS_AT_ONCE: usize = 512;

/// How many bytes of events are sent in one record, about.
const PAGE: usize = 48 * 1024;

/// How many bytes of totals.
const TOTALS: usize = 32 * 1024;

/// A connection that watches.
#[derive(Debug)]
pub(super) struct Watching {
    prefix: String,
    /// The last event that was looked at.
    after: u64,
    /// Whether it is still to be told that it watches, and that events were lost.
    new: bool,
    lost: bool,
}

/// What was asked of the server so far.
#[derive(Debug)]
pub(super) struct Metrics {
    started_ms: u64,
    requests: BTreeMap<(&'static str, String), u64>,
    durations: BTreeMap<&'static str, ([u64; BOUNDS.len() + 1], u64)>,
}

impl Metrics {
    pub(super) fn new() -> Self {
        Self { started_ms: now_ms(), requests: BTreeMap::new(), durations: BTreeMap::new() }
    }

    /// Counts a request that is answered.
    pub(super) fn count(&mut self, verb: &'static str, outcome: &str, took: Duration) {
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        match self.requests.get_mut(&(verb, String::new())).filter(|_| outcome == "ok") {
            Some(count) => *count += 1,
            // The empty outcome stands for `ok`: the most frequent needs no text of its own.
            None => {
                let outcome = if outcome == "ok" { String::new() } else { outcome.to_owned() };
                *self.requests.entry((verb, outcome)).or_default() += 1;
            }
        }
        let (classes, sum) = self.durations.entry(verb).or_default();
        classes[BOUNDS.partition_point(|bound| *bound < micros)] += 1;
        *sum = sum.saturating_add(micros);
    }
}

impl Reactor {
    /// Notes that a request has come.
    pub(super) fn begin_request(&mut self, id: ConnectionId, verb: &'static str) {
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.asked = Some((verb, Instant::now()));
        }
    }

    /// Notes that a request is answered.
    pub(super) fn count_request(&mut self, id: ConnectionId, outcome: &str) {
        let asked = self.connections.get_mut(&id).and_then(|connection| connection.asked.take());
        if let Some((verb, since)) = asked {
            self.metrics.count(verb, outcome, since.elapsed());
        }
    }

    /// A watch has come.
    pub(super) fn watch_events(&mut self, id: ConnectionId, watch: Watch) {
        let journal = self.objects.journal();
        let other = watch.instance.as_ref().is_some_and(|instance| instance != journal.instance());
        let (after, lost) = match watch.after {
            // What another broker counted says nothing here: all that is known is new.
            _ if other => (0, true),
            Some(after) => (after.min(journal.last_event()), false),
            None => (journal.last_event(), false),
        };
        let watching = Watching { prefix: watch.prefix, after, new: true, lost };
        self.set_request(id, Request::Watch(Box::new(watching)));
        self.watchers.insert(id);
        self.send_events(id);
    }

    /// Sends those who watch what has happened since they were told last.
    pub(super) fn tell_watchers(&mut self) {
        let last = self.objects.journal().last_event();
        if self.told == last {
            return;
        }
        self.told = last;
        for id in self.watchers.iter().copied().collect::<Vec<_>>() {
            self.send_events(id);
        }
    }

    /// Sends a connection the events that it was not sent, unless it has not read the last ones.
    pub(super) fn send_events(&mut self, id: ConnectionId) {
        loop {
            let Some(connection) = self.connections.get_mut(&id).filter(|connection| !connection.is_blocked()) else {
                return;
            };
            let Request::Watch(watching) = &mut connection.request else { return };
            let journal = self.objects.journal();
            let (forgotten, events) = journal.events_after(watching.after);
            let lost = watching.lost || forgotten;
            if !(watching.new || lost || watching.after < journal.last_event()) {
                return;
            }
            let (mut page, mut length, mut next) = (Vec::<Event>::new(), 0, journal.last_event());
            for (looked_at, seen) in events.enumerate() {
                if length > PAGE || looked_at >= EVENTS_AT_ONCE {
                    next = seen.event.seq - 1;
                    break;
                }
                let visible = seen.event.name.starts_with(&watching.prefix)
                    && connection.caller.may(Right::Read, seen.owner, seen.mode, &connection.socket);
                if visible {
                    length +=
                        240 + seen.event.name.len() + seen.event.message.as_ref().map_or(0, |text| 2 * text.len());
                    page.push(seen.event.clone());
                }
            }
            let silent = page.is_empty() && !watching.new && !lost;
            (watching.after, watching.new, watching.lost) = (next, false, false);
            if silent {
                continue;
            }
            let events = Events { instance: journal.instance().to_owned(), lost, events: page, next };
            self.push_events(id, &Message::Events(events));
        }
    }

    /// How much the server holds and does.
    pub(super) fn measure(&mut self, id: ConnectionId) {
        let Some(caller) = self.connections.get(&id).map(|connection| connection.caller.clone()) else { return };
        let (objects, versions, leases, _) = self.objects.sums();
        let (used, allowed) = self.objects.store().room();
        let number = |of: usize| u64::try_from(of).unwrap_or(u64::MAX);
        let outcome = |text: &String| if text.is_empty() { "ok".to_owned() } else { text.clone() };
        let requests = self.metrics.requests.iter().map(|((verb, text), count)| RequestCount {
            verb: (*verb).to_owned(),
            outcome: outcome(text),
            count: *count,
        });
        let durations = self.metrics.durations.iter().map(|(verb, (counts, sum_us))| Durations {
            verb: (*verb).to_owned(),
            bounds_us: BOUNDS.to_vec(),
            counts: counts.to_vec(),
            sum_us: *sum_us,
        });
        let measured = Measured {
            instance: self.objects.journal().instance().to_owned(),
            started_ms: self.metrics.started_ms,
            restarts: self.objects.journal().restarts(),
            objects,
            versions,
            leases,
            connections: number(self.connections.len()),
            watchers: number(self.watchers.len()),
            descriptors: Room { used: number(self.descriptors()), allowed: number(self.limit) },
            store: StoreRoom {
                kind: self.objects.store().keeper().as_str().to_owned(),
                used: number(used),
                allowed: number(allowed),
            },
            requests: requests.collect(),
            durations: durations.collect(),
            totals: self.objects.totals(&caller, TOTALS),
        };
        self.reply(id, &Message::Measured(Box::new(measured)));
    }
}
