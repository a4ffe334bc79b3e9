//! Creates, resumes and releases leases, and keeps readers' reports.

use std::{collections::BTreeSet, sync::Arc};

use super::{Objects, Version, event, events::Seen, readers::Rights};
use crate::{
    broker::server::{
        admit::Resource,
        state::{
            caller::{Caller, ConnectionId, Right},
            random, refuse,
        },
    },
    error::{BrokerError, RefusalCode},
    wire::{
        broker::{EventKind, Maker, ReportInfo, ResumedLease, Token},
        shorten,
    },
};

/// The most bytes of a report, and the most reports of a version.
const MAX_REPORT: usize = 256;
const MAX_REPORTS: usize = 16;

/// A lease.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) number: u64,
    /// The version's key.
    pub(super) key: u64,
    pub(super) reader: Maker,
    /// The time of the grant, in milliseconds since 1970.
    pub(super) since_ms: u64,
    /// How many bytes of the version it covers.
    pub(super) size: u64,
    /// The connection that holds it.
    pub(super) holder: ConnectionId,
}

impl Objects {
    /// Leases `bytes` bytes of a version.
    pub(crate) fn lease(&mut self, caller: &Caller, key: u64, bytes: u64) -> Result<Token, BrokerError> {
        let token = Token(random());
        self.add_lease(caller, token, key, bytes)?;
        Ok(token)
    }

    fn add_lease(&mut self, caller: &Caller, token: Token, key: u64, size: u64) -> Result<(), BrokerError> {
        let Some(version) = self.versions.get_mut(&key) else { return Ok(()) };
        self.users.take(caller.uid, Resource::Leases, 1)?;
        self.last_lease += 1;
        version.leases += 1;
        if version.record.resume_by_ms.take().is_some() {
            self.store.update(key);
        }
        if let Some(name) = self.names.get_mut(version.record.name.as_str()).filter(|_| !version.record.is_unnamed) {
            name.leases += 1;
        }
        let rights = Rights::of(version.record.owner, version.record.mode, Some(caller.uid));
        self.lease_readers.add(rights, (self.last_lease, token));
        let (reader, since_ms) = (caller.describe(), self.now.ms);
        let held = Held { number: self.last_lease, key, reader, since_ms, size, holder: caller.connection };
        self.leases.insert(token, held);
        self.holders.insert((caller.connection, token));
        // A lease of the description only is published when it gets memory.
        if size > 0 {
            self.publish_lease(EventKind::Leased, token);
        }
        Ok(())
    }

    /// Notes that a lease covers at least `bytes` bytes of its version.
    pub(crate) fn extend_lease(&mut self, token: Token, bytes: u64) {
        let Some(held) = self.leases.get_mut(&token).filter(|held| held.size < bytes) else { return };
        if std::mem::replace(&mut held.size, bytes) == 0 {
            self.publish_lease(EventKind::Leased, token);
        }
    }

    /// Publishes the event of a lease's beginning or end.
    fn publish_lease(&mut self, kind: EventKind, token: Token) {
        let Some(held) = self.leases.get(&token) else { return };
        let Some(version) = self.versions.get(&held.key) else { return };
        let Seen { mut event, owner, mode } = event(kind, &version.record, self.now.ms, &held.reader);
        event.size = Some(held.size);
        self.events.publish(Seen { event, owner, mode });
    }

    pub(crate) fn end_lease(&mut self, token: Token) {
        self.publish_lease(EventKind::Ended, token);
        let Some(key) = self.forget_lease(token) else { return };
        let Some(version) = self.versions.get(&key) else { return };
        let name = (!version.record.is_unnamed).then(|| version.record.name.clone());
        if version.leases == 0 {
            self.drop_unless_kept(key);
        }
        name.iter().for_each(|name| self.note_expiry(name));
    }

    /// Removes a lease. Returns the key of its version.
    fn forget_lease(&mut self, token: Token) -> Option<u64> {
        let held = self.leases.remove(&token)?;
        self.holders.remove(&(held.holder, token));
        self.users.sub(held.reader.uid, Resource::Leases, 1);
        let version = self.versions.get_mut(&held.key)?;
        let rights = Rights::of(version.record.owner, version.record.mode, Some(held.reader.uid));
        self.lease_readers.remove(rights, &(held.number, token));
        version.leases -= 1;
        // The recall is complete: it does not concern later leases.
        if version.leases == 0 && std::mem::take(&mut version.record.is_recalled) {
            self.store.update(held.key);
        }
        if !version.record.is_unnamed
            && let Some(entry) = self.names.get_mut(version.record.name.as_str())
        {
            entry.leases -= 1;
            if entry.leases == 0 {
                entry.idle_since = self.now.at;
            }
        }
        Some(held.key)
    }

    pub(crate) fn holder(&self, token: Token) -> Option<ConnectionId> {
        self.leases.get(&token).map(|held| held.holder)
    }

    /// Leases a restored version under its former tokens, as far as the caller has quota.
    pub(crate) fn restore_leases(&mut self, caller: &Caller, key: u64, tokens: &[Token]) {
        let size = self.versions.get(&key).map_or(0, |version| version.record.memory());
        for token in tokens {
            if !self.leases.contains_key(token) {
                let _ = self.add_lease(caller, *token, key, size);
            }
        }
    }

