//! Publishes versions: checks them, gives them to the keeper, and makes them available once the keeper has them.

use std::{
    collections::BTreeMap,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use uuid::Builder;

use super::{Name, Objects, Request, Version, event, readers::Rights, token_reused};
use crate::{
    broker::{
        manifest::{self, fds_of},
        server::{
            admit::Resource,
            state::{
                caller::{Caller, ConnectionId, Right},
                inspect::inspect,
                random,
            },
        },
        table,
    },
    driver::{Backend, GRANULARITY},
    error::BrokerError,
    wire::broker::{
        EventKind, MAX_KEPT, Maker, NEEDS_BOTH, Owner, Published, PutHeader, PutPartHeader, Restore, Table, Token,
    },
};

/// A put on its way to the keeper: the request, and the descriptors that have arrived. Puts of one group become one version.
#[derive(Debug)]
pub(crate) struct NewVersion {
    /// The request, without its parts and sizes.
    pub(crate) header: PutHeader,
    pub(crate) backend: Backend,
    /// The connections that put the parts.
    pub(crate) makers: Vec<ConnectionId>,
    /// Tokens that clients gave to their puts.
    pub(crate) requests: Vec<Token>,
    /// The memfd of the metadata.
    pub(crate) metadata: Option<OwnedFd>,
    pub(crate) parts: Vec<NewPart>,
}

/// A part with its descriptors: the memfd of its table, if any, and the segments.
#[derive(Debug)]
pub(crate) struct NewPart {
    pub(crate) record: manifest::Part,
    pub(crate) fds: Vec<OwnedFd>,
}

impl NewPart {
    fn lacks_segments(&self) -> bool {
        (self.record.sizes.len() as u64) < self.record.header.memory.segments
    }
}

impl NewVersion {
    /// A checked put whose descriptors have not arrived.
    pub(crate) fn new(mut header: PutHeader, backend: Backend, caller: &Caller) -> Self {
        header.replace |= header.if_version.is_some();
        let part = |header| NewPart {
            record: manifest::Part { header, maker: caller.describe(), sizes: Vec::new() },
            fds: Vec::new(),
        };
        let parts = std::mem::take(&mut header.parts).into_iter().map(part).collect();
        let (makers, requests) = (vec![caller.connection], header.request.into_iter().collect());
        Self { header, backend, makers, requests, metadata: None, parts }
    }

    /// Takes the tables from the descriptors of the first record. Checks their seals and sizes, and does not read them.
    pub(crate) fn take_tables(&mut self, fds: &mut impl Iterator<Item = OwnedFd>) -> Result<(), BrokerError> {
        let mut checked = Ok(());
        let mut take = |table: Option<&Table>, what: String| {
            let Some(Table::Length(length)) = table else { return None };
            let fd = fds.next()?;
            if let Err(problem) = table::check(fd.as_fd(), *length)
                && checked.is_ok()
            {
                checked = refuse!(Invalid, "{what}: {problem}");
            }
            Some(fd)
        };
        self.metadata = take(self.header.metadata.as_ref(), "the metadata".to_owned());
        for NewPart { record, fds } in &mut self.parts {
            fds.extend(take(record.header.arrays.as_ref(), format!("part `{}`", record.header.name)));
        }
        checked
    }

    /// Takes the next segments. Checks that each can be the claimed memory.
    pub(crate) fn take_segments(
        &mut self,
        segments: impl Iterator<Item = (u64, OwnedFd)>,
        emulated: bool,
    ) -> Result<(), BrokerError> {
        let mut checked = Ok(());
        let mut parts = self.parts.iter_mut().skip_while(|part| !part.lacks_segments()).peekable();
        for (size, fd) in segments {
            while parts.next_if(|part| !part.lacks_segments()).is_some() {}
            let Some(NewPart { record, fds }) = parts.peek_mut() else { break };
            if checked.is_ok() {
                checked = check_segment(self.backend, record, size, fd.as_fd(), emulated);
            }
            record.sizes.push(size);
            fds.push(fd);
        }
        checked
    }

    /// The user whose quota it counts towards.
    pub(crate) fn uid(&self) -> u32 {
        self.parts.first().map_or(0, |part| part.record.maker.uid)
    }

    /// The number of segments that have arrived.
    pub(crate) fn segments(&self) -> usize {
        self.parts.iter().map(|part| part.record.sizes.len()).sum()
    }

    /// The number of segments of the complete put.
    pub(crate) fn all_segments(&self) -> usize {
        self.parts.iter().map(|part| part.record.header.memory.segments as usize).sum()
    }

    /// Checks that the segments of each part have the claimed size. All have arrived.
    pub(crate) fn check_sizes(&self) -> Result<(), BrokerError> {
        self.parts.iter().try_for_each(|part| {
            let PutPartHeader { name, memory, .. } = &part.record.header;
            let sum = part.record.sizes.iter().fold(0u64, |sum, size| sum.saturating_add(*size));
            match sum == memory.mapped_size {
                true => Ok(()),
                false => refuse!(
                    Invalid,
                    "the segments of part `{name}` have {sum} bytes in total, but the part claims {}",
                    memory.mapped_size
                ),
            }
        })
    }

    /// Adds the parts of another put of the same group.
    pub(crate) fn join(&mut self, other: Self) {
        if other.header.metadata.is_some() {
            (self.header.metadata, self.metadata) = (other.header.metadata, other.metadata);
        }
        self.makers.extend(other.makers);
        self.requests.extend(other.requests);
        self.parts.extend(other.parts);
    }

    /// Bytes of memory and tables, as claimed.
    pub(crate) fn bytes(&self) -> u64 {
        let metadata = self.header.metadata.as_ref().map_or(0, Table::length);
        metadata + self.parts.iter().map(|part| part.record.bytes()).sum::<u64>()
    }

    /// The number of descriptors of the complete put.
    pub(crate) fn descriptors(&self) -> usize {
        let tables = self.parts.iter().map(|part| fds_of(part.record.header.arrays.as_ref()));
        fds_of(self.header.metadata.as_ref()) + tables.sum::<usize>() + self.all_segments()
    }

    /// Takes the descriptors, in the order of the manifest.
    pub(crate) fn into_fds(self) -> Vec<OwnedFd> {
        self.metadata.into_iter().chain(self.parts.into_iter().flat_map(|part| part.fds)).collect()
    }
}

fn check_segment(
    backend: Backend,
    part: &manifest::Part,
    size: u64,
    fd: BorrowedFd<'_>,
    emulated: bool,
) -> Result<(), BrokerError> {
    let PutPartHeader { name, memory, .. } = &part.header;
    let at = part.sizes.len();
    if !size.is_multiple_of(GRANULARITY) {
        return refuse!(
            Invalid,
            "segment {at} of part `{name}` has {size} bytes, which is not a multiple of the granularity, {GRANULARITY} bytes"
        );
    }
    inspect(fd, backend, size, memory.immutable, emulated)
        .or_else(|unfit| refuse!(Memory, "segment {at} of part `{name}` can't be held: {unfit}"))
}

impl Objects {
    /// Checks a put, before its memory is received and again when it is complete.
    pub(crate) fn check_put(&self, caller: &Caller, put: &NewVersion) -> Result<(), BrokerError> {
        self.check_terms(caller, put)?;
        let memory = put.parts.iter().map(|part| &part.record.header.memory);
        let bytes = self.users.check(caller.uid, Resource::Bytes, put.bytes());
        bytes.and_then(|()| self.users.check_devices(caller.uid, memory)).map_err(|refusal| {
            match self.names.contains_key(put.header.name.as_str()) {
                true => BrokerError::new(refusal.code, format!("{}; {NEEDS_BOTH}", refusal.message)),
                false => refusal,
            }
        })
    }

    fn check_terms(&self, caller: &Caller, put: &NewVersion) -> Result<(), BrokerError> {
        let PutHeader { name, replace, if_version, mode, keep, lifetime, .. } = &put.header;
        check_mapped(caller)?;
        if let Some(keep) = keep.filter(|&keep| keep > MAX_KEPT) {
            return refuse!(Invalid, "`keep` is {keep}, but at most {MAX_KEPT} earlier versions can be kept");
        }
        if let Some(restore) = &put.header.restore {
            return self.check_restore(caller, &put.header, restore);
        }
        match self.names.get(name.as_str()) {
            None => {
                if let Some(wanted) = if_version {
                    return refuse!(Version, "`{name}` does not exist, so it has no version {wanted}");
                }
                self.users.check(caller.uid, Resource::Objects, 1)
            }
            Some(existing) => {
                let current = self.current(existing).record.version;
                if !replace {
                    return refuse!(Exists, "`{name}` exists at version {current}: replace it or choose another name");
                }
                caller.require(Right::Write, name, existing.owner, existing.mode)?;
                let owns = caller.is_superuser() || caller.uid == existing.owner.uid && !caller.is_unmapped();
                let changes = lifetime.is_some_and(|lifetime| lifetime != existing.lifetime)
                    || keep.is_some_and(|keep| keep != existing.keep);
                if changes && !owns {
                    let (uid, owner) = (caller.uid, existing.owner.uid);
                    return refuse!(
                        Denied,
                        "uid {uid} may replace `{name}`, but only its owner, uid {owner}, may change its lifetime or `keep`"
                    );
                }
                if let Some(wanted) = if_version.filter(|wanted| *wanted != current) {
                    return refuse!(Version, "`{name}` is at version {current}, not {wanted}");
                }
                if let Some(mode) = mode.filter(|mode| *mode != existing.mode) {
                    let was = existing.mode;
                    return refuse!(
                        Invalid,
                        "`{name}` has mode {was:04o}, which a replacement can't change to {mode:04o}"
                    );
                }
                self.check_kept(existing, keep.unwrap_or(existing.keep))
            }
        }
    }

    /// Checks whether the caller may put a version of a name that it wants to claim.
    pub(crate) fn check_claim(&self, caller: &Caller, name: &str) -> Result<(), BrokerError> {
        check_mapped(caller)?;
        match self.names.get(name) {
            None => self.users.check(caller.uid, Resource::Objects, 1),
            Some(existing) => caller.require(Right::Write, name, existing.owner, existing.mode),
        }
    }

    /// Checks whether a name may have one more version and keep `keep` earlier ones.
    fn check_kept(&self, name: &Name, keep: u32) -> Result<(), BrokerError> {
        self.users.check(name.owner.uid, Resource::Kept, name.kept_after_put(keep) - name.kept)
    }

    /// Whether a version of this name waits for the keeper.
    pub(crate) fn is_pending(&self, name: &str) -> bool {
        self.pending.values().any(|version| version.record.name == name)
    }

    /// Checks a put and gives the version to the keeper. [`Objects::publish`] follows once the keeper has confirmed it. No version of the
    /// name may be pending. Returns the version's key. On failure, its descriptors become garbage.
    pub(crate) fn stage(&mut self, caller: &Caller, put: NewVersion) -> Result<u64, BrokerError> {
        let checked = self.check_put(caller, &put);
        if let Err(refusal) = checked.and_then(|()| self.store.require_room(put.descriptors())) {
            self.garbage.push((caller.uid, put.into_fds()));
            return Err(refusal);
        }
        let (record, fds) = self.describe(caller, put);
        self.last_key += 1;
        let key = self.last_key;
        self.users.add_version(&record);
        // Counted now: its owner's other names may be put before it is published.
        match self.names.get_mut(record.name.as_str()) {
            None => self.users.add(record.owner.uid, Resource::Objects, 1),
            Some(name) => {
                let kept = name.kept_after_put(record.keep);
                self.users.recount(name.owner.uid, Resource::Kept, &mut name.kept, kept);
            }
        }
        self.store.send(key, fds.len());
        self.pending.insert(key, Version { record, fds, leases: 0 });
        Ok(key)
    }

    /// The manifest of a put, and its descriptors.
    fn describe(&self, caller: &Caller, put: NewVersion) -> (Box<manifest::Version>, Vec<OwnedFd>) {
        let NewVersion { header, backend, requests, metadata, parts, .. } = put;
        let existing = self.names.get(header.name.as_str());
        let restore = header.restore.as_ref();
        // A restored version keeps its group if the caller is a member of it.
        let own = Owner { uid: restore.map_or(caller.uid, |restore| restore.owner.uid), gid: caller.gid };
        let offered = restore.map(|restore| restore.owner);
        let offered = offered.filter(|owner| caller.is_superuser() || caller.is_member_of(owner.gid));
        let next = existing.map_or(0, |name| self.current(name).record.version) + 1;
        let new_id = || Builder::from_random_bytes(random()).into_uuid().to_string();
        let (parts, fds): (Vec<_>, Vec<_>) = parts.into_iter().map(|part| (part.record, part.fds)).unzip();
        let record = manifest::Version {
            version: restore.map_or(next, |restore| restore.version),
            id: restore.map_or_else(new_id, |restore| restore.id.clone()),
            created_ms: restore.map_or(self.now.ms, |restore| restore.created_ms),
            owner: existing.map_or(offered.unwrap_or(own), |name| name.owner),
            mode: existing.map_or_else(|| header.mode.unwrap_or(0o600), |name| name.mode),
            lifetime: header.lifetime.or(existing.map(|name| name.lifetime)).unwrap_or_default(),
            keep: header.keep.or(existing.map(|name| name.keep)).unwrap_or(0),
            backend,
            name: header.name,
            requests,
            metadata: header.metadata,
            parts,
            is_unnamed: false,
            is_recalled: false,
            reports: Vec::new(),
        };
        (Box::new(record), metadata.into_iter().chain(fds.into_iter().flatten()).collect())
    }

    /// Publishes a version that the keeper has confirmed. `maker` is the connection that put it, if it is still open.
    pub(crate) fn publish(&mut self, key: u64, maker: Option<ConnectionId>) -> Option<Published> {
        let Version { record, fds, .. } = self.pending.remove(&key)?;
        let replaces = self.names.contains_key(record.name.as_str());
        let kind = if replaces { EventKind::Replaced } else { EventKind::Published };
        let server = || Maker { pid: 0, uid: record.owner.uid, command: None };
        let by = record.parts.first().map_or_else(server, |part| part.maker.clone());
        self.events.publish(event(kind, &record, record.created_ms, &by));
        let published = Published { version: record.version, id: record.id.clone() };
        let name = record.name.clone();
        tracing::debug!(
            name,
            version = record.version,
            bytes = record.charged(),
            uid = by.uid,
            pid = by.pid,
            "published"
        );
        self.add_version(key, record, fds);
        self.set_maker(&name, maker);
        // Versions further back were not covered before. They still exist because they have leases.
        self.drop_old(&name, MAX_KEPT as usize + 1);
        self.note_expiry(&name);
        Some(published)
    }

    /// Adds a version that is counted. It becomes the current version of its name, unless it has lost the name.
    pub(super) fn add_version(&mut self, key: u64, record: Box<manifest::Version>, fds: Vec<OwnedFd>) {
        self.requests.extend(record.requests.iter().map(|request| (*request, key)));
        self.ids.insert(record.id.clone(), key);
        record.reports.iter().for_each(|report| self.users.add(report.reader.uid, Resource::Reports, 1));
        if !record.is_unnamed {
            self.add_to_name(key, &record);
        }
        self.versions.insert(key, Version { record, fds, leases: 0 });
    }

    fn add_to_name(&mut self, key: u64, record: &manifest::Version) {
        let manifest::Version { owner, mode, lifetime, keep, .. } = *record;
        if !self.names.contains_key(record.name.as_str()) {
            let name: Arc<str> = record.name.as_str().into();
            self.name_readers.add(Rights::of(owner, mode, None), Arc::clone(&name));
            let new = Name {
                owner,
                mode,
                lifetime,
                keep,
                versions: BTreeMap::new(),
                kept: 0,
                maker: None,
                idle_since: self.now.at,
                leases: 0,
            };
            self.names.insert(name, new);
        }
        let name = self.names.get_mut(record.name.as_str()).expect("the name was just added");
        (name.lifetime, name.keep) = (lifetime, keep);
        // Two versions have a number if the keeper had an outdated entry of a name that was put again.
        if let Some(outdated) = name.versions.insert(record.version, key)
            && let Some(version) = self.versions.get_mut(&outdated)
        {
            version.record.is_unnamed = true;
            self.store.update(outdated);
        }
        let earlier = name.earlier();
        self.users.recount(name.owner.uid, Resource::Kept, &mut name.kept, earlier);
        if name.leases == 0 {
            name.idle_since = self.now.at;
        }
    }

    /// The version that an earlier attempt of this put published.
    ///
    /// # Errors
    /// [`RefusalCode::Invalid`] if the token belongs to another request.
    pub(crate) fn published_before(
        &self,
        caller: &Caller,
        name: &str,
        request: Token,
    ) -> Result<Option<Published>, BrokerError> {
        match self.request(caller, Some(request)) {
            None => Ok(None),
            Some(Request::Put(of, published)) if of == name => Ok(Some(published)),
            Some(_) => Err(token_reused()),
        }
    }

    /// The key of a version that a caller wants to restore, if it already exists and the caller may restore it.
    pub(crate) fn restored(&self, caller: &Caller, name: &str, restore: &Restore) -> Option<u64> {
        let same = |of: &manifest::Version| {
            (of.name.as_str(), of.version, of.id.as_str(), of.owner.uid)
                == (name, restore.version, restore.id.as_str(), restore.owner.uid)
        };
        let may = caller.is_superuser() || !caller.is_unmapped() && caller.uid == restore.owner.uid;
        let may = may && !self.events.was_deleted(name, restore.owner.uid);
        let key = *self.ids.get(&restore.id)?;
        self.versions.get(&key).filter(|version| may && same(&version.record)).map(|_| key)
    }

    pub(crate) fn current_key(&self, name: &str) -> Option<u64> {
        self.names.get(name)?.current()
    }

    /// Checks whether the caller may restore this version, which the previous server had.
    fn check_restore(&self, caller: &Caller, put: &PutHeader, restore: &Restore) -> Result<(), BrokerError> {
        let name = put.name.as_str();
        let Restore { version, owner, id, .. } = restore;
        if !(caller.is_superuser() || caller.uid == owner.uid) {
            let (uid, owner) = (caller.uid, owner.uid);
            return refuse!(Denied, "uid {uid} may not restore `{name}`: its owner was uid {owner}");
        }
        if !(1..=u64::MAX / 2).contains(version)
            || uuid::Uuid::parse_str(id).map(|id| id.to_string()).ok().as_ref() != Some(id)
        {
            return refuse!(Invalid, "version {version} with id `{id}` is not a valid version of `{name}`");
        }
        if self.events.was_deleted(name, owner.uid) {
            return refuse!(
                Denied,
                "`{name}` was deleted after this broker lost it: put it again instead of restoring it"
            );
        }
        if let Some(known) = self.ids.get(id).and_then(|key| self.versions.get(key)) {
            return refuse!(
                Exists,
                "version {} of `{}` already has the id {id}",
                known.record.version,
                known.record.name
            );
        }
        let Some(existing) = self.names.get(name) else { return self.users.check(owner.uid, Resource::Objects, 1) };
        let current = &self.current(existing).record;
        if current.version >= *version {
            return refuse!(Exists, "`{name}` exists at version {} with the id {}", current.version, current.id);
        }
        if existing.owner.uid != owner.uid {
            return refuse!(
                Denied,
                "the owner of `{name}` is uid {}, but the restored version belonged to uid {}",
                existing.owner.uid,
                owner.uid
            );
        }
        self.check_kept(existing, put.keep.unwrap_or(existing.keep))
    }
}

/// Refuses unmapped callers, which can't own objects.
fn check_mapped(caller: &Caller) -> Result<(), BrokerError> {
    if !caller.is_unmapped() {
        return Ok(());
    }
    let uid = caller.uid;
    refuse!(Denied, "uid {uid} stands for all unmapped users, so it can't own objects: put as another user")
}
