//! Names, versions and leases, their catalogue, and messages to the keeper. No client sockets, no waiting.
//!
//! | File | Purpose |
//! |---|---|
//! | `publish`, `remove`, `leases`, `lifetimes` | changes; each is logged before it takes effect |
//! | `journal`, `compaction` | the log, and the events for watchers |
//! | `restore` | objects of the previous server |
//! | `select`, `view`, `usage` | answers to gets, listings, usage per user |
//! | `readers` | indexes of names and leases by permission to read |

#[cfg(test)]
pub(in crate::broker::server) mod audit;
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
    compaction::Compaction,
    journal::{event, event_of_lease},
    leases::ClosedConnection,
    readers::Readers,
    remove::segments_of,
    usage::Users,
};
pub(crate) use self::{
    journal::{Journal, catalogue_error},
    leases::Resumption,
    lifetimes::Expiry,
    publish::{NewPart, NewTable, Staged, Terms},
    select::{Answer, LeaseParts, Selected, Selection, TableQuery},
    view::{Counts, LeasePage, Total},
};
use super::{history::LostVersions, quota::Rules, segments::SegmentTable, time::Time};
use crate::{
    broker::{
        catalogue::{
            CatalogueError, Record, SegmentId,
            record::{self, Deleted, Seen},
        },
        keeper::{Flushed, Store},
        server::state::caller::ConnectionId,
    },
    error::{BrokerError, RefusalCode},
    wire::broker::{EventKind, Lifetime, Maker, Owner, Token},
};

/// Work per turn of the event loop: leases and names of closed connections, and released segments. The simulation's few objects take
/// several turns.
const CLEANUPS_PER_TURN: usize = if cfg!(test) { 1 } else { 128 };
const RELEASES_PER_TURN: usize = if cfg!(test) { 1 } else { 128 };

/// All objects. Large tables are trees: a growing hash table would move all entries in one turn of the event loop.
#[derive(Debug)]
pub(crate) struct Objects {
    /// The time of the current request.
    pub(crate) now: Time,
    names: BTreeMap<Arc<str>, Name>,
    /// By key.
    versions: BTreeMap<u64, Version>,
    /// Version keys by version id.
    ids: BTreeMap<String, u64>,
    leases: BTreeMap<Token, Held>,
    readers: Readers,
    /// Closed connections that still have leases or names to clean up.
    closed_connections: VecDeque<ClosedConnection>,
    /// Remaining budget of this turn.
    cleanup_budget: usize,
    /// Segments of dropped versions, with their users, and the remaining budget of this turn.
    releasing: VecDeque<(u32, SegmentId)>,
    release_budget: usize,
    compaction: Option<Compaction>,
    users: Users,
    segments: SegmentTable,
    journal: Journal,
    store: Store,
    /// Versions by the tokens of their puts.
    requests: BTreeMap<Token, u64>,
    last_key: u64,
    last_lease: u64,
    /// Descriptors for the caller to close where blocking is allowed.
    garbage: Vec<OwnedFd>,
    /// Unused versions whose drop is not logged yet, because writing the log failed.
    pending_drops: Vec<u64>,
    /// Scheduled expiry checks.
    expiries: Vec<Expiry>,
    /// Versions that were lost because the keeper lacked some of their memory.
    lost: LostVersions,
}

#[derive(Debug)]
struct Name {
    owner: Owner,
    mode: u16,
    lifetime: Lifetime,
    keep: u32,
    /// Version keys by version number. The last one is current.
    versions: BTreeMap<u64, u64>,
    /// Earlier versions that count towards the owner's quota.
    kept: u64,
    /// The connection that put the current version, if it is still open.
    maker: Option<ConnectionId>,
    /// When the last lease of any version ended.
    idle_since: Instant,
    leases: u64,
    /// When its lifetime is next checked.
    next_check: Option<Instant>,
}

#[derive(Debug)]
struct Version {
    record: record::Version,
    leases: u64,
    /// Whether the version is available under its name.
    named: bool,
    reports: Vec<record::Report>,
    /// Whether its holders were asked to release their leases.
    recalled: bool,
}

impl Name {
    fn current(&self) -> Option<u64> {
        self.versions.last_key_value().map(|(_, key)| *key)
    }

    /// Whether a version is current, or one of the `keep` versions before it.
    fn keeps(&self, number: u64) -> bool {
        self.versions.range(number + 1..).nth(self.keep as usize).is_none()
    }

    /// The number of earlier versions that `keep` covers.
    fn earlier(&self) -> u64 {
        u64::from(self.keep).min((self.versions.len() as u64).saturating_sub(1))
    }

    /// Removes a version.
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

    /// Bytes that count towards a quota: memory and tables, as claimed.
    fn charged(&self) -> u64 {
        record::bytes_of(self.record.metadata.as_ref(), &self.record.parts)
    }

    /// The user whose quota it counts towards. All parts belong to one user.
    fn payer(&self) -> u32 {
        self.record.parts.first().map_or(self.record.owner.uid, |part| part.maker.uid)
    }
}

