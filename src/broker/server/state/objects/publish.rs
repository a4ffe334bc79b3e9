//! Publishes versions: checks them, gives them to the keeper, and makes them available once the keeper has them.

use std::{collections::BTreeMap, os::fd::OwnedFd, sync::Arc};

use uuid::Builder;

use super::{Name, Objects, Version, event, token_reused};
use crate::{
    broker::{
        manifest::{self, Table},
        server::state::{
            caller::{Caller, ConnectionId, Right},
            random::random,
            refuse,
        },
    },
    driver::Backend,
    error::{BrokerError, RefusalCode},
    wire::{
        Memory,
        broker::{Attached, EventKind, Lifetime, MAX_KEPT, Maker, NEEDS_BOTH, Owner, Published, Restore, Token},
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

/// A checked version, ready to publish.
#[derive(Debug)]
pub(crate) struct NewVersion {
    pub(crate) terms: Terms,
    pub(crate) metadata: Option<NewTable>,
    pub(crate) parts: Vec<NewPart>,
}

impl NewVersion {
    /// Bytes of memory and tables, as claimed.
    pub(crate) fn bytes(&self) -> u64 {
        let metadata = self.metadata.as_ref().map_or(0, NewTable::length);
        metadata + self.parts.iter().map(NewPart::bytes).sum::<u64>()
    }

    /// Takes the descriptors, in the order of the manifest.
    pub(crate) fn into_fds(self) -> Vec<OwnedFd> {
        let (_, _, fds) = self.split();
        fds
    }

    /// The tables and parts of a manifest, and the descriptors.
    fn split(self) -> (Option<Table>, Vec<manifest::Part>, Vec<OwnedFd>) {
        let mut fds = Vec::new();
        let table = |table: NewTable, fds: &mut Vec<OwnedFd>| match table {
            NewTable::Inline(text) => Table::Inline(text),
            NewTable::Memfd { fd, length } => {
                fds.push(fd);
                Table::Memfd(length)
            }
        };
        let metadata = self.metadata.map(|metadata| table(metadata, &mut fds));
        let mut parts = Vec::with_capacity(self.parts.len());
        for part in self.parts {
            let NewPart { name, memory, arrays, array_count, digest, maker, segments } = part;
            let arrays = arrays.map(|arrays| table(arrays, &mut fds));
            let (sizes, segments): (Vec<u64>, Vec<OwnedFd>) = segments.into_iter().unzip();
            fds.extend(segments);
            parts.push(manifest::Part { name, memory, arrays, array_count, maker, digest, sizes });
        }
        (metadata, parts, fds)
    }
}

impl Objects {
    /// Checks a put, before its memory is received and again when it is complete.
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

    /// Whether a version of this name waits for the keeper.
    pub(crate) fn is_unconfirmed(&self, name: &str) -> bool {
        self.unconfirmed_names.contains(name)
    }

    /// Checks a put and gives the version to the keeper. [`Objects::publish`] follows once the keeper has confirmed it. No version of the
    /// name may be unconfirmed. Returns the version's key. On failure, its descriptors become garbage.
    pub(crate) fn stage(&mut self, caller: &Caller, put: NewVersion) -> Result<u64, BrokerError> {
        let checked = self.check_put(caller, &put.terms, put.bytes());
        let memory = put.parts.iter().map(|part| &part.memory);
        let checked = checked.and_then(|()| self.check_devices(caller, &put.terms.name, memory));
        let descriptors = put.parts.iter().map(|part| part.segments.len() + 1).sum::<usize>() + 1;
        if let Err(refusal) = checked.and_then(|()| self.require_room(descriptors)) {
            self.garbage.extend(put.into_fds());
            return Err(refusal);
        }
        let terms = put.terms.clone();
        let (metadata, parts, fds) = put.split();
        let record = self.describe(caller, terms, metadata, parts);
        self.last_key += 1;
        let key = self.last_key;
        self.charge(&record);
        if !self.names.contains_key(record.name.as_str()) {
            self.users.add_object(record.owner.uid);
        }
        self.store.send(key, fds.len());
        self.unconfirmed_names.insert(record.name.clone());
        self.unconfirmed.insert(key, Version { record, fds, leases: 0 });
        Ok(key)
    }

    /// The manifest of a put.
    fn describe(
        &self,
        caller: &Caller,
        terms: Terms,
        metadata: Option<Table>,
        parts: Vec<manifest::Part>,
    ) -> manifest::Version {
        let existing = self.names.get(terms.name.as_str());
        let restore = terms.restore.as_ref();
        // A restored version keeps its group if the caller is a member of it.
        let own = Owner { uid: restore.map_or(caller.uid, |restore| restore.owner.uid), gid: caller.gid };
        let offered = restore.map(|restore| restore.owner);
        let offered = offered.filter(|owner| caller.is_superuser() || caller.is_member_of(owner.gid));
        let next = existing.map_or(0, |name| self.current(name).record.version) + 1;
        let new_id = || Builder::from_random_bytes(random()).into_uuid().to_string();
        manifest::Version {
            version: restore.map_or(next, |restore| restore.version),
            id: restore.map_or_else(new_id, |restore| restore.id.clone()),
            created_ms: restore.map_or(self.now.ms, |restore| restore.created_ms),
            owner: existing.map_or(offered.unwrap_or(own), |name| name.owner),
            mode: existing.map_or_else(|| terms.mode.unwrap_or(0o600), |name| name.mode),
            lifetime: terms.lifetime.or(existing.map(|name| name.lifetime)).unwrap_or_default(),
            keep: terms.keep.or(existing.map(|name| name.keep)).unwrap_or(0),
            backend: terms.backend,
            name: terms.name,
            requests: terms.requests,
            metadata,
            parts,
            is_unnamed: false,
            is_recalled: false,
            reports: Vec::new(),
        }
    }

    /// Publishes a version that the keeper has confirmed. `maker` is the connection that put it, if it is still open.
    pub(crate) fn publish(&mut self, key: u64, maker: Option<ConnectionId>) -> Option<Published> {
        let Version { record, fds, .. } = self.unconfirmed.remove(&key)?;
        self.unconfirmed_names.remove(&record.name);
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
        if let Some(entry) = self.names.get_mut(name.as_str()) {
            entry.maker = maker;
        }
        // Versions further back were not covered before. They still exist because they have leases.
        self.drop_old(&name, MAX_KEPT as usize + 1);
        self.note_expiry(&name);
        Some(published)
    }

    /// Counts a version for its user.
    pub(super) fn charge(&mut self, record: &manifest::Version) {
        self.users.add_version(record);
    }

    /// Adds a version that is counted. It becomes the current version of its name, unless it has lost the name.
    pub(super) fn add_version(&mut self, key: u64, record: manifest::Version, fds: Vec<OwnedFd>) {
        self.requests.extend(record.requests.iter().map(|request| (*request, key)));
        self.ids.insert(record.id.clone(), key);
        record.reports.iter().for_each(|report| self.users.add_report(report.reader.uid));
        if !record.is_unnamed {
            self.add_to_name(key, &record);
        }
        self.versions.insert(key, Version { record, fds, leases: 0 });
    }

    fn add_to_name(&mut self, key: u64, record: &manifest::Version) {
        let manifest::Version { owner, mode, lifetime, keep, .. } = *record;
        if !self.names.contains_key(record.name.as_str()) {
            let name: Arc<str> = record.name.as_str().into();
            self.readers.add_name(Arc::clone(&name), owner, mode);
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
                next_check: None,
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
        self.users.set_kept(name.owner.uid, name.kept, earlier);
        name.kept = earlier;
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
        let Some(version) = self.requests.get(&request).and_then(|key| self.versions.get(key)) else {
            return match self.events.put(request) {
                Some(put) if put.name == name => Ok(Some(put.published.clone())),
                Some(_) => Err(token_reused()),
                None if self.events.delete(request).is_some() => Err(token_reused()),
                None => Ok(None),
            };
        };
        let record = &version.record;
        let published = Published { version: record.version, id: record.id.clone() };
        match record.payer() == caller.uid {
            false => Ok(None),
            true if record.name == name => Ok(Some(published)),
            true => Err(token_reused()),
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
        if self.events.was_deleted(name, owner.uid) {
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
