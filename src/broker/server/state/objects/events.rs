//! The broker's identity, its events for watchers, and the requests that it remembers.

use std::collections::{BTreeMap, HashMap, VecDeque};

use uuid::Builder;

use crate::{
    broker::{
        manifest::{Identity, Manifest, Version},
        server::state::random,
    },
    wire::broker::{Event, EventKind, Maker, Owner},
};

/// The number of events kept.
const MAX_EVENTS: usize = 4096;

/// The number of remembered puts of versions that are gone, and of deletions of each owner's names.
const MAX_DONE: usize = 1024;

/// The bits of an event's number that count the events of one server. The others count the servers, so numbers grow over restarts.
const EVENT_BITS: u32 = 32;

/// An event, and the data that decides who may see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) event: Event,
    pub(crate) owner: Owner,
    pub(crate) mode: u16,
}

/// An event of a version. It is numbered when it is published.
pub(crate) fn event(kind: EventKind, of: &Version, at_ms: u64, by: &Maker) -> Seen {
    let event = Event {
        seq: 0,
        at_ms,
        kind,
        name: of.name.clone(),
        version: of.version,
        id: of.id.clone(),
        uid: by.uid,
        pid: by.pid,
        command: by.command.clone(),
        size: Some(of.memory()),
        message: None,
    };
    Seen { event, owner: of.owner, mode: of.mode }
}

#[derive(Debug)]
pub(crate) struct Events {
    pub(crate) identity: Identity,
    events: VecDeque<Seen>,
    last: u64,
    /// Puts of versions that are gone, and deleted names, by the keys of their entries.
    done: BTreeMap<u64, Manifest>,
    /// The keys of the puts, and of each owner's deletions, oldest first.
    order: HashMap<Option<u32>, VecDeque<u64>>,
}

impl Events {
    /// Continues the state of the previous server, if there was one.
    pub(super) fn new(before: Option<Identity>) -> Self {
        let new = || Identity {
            instance: Builder::from_random_bytes(random()).into_uuid().to_string(),
            ..Identity::default()
        };
        let mut identity = before.unwrap_or_else(new);
        let last = identity.starts << EVENT_BITS;
        identity.starts += 1;
        Self { identity, events: VecDeque::new(), last, done: BTreeMap::new(), order: HashMap::new() }
    }

    pub(crate) fn instance(&self) -> &str {
        &self.identity.instance
    }

    pub(crate) fn restarts(&self) -> u64 {
        self.identity.starts - 1
    }

    /// Numbers an event and keeps it for watchers.
    pub(super) fn publish(&mut self, mut seen: Seen) {
        self.last += 1;
        seen.event.seq = self.last;
        push_bounded(&mut self.events, seen, MAX_EVENTS);
    }

    pub(crate) fn last_event(&self) -> u64 {
        self.last
    }

    /// The events after a number, and whether earlier events after it were discarded.
    pub(crate) fn events_after(&self, after: u64) -> (bool, impl Iterator<Item = &Seen>) {
        let first = self.last + 1 - self.events.len() as u64;
        let skip = usize::try_from((after + 1).saturating_sub(first)).unwrap_or(usize::MAX);
        (after + 1 < first, self.events.iter().skip(skip))
    }

    /// Remembers a put whose version is gone, or a deletion. Returns an entry that is no longer needed, with its key.
    pub(super) fn note_done(&mut self, key: u64, done: Manifest) -> Option<(u64, Manifest)> {
        let owner = match &done {
            Manifest::Deleted(of) => Some(of.owner),
            _ => None,
        };
        self.done.insert(key, done);
        let oldest = push_bounded(self.order.entry(owner).or_default(), key, MAX_DONE)?;
        Some((oldest, self.done.remove(&oldest)?))
    }

    /// The manifest of a completed request.
    pub(super) fn manifest(&self, key: u64) -> Option<&Manifest> {
        self.done.get(&key)
    }

    /// The keys of all completed requests.
    pub(super) fn keys(&self) -> impl Iterator<Item = u64> {
        self.done.keys().copied()
    }

    /// Whether this user deleted the name recently.
    pub(crate) fn was_deleted(&self, name: &str, owner: u32) -> bool {
        let mut keys = self.order.get(&Some(owner)).into_iter().flatten();
        keys.any(|key| matches!(self.done.get(key), Some(Manifest::Deleted(deleted)) if deleted.name == name))
    }
}

/// Adds an entry. Returns the oldest one if the queue is full.
fn push_bounded<T>(entries: &mut VecDeque<T>, entry: T, max: usize) -> Option<T> {
    let oldest = (entries.len() >= max).then(|| entries.pop_front()).flatten();
    entries.push_back(entry);
    oldest
}
