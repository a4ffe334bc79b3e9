//! Names, versions and leases: what the broker holds, the catalogue of it, and what the keeper is told. No
//! sockets of clients, no waiting.
//!
//! | File | What it does |
//! |---|---|
//! | `publish`, `remove`, `leases`, `lifetimes` | changes, each written down before it holds |
//! | `journal` | what is written down, and the events that are told of it |
//! | `restore` | what a server before this one left |
//! | `select`, `view`, `usage` | what is asked for, what there is, what each user has |
//! | `readers` | indexes of names and leases by right to read |

mod compaction;
mod journal;
mod leases;
mod lifetimes;
mod publish;
mod readers;
mod remove;
mod restore;
mod select;
mod usage;
mod view;

use std::{
    collections::{BTreeMap, VecDeque},
    os::fd::{BorrowedFd, OwnedFd},
    sync::Arc,
    time::Instant,
};

use self::{
    compaction::Compaction, journal::event, leases::Departed, readers::Readers, remove::segments_of, usage::Users,
};
pub(crate) use self::{
    journal::{Journal, unusable},
    leases::TakenUp,
    lifetimes::Expiry,
    publish::{NewPart, NewTable, Staged, Terms},
    select::{Answer, LeaseParts, Question, Selected, Selection},
    view::{Counts, LeasePage, Total},
};
use super::{history::Losses, quota::Rules, segments::Segments, time::Time};
use crate::{
    broker::{
        catalogue::{
            CatalogueError, Record, SegmentId,
            record::{self, Seen},
        },
        keeper::{Flushed, Store},
        server::state::caller::ConnectionId,
    },
    error::{BrokerError, RefusalCode},
    wire::broker::{EventKind, Lifetime, Owner, Token},
};

/// How many leases and names of closed connections end before other connections are served, and how many segments are released.
const ENDS_AT_ONCE: usize = 128;
const RELEASES_AT_ONCE: usize = 128;

/// What the broker holds. Its large tables are trees: a hash table that grows moves all of its entries in one turn of the event loop.
#[derive(Debug)]
pub(crate) struct Objects {
    /// The time at which the current request is handled.
    pub(crate) now: Time,
    names: BTreeMap<Arc<str>, Name>,
    /// By their keys.
    versions: BTreeMap<u64, Version>,
    /// The keys of versions by their ids.
    ids: BTreeMap<String, u64>,
    leases: BTreeMap<Token, Held>,
    readers: Readers,
    /// Closed connections whose leases and names have not all ended yet.
    departed: VecDeque<Departed>,
    /// How many leases and names of closed connections may still end in this turn of the event loop.
    ends_left: usize,
    /// Segments of versions that are gone, with their users, and how many may still be released in this turn.
    releasing: VecDeque<(u32, SegmentId)>,
    releases_left: usize,
    compaction: Option<Compaction>,
    users: Users,
    segments: Segments,
    journal: Journal,
    store: Store,
    /// The versions by what the clients call their puts.
    requests: BTreeMap<Token, u64>,
    last_key: u64,
    last_lease: u64,
    /// Descriptors that the caller is to close where that may block.
    garbage: Vec<OwnedFd>,
    /// Versions that are gone, which could not be written down.
    undropped: Vec<u64>,
    /// Names whose time may be over at a moment.
    expiries: Vec<Expiry>,
    /// Versions whose memory the store had not kept whole.
    lost: Losses,
}

/// A name that exists.
#[derive(Debug)]
struct Name {
    owner: Owner,
    mode: u16,
    lifetime: Lifetime,
    keep: u32,
    /// The keys of its versions that are there, by their numbers: the last one is current.
    versions: BTreeMap<u64, u64>,
    /// How many versions before the current one count for the owner's quota.
    kept: u64,
    /// The connection that put the current version, while it lives.
    maker: Option<ConnectionId>,
    /// Since when no lease of any version is held.
    idle_since: Instant,
    leases: u64,
    /// When it is looked at next, whether its time is over.
    looked_at: Option<Instant>,
}

/// A version that is there.
#[derive(Debug)]
struct Version {
    record: record::Version,
    leases: u64,
    /// Whether it can be had by its name.
    named: bool,
    reports: Vec<record::Report>,
}

