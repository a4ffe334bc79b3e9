//! Creates, resumes and releases leases, and keeps readers' reports.

use std::{collections::BTreeSet, sync::Arc};

use super::{Held, Name, Objects, Version, write_failed};
use crate::{
    broker::{
        catalogue::{Record, record},
        server::state::{
            caller::{Caller, ConnectionId},
            random::random,
            refuse,
        },
    },
    error::{BrokerError, RefusalCode},
    wire::{
        broker::{Lifetime, Maker, Resume, Token},
        shorten,
    },
};

/// The result of a resume.
#[derive(Debug, Default)]
pub(crate) struct Resumption {
    pub(crate) leases: Vec<Token>,
    pub(crate) names: Vec<Arc<str>>,
    /// Previous holders of the leases.
    pub(crate) before: Vec<(ConnectionId, Token)>,
    pub(crate) lost: Vec<Token>,
}

/// The most bytes of a report.
const MAX_REPORT: usize = 256;

/// A closed connection whose leases and names are still to be cleaned up.
#[derive(Debug)]
pub(crate) struct ClosedConnection {
    connection: ConnectionId,
    /// The user whose connection count includes it.
    uid: Option<u32>,
    pub(super) leases: Vec<Token>,
    names: Vec<Arc<str>>,
}

impl Objects {
    /// Leases `bytes` bytes of a version.
    pub(crate) fn lease(&mut self, caller: &Caller, key: u64, bytes: u64) -> Result<Token, BrokerError> {
        let token = Token(random());
        self.log_lease(caller, token, key, bytes)?;
        Ok(token)
    }

    fn log_lease(&mut self, caller: &Caller, token: Token, key: u64, size: u64) -> Result<(), BrokerError> {
        self.users.check_lease(caller.uid)?;
        let Maker { pid, uid, command } = caller.describe();
        let record = record::Lease { token, key, uid, pid, command, since_ms: self.now.ms, size };
        self.write(&Record::Leased(record.clone())).map_err(write_failed)?;
        self.add_lease(record, Some(caller.connection));
        Ok(())
    }

    /// Adds a lease that the log contains.
    pub(crate) fn add_lease(&mut self, record: record::Lease, holder: Option<ConnectionId>) {
        let (token, key) = (record.token, record.key);
        self.last_lease += 1;
        self.users.add_lease(record.uid);
        if let Some(version) = self.versions.get_mut(&key) {
            version.leases += 1;
            if let Some(name) = self.names.get_mut(version.record.name.as_str()).filter(|_| version.named) {
                name.leases += 1;
            }
            self.readers.add_lease(&version.record, record.uid, self.last_lease, token);
        }
        self.leases.insert(token, Held { number: self.last_lease, record, holder });
    }

    pub(crate) fn end_lease(&mut self, token: Token) {
        if !self.leases.contains_key(&token) {
            return;
        }
        // If the log lacks this record, the lease returns after a crash and then expires: no process has its token.
        if let Err(error) = self.write(&Record::Ended { token, at_ms: self.now.ms }) {
            tracing::error!(%error, "cannot record the end of a lease");
        }
        let Some(key) = self.forget_lease(token) else { return };
        let Some(version) = self.versions.get(&key) else { return };
        let name = version.named.then(|| version.record.name.clone());
        if version.leases == 0 {
            self.drop_unless_kept(key);
        }
        name.iter().for_each(|name| self.note_expiry(name));
        self.compact();
    }

    /// Removes a lease from memory. Returns the key of its version.
    pub(crate) fn forget_lease(&mut self, token: Token) -> Option<u64> {
        let held = self.leases.remove(&token)?;
        self.users.remove_lease(held.record.uid);
        let version = self.versions.get_mut(&held.record.key)?;
        self.readers.remove_lease(&version.record, held.record.uid, held.number);
        version.leases -= 1;
        // The recall is complete: it does not concern later leases.
        version.recalled &= version.leases > 0;
        if version.named
            && let Some(entry) = self.names.get_mut(version.record.name.as_str())
        {
            entry.leases -= 1;
            if entry.leases == 0 {
                entry.idle_since = self.now.at;
            }
        }
        Some(held.record.key)
    }

    pub(crate) fn holder(&self, token: Token) -> Option<ConnectionId> {
        self.leases.get(&token)?.holder
    }

    /// Leases a restored version under its former tokens. Returns the tokens that were accepted.
    pub(crate) fn restore_leases(&mut self, caller: &Caller, key: u64, tokens: &[Token]) -> Vec<Token> {
        let size = self.versions.get(&key).map_or(0, Version::bytes);
        let mut accepted = tokens.to_vec();
        accepted.retain(|token| !self.leases.contains_key(token) && self.log_lease(caller, *token, key, size).is_ok());
        accepted
    }

    /// Moves a client's leases and puts to this connection. Tokens that are not the caller's are returned as lost.
    pub(crate) fn resume(&mut self, caller: &Caller, resume: &Resume) -> Resumption {
        let mut taken = Resumption::default();
        for token in &resume.leases {
            match self.leases.get_mut(token).filter(|held| held.record.uid == caller.uid) {
                Some(held) => {
                    let before = held.holder.replace(caller.connection).filter(|before| *before != caller.connection);
                    taken.before.extend(before.map(|before| (before, *token)));
                    taken.leases.push(*token);
                }
                None => taken.lost.push(*token),
            }
        }
        for request in &resume.puts {
            let version = self.requests.get(request).and_then(|key| self.versions.get(key));
            let version = version.filter(|version| version.payer() == caller.uid);
            let Some(version) = version else {
                taken.lost.push(*request);
                continue;
            };
            let (key, name) = (version.record.key, &version.record.name);
            if let Some(entry) = self.names.get_mut(name.as_str()).filter(|entry| entry.current() == Some(key)) {
                entry.maker = Some(caller.connection);
                taken.names.push(name.as_str().into());
            }
        }
        taken
    }

