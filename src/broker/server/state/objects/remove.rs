//! Removes names and versions, and lets names expire.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use nix::unistd::geteuid;

use super::{Name, Objects, Request, Version, event, readers::Rights, token_reused};
use crate::{
    broker::{
        manifest::{self, Completed, Deleted, Manifest},
        server::{
            admit::Resource,
            state::caller::{Caller, ConnectionId},
        },
    },
    error::BrokerError,
    wire::broker::{EventKind, Lifetime, Maker, Published, Token},
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
        self.name_readers.remove(Rights::of(gone.owner, gone.mode, None), name);
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
                return self.limit_resume(key);
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

impl Objects {
    /// Sets the connection that put the current version of a name, if it is still open.
    pub(super) fn set_maker(&mut self, name: &str, maker: Option<ConnectionId>) {
        let Some((name, _)) = self.names.get_key_value(name) else { return };
        let name = Arc::clone(name);
        let Some(entry) = self.names.get_mut(&name) else { return };
        let depends = matches!(entry.lifetime, Lifetime::Maker | Lifetime::Leased);
        if let Some(before) = std::mem::replace(&mut entry.maker, maker) {
            self.makers.remove(&(before, Arc::clone(&name)));
        }
        self.makers.extend(maker.filter(|_| depends).map(|maker| (maker, name)));
    }

    /// Schedules the next check of a name, or none if it can't expire.
    pub(crate) fn note_expiry(&mut self, name: &str) {
        // Everything is checked when the clients of the previous server have had their time.
        if self.awaits_clients() {
            return;
        }
        let expires_at = self.names.get(name).and_then(Name::expires_at);
        self.expiries.push((name.into(), expires_at));
    }

    /// Removes a name if its lifetime is over.
    pub(crate) fn expire(&mut self, name: &str) {
        match self.names.get(name).and_then(Name::expires_at) {
            Some(at) if at > self.now.at => self.note_expiry(name),
            // The put's end checks the name again.
            Some(_) if !self.is_pending(name) => self.remove_unasked(name, "expired"),
            _ => {}
        }
    }
}

impl Name {
    /// When its lifetime is over, unless it is used until then. `None` if only a change of its users can end it.
    fn expires_at(&self) -> Option<Instant> {
        let (has_left, is_free) = (self.maker.is_none(), self.leases == 0);
        match self.lifetime {
            Lifetime::Idle { ms } if is_free => self.idle_since.checked_add(Duration::from_millis(ms)),
            Lifetime::Maker if has_left => Some(self.idle_since),
            Lifetime::Leased if has_left && is_free => Some(self.idle_since),
            _ => None,
        }
    }
}