#[derive(Debug)]
struct Held {
    number: u64,
    record: record::Lease,
    /// The connection that holds it. `None` until a client resumes a lease of the previous server.
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
            closed_connections: VecDeque::new(),
            cleanup_budget: CLEANUPS_PER_TURN,
            releasing: VecDeque::new(),
            release_budget: RELEASES_PER_TURN,
            compaction: None,
            users: Users::new(rules),
            segments: SegmentTable::default(),
            journal,
            store,
            requests: BTreeMap::new(),
            last_key: 0,
            last_lease: 0,
            garbage: Vec::new(),
            pending_drops: Vec::new(),
            expiries: Vec::new(),
            lost: LostVersions::default(),
        }
    }

    /// Logs a change, for the next server too. The caller then applies it.
    fn write(&mut self, record: &Record) -> Result<(), CatalogueError> {
        let seen = self.event_of(record);
        self.journal.write(record, seen)
    }

    /// The event of a change that is not applied yet.
    fn event_of(&self, record: &Record) -> Option<Seen> {
        let version = |key: &u64| self.versions.get(key).map(|version| &version.record);
        match record {
            Record::Published(record) => {
                let replaces = self.names.contains_key(record.name.as_str());
                let kind = if replaces { EventKind::Replaced } else { EventKind::Published };
                let server = || Maker { pid: 0, uid: record.owner.uid, command: None };
                let by = record.parts.first().map_or_else(server, |part| part.maker.clone());
                Some(event(kind, record, record.created_ms, by))
            }
            Record::Deleted(Deleted { name, at_ms, uid, pid, command, .. }) => {
                let current = self.current(self.names.get(name.as_str())?);
                let by = Maker { pid: *pid, uid: *uid, command: command.clone() };
                Some(event(EventKind::Deleted, &current.record, *at_ms, by))
            }
            Record::Leased(lease) => {
                Some(event_of_lease(EventKind::Leased, version(&lease.key)?, lease.since_ms, lease))
            }
            Record::Ended { token, at_ms } => {
                let lease = &self.leases.get(token)?.record;
                Some(event_of_lease(EventKind::Ended, version(&lease.key)?, *at_ms, lease))
            }
            Record::Reported(report) => {
                let mut seen = event(EventKind::Reported, version(&report.key)?, report.at_ms, report.reader.clone());
                seen.event.message = Some(report.message.clone());
                Some(seen)
            }
            Record::Recalled { key, by, at_ms } => Some(event(EventKind::Recalled, version(key)?, *at_ms, by.clone())),
            _ => None,
        }
    }

    /// Versions that this server could not restore.
    pub(crate) fn lost(&self) -> &LostVersions {
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

    /// Sends unsent messages to the keeper.
    pub(crate) fn flush_store(&mut self) -> Flushed {
        let segments = &self.segments;
        self.store.flush(|id| segments.find(id))
    }

    /// Sends the catalogue to a new keeper. It comes first: if the keeper's set is incomplete, the catalogue reveals the missing versions.
    pub(crate) fn resend_catalogue(&mut self) -> crate::error::Result<()> {
        self.journal.hand_to(&mut self.store)
    }

    /// Sends all segments to a new keeper.
    pub(crate) fn resend_segments(&mut self) {
        self.segments.ids().for_each(|id| self.store.hold(id));
    }

    /// Logs each version of which the keeper lacks some memory.
    pub(crate) fn log_lost_versions(&self) {
        let unsent = self.store.unsent();
        let mut versions: Vec<&record::Version> = self.versions.values().map(|version| &version.record).collect();
        versions.sort_by(|some, other| (&some.name, some.version).cmp(&(&other.name, other.version)));
        for record in versions {
            let lacks = unsent.as_ref().is_none_or(|unsent| segments_of(record).any(|id| unsent.contains(&id)));
            if lacks {
                tracing::error!(
                    name = record.name,
                    version = record.version,
                    "a version is lost: the keeper lacks some of its memory"
                );
            }
        }
    }

    /// The descriptor of a leased segment.
    pub(crate) fn segment(&self, id: SegmentId) -> BorrowedFd<'_> {
        self.segments.get(id)
    }

    /// The number of descriptors that are kept, or reserved for pending puts.
    pub(crate) fn descriptors(&self) -> usize {
        self.segments.len() + self.journal.descriptors() + self.users.reserved()
    }

    /// The number of a user's descriptors, including connections.
    pub(crate) fn descriptors_of(&self, uid: u32) -> usize {
        self.users.descriptors_of(uid)
    }

    pub(crate) fn users(&mut self) -> &mut Users {
        &mut self.users
    }

    pub(crate) fn take_garbage(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.garbage)
    }

    pub(crate) fn take_expiries(&mut self) -> Vec<Expiry> {
        std::mem::take(&mut self.expiries)
    }

    /// The key of the version that a get with these arguments finds.
    pub(crate) fn find(&self, name: &str, version: Option<u64>, newer_than: Option<u64>) -> Option<u64> {
        let name = self.names.get(name)?;
        let found = match version {
            Some(wanted) => name.versions.get_key_value(&wanted),
            None => name.versions.last_key_value(),
        };
        let (_, key) = found.filter(|(number, _)| newer_than.is_none_or(|older| **number > older))?;
        Some(*key)
    }

    /// Resets the budgets for a turn of the event loop.
    pub(crate) fn begin_turn(&mut self) {
        (self.cleanup_budget, self.release_budget) = (CLEANUPS_PER_TURN, RELEASES_PER_TURN);
    }

    /// Whether there is work that no event announces.
    pub(crate) fn has_work(&self) -> bool {
        !self.closed_connections.is_empty() || !self.releasing.is_empty() || self.compaction.is_some()
    }

    fn current(&self, name: &Name) -> &Version {
        let key = name.current().expect("a name has a current version");
        self.versions.get(&key).expect("a name's versions exist")
    }
}

fn write_failed(error: CatalogueError) -> BrokerError {
    tracing::error!(%error, "the catalogue can't be written");
    BrokerError::new(RefusalCode::Failed, format!("the broker can't write its catalogue: {error}"))
}

fn token_reused() -> BrokerError {
    let message = "this request number was used by another request: number each request with 128 new random bits";
    BrokerError::new(RefusalCode::Invalid, message)
}
