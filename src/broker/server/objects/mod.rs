//! Names, versions and leases: what the broker holds, and the catalogue of it. No sockets, no waiting.

mod lifetimes;
mod select;
mod usage;
mod view;

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    os::fd::{BorrowedFd, OwnedFd},
    time::{Instant, SystemTime},
};

use uuid::Builder;

pub(super) use self::select::{Answer, LeaseParts, Question, Selected, Selection};
use self::usage::Users;
use super::{
    ConnectionId, Quota,
    caller::{Caller, Right},
    segments::{NotKept, Segments},
};
use crate::{
    broker::catalogue::{
        Catalogue, CatalogueError, Record, SegmentId,
        record::{self, Table},
    },
    driver::Backend,
    error::{BrokerError, RefusalCode},
    wire::{
        Memory,
        broker::{Attached, Lifetime, Maker, Owner, Published, Token},
    },
};

/// What the broker holds.
#[derive(Debug)]
pub(super) struct Objects {
    names: BTreeMap<String, Name>,
    /// By their keys.
    versions: HashMap<u64, Version>,
    leases: HashMap<Token, Held>,
    /// The leases by their numbers.
    numbers: BTreeMap<u64, Token>,
    users: Users,
    segments: Segments,
    catalogue: Catalogue,
    last_key: u64,
    last_lease: u64,
    /// Descriptors that the caller is to close where that may block.
    garbage: Vec<OwnedFd>,
    /// Versions that are gone, which could not be written down.
    undropped: Vec<u64>,
    /// Names whose time may be over at a moment.
    expiries: Vec<(Instant, String)>,
}

/// A name that exists.
#[derive(Debug)]
struct Name {
    owner: Owner,
    mode: u16,
    lifetime: Lifetime,
    keep: u32,
    /// The keys of its versions that are there, the current one last.
    versions: VecDeque<u64>,
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

impl Version {
    /// Bytes of memory, as claimed.
    fn bytes(&self) -> u64 {
        self.record.parts.iter().map(|part| part.memory.mapped_size).sum()
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
}

/// A part that was checked and is to be published.
#[derive(Debug)]
pub(super) struct NewPart {
    pub(super) name: String,
    pub(super) memory: Memory,
    pub(super) arrays: Option<NewTable>,
    pub(super) array_count: u64,
    pub(super) digest: Option<String>,
    pub(super) maker: Maker,
    pub(super) segments: Vec<(u64, OwnedFd)>,
}

/// A table that was checked and is to be kept.
#[derive(Debug)]
pub(super) enum NewTable {
    Inline(Attached),
    Memfd { fd: OwnedFd, length: u64 },
}

/// What a put says besides its parts.
#[derive(Debug, Clone)]
pub(super) struct Terms {
    pub(super) name: String,
    pub(super) replace: bool,
    pub(super) if_version: Option<u64>,
    pub(super) mode: Option<u16>,
    pub(super) lifetime: Option<Lifetime>,
    pub(super) keep: Option<u32>,
    pub(super) backend: Backend,
}

/// The most earlier versions that a name keeps.
const MAX_KEPT: u32 = 64;

impl Objects {
    pub(super) fn new(quota: Quota) -> Result<Self, CatalogueError> {
        Ok(Self {
            names: BTreeMap::new(),
            versions: HashMap::new(),
            leases: HashMap::new(),
            numbers: BTreeMap::new(),
            users: Users::new(quota),
            segments: Segments::default(),
            catalogue: Catalogue::create()?,
            last_key: 0,
            last_lease: 0,
            garbage: Vec::new(),
            undropped: Vec::new(),
            expiries: Vec::new(),
        })
    }

    /// The descriptor of a segment that a lease is of.
    pub(super) fn segment(&self, id: SegmentId) -> BorrowedFd<'_> {
        self.segments.get(id)
    }

    /// How many descriptors are kept.
    pub(super) fn descriptors(&self) -> usize {
        self.segments.len() + 1
    }

    pub(super) fn users(&mut self) -> &mut Users {
        &mut self.users
    }

    /// Descriptors to close.
    pub(super) fn take_garbage(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.garbage)
    }

    /// Names to look at again, and when.
    pub(super) fn take_expiries(&mut self) -> Vec<(Instant, String)> {
        std::mem::take(&mut self.expiries)
    }