    /// Moves a client's leases and puts to this connection. Returns the tokens that are not the caller's.
    pub(crate) fn resume(&mut self, caller: &Caller, leases: &[ResumedLease], puts: &[Token]) -> Vec<Token> {
        let mut lost = Vec::new();
        for lease in leases {
            let token = lease.token;
            let is_taken = match self.leases.get_mut(&token) {
                Some(held) if held.reader.uid == caller.uid => {
                    let before = std::mem::replace(&mut held.holder, caller.connection);
                    self.holders.remove(&(before, token));
                    self.holders.insert((caller.connection, token))
                }
                Some(_) => false,
                None => self.resume_after_restart(caller, lease),
            };
            lost.extend((!is_taken).then_some(token));
        }
        for request in puts {
            let key = self.requests.get(request).copied();
            let version = key.and_then(|key| self.versions.get(&key));
            let Some(version) = version.filter(|version| version.record.payer() == caller.uid) else {
                lost.push(*request);
                continue;
            };
            let name = version.record.name.clone();
            if self.current_key(&name) == key {
                self.set_maker(&name, Some(caller.connection));
            }
        }
        lost
    }

    /// Leases a version again that a client leased from the previous server. The server does not know its leases: it checks that the client
    /// may read the version.
    fn resume_after_restart(&mut self, caller: &Caller, lease: &ResumedLease) -> bool {
        let Some(key) = self.ids.get(&lease.id).copied().filter(|key| self.is_awaited(*key)) else { return false };
        let Some(version) = self.versions.get(&key) else { return false };
        let may_read = caller.may(Right::Read, version.record.owner, version.record.mode);
        let size = lease.size.min(version.record.memory());
        may_read && self.add_lease(caller, lease.token, key, size).is_ok()
    }

    /// Queues the leases and dependent names of a closed connection for cleanup. The user's connection count includes the connection until
    /// its cleanup is done.
    pub(crate) fn connection_closed(&mut self, connection: ConnectionId, uid: u32) {
        self.users.add(uid, Resource::Connections, 1);
        self.closed_connections.push_back((connection, uid));
    }

    /// Cleans up after closed connections, within the budget of this turn.
    pub(crate) fn clean_up_closed(&mut self) {
        while let Some(&(connection, uid)) = self.closed_connections.front() {
            let lease = self.holders.range((connection, Token([0; 16]))..).next();
            let lease = lease.filter(|(holder, _)| *holder == connection).map(|(_, token)| *token);
            let name = self.makers.range((connection, Arc::from(""))..).next();
            let name = name.filter(|(maker, _)| *maker == connection).map(|(_, name)| Arc::clone(name));
            if lease.is_none() && name.is_none() {
                self.closed_connections.pop_front();
                self.users.sub(uid, Resource::Connections, 1);
            } else if self.cleanup_budget == 0 {
                return;
            } else {
                self.cleanup_budget -= 1;
                if let Some(token) = lease {
                    self.end_lease(token);
                } else if let Some(name) = name {
                    self.set_maker(&name, None);
                    self.note_expiry(&name);
                }
            }
        }
    }

    /// Asks the holders of versions to release their leases. Unknown versions are ignored: their memory is free.
    pub(crate) fn recall(&mut self, caller: &Caller, ids: &[String]) -> Result<(), BrokerError> {
        let keys: BTreeSet<u64> = ids.iter().filter_map(|id| self.ids.get(id).copied()).collect();
        let versions = keys.iter().filter_map(|key| self.versions.get(key));
        if let Some(version) = versions.clone().find(|version| !caller.may_remove(version.record.owner)) {
            let (name, owner) = (&version.record.name, version.record.owner);
            let message =
                format!("uid {} may not recall versions of `{name}`: its owner is uid {}", caller.uid, owner.uid);
            return refuse(RefusalCode::Denied, message);
        }
        // The holders of awaited versions may not have resumed their leases yet.
        let is_held =
            |key: &&u64| self.is_awaited(**key) || self.versions.get(key).is_some_and(|version| version.leases > 0);
        let held: Vec<u64> = keys.iter().filter(is_held).copied().collect();
        for key in held {
            let Some(version) = self.versions.get_mut(&key) else { continue };
            version.record.is_recalled = true;
            self.events.publish(event(EventKind::Recalled, &version.record, self.now.ms, &caller.describe()));
            self.store.update(key);
        }
        Ok(())
    }

    /// Records a reader's report about a version that it leases.
    pub(crate) fn report(&mut self, caller: &Caller, token: Token, mut message: String, should_log: bool) {
        let Some(key) = self.leases.get(&token).map(|held| held.key) else { return };
        if !self.users.has_room(caller.uid, Resource::Reports, 1) {
            return;
        }
        let has_room = |version: &&mut Version| version.record.reports.len() < MAX_REPORTS;
        let Some(Version { record, .. }) = self.versions.get_mut(&key).filter(has_room) else { return };
        shorten(&mut message, MAX_REPORT);
        let reader = caller.describe();
        if should_log {
            tracing::warn!(
                name = record.name,
                version = record.version,
                uid = caller.uid,
                pid = caller.pid,
                message,
                "a reader reports that memory differs from its claim"
            );
        }
        let mut seen = event(EventKind::Reported, record, self.now.ms, &reader);
        seen.event.message = Some(message.clone());
        record.reports.push(ReportInfo { reader, at_ms: self.now.ms, message });
        self.events.publish(seen);
        self.users.add(caller.uid, Resource::Reports, 1);
        self.store.update(key);
    }
}
