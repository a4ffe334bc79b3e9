//! Publishes versions: checks them, keeps their descriptors, logs them.

use std::{collections::BTreeMap, os::fd::OwnedFd, sync::Arc};

use uuid::Builder;

use super::{Name, Objects, Version, token_reused, write_failed};
use crate::{
    broker::{
        catalogue::{
            Record, SegmentId,
            record::{self, Table},
        },
        keeper::Mark,
        server::state::{
            caller::{Caller, Right},
            random::random,
            refuse,
            segments::NotHeld,
        },
    },
    driver::Backend,
    error::{BrokerError, RefusalCode},
    wire::{
        Memory,
        broker::{Attached, Lifetime, MAX_KEPT, Maker, NEEDS_BOTH, Owner, Published, Restore, Token},
    },
};

/// A checked part, ready to publish.
#[derive(Debug)]
pub(crate) struct NewPart {
    pub(crate) name: String,
    pub(crate) memory: Memory,
    pub(crate) arrays: Option<NewTable>,
    pub(crate) array_count: u64,
    pub(crate) digest: Option<String>,
    pub(crate) maker: Maker,
    pub(crate) segments: Vec<(u64, OwnedFd)>,
}

impl NewPart {
    /// Bytes of memory and table, as claimed.
    pub(crate) fn bytes(&self) -> u64 {
        self.memory.mapped_size + self.arrays.as_ref().map_or(0, NewTable::length)
    }
}

/// A checked table, ready to publish.
#[derive(Debug)]
pub(crate) enum NewTable {
    Inline(Attached),
    Memfd { fd: OwnedFd, length: u64 },
}

impl NewTable {
    pub(crate) fn length(&self) -> u64 {
        match self {
            Self::Inline(text) => text.as_str().len() as u64,
            Self::Memfd { length, .. } => *length,
        }
    }
}

/// The arguments of a put, without its parts.
#[derive(Debug, Clone)]
pub(crate) struct Terms {
    pub(crate) name: String,
    pub(crate) replace: bool,
    pub(crate) if_version: Option<u64>,
    pub(crate) mode: Option<u16>,
    pub(crate) lifetime: Option<Lifetime>,
    pub(crate) keep: Option<u32>,
    pub(crate) backend: Backend,
    /// Tokens that clients gave to their puts.
    pub(crate) requests: Vec<Token>,
    /// The version to restore, as a client remembers it.
    pub(crate) restore: Option<Restore>,
}

/// A version whose descriptors the keeper has not confirmed.
#[derive(Debug)]
pub(crate) struct Staged {
    uid: u32,
    metadata: Option<Table>,
    parts: Vec<record::Part>,
    held: Vec<SegmentId>,
    /// The version can be published once the keeper has everything up to this mark.
    pub(crate) mark: Mark,
}

#[cfg(test)]
impl Staged {
    pub(crate) fn held(&self) -> &[SegmentId] {
        &self.held
    }
}

impl Objects {
    /// Checks a put, before its memory is examined and again when it is published.
    pub(crate) fn check_put(&self, caller: &Caller, terms: &Terms, bytes: u64) -> Result<(), BrokerError> {
        let Terms { name, replace, if_version, mode, keep, .. } = terms;
        check_mapped(caller)?;
        if let Some(keep) = keep.filter(|&keep| keep > MAX_KEPT) {
            return refuse(
                RefusalCode::Invalid,
                format!("`keep` is {keep}, but at most {MAX_KEPT} earlier versions can be kept"),
            );
        }
        if let Some(restore) = &terms.restore {
            self.check_restore(caller, name, restore, keep.unwrap_or(0))?;
            return self.users.check_bytes(caller.uid, bytes);
        }
        match self.names.get(name.as_str()) {
            None => {
                if let Some(wanted) = if_version {
                    return refuse(
                        RefusalCode::Version,
                        format!("`{name}` does not exist, so it has no version {wanted}"),
                    );
                }
                self.users.check_objects(caller.uid, 1, 0)?;
            }
            Some(existing) => {
                let current = self.current(existing).record.version;
                if !replace {
                    return refuse(
                        RefusalCode::Exists,
                        format!("`{name}` exists at version {current}: replace it or choose another name"),
                    );
                }
                caller.require(Right::Write, name, existing.owner, existing.mode)?;
                let owns = caller.is_superuser() || caller.uid == existing.owner.uid && !caller.is_unmapped();
                let changes = terms.lifetime.is_some_and(|lifetime| lifetime != existing.lifetime)
                    || keep.is_some_and(|keep| keep != existing.keep);
                if changes && !owns {
                    let (uid, owner) = (caller.uid, existing.owner.uid);
                    return refuse(
                        RefusalCode::Denied,
                        format!(
                            "uid {uid} may replace `{name}`, but only its owner, uid {owner}, may change its lifetime or `keep`"
                        ),
                    );
                }
                if let Some(wanted) = if_version.filter(|wanted| *wanted != current) {
                    return refuse(RefusalCode::Version, format!("`{name}` is at version {current}, not {wanted}"));
                }
                if let Some(mode) = mode.filter(|mode| *mode != existing.mode) {
                    let was = existing.mode;
                    return refuse(
                        RefusalCode::Invalid,
                        format!("`{name}` has mode {was:04o}, which a replacement can't change to {mode:04o}"),
                    );
                }
                self.check_kept(existing, keep.unwrap_or(existing.keep))?;
                return self
                    .users
                    .check_bytes(caller.uid, bytes)
                    .map_err(|refusal| BrokerError::new(refusal.code, format!("{}; {NEEDS_BOTH}", refusal.message)));
            }
        }
        self.users.check_bytes(caller.uid, bytes)
    }