    /// Whether a name exists and has a version that a get with these words finds now.
    pub(super) fn find(&self, name: &str, version: Option<u64>, newer_than: Option<u64>) -> Option<u64> {
        let name = self.names.get(name)?;
        let fits = |key: &&u64| {
            let number = self.versions.get(*key).map_or(0, |found| found.record.version);
            version.is_none_or(|wanted| wanted == number) && newer_than.is_none_or(|older| number > older)
        };
        match version {
            Some(_) => name.versions.iter().rev().find(fits).copied(),
            None => name.versions.back().filter(fits).copied(),
        }
    }

    /// Checks what can be checked of a put before its memory is looked at, and again when it is published.
    pub(super) fn check_put(
        &self,
        caller: &Caller,
        socket: &impl std::os::fd::AsFd,
        terms: &Terms,
        bytes: u64,
    ) -> Result<(), BrokerError> {
        let Terms { name, replace, if_version, mode, keep, .. } = terms;
        let refuse = |code, message: String| Err(BrokerError::new(code, message));
        if caller.is_unmapped() {
            let uid = caller.uid;
            return refuse(
                RefusalCode::Denied,
                format!("uid {uid} stands for all users without a number here, and owns nothing: put as another user"),
            );
        }
        if let Some(keep) = keep.filter(|&keep| keep > MAX_KEPT) {
            return refuse(
                RefusalCode::Invalid,
                format!("{keep} earlier versions are too many to keep: at most {MAX_KEPT}"),
            );
        }
        match self.names.get(name) {
            None => {
                if let Some(wanted) = if_version {
                    let message = format!("`{name}` has no version {wanted}: there is no such object");
                    return refuse(RefusalCode::Version, message);
                }
                self.users.check_object(caller.uid)?;
            }
            Some(existing) => {
                let current = self.current(existing).record.version;
                if !replace {
                    let message = format!("`{name}` exists, at version {current}: replace it, or choose another name");
                    return refuse(RefusalCode::Exists, message);
                }
                caller.require(Right::Write, name, existing.owner, existing.mode, socket)?;
                let owns = caller.is_superuser() || caller.uid == existing.owner.uid && !caller.is_unmapped();
                let changes = terms.lifetime.is_some_and(|lifetime| lifetime != existing.lifetime)
                    || keep.is_some_and(|keep| keep != existing.keep);
                if changes && !owns {
                    let (uid, owner) = (caller.uid, existing.owner.uid);
                    let message =
                        format!("uid {uid} may replace `{name}`, and not say how long it stays: it is uid {owner}'s");
                    return refuse(RefusalCode::Denied, message);
                }
                if let Some(wanted) = if_version.filter(|wanted| *wanted != current) {
                    let message = format!("`{name}` is at version {current}, and not at {wanted}");
                    return refuse(RefusalCode::Version, message);
                }
                if let Some(mode) = mode.filter(|mode| *mode != existing.mode) {
                    let was = existing.mode;
                    let message = format!(
                        "`{name}` has mode {was:04o} and keeps it when it is replaced: {mode:04o} was asked for"
                    );
                    return refuse(RefusalCode::Invalid, message);
                }
            }
        }
        self.users.check_bytes(caller.uid, bytes)
    }