    /// Ends leases and makers' names of the previous server that no client has resumed in time.
    pub(crate) fn end_unresumed(&mut self) {
        let leases = self.leases.iter().filter(|(_, held)| held.holder.is_none()).map(|(token, _)| *token);
        let leases: Vec<Token> = leases.collect();
        let ends = |entry: &Name| matches!(entry.lifetime, Lifetime::Maker | Lifetime::Leased);
        let names =
            self.names.iter().filter(|(_, entry)| entry.maker == Some(ConnectionId::PREVIOUS_SERVER) && ends(entry));
        let names: Vec<Arc<str>> = names.map(|(name, _)| Arc::clone(name)).collect();
        if !leases.is_empty() {
            tracing::info!(leases = leases.len(), "leases ended that no client resumed after the restart");
        }
        self.closed_connections.push_back(ClosedConnection {
            connection: ConnectionId::PREVIOUS_SERVER,
            uid: None,
            leases,
            names,
        });
    }

    /// Queues the leases and dependent names of a closed connection for cleanup. The user's connection count includes the connection until
    /// its cleanup is done.
    pub(crate) fn connection_closed(
        &mut self,
        connection: ConnectionId,
        uid: u32,
        leases: impl IntoIterator<Item = Token>,
        names: impl IntoIterator<Item = Arc<str>>,
    ) {
        let (leases, names) = (leases.into_iter().collect(), names.into_iter().collect());
        self.users.add_connection(uid);
        self.closed_connections.push_back(ClosedConnection { connection, uid: Some(uid), leases, names });
    }

    /// Cleans up after closed connections, within the budget of this turn.
    pub(crate) fn clean_up_closed(&mut self) {
        while let Some(mut closed) = self.closed_connections.pop_front() {
            let connection = closed.connection;
            // Another connection may have resumed it.
            let is_left = |held: &Held| held.holder.unwrap_or(ConnectionId::PREVIOUS_SERVER) == connection;
            while self.cleanup_budget > 0
                && let Some(token) = closed.leases.pop()
            {
                self.cleanup_budget -= 1;
                if self.leases.get(&token).is_some_and(is_left) {
                    self.end_lease(token);
                }
            }
            while self.cleanup_budget > 0
                && let Some(name) = closed.names.pop()
            {
                self.cleanup_budget -= 1;
                self.maker_disconnected(connection, &name);
            }
            if !closed.leases.is_empty() || !closed.names.is_empty() {
                self.closed_connections.push_front(closed);
                return;
            }
            closed.uid.into_iter().for_each(|uid| self.users.remove_connection(uid));
        }
    }

    /// Asks the holders of versions to release their leases. Unknown versions are ignored: their memory is free.
    pub(crate) fn recall(&mut self, caller: &Caller, ids: &[String]) -> Result<(), BrokerError> {
        let keys: BTreeSet<u64> = ids.iter().filter_map(|id| self.ids.get(id).copied()).collect();
        let versions = keys.iter().filter_map(|key| self.versions.get(key));
        if let Some(version) = versions.clone().find(|version| !caller.may_remove(version.record.owner)) {
            let record::Version { name, owner, .. } = &version.record;
            let message =
                format!("uid {} may not recall versions of `{name}`: its owner is uid {}", caller.uid, owner.uid);
            return refuse(RefusalCode::Denied, message);
        }
        let held = versions.filter(|version| version.leases > 0).map(|version| version.record.key);
        for key in held.collect::<Vec<_>>() {
            let record = Record::Recalled { key, by: caller.describe(), at_ms: self.now.ms };
            self.write(&record).map_err(write_failed)?;
            self.mark_recalled(key);
        }
        self.compact();
        Ok(())
    }

    /// Marks a version whose recall the log contains.
    pub(super) fn mark_recalled(&mut self, key: u64) {
        if let Some(version) = self.versions.get_mut(&key) {
            version.recalled = version.leases > 0;
        }
    }

    /// Records a reader's report about a version that it leases.
    pub(crate) fn report(&mut self, caller: &Caller, token: Token, mut message: String, should_log: bool) {
        const MAX: usize = 16;
        let Some(key) = self.leases.get(&token).map(|held| held.record.key) else { return };
        let Some(version) = self.versions.get(&key).filter(|version| version.reports.len() < MAX) else { return };
        if !self.users.has_room_for_report(caller.uid) {
            return;
        }
        shorten(&mut message, MAX_REPORT);
        let report = record::Report { key, reader: caller.describe(), at_ms: self.now.ms, message };
        let record = &version.record;
        if should_log {
            tracing::warn!(
                name = record.name,
                version = record.version,
                uid = caller.uid,
                pid = caller.pid,
                message = report.message,
                "a reader reports that memory differs from its claim"
            );
        }
        if let Err(error) = self.write(&Record::Reported(report.clone())) {
            tracing::error!(%error, "cannot record a report");
        }
        self.add_report(report);
    }

    /// Adds a report that the log contains.
    pub(crate) fn add_report(&mut self, report: record::Report) {
        let Some(version) = self.versions.get_mut(&report.key) else { return };
        // A rewritten log may contain it twice.
        if version.reports.contains(&report) {
            return;
        }
        self.users.add_report(report.reader.uid);
        version.reports.push(report);
    }
}
