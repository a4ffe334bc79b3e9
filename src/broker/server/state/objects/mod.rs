//! Names, versions and leases, and messages to the keeper. No client sockets, no waiting.
//!
//! | File | Purpose |
//! |---|---|
//! | `publish`, `remove`, `leases` | changes |
//! | `events` | the broker's identity, events for watchers, completed requests |
//! | `restore` | objects of the previous server, and everything for a new keeper |
//! | `view` | answers to gets, listings |
//! | `readers` | indexes of names and leases by permission to read |

#[cfg(test)]
pub(in crate::broker::server) mod audit;
mod events;
mod leases;
mod publish;
mod readers;
mod remove;
mod restore;
mod view;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
    time::Instant,
};

pub use self::view::ServerReport;
use self::{events::event, leases::Held, readers::Readers};
pub(crate) use self::{
    events::{Events, Seen},
    publish::NewVersion,
    view::{LeasePage, Selection},
};
use super::root::Time;
use crate::{
    broker::{
        keeper::Store,
        manifest::{self, Manifest},
        server::{
            admit::{Limits, Users},
            state::caller::{Caller, ConnectionId},
        },
    },
    error::{BrokerError, RefusalCode},
    wire::broker::{Lifetime, Owner, Published, Token},
};

/// The cleanups of closed connections per turn of the event loop. The simulation's few objects take several turns.
const CLEANUPS_PER_TURN: usize = if cfg!(test) { 1 } else { 128 };

/// A descriptor of a version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct VersionFd {
    /// The version's key.
    pub(crate) key: u64,
    /// The position among the version's descriptors.
    pub(crate) at: usize,
}

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
    /// The leases of each connection.
    holders: BTreeSet<(ConnectionId, Token)>,
    /// The names of each connection whose lifetimes depend on it.
    makers: BTreeSet<(ConnectionId, Arc<str>)>,
    name_readers: Readers<Arc<str>>,
    /// The leases by number.
    lease_readers: Readers<(u64, Token)>,
    /// Closed connections that still have leases or names to clean up, and the users whose connection counts include them.
    closed_connections: VecDeque<(ConnectionId, u32)>,
    /// Remaining budget of this turn.
    cleanup_budget: usize,
    pub(crate) users: Users,
    pub(crate) events: Events,
    pub(crate) store: Store,
    /// The listening socket and the device nodes, which the keeper holds too.
    own: Vec<OwnedFd>,
    /// Versions that the keeper does not have yet, by key.
    pending: BTreeMap<u64, Version>,
    /// The keys of versions and of completed requests, by the clients' tokens.
    requests: BTreeMap<Token, u64>,
    last_key: u64,
    /// The last key of the previous server, as long as clients may resume its leases; 0 afterwards.
    last_restored: u64,
    /// Until when clients may resume leases of the previous server, in milliseconds since 1970.
    resume_by_ms: u64,
    last_lease: u64,
    /// Descriptors of users, for the caller to close where blocking is allowed.
    pub(crate) garbage: Vec<(u32, Vec<OwnedFd>)>,
    /// When to check names for expiry; `None` for names that need no check any more.
    pub(crate) expiries: Vec<(Arc<str>, Option<Instant>)>,
}

#[derive(Debug)]
struct Name {
    owner: Owner,
    mode: u16,
    lifetime: Lifetime,
    keep: u32,
    /// Version keys by version number. The last one is current.
    versions: BTreeMap<u64, u64>,
    /// Earlier versions that count towards the owner's quota, also for a version that is not published yet.
    kept: u64,
    /// The connection that put the current version, if it is still open.
    maker: Option<ConnectionId>,
    /// When the last lease of any version ended.
    idle_since: Instant,
    leases: u64,
}

#[derive(Debug)]
struct Version {
    /// Boxed: the nodes of a tree have room for several versions.
    record: Box<manifest::Version>,
    fds: Vec<OwnedFd>,
    leases: u64,
}

/// A completed request, with the name that it changed.
enum Request<'a> {
    Put(&'a str, Published),
    Deleted(&'a str),
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

    /// The most earlier versions that it keeps until another version with this `keep` is published.
    fn kept_after_put(&self, keep: u32) -> u64 {
        u64::from(keep).min(self.versions.len() as u64).max(self.kept)
    }

    /// Removes a version.
    fn forget(&mut self, number: u64, key: u64) {
        if self.versions.get(&number) == Some(&key) {
            self.versions.remove(&number);
        }
    }
}

impl Objects {
    fn empty(now: Time, limits: Limits, events: Events, store: Store) -> Self {
        Self {
            now,
            names: BTreeMap::new(),
            versions: BTreeMap::new(),
            ids: BTreeMap::new(),
            leases: BTreeMap::new(),
            holders: BTreeSet::new(),
            makers: BTreeSet::new(),
            name_readers: Readers::default(),
            lease_readers: Readers::default(),
            closed_connections: VecDeque::new(),
            cleanup_budget: CLEANUPS_PER_TURN,
            users: Users::new(limits),
            events,
            store,
            own: Vec::new(),
            pending: BTreeMap::new(),
            requests: BTreeMap::new(),
            last_key: 0,
            last_restored: 0,
            resume_by_ms: 0,
            last_lease: 0,
            garbage: Vec::new(),
            expiries: Vec::new(),
        }
    }

    /// A version, published or not.
    fn version(&self, key: u64) -> Option<&Version> {
        self.versions.get(&key).or_else(|| self.pending.get(&key))
    }

    /// A descriptor of a leased version.
    pub(crate) fn descriptor(&self, VersionFd { key, at }: VersionFd) -> BorrowedFd<'_> {
        self.versions[&key].fds[at].as_fd()
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

    /// A completed request of a caller.
    fn request(&self, caller: &Caller, token: Option<Token>) -> Option<Request<'_>> {
        let key = self.requests.get(&token?)?;
        if let Some(Version { record, .. }) = self.versions.get(key) {
            let published = Published { version: record.version, id: record.id.clone() };
            return (record.payer() == caller.uid).then_some(Request::Put(&record.name, published));
        }
        match self.events.manifest(*key)? {
            Manifest::Completed(put) => Some(Request::Put(&put.name, put.published.clone())),
            Manifest::Deleted(deleted) => Some(Request::Deleted(&deleted.name)),
            _ => None,
        }
    }

    /// Resets the budget for a turn of the event loop.
    pub(crate) fn begin_turn(&mut self) {
        self.cleanup_budget = CLEANUPS_PER_TURN;
    }

    /// Whether there is work that no event announces.
    pub(crate) fn has_work(&self) -> bool {
        !self.closed_connections.is_empty()
    }

    fn current(&self, name: &Name) -> &Version {
        let key = name.current().expect("a name has a current version");
        self.versions.get(&key).expect("a name's versions exist")
    }
}

fn token_reused() -> BrokerError {
    let message = "this request number was used by another request: number each request with 128 new random bits";
    BrokerError::new(RefusalCode::Invalid, message)
}