    /// Publishes a version. On failure nothing of it is kept.
    pub(super) fn publish(
        &mut self,
        caller: &Caller,
        socket: &impl std::os::fd::AsFd,
        terms: &Terms,
        metadata: Option<NewTable>,
        parts: Vec<NewPart>,
    ) -> Result<Published, BrokerError> {
        let bytes = parts.iter().map(|part| part.memory.mapped_size).sum();
        if let Err(refusal) = self.check_put(caller, socket, terms, bytes) {
            self.discard(metadata, parts);
            return Err(refusal);
        }
        let mut kept = Vec::new();
        let result = self.keep(metadata, parts, &mut kept);
        let (metadata, parts) = match result {
            Ok(both) => both,
            Err(refusal) => {
                self.forget(kept);
                return Err(refusal);
            }
        };
        let existing = self.names.get(&terms.name);
        let owner = existing.map_or(Owner { uid: caller.uid, gid: caller.gid }, |name| name.owner);
        let mode = existing.map_or_else(|| terms.mode.unwrap_or(0o600), |name| name.mode);
        let lifetime = terms.lifetime.or(existing.map(|name| name.lifetime)).unwrap_or_default();
        let keep = terms.keep.or(existing.map(|name| name.keep)).unwrap_or(0);
        let number = existing.map_or(0, |name| self.current(name).record.version) + 1;
        let record = record::Version {
            key: self.last_key + 1,
            name: terms.name.clone(),
            version: number,
            id: Builder::from_random_bytes(random()).into_uuid().to_string(),
            created_ms: now_ms(),
            owner,
            mode,
            lifetime,
            backend: terms.backend,
            keep,
            metadata,
            parts,
        };
        let published = Published { version: number, id: record.id.clone() };
        let entry = Record::Published(Box::new(record));
        if let Err(error) = self.catalogue.append(&entry) {
            self.forget(kept);
            return Err(unwritten(error));
        }
        let Record::Published(record) = entry else { return Err(unwritten_kind()) };
        self.last_key += 1;
        let version = Version { record: *record, leases: 0, named: true, reports: Vec::new() };
        self.users.add_version(version.payer(), version.bytes(), &version.record.parts);
        self.versions.insert(self.last_key, version);
        let name = self.names.entry(terms.name.clone()).or_insert_with(|| {
            self.users.add_object(owner.uid);
            let (versions, idle_since) = (VecDeque::new(), Instant::now());
            Name { owner, mode, lifetime, keep, versions, maker: None, idle_since, leases: 0, looked_at: None }
        });
        (name.lifetime, name.keep) = (lifetime, keep);
        name.versions.push_back(self.last_key);
        name.maker = Some(caller.connection);
        if name.leases == 0 {
            name.idle_since = Instant::now();
        }
        self.drop_old(&terms.name);
        self.note_expiry(&terms.name);
        tracing::info!(name = terms.name, version = number, bytes, uid = caller.uid, pid = caller.pid, "published");
        Ok(published)
    }

    /// Puts the descriptors of parts into the store. What was kept so far is in `kept`, also after a failure.
    fn keep(
        &mut self,
        metadata: Option<NewTable>,
        parts: Vec<NewPart>,
        kept: &mut Vec<SegmentId>,
    ) -> Result<(Option<Table>, Vec<record::Part>), BrokerError> {
        // The first failure. What comes behind it is closed.
        let mut failed = None;
        let mut add = |fd: OwnedFd, size: u64| match self.segments.add(fd, size) {
            Ok((id, duplicate)) => {
                self.garbage.extend(duplicate);
                kept.push(id);
                Some(id)
            }
            Err(NotKept { fd, reason }) => {
                self.garbage.push(fd);
                failed.get_or_insert(reason);
                None
            }
        };
        let table = |table: NewTable, add: &mut dyn FnMut(OwnedFd, u64) -> Option<SegmentId>| match table {
            NewTable::Inline(text) => Some(Table::Inline(text)),
            NewTable::Memfd { fd, length } => add(fd, length).map(|segment| Table::Kept { segment, length }),
        };
        let metadata = metadata.and_then(|metadata| table(metadata, &mut add));
        let mut records = Vec::with_capacity(parts.len());
        for part in parts {
            let NewPart { name, memory, arrays, array_count, digest, maker, segments } = part;
            let arrays = arrays.and_then(|arrays| table(arrays, &mut add));
            let segments = segments.into_iter().filter_map(|(size, fd)| add(fd, size).map(|id| (id, size))).collect();
            records.push(record::Part { name, memory, arrays, array_count, maker, digest, segments });
        }
        match failed {
            None => Ok((metadata, records)),
            Some(reason) => Err(BrokerError::new(RefusalCode::Memory, reason.to_string())),
        }
    }

    /// Takes back what was kept of a put that failed.
    fn forget(&mut self, kept: Vec<SegmentId>) {
        for id in kept {
            self.garbage.extend(self.segments.release(id));
        }
    }

    /// Closes what was to be published.
    pub(super) fn discard(&mut self, metadata: Option<NewTable>, parts: Vec<NewPart>) {
        let mut tables = vec![metadata];
        for part in parts {
            tables.push(part.arrays);
            self.garbage.extend(part.segments.into_iter().map(|(_, fd)| fd));
        }
        self.garbage.extend(tables.into_iter().flatten().filter_map(|table| match table {
            NewTable::Memfd { fd, .. } => Some(fd),
            NewTable::Inline(_) => None,
        }));
    }

