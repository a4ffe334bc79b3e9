//! Removes names and versions.

use nix::unistd::geteuid;

use super::{Name, Objects, Request, Version, event, token_reused};
use crate::{
    broker::{
        manifest::{self, Completed, Deleted, Manifest},
        server::{admit::Resource, state::caller::Caller},
    },
    error::BrokerError,
    wire::broker::{EventKind, Maker, Published, Token},
};

impl Objects {
    /// Deletes a name at a caller's request. No version of the name may be pending.
    pub(crate) fn delete(&mut self, caller: &Caller, name: &str, request: Option<Token>) -> Result<(), BrokerError> {
        match self.request(caller, request) {
            None => {}
            Some(Request::Deleted(deleted)) if deleted == name => return Ok(()),
            Some(_) => return Err(token_reused()),
        }
        let Some(existing) = self.names.get(name) else {
            return refuse!(Absent, "there is no object `{name}`");
        };
        let owner = existing.owner.uid;
        if !caller.may_remove(existing.owner) {
            return refuse!(Denied, "uid {} may not delete `{name}`: its owner is uid {owner}", caller.uid);
        }
        // The keeper gets the deletion first. If this server dies before it has removed every version, the next one removes the others.
        self.last_key += 1;
        let key = self.last_key;
        self.store.send(key, 0);
        self.note_done(key, Manifest::Deleted(Deleted { name: name.to_owned(), owner, request }));
        self.remove(name, &caller.describe(), "deleted");
        Ok(())
    }

    /// Removes a name that no client asked to delete.
    pub(crate) fn remove_unasked(&mut self, name: &str, why: &'static str) {
        let by = Maker { pid: std::process::id().cast_signed(), uid: geteuid().as_raw(), command: None };
        self.remove(name, &by, why);
    }

    /// Removes a name, and its versions without leases.
    fn remove(&mut self, name: &str, by: &Maker, why: &'static str) {
        let Some(existing) = self.names.get(name) else { return };
        self.events.publish(event(EventKind::Deleted, &self.current(existing).record, self.now.ms, by));
        let Some(gone) = self.forget_name(name) else { return };
        tracing::debug!(name, leases = gone.leases, "{why}");
        for key in gone.versions.into_values() {
            if !self.drop_if_unused(key) {
                self.store.update(key);
            }
        }
    }

    /// Removes a name from memory. Its versions lose their name.
    pub(super) fn forget_name(&mut self, name: &str) -> Option<Name> {
        self.set_maker(name, None);
        let gone = self.names.remove(name)?;
        self.readers.remove_name(name, gone.owner, gone.mode);
        self.expiries.push((name.into(), None));
        self.users.sub(gone.owner.uid, Resource::Objects, 1);
        self.users.sub(gone.owner.uid, Resource::Kept, gone.kept);
        for key in gone.versions.values() {
            if let Some(version) = self.versions.get_mut(key) {
                version.record.is_unnamed = true;
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
    }

    /// Drops a version without leases, unless its name keeps it.
    pub(crate) fn drop_unless_kept(&mut self, key: u64) {
        let is_awaited = self.is_awaited(key);
        let Some(version) = self.versions.get_mut(&key).filter(|version| version.leases == 0) else { return };
        if !version.record.is_unnamed
            && let Some(entry) = self.names.get_mut(version.record.name.as_str())
        {
            if entry.keeps(version.record.version) {
                return;
            }
            if is_awaited {
                self.limit_resume(key);
                return;
            }
            entry.forget(version.record.version, key);
            version.record.is_unnamed = true;
        }
        self.drop_if_unused(key);
    }

    /// Drops a version without a name and leases. Returns whether it did.
    pub(super) fn drop_if_unused(&mut self, key: u64) -> bool {
        let is_used = |version: &Version| !version.record.is_unnamed || version.leases > 0;
        if self.versions.get(&key).is_none_or(is_used) {
            return false;
        }
        if self.is_awaited(key) {
            self.limit_resume(key);
            return false;
        }
        let Some(Version { record, fds, .. }) = self.versions.remove(&key) else { return false };
        let descriptors = fds.len();
        self.garbage.push((record.payer(), fds));
        if self.ids.get(&record.id) == Some(&key) {
            self.ids.remove(&record.id);
        }
        self.users.remove_version(&record);
        record.reports.iter().for_each(|report| self.users.sub(report.reader.uid, Resource::Reports, 1));
        let manifest::Version { name, version, id, mut requests, .. } = *record;
        requests.retain(|request| self.requests.get(request) == Some(&key));
        if requests.is_empty() {
            self.store.remove(key, descriptors);
            return true;
        }
        // A client may repeat these requests: they must not run again over later changes.
        self.store.replace(key, descriptors, 0);
        let put = Completed { name, published: Published { version, id }, requests };
        self.note_done(key, Manifest::Completed(put));
        true
    }
}