    /// Checks that a put of this name does not exceed the user's limits on devices and their memory.
    pub(crate) fn check_devices<'a>(
        &self,
        caller: &Caller,
        name: &str,
        memory: impl Iterator<Item = &'a Memory>,
    ) -> Result<(), BrokerError> {
        self.users.check_devices(caller.uid, memory).map_err(|refusal| match self.names.contains_key(name) {
            true => BrokerError::new(refusal.code, format!("{}; {NEEDS_BOTH}", refusal.message)),
            false => refusal,
        })
    }

    /// Checks whether the caller may put a version of a name that it wants to claim.
    pub(crate) fn check_claim(&self, caller: &Caller, name: &str) -> Result<(), BrokerError> {
        check_mapped(caller)?;
        match self.names.get(name) {
            None => self.users.check_objects(caller.uid, 1, 0),
            Some(existing) => caller.require(Right::Write, name, existing.owner, existing.mode),
        }
    }

    /// Checks whether a name may have one more version and keep `keep` earlier ones.
    fn check_kept(&self, name: &Name, keep: u32) -> Result<(), BrokerError> {
        let kept = u64::from(keep).min(name.versions.len() as u64);
        self.users.check_objects(name.owner.uid, 0, kept.saturating_sub(name.kept))
    }

    /// Keeps the descriptors of a put before it is published. On failure, none are kept.
    pub(crate) fn stage(&mut self, metadata: Option<NewTable>, parts: Vec<NewPart>) -> Result<Staged, BrokerError> {
        let uid = parts.first().map_or(0, |part| part.maker.uid);
        let descriptors = 1 + parts.iter().map(|part| part.segments.len() + 1).sum::<usize>();
        if let Err(refusal) = self.store.require_room(descriptors) {
            self.discard(metadata, parts);
            return Err(refusal);
        }
        let mut held = Vec::new();
        match self.hold(uid, metadata, parts, &mut held) {
            Ok((metadata, parts)) => Ok(Staged { uid, metadata, parts, held, mark: self.store.mark() }),
            Err(refusal) => {
                self.forget(uid, held);
                Err(refusal)
            }
        }
    }

    /// Undoes [`Objects::stage`].
    pub(crate) fn unstage(&mut self, staged: Staged) {
        self.forget(staged.uid, staged.held);
    }

    /// Publishes a staged version. On failure, nothing is kept.
    pub(crate) fn publish(&mut self, caller: &Caller, terms: &Terms, staged: Staged) -> Result<Published, BrokerError> {
        let Staged { uid, metadata, parts, held, .. } = staged;
        let bytes = record::bytes_of(metadata.as_ref(), &parts);
        let checked = self.check_put(caller, terms, bytes);
        if let Err(refusal) =
            checked.and_then(|()| self.check_devices(caller, &terms.name, parts.iter().map(|part| &part.memory)))
        {
            self.forget(uid, held);
            return Err(refusal);
        }
        let existing = self.names.get(terms.name.as_str());
        let restore = terms.restore.as_ref();
        // A restored version keeps its group if the caller is a member of it.
        let own = Owner { uid: restore.map_or(caller.uid, |restore| restore.owner.uid), gid: caller.gid };
        let offered = restore.map(|restore| restore.owner);
        let offered = offered.filter(|owner| caller.is_superuser() || caller.is_member_of(owner.gid));
        let owner = existing.map_or(offered.unwrap_or(own), |name| name.owner);
        let mode = existing.map_or_else(|| terms.mode.unwrap_or(0o600), |name| name.mode);
        let lifetime = terms.lifetime.or(existing.map(|name| name.lifetime)).unwrap_or_default();
        let keep = terms.keep.or(existing.map(|name| name.keep)).unwrap_or(0);
        let next = existing.map_or(0, |name| self.current(name).record.version) + 1;
        let record = record::Version {
            key: self.last_key + 1,
            name: terms.name.clone(),
            version: restore.map_or(next, |restore| restore.version),
            id: restore.map_or_else(
                || Builder::from_random_bytes(random()).into_uuid().to_string(),
                |restore| restore.id.clone(),
            ),
            created_ms: restore.map_or(self.now.ms, |restore| restore.created_ms),
            owner,
            mode,
            lifetime,
            backend: terms.backend,
            keep,
            requests: terms.requests.clone(),
            metadata,
            parts,
        };
        let published = Published { version: record.version, id: record.id.clone() };
        let entry = Record::Published(Box::new(record));
        if let Err(error) = self.write(&entry) {
            self.forget(uid, held);
            return Err(write_failed(error));
        }
        let Record::Published(record) = entry else { unreachable!("the entry was built above") };
        let number = record.version;
        self.add_version(*record);
        if let Some(name) = self.names.get_mut(terms.name.as_str()) {
            name.maker = Some(caller.connection);
        }
        // Versions further back were not covered before. They still exist because they have leases.
        self.drop_old(&terms.name, MAX_KEPT as usize + 1);
        self.note_expiry(&terms.name);
        tracing::debug!(name = terms.name, version = number, bytes, uid = caller.uid, pid = caller.pid, "published");
        Ok(published)
    }

    /// Adds a version that the log contains. It becomes the current version of its name.
    pub(crate) fn add_version(&mut self, record: record::Version) {
        let record::Version { key, owner, mode, lifetime, keep, .. } = record;
        self.last_key = self.last_key.max(key);
        self.requests.extend(record.requests.iter().map(|request| (*request, key)));
        if !self.names.contains_key(record.name.as_str()) {
            let name: Arc<str> = record.name.as_str().into();
            self.readers.add_name(Arc::clone(&name), owner, mode);
            let (versions, idle_since) = (BTreeMap::new(), self.now.at);
            let new = Name {
                owner,
                mode,
                lifetime,
                keep,
                versions,
                kept: 0,
                maker: None,
                idle_since,
                leases: 0,
                next_check: None,
            };
            self.users.add_object(owner.uid);
            self.names.insert(name, new);
        }
        let name = self.names.get_mut(record.name.as_str()).expect("the name was just added");
        (name.lifetime, name.keep) = (lifetime, keep);
        name.versions.insert(record.version, key);
        let earlier = name.earlier();
        self.users.set_kept(name.owner.uid, name.kept, earlier);
        name.kept = earlier;
        if name.leases == 0 {
            name.idle_since = self.now.at;
        }
        self.ids.insert(record.id.clone(), key);
        let version = Version { record, leases: 0, named: true, reports: Vec::new(), recalled: false };
        self.users.add_version(version.payer(), version.charged(), &version.record.parts);
        self.versions.insert(key, version);
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
        let Some(version) = self.requests.get(&request).and_then(|key| self.versions.get(key)) else {
            return match self.journal.completed(request) {
                None => Ok(None),
                Some(answered) if answered.name == name && answered.published.is_some() => {
                    Ok(answered.published.clone())
                }
                Some(_) => Err(token_reused()),
            };
        };
        let record = &version.record;
        let published = Published { version: record.version, id: record.id.clone() };
        match version.payer() == caller.uid {
            false => Ok(None),
            true if record.name == name => Ok(Some(published)),
            true => Err(token_reused()),
        }
    }

    /// The key of a version that a caller wants to restore, if it already exists and the caller may restore it.
    pub(crate) fn restored(&self, caller: &Caller, name: &str, restore: &Restore) -> Option<u64> {
        let same = |of: &record::Version| {
            (of.name.as_str(), of.version, of.id.as_str(), of.owner.uid)
                == (name, restore.version, restore.id.as_str(), restore.owner.uid)
        };
        let may = caller.is_superuser() || !caller.is_unmapped() && caller.uid == restore.owner.uid;
        let may = may && !self.journal.was_deleted(name, restore.owner.uid);
        let key = *self.ids.get(&restore.id)?;
        self.versions.get(&key).filter(|version| may && same(&version.record)).map(|_| key)
    }

    pub(crate) fn current_key(&self, name: &str) -> Option<u64> {
        self.names.get(name)?.current()
    }

    /// Checks whether the caller may restore this version, which the previous server had.
    fn check_restore(&self, caller: &Caller, name: &str, restore: &Restore, keep: u32) -> Result<(), BrokerError> {
        let Restore { version, owner, id, .. } = restore;
        if !(caller.is_superuser() || caller.uid == owner.uid) {
            let (uid, owner) = (caller.uid, owner.uid);
            return refuse(
                RefusalCode::Denied,
                format!("uid {uid} may not restore `{name}`: its owner was uid {owner}"),
            );
        }
        if !(1..=u64::MAX / 2).contains(version)
            || uuid::Uuid::parse_str(id).map(|id| id.to_string()).ok().as_ref() != Some(id)
        {
            return refuse(
                RefusalCode::Invalid,
                format!("version {version} with id `{id}` is not a valid version of `{name}`"),
            );
        }
        if self.journal.was_deleted(name, owner.uid) {
            return refuse(
                RefusalCode::Denied,
                format!("`{name}` was deleted after this broker lost it: put it again instead of restoring it"),
            );
        }
        if let Some(known) = self.ids.get(id).and_then(|key| self.versions.get(key)) {
            return refuse(
                RefusalCode::Exists,
                format!("version {} of `{}` already has the id {id}", known.record.version, known.record.name),
            );
        }
        let Some(existing) = self.names.get(name) else { return self.users.check_objects(owner.uid, 1, 0) };
        let current = &self.current(existing).record;
        if current.version >= *version {
            return refuse(
                RefusalCode::Exists,
                format!("`{name}` exists at version {} with the id {}", current.version, current.id),
            );
        }
        if existing.owner.uid != owner.uid {
            return refuse(
                RefusalCode::Denied,
                format!(
                    "the owner of `{name}` is uid {}, but the restored version belonged to uid {}",
                    existing.owner.uid, owner.uid
                ),
            );
        }
        self.check_kept(existing, keep)
    }

    /// Keeps the descriptors of parts. `kept` lists them, also after a failure.
    fn hold(
        &mut self,
        uid: u32,
        metadata: Option<NewTable>,
        parts: Vec<NewPart>,
        held: &mut Vec<SegmentId>,
    ) -> Result<(Option<Table>, Vec<record::Part>), BrokerError> {
        // The first failure. Later descriptors are closed.
        let mut failed = None;
        let mut add = |fd: OwnedFd, size: u64| match self.segments.add(fd, size) {
            Ok((id, duplicate)) => {
                match duplicate {
                    Some(duplicate) => self.garbage.push(duplicate),
                    None => self.store.hold(id),
                }
                self.users.add_segment(uid, id);
                held.push(id);
                Some(id)
            }
            Err(NotHeld { fd, reason }) => {
                self.garbage.push(fd);
                failed.get_or_insert(reason);
                None
            }
        };
        let table = |table: NewTable, add: &mut dyn FnMut(OwnedFd, u64) -> Option<SegmentId>| match table {
            NewTable::Inline(text) => Some(Table::Inline(text)),
            NewTable::Memfd { fd, length } => add(fd, length).map(|segment| Table::Held { segment, length }),
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
            Some(reason) => refuse(RefusalCode::Memory, reason.to_string()),
        }
    }

    /// Releases the descriptors of a failed put.
    fn forget(&mut self, uid: u32, held: Vec<SegmentId>) {
        held.into_iter().for_each(|id| self.release(uid, id));
    }

    /// Queues the descriptors of an unpublished version for closing.
    pub(crate) fn discard(&mut self, metadata: Option<NewTable>, parts: Vec<NewPart>) {
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
}

/// Refuses unmapped callers, which can't own objects.
fn check_mapped(caller: &Caller) -> Result<(), BrokerError> {
    if !caller.is_unmapped() {
        return Ok(());
    }
    let uid = caller.uid;
    refuse(
        RefusalCode::Denied,
        format!("uid {uid} stands for all unmapped users, so it can't own objects: put as another user"),
    )
}