impl Name {
    /// The key of its current version.
    fn current(&self) -> Option<u64> {
        self.versions.last_key_value().map(|(_, key)| *key)
    }

    /// Whether a version is the current one, or one of the `keep` before it.
    fn keeps(&self, number: u64) -> bool {
        self.versions.range(number + 1..).nth(self.keep as usize).is_none()
    }

    /// How many versions before the current one `keep` covers.
    fn earlier(&self) -> u64 {
        u64::from(self.keep).min((self.versions.len() as u64).saturating_sub(1))
    }

    /// Takes a version from those that are there.
    fn forget(&mut self, number: u64, key: u64) {
        if self.versions.get(&number) == Some(&key) {
            self.versions.remove(&number);
        }
    }
}

impl Version {
    /// Bytes of memory, as claimed.
    fn bytes(&self) -> u64 {
        self.record.parts.iter().map(|part| part.memory.mapped_size).sum()
    }

    /// Bytes that count towards a quota: of memory and tables, as claimed.
    fn charged(&self) -> u64 {
        record::bytes_of(self.record.metadata.as_ref(), &self.record.parts)
    }

    /// Whose quota it is on: all parts are one user's.
    fn payer(&self) -> u32 {
        self.record.parts.first().map_or(self.record.owner.uid, |part| part.maker.uid)
    }
}

/// A lease that is held.
#[derive(Debug)]
struct Held {
    number: u64,
    record: record::Lease,
    /// The connection that has it; none yet of one that a server before this one gave.
    holder: Option<ConnectionId>,
}

impl Objects {
    fn empty(now: Time, rules: Rules, journal: Journal, store: Store) -> Self {
        Self {
            now,
            names: BTreeMap::new(),
            versions: BTreeMap::new(),
            ids: BTreeMap::new(),
            leases: BTreeMap::new(),
            readers: Readers::default(),
            departed: VecDeque::new(),
            ends_left: ENDS_AT_ONCE,
            releasing: VecDeque::new(),
            releases_left: RELEASES_AT_ONCE,
            compaction: None,
            users: Users::new(rules),
            segments: Segments::default(),
            journal,
            store,
            requests: BTreeMap::new(),
            last_key: 0,
            last_lease: 0,
            garbage: Vec::new(),
            undropped: Vec::new(),
            expiries: Vec::new(),
            lost: Losses::default(),
        }
    }

    /// Writes a change down. Then it holds, for the next server too.
    fn write(&mut self, record: &Record) -> Result<(), CatalogueError> {
        let seen = self.event_of(record);
        self.journal.write(record, seen)
    }

    /// The event that a change is, which is not made yet.
    fn event_of(&self, record: &Record) -> Option<Seen> {
        let version = |key: &u64| self.versions.get(key).map(|version| &version.record);
        match record {
            Record::Published(record) => {
                let replaces = self.names.contains_key(record.name.as_str());
                let kind = if replaces { EventKind::Replaced } else { EventKind::Published };
                let (uid, pid) = record.parts.first().map_or((record.owner.uid, 0), |of| (of.maker.uid, of.maker.pid));
                Some(event(kind, record, record.created_ms, uid, pid, None))
            }
            Record::Deleted(deleted) => {
                let current = self.current(self.names.get(deleted.name.as_str())?);
                Some(event(EventKind::Deleted, &current.record, deleted.at_ms, deleted.uid, deleted.pid, None))
            }
            Record::Leased(lease) => {
                Some(event(EventKind::Leased, version(&lease.key)?, lease.since_ms, lease.uid, lease.pid, None))
            }
            Record::Ended { token, at_ms } => {
                let lease = &self.leases.get(token)?.record;
                Some(event(EventKind::Ended, version(&lease.key)?, *at_ms, lease.uid, lease.pid, None))
            }
            Record::Reported(report) => {
                let (reader, message) = (&report.reader, Some(report.message.clone()));
                Some(event(EventKind::Reported, version(&report.key)?, report.at_ms, reader.uid, reader.pid, message))
            }
            _ => None,
        }
    }