    /// Takes a name away.
    pub(super) fn delete(&mut self, caller: &Caller, name: &str) -> Result<(), BrokerError> {
        let Some(existing) = self.names.get(name) else {
            return Err(BrokerError::new(RefusalCode::Absent, format!("there is no object `{name}`")));
        };
        let owner = existing.owner.uid;
        if !(caller.is_superuser() || caller.uid == owner && !caller.is_unmapped()) {
            let message = format!("uid {} may not delete `{name}`: it is uid {owner}'s", caller.uid);
            return Err(BrokerError::new(RefusalCode::Denied, message));
        }
        self.remove(name, "deleted")
    }

    /// Takes a name away, and the versions of it that no lease holds.
    fn remove(&mut self, name: &str, why: &'static str) -> Result<(), BrokerError> {
        self.catalogue.append(&Record::Deleted { name: name.to_owned() }).map_err(unwritten)?;
        let Some(gone) = self.names.remove(name) else { return Ok(()) };
        self.users.remove_object(gone.owner.uid);
        tracing::info!(name, leases = gone.leases, "{why}");
        for key in gone.versions {
            if let Some(version) = self.versions.get_mut(&key) {
                version.named = false;
            }
            self.drop_if_unused(key);
        }
        self.compact();
        Ok(())
    }

    /// Gives back versions before the current one that nothing keeps.
    fn drop_old(&mut self, name: &str) {
        let Some(of) = self.names.get_mut(name) else { return };
        let keep = of.keep as usize + 1;
        let mut dropped = Vec::new();
        let beyond = of.versions.len().saturating_sub(keep);
        let (versions, mut at) = (&self.versions, 0);
        of.versions.retain(|key| {
            at += 1;
            let stays = at > beyond || versions.get(key).is_some_and(|version| version.leases > 0);
            if !stays {
                dropped.push(*key);
            }
            stays
        });
        for key in dropped {
            if let Some(version) = self.versions.get_mut(&key) {
                version.named = false;
            }
            self.drop_if_unused(key);
        }
        self.compact();
    }

    /// Gives the memory of a version back if it has no name and no lease.
    fn drop_if_unused(&mut self, key: u64) {
        let unused = |version: &Version| !version.named && version.leases == 0;
        if !self.versions.get(&key).is_some_and(unused) {
            return;
        }
        // The numbers of its segments are used again: not before it is written down that they are no more its.
        if let Err(error) = self.catalogue.append(&Record::Dropped { key }) {
            tracing::error!(%error, "cannot write down that a version is gone: its memory stays until that is possible");
            return self.undropped.push(key);
        }
        let Some(version) = self.versions.remove(&key) else { return };
        self.users.remove_version(version.payer(), version.bytes(), &version.record.parts);
        let tables = version.record.metadata.iter().chain(version.record.parts.iter().flat_map(|part| &part.arrays));
        let tables = tables.filter_map(|table| match table {
            Table::Kept { segment, .. } => Some(*segment),
            Table::Inline(_) => None,
        });
        let segments = version.record.parts.iter().flat_map(|part| part.segments.iter().map(|(id, _)| *id));
        for id in tables.chain(segments) {
            self.garbage.extend(self.segments.release(id));
        }
    }

    /// Gives a lease of a version. `bytes` is what is handed out of it.
    pub(super) fn lease(&mut self, caller: &Caller, key: u64, bytes: u64) -> Result<Token, BrokerError> {
        self.users.check_lease(caller.uid)?;
        let record = record::Lease {
            token: Token(random()),
            key,
            uid: caller.uid,
            pid: caller.pid,
            since_ms: now_ms(),
            size: bytes,
        };
        let token = record.token;
        let entry = Record::Leased(record);
        self.catalogue.append(&entry).map_err(unwritten)?;
        let Record::Leased(record) = entry else { return Err(unwritten_kind()) };
        self.last_lease += 1;
        self.users.add_lease(caller.uid);
        if let Some(version) = self.versions.get_mut(&key) {
            version.leases += 1;
            if let Some(name) = self.names.get_mut(&version.record.name).filter(|_| version.named) {
                name.leases += 1;
            }
        }
        self.numbers.insert(self.last_lease, token);
        self.leases.insert(token, Held { number: self.last_lease, record });
        Ok(token)
    }

