//! Removes names and versions.

use nix::unistd::geteuid;

use super::{Name, Objects, Version, token_reused, write_failed};
use crate::{
    broker::{
        catalogue::{
            Record, SegmentId,
            record::{self, Completed, Deleted, Table},
        },
        keeper::Name as StoredName,
        server::state::{caller::Caller, refuse},
    },
    error::{BrokerError, RefusalCode},
    wire::broker::{Maker, Published, Token},
};

impl Objects {
    /// Deletes a name at a caller's request.
    pub(crate) fn delete(&mut self, caller: &Caller, name: &str, request: Option<Token>) -> Result<(), BrokerError> {
        let completed = request.and_then(|request| self.journal.completed(request));
        if let Some(completed) = completed {
            return if completed.name == name && completed.published.is_none() { Ok(()) } else { Err(token_reused()) };
        }
        let Some(existing) = self.names.get(name) else {
            return refuse(RefusalCode::Absent, format!("there is no object `{name}`"));
        };
        let owner = existing.owner.uid;
        if !caller.may_remove(existing.owner) {
            return refuse(
                RefusalCode::Denied,
                format!("uid {} may not delete `{name}`: its owner is uid {owner}", caller.uid),
            );
        }
        let (Maker { pid, uid, command }, name, at_ms) = (caller.describe(), name.to_owned(), self.now.ms);
        let deleted = Deleted { name, at_ms, uid, pid, command, request, owner: Some(owner) };
        self.log_and_remove(deleted, "deleted")
    }

    /// Removes a name that no client asked to delete.
    pub(crate) fn remove(&mut self, name: &str, why: &'static str) -> Result<(), BrokerError> {
        let (uid, pid) = (geteuid().as_raw(), std::process::id().cast_signed());
        let (name, at_ms) = (name.to_owned(), self.now.ms);
        let deleted = Deleted { name, at_ms, uid, pid, command: None, request: None, owner: None };
        self.log_and_remove(deleted, why)
    }

    /// Removes a name, and its versions without leases.
    fn log_and_remove(&mut self, deleted: Deleted, why: &'static str) -> Result<(), BrokerError> {
        self.write(&Record::Deleted(deleted.clone())).map_err(write_failed)?;
        self.journal.note_deleted(&deleted);
        let name = deleted.name;
        let Some(gone) = self.forget_name(&name) else { return Ok(()) };
        tracing::debug!(name, leases = gone.leases, "{why}");
        gone.versions.into_values().for_each(|key| self.drop_if_unused(key));
        self.compact();
        Ok(())
    }

    /// Removes a name from memory. Its versions lose their name.
    pub(super) fn forget_name(&mut self, name: &str) -> Option<Name> {
        let gone = self.names.remove(name)?;
        self.readers.remove_name(name, gone.owner, gone.mode);
        self.users.remove_object(gone.owner.uid);
        self.users.set_kept(gone.owner.uid, gone.kept, 0);
        for key in gone.versions.values() {
            if let Some(version) = self.versions.get_mut(key) {
                version.named = false;
            }
        }
        Some(gone)
    }

    /// Drops old versions without leases: among the `max` newest versions that `keep` does not cover.
    pub(crate) fn drop_old(&mut self, name: &str, max: usize) {
        let Some(entry) = self.names.get(name) else { return };
        let beyond = entry.versions.values().rev().skip(entry.keep as usize + 1).take(max);
        let beyond: Vec<u64> = beyond.copied().collect();
        beyond.into_iter().for_each(|key| self.drop_unless_kept(key));
        self.compact();
    }

    /// Drops a version without leases, unless its name keeps it.
    pub(crate) fn drop_unless_kept(&mut self, key: u64) {
        let Some(version) = self.versions.get_mut(&key).filter(|version| version.leases == 0) else { return };
        if version.named
            && let Some(entry) = self.names.get_mut(version.record.name.as_str())
        {
            if entry.keeps(version.record.version) {
                return;
            }
            entry.forget(version.record.version, key);
            version.named = false;
        }
        self.drop_if_unused(key);
    }

    /// Drops a version without a name and leases.
    pub(crate) fn drop_if_unused(&mut self, key: u64) {
        let unused = |version: &Version| !version.named && version.leases == 0;
        if !self.versions.get(&key).is_some_and(unused) {
            return;
        }
        // Log this before its segment numbers are reused.
        if let Err(error) = self.write(&Record::Dropped { key }) {
            tracing::error!(%error, "cannot record that a version is gone: its memory is freed once the catalogue can be written");
            return self.pending_drops.push(key);
        }
        if let Some(version) = self.forget_version(key) {
            let uid = version.payer();
            self.releasing.extend(segments_of(&version.record).map(|id| (uid, id)));
            self.release_some();
        }
    }

    /// Removes a version from memory. The caller releases its segments.
    pub(super) fn forget_version(&mut self, key: u64) -> Option<Version> {
        let version = self.versions.remove(&key)?;
        if self.ids.get(&version.record.id) == Some(&key) {
            self.ids.remove(&version.record.id);
        }
        self.users.remove_version(version.payer(), version.charged(), &version.record.parts);
        version.reports.iter().for_each(|report| self.users.remove_report(report.reader.uid));
        // A client may repeat these requests: they must not run again over later changes.
        for request in &version.record.requests {
            if self.requests.get(request) == Some(&key) {
                self.requests.remove(request);
                let published = Published { version: version.record.version, id: version.record.id.clone() };
                let name = version.record.name.clone();
                self.journal.note_completed(Completed { request: *request, name, published: Some(published) });
            }
        }
        Some(version)
    }

    /// Removes one of a user's references to a segment. The last reference closes the descriptor, in the keeper too.
    pub(crate) fn release(&mut self, uid: u32, id: SegmentId) {
        self.users.remove_segment(uid, id);
        if let Some(fd) = self.segments.release(id) {
            self.store.remove(StoredName::Segment(id));
            self.garbage.push(fd);
        }
    }

    pub(crate) fn releasing(&self) -> usize {
        self.releasing.len()
    }

    /// Releases segments of dropped versions, within the budget of this turn.
    pub(crate) fn release_some(&mut self) {
        while self.release_budget > 0
            && let Some((uid, id)) = self.releasing.pop_front()
        {
            self.release_budget -= 1;
            self.release(uid, id);
        }
    }
}

/// The segments of a version and its tables, in no particular order. A segment can occur more than once.
pub(crate) fn segments_of(record: &record::Version) -> impl Iterator<Item = SegmentId> {
    sized_segments_of(record).map(|(id, _)| id)
}

/// As [`segments_of`], with the size of each.
pub(crate) fn sized_segments_of(record: &record::Version) -> impl Iterator<Item = (SegmentId, u64)> {
    let tables = record.metadata.iter().chain(record.parts.iter().flat_map(|part| &part.arrays));
    let tables = tables.filter_map(|table| match table {
        Table::Held { segment, length } => Some((*segment, *length)),
        Table::Inline(_) => None,
    });
    tables.chain(record.parts.iter().flat_map(|part| part.segments.iter().copied()))
}
