//! Leases: given, taken up by another connection, ended; and what their holders report.

use std::time::Instant;

use super::{Held, Objects, now_ms, random, unwritten, unwritten_kind};
use crate::{
    broker::{
        catalogue::{Record, record},
        server::{ConnectionId, caller::Caller},
    },
    error::BrokerError,
    wire::broker::{Resume, Token},
};

/// What a client has taken up.
#[derive(Debug, Default)]
pub(in crate::broker::server) struct TakenUp {
    pub(in crate::broker::server) leases: Vec<Token>,
    pub(in crate::broker::server) names: Vec<String>,
    /// The connections that had some of the leases.
    pub(in crate::broker::server) before: Vec<(ConnectionId, Token)>,
    pub(in crate::broker::server) lost: Vec<Token>,
}

impl Objects {
    /// Gives a lease of a version. `bytes` is what is handed out of it.
    pub(in crate::broker::server) fn lease(
        &mut self,
        caller: &Caller,
        key: u64,
        bytes: u64,
    ) -> Result<Token, BrokerError> {
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
        self.write(&entry).map_err(unwritten)?;
        let Record::Leased(record) = entry else { return Err(unwritten_kind()) };
        self.add_lease(record, Some(caller.connection));
        Ok(token)
    }

    /// Takes a lease that is written down among those that are held.
    pub(super) fn add_lease(&mut self, record: record::Lease, holder: Option<ConnectionId>) {
        let (token, key) = (record.token, record.key);
        self.last_lease += 1;
        self.users.add_lease(record.uid);
        if let Some(version) = self.versions.get_mut(&key) {
            version.leases += 1;
            if let Some(name) = self.names.get_mut(&version.record.name).filter(|_| version.named) {
                name.leases += 1;
            }
        }
        self.numbers.insert(self.last_lease, token);
        self.leases.insert(token, Held { number: self.last_lease, record, holder });
    }

    /// Ends a lease.
    pub(in crate::broker::server) fn end_lease(&mut self, token: Token) {
        if !self.leases.contains_key(&token) {
            return;
        }
        // Not written down, it would come back after a crash, and end then, since no process has its token.
        if let Err(error) = self.write(&Record::Ended { token, at_ms: now_ms() }) {
            tracing::error!(%error, "cannot write down that a lease ended");
        }
        let Some(key) = self.forget_lease(token) else { return };
        let Some(version) = self.versions.get(&key) else { return };
        if version.named {
            let (name, unused) = (version.record.name.clone(), version.leases == 0);
            if unused {
                self.drop_old(&name);
            }
            self.note_expiry(&name);
        } else {
            self.drop_if_unused(key);
        }
        self.compact();
    }

    /// Takes a lease from those that are held. Returns the key of its version.
    pub(super) fn forget_lease(&mut self, token: Token) -> Option<u64> {
        let held = self.leases.remove(&token)?;
        self.numbers.remove(&held.number);
        self.users.remove_lease(held.record.uid);
        let version = self.versions.get_mut(&held.record.key)?;
        version.leases -= 1;
        if version.named
            && let Some(of) = self.names.get_mut(&version.record.name)
        {
            of.leases -= 1;
            if of.leases == 0 {
                of.idle_since = Instant::now();
            }
        }
        Some(held.record.key)
    }

    /// Gives the leases with these tokens of a version that was offered back.
    pub(in crate::broker::server) fn lease_again(&mut self, caller: &Caller, id: &str, tokens: &[Token]) -> Vec<Token> {
        let version = self.versions.values().find(|version| version.record.id == id);
        let Some((key, size)) = version.map(|version| (version.record.key, version.bytes())) else { return Vec::new() };
        let mut given = Vec::new();
        for token in tokens {
            let (uid, pid) = (caller.uid, caller.pid);
            let entry = Record::Leased(record::Lease { token: *token, key, uid, pid, since_ms: now_ms(), size });
            if self.leases.contains_key(token) || self.users.check_lease(uid).is_err() || self.write(&entry).is_err() {
                continue;
            }
            let Record::Leased(record) = entry else { continue };
            self.add_lease(record, Some(caller.connection));
            given.push(*token);
        }
        given
    }

    /// A client takes up its leases and puts with another connection. Returns the leases and the names that are that connection's
    /// now, the connections that they were of, and the tokens that are not the caller's.
    pub(in crate::broker::server) fn resume(&mut self, caller: &Caller, resume: &Resume) -> TakenUp {
        let mut taken = TakenUp::default();
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
            if let Some(of) = self.names.get_mut(name).filter(|of| of.versions.back() == Some(&key)) {
                of.maker = Some(caller.connection);
                taken.names.push(name.clone());
            }
        }
        taken
    }

    /// The time is over in which what a server before this one knew can be taken up: ends the leases and the makers' names that
    /// were not.
    pub(in crate::broker::server) fn end_unclaimed(&mut self) {
        let leases = self.leases.iter().filter(|(_, held)| held.holder.is_none()).map(|(token, _)| *token);
        let leases: Vec<Token> = leases.collect();
        let names = self.names.iter().filter(|(_, of)| of.maker == Some(ConnectionId::BEFORE));
        let names: Vec<String> = names.map(|(name, _)| name.clone()).collect();
        if !leases.is_empty() {
            tracing::info!(leases = leases.len(), "leases end that no client took up after the restart");
        }
        leases.into_iter().for_each(|token| self.end_lease(token));
        self.maker_gone(ConnectionId::BEFORE, names);
    }

    /// Notes what a reader said of a version that it leases.
    pub(in crate::broker::server) fn report(&mut self, caller: &Caller, token: Token, message: String) {
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
        if let Err(error) = self.write(&Record::Reported(report.clone())) {
            tracing::error!(%error, "cannot write down a report");
        }
        if let Some(version) = self.versions.get_mut(&key) {
            version.reports.push(report);
        }
    }
}