    /// How many versions this server could not take over whole.
    pub(crate) fn lost(&self) -> &Losses {
        &self.lost
    }

    pub(crate) fn journal(&self) -> &Journal {
        &self.journal
    }

    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    pub(crate) fn store_mut(&mut self) -> &mut Store {
        &mut self.store
    }

    /// Tells the keeper what it was not told yet.
    pub(crate) fn flush_store(&mut self) -> Flushed {
        let segments = &self.segments;
        self.store.flush(|id| segments.find(id))
    }

    /// Has the catalogue kept anew, by a keeper that has nothing yet. It comes first: with it, an incomplete set shows what is lost.
    pub(crate) fn keep_catalogue(&mut self) -> crate::error::Result<()> {
        self.journal.keep(&mut self.store)
    }

    /// Has all segments kept anew.
    pub(crate) fn keep_segments(&mut self) {
        self.segments.ids().for_each(|id| self.store.keep(id));
    }

    /// Reports each version that the keeper does not have whole.
    pub(crate) fn report_unkept(&self) {
        let unsent = self.store.unsent();
        let mut versions: Vec<&record::Version> = self.versions.values().map(|version| &version.record).collect();
        versions.sort_by(|some, other| (&some.name, some.version).cmp(&(&other.name, other.version)));
        for record in versions {
            let lacks = unsent.as_ref().is_none_or(|unsent| segments_of(record).any(|id| unsent.contains(&id)));
            if lacks {
                tracing::error!(
                    name = record.name,
                    version = record.version,
                    "a version is lost: the keeper has not all of its memory"
                );
            }
        }
    }

    /// The descriptor of a segment that a lease is of.
    pub(crate) fn segment(&self, id: SegmentId) -> BorrowedFd<'_> {
        self.segments.get(id)
    }

    /// How many descriptors are kept, or reserved for puts under way.
    pub(crate) fn descriptors(&self) -> usize {
        self.segments.len() + self.journal.descriptors() + self.users.reserved()
    }

    /// How many descriptors a user has, connections included.
    pub(crate) fn descriptors_of(&self, uid: u32) -> usize {
        self.users.descriptors_of(uid)
    }

    pub(crate) fn users(&mut self) -> &mut Users {
        &mut self.users
    }

    /// Descriptors to close.
    pub(crate) fn take_garbage(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.garbage)
    }

    /// Names to look at again, and when.
    pub(crate) fn take_expiries(&mut self) -> Vec<Expiry> {
        std::mem::take(&mut self.expiries)
    }

    /// Whether a name exists and has a version that a get with these words finds now.
    pub(crate) fn find(&self, name: &str, version: Option<u64>, newer_than: Option<u64>) -> Option<u64> {
        let name = self.names.get(name)?;
        let found = match version {
            Some(wanted) => name.versions.get_key_value(&wanted),
            None => name.versions.last_key_value(),
        };
        let (_, key) = found.filter(|(number, _)| newer_than.is_none_or(|older| **number > older))?;
        Some(*key)
    }

    /// A turn of the event loop begins.
    pub(crate) fn begin_turn(&mut self) {
        (self.ends_left, self.releases_left) = (ENDS_AT_ONCE, RELEASES_AT_ONCE);
    }

    /// Whether there is work left that no event announces.
    pub(crate) fn has_work(&self) -> bool {
        self.has_departed() || !self.releasing.is_empty() || self.is_compacting()
    }

    fn current(&self, name: &Name) -> &Version {
        let key = name.current().expect("a name has a current version");
        self.versions.get(&key).expect("a name's versions are there")
    }
}

fn unwritten(error: CatalogueError) -> BrokerError {
    tracing::error!(%error, "the catalogue can't be written");
    BrokerError::new(RefusalCode::Failed, format!("the broker can't write its catalogue: {error}"))
}

fn used_before() -> BrokerError {
    let message = "another request had this number: a client numbers each request anew, with 128 random bits";
    BrokerError::new(RefusalCode::Invalid, message)
}

fn unwritten_kind() -> BrokerError {
    BrokerError::new(RefusalCode::Failed, "the broker wrote another record than it meant")
}
