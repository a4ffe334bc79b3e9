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
        manifest,
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
        EventKind, Lifetime, MAX_KEPT, Maker, NEEDS_BOTH, Owner, Published, PutHeader, PutPartHeader, Restore, Table,
        Token,
    },
};

/// A put on its way to the keeper, and the descriptors that have arrived. Puts of one group become one version.
#[derive(Debug)]
pub(crate) struct NewVersion {
    /// The request, without its parts, sizes and metadata.
    pub(crate) header: PutHeader,
    /// The manifest. Its number, id, owner and terms depend on the name's state when the put begins.
    pub(crate) record: Box<manifest::Version>,
    /// The connections that put the parts.
    pub(crate) makers: Vec<ConnectionId>,
    /// The memfd of the metadata.
    metadata: Option<OwnedFd>,
    /// Of each part, the memfd of its table, if any, and the segments.
    fds: Vec<Vec<OwnedFd>>,
}

impl NewVersion {
    /// A checked put whose descriptors have not arrived.
    pub(crate) fn new(mut header: PutHeader, backend: Backend, caller: &Caller) -> Self {
        header.replace |= header.if_version.is_some();
        let part = |header| manifest::Part { header, maker: caller.describe(), sizes: Vec::new() };
        let parts: Vec<manifest::Part> = std::mem::take(&mut header.parts).into_iter().map(part).collect();
        let fds = parts.iter().map(|_| Vec::new()).collect();
        let record = manifest::Version {
            name: header.name.clone(),
            version: 0,
            id: String::new(),
            created_ms: 0,
            owner: Owner { uid: caller.uid, gid: caller.gid },
            mode: 0,
            lifetime: Lifetime::default(),
            backend,
            keep: 0,
            requests: header.request.into_iter().collect(),
            metadata: header.metadata.take(),
            parts,
            is_unnamed: false,
            is_recalled: false,
            resume_by_ms: None,
            reports: Vec::new(),
        };
        Self { header, record: Box::new(record), makers: vec![caller.connection], metadata: None, fds }
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
        self.metadata = take(self.record.metadata.as_ref(), "the metadata".to_owned());
        for (part, fds) in self.record.parts.iter().zip(&mut self.fds) {
            fds.extend(take(part.header.arrays.as_ref(), format!("part `{}`", part.header.name)));
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
        let backend = self.record.backend;
        let mut parts = self.record.parts.iter_mut().zip(&mut self.fds).peekable();
        for (size, fd) in segments {
            while parts.next_if(|(part, _)| part.sizes.len() == part.segments()).is_some() {}
            let Some((part, fds)) = parts.peek_mut() else { break };
            if checked.is_ok() {
                checked = check_segment(backend, part, size, fd.as_fd(), emulated);
            }
            part.sizes.push(size);
            fds.push(fd);
        }
        checked
    }

    /// The number of segments that have arrived.
    pub(crate) fn arrived(&self) -> usize {
        self.record.parts.iter().map(|part| part.sizes.len()).sum()
    }

    /// The number of segments of the complete put.
    pub(crate) fn segments(&self) -> usize {
        self.record.parts.iter().map(manifest::Part::segments).sum()
    }

    /// Checks that the segments of each part have the claimed size. All have arrived.
    pub(crate) fn check_sizes(&self) -> Result<(), BrokerError> {
        self.record.parts.iter().try_for_each(|manifest::Part { header, sizes, .. }| {
            let (name, want) = (&header.name, header.memory.mapped_size);
            let sum = sizes.iter().fold(0u64, |sum, size| sum.saturating_add(*size));
            match sum == want {
                true => Ok(()),
                false => refuse!(
                    Invalid,
                    "the segments of part `{name}` have {sum} bytes in total, but the part claims {want}"
                ),
            }
        })
    }

    /// Adds the parts of another put of the same group.
    pub(crate) fn join(&mut self, other: Self) {
        if other.record.metadata.is_some() {
            (self.record.metadata, self.metadata) = (other.record.metadata, other.metadata);
        }
        self.makers.extend(other.makers);
        self.record.requests.extend(other.record.requests);
        self.record.parts.extend(other.record.parts);
        self.fds.extend(other.fds);
    }

    /// Sorts the parts as they were announced.
    pub(crate) fn sort(&mut self) {
        let parts = std::mem::take(&mut self.record.parts);
        let mut parts: Vec<_> = parts.into_iter().zip(std::mem::take(&mut self.fds)).collect();
        let announced = &self.header.announced;
        parts.sort_by_cached_key(|(part, _)| announced.iter().position(|name| *name == part.header.name));
        (self.record.parts, self.fds) = parts.into_iter().unzip();
    }

    /// Takes the descriptors, in the order of the manifest.
    pub(crate) fn into_fds(self) -> Vec<OwnedFd> {
        self.metadata.into_iter().chain(self.fds.into_iter().flatten()).collect()
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
        let memory = put.record.parts.iter().map(|part| &part.header.memory);
        let bytes = self.users.check(caller.uid, Resource::Bytes, put.record.charged());
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

    /// Checks a put and gives the version to the keeper. [`Objects::publish`] follows once it is safe. No version of the
    /// name may be pending. Returns the version's key. On failure, its descriptors become garbage.
    pub(crate) fn stage(&mut self, caller: &Caller, put: NewVersion) -> Result<u64, BrokerError> {
        let checked = self.check_put(caller, &put);
        if let Err(refusal) = checked.and_then(|()| self.store.require_room(put.record.descriptors())) {
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

    /// Completes the manifest of a put with the state of its name. Also returns its descriptors.
    fn describe(&self, caller: &Caller, mut put: NewVersion) -> (Box<manifest::Version>, Vec<OwnedFd>) {
        let PutHeader { mode, lifetime, keep, ref restore, .. } = put.header;
        let existing = self.names.get(put.record.name.as_str());
        let record = &mut put.record;
        match restore {
            Some(restore) => {
                (record.version, record.created_ms) = (restore.version, restore.created_ms);
                record.id.clone_from(&restore.id);
                // A restored version keeps its group if the caller is a member of it.
                let keeps_group = caller.is_superuser() || caller.is_member_of(restore.owner.gid);
                let gid = if keeps_group { restore.owner.gid } else { caller.gid };
                record.owner = Owner { uid: restore.owner.uid, gid };
            }
            None => {
                record.version = existing.map_or(0, |name| self.current(name).record.version) + 1;
                record.id = Builder::from_random_bytes(random()).into_uuid().to_string();
                record.created_ms = self.now.ms;
                record.owner = Owner { uid: caller.uid, gid: caller.gid };
            }
        }
        record.owner = existing.map_or(record.owner, |name| name.owner);
        record.mode = existing.map_or_else(|| mode.unwrap_or(0o600), |name| name.mode);
        record.lifetime = lifetime.or(existing.map(|name| name.lifetime)).unwrap_or_default();
        record.keep = keep.or(existing.map(|name| name.keep)).unwrap_or(0);
        let NewVersion { record, metadata, fds, .. } = put;
        (record, metadata.into_iter().chain(fds.into_iter().flatten()).collect())
    }

    /// Publishes a version that the keeper has. `maker` is the connection that put it, if it is still open.
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