    /// Ends a lease.
    pub(super) fn end_lease(&mut self, token: Token) {
        let Some(held) = self.leases.remove(&token) else { return };
        self.numbers.remove(&held.number);
        self.users.remove_lease(held.record.uid);
        // Not written down, it would come back after a crash, and end then, since no process has its token.
        if let Err(error) = self.catalogue.append(&Record::Ended { token }) {
            tracing::error!(%error, "cannot write down that a lease ended");
        }
        let Some(version) = self.versions.get_mut(&held.record.key) else { return };
        version.leases -= 1;
        if version.named {
            let name = version.record.name.clone();
            if let Some(of) = self.names.get_mut(&name) {
                of.leases -= 1;
                if of.leases == 0 {
                    of.idle_since = Instant::now();
                }
            }
            if version.leases == 0 {
                self.drop_old(&name);
            }
            self.note_expiry(&name);
        } else {
            self.drop_if_unused(held.record.key);
        }
        self.compact();
    }

    /// Notes what a reader said of a version that it leases.
    pub(super) fn report(&mut self, caller: &Caller, token: Token, message: String) {
        const MOST: usize = 16;
        let Some(key) = self.leases.get(&token).map(|held| held.record.key) else { return };
        let Some(version) = self.versions.get_mut(&key).filter(|version| version.reports.len() < MOST) else { return };
        let report = record::Report { key, reader: caller.describe(), at_ms: now_ms(), message };
        let record = &version.record;
        tracing::warn!(
            name = record.name,
            version = record.version,
            uid = caller.uid,
            pid = caller.pid,
            message = report.message,
            "a reader reports that memory is not as claimed"
        );
        if let Err(error) = self.catalogue.append(&Record::Reported(report.clone())) {
            tracing::error!(%error, "cannot write down a report");
        }
        version.reports.push(report);
    }

    /// Writes the catalogue anew once most of it is history.
    fn compact(&mut self) {
        for key in std::mem::take(&mut self.undropped) {
            self.drop_if_unused(key);
        }
        if !self.catalogue.should_compact() {
            return;
        }
        match self.catalogue.compact(records(&self.names, &self.versions, &self.leases)) {
            Ok(old) => self.garbage.push(old),
            Err(error) => tracing::warn!(%error, "cannot write the catalogue anew: it goes on growing"),
        }
    }

    fn current(&self, name: &Name) -> &Version {
        let key = name.versions.back().expect("a name has a current version");
        self.versions.get(key).expect("a name's versions are there")
    }
}

/// The records from which all that is held can be read again. What has no name comes first: a `Deleted` takes the name of all before
/// it.
fn records<'a>(
    names: &'a BTreeMap<String, Name>,
    versions: &'a HashMap<u64, Version>,
    leases: &'a HashMap<Token, Held>,
) -> impl Iterator<Item = Record> + 'a {
    let published = |version: &Version| Record::Published(Box::new(version.record.clone()));
    let unnamed = versions
        .values()
        .filter(|version| !version.named)
        .flat_map(move |version| [published(version), Record::Deleted { name: version.record.name.clone() }]);
    let named = names.values().flat_map(|name| &name.versions).filter_map(|key| versions.get(key)).map(published);
    let reports = versions.values().flat_map(|version| &version.reports).cloned().map(Record::Reported);
    let leases = leases.values().map(|held| Record::Leased(held.record.clone()));
    unnamed.chain(named).chain(reports).chain(leases)
}

fn unwritten(error: CatalogueError) -> BrokerError {
    tracing::error!(%error, "the catalogue can't be written");
    BrokerError::new(RefusalCode::Failed, format!("the broker can't write its catalogue: {error}"))
}

fn unwritten_kind() -> BrokerError {
    BrokerError::new(RefusalCode::Failed, "the broker wrote another record than it meant")
}

/// So many random bytes. See getrandom(2).
pub(super) fn random() -> [u8; 16] {
    let mut bytes = [0; 16];
    let filled = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    // Requests of up to 256 bytes are neither cut short nor interrupted once the pool is initialised.
    assert_eq!(filled, Ok(bytes.len()), "getrandom(2) failed");
    bytes
}

/// The time, in milliseconds since 1970.
pub(super) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
