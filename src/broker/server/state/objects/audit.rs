//! A copy of the objects for the simulation, and the checks that their tables agree.

use std::collections::{BTreeMap, BTreeSet};

use super::{Objects, VersionFd};
use crate::{
    broker::{
        keeper::Source,
        manifest::BROKER,
        server::{admit::Resource, state::caller::ConnectionId},
    },
    wire::broker::{Lifetime, Token},
};

/// A version, with the numbers of its segments.
#[derive(Debug, Clone)]
pub(in crate::broker::server) struct AuditedVersion {
    pub(in crate::broker::server) name: String,
    pub(in crate::broker::server) number: u64,
    pub(in crate::broker::server) id: String,
    pub(in crate::broker::server) owner: u32,
    pub(in crate::broker::server) named: bool,
    /// Whether its name keeps it, as the current version or an earlier one.
    pub(in crate::broker::server) kept: bool,
    /// How many earlier versions its name keeps.
    pub(in crate::broker::server) keep: u32,
    pub(in crate::broker::server) leases: u64,
    pub(in crate::broker::server) lifetime: Lifetime,
    pub(in crate::broker::server) requests: Vec<Token>,
    /// Each part with its segments.
    pub(in crate::broker::server) parts: Vec<(String, Vec<VersionFd>)>,
    /// Whether clients of the previous server may still resume leases of it.
    pub(in crate::broker::server) is_awaited: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::broker::server) struct AuditedLease {
    pub(in crate::broker::server) key: u64,
    pub(in crate::broker::server) uid: u32,
    pub(in crate::broker::server) holder: ConnectionId,
    /// Whether its connection has closed, and only its cleanup is due.
    pub(in crate::broker::server) is_closing: bool,
}

#[derive(Debug, Default)]
pub(in crate::broker::server) struct Audit {
    /// By key.
    pub(in crate::broker::server) versions: BTreeMap<u64, AuditedVersion>,
    pub(in crate::broker::server) leases: BTreeMap<Token, AuditedLease>,
    /// The maker's connection of each name.
    pub(in crate::broker::server) makers: BTreeMap<String, Option<ConnectionId>>,
}

impl Objects {
    /// Checks the tables, and copies the objects.
    pub(in crate::broker::server) fn audit(&self) -> Result<Audit, String> {
        let audit = self.copy();
        self.check_leases(&audit)?;
        self.check_users()?;
        Ok(audit)
    }

    /// Copies the objects.
    pub(in crate::broker::server) fn copy(&self) -> Audit {
        let mut audit = Audit::default();
        for (key, version) in &self.versions {
            let record = &version.record;
            let parts = record.parts.iter().zip(record.places()).map(|(part, place)| {
                let first = place.first_segment;
                let fds = (first..first + part.sizes.len()).map(|at| VersionFd { key: *key, at });
                (part.header.name.clone(), fds.collect())
            });
            let name = self.names.get(record.name.as_str());
            let name = name.filter(|name| name.versions.get(&record.version) == Some(key));
            let audited = AuditedVersion {
                name: record.name.clone(),
                number: record.version,
                id: record.id.clone(),
                owner: name.map_or(record.owner.uid, |name| name.owner.uid),
                named: !record.is_unnamed && name.is_some(),
                kept: name.is_some_and(|name| name.keeps(record.version)),
                keep: name.map_or(0, |name| name.keep),
                leases: version.leases,
                lifetime: name.map_or(record.lifetime, |name| name.lifetime),
                requests: record.requests.clone(),
                parts: parts.collect(),
                is_awaited: self.is_awaited(*key),
            };
            audit.versions.insert(*key, audited);
        }
        for (token, held) in &self.leases {
            let (key, uid, holder) = (held.key, held.reader.uid, held.holder);
            let is_closing = self.closed_connections.iter().any(|(closed, _)| *closed == holder);
            audit.leases.insert(*token, AuditedLease { key, uid, holder, is_closing });
        }
        audit.makers = self.names.iter().map(|(name, entry)| (name.to_string(), entry.maker)).collect();
        audit
    }

    fn check_leases(&self, audit: &Audit) -> Result<(), String> {
        let mut counts = BTreeMap::<u64, u64>::new();
        audit.leases.values().for_each(|lease| *counts.entry(lease.key).or_default() += 1);
        if let Some(key) = counts.keys().find(|key| !audit.versions.contains_key(key)) {
            return Err(format!("a lease of the version with key {key} is counted, but there is no such version"));
        }
        for (key, AuditedVersion { name, number, leases, .. }) in &audit.versions {
            let counted = counts.get(key).copied().unwrap_or(0);
            if counted != *leases {
                return Err(format!("version {number} of `{name}` counts {leases} leases, but there are {counted}"));
            }
        }
        let of_holders = self.leases.iter().map(|(token, held)| (held.holder, *token)).collect::<BTreeSet<_>>();
        let is_maker =
            |(maker, name): &(ConnectionId, _)| self.names.get(name).is_some_and(|of| of.maker == Some(*maker));
        if of_holders != self.holders || !self.makers.iter().all(is_maker) {
            return Err("an index of connections differs from the leases or names".to_owned());
        }
        for (name, entry) in &self.names {
            let is_named = |key| self.versions.get(key).is_some_and(|version| !version.record.is_unnamed);
            if !entry.versions.values().all(is_named) {
                return Err(format!("`{name}` has a version that is gone or has lost its name"));
            }
            let of_name = entry.versions.values().map(|key| audit.versions.get(key).map_or(0, |of| of.leases));
            if entry.versions.is_empty() || entry.leases != of_name.sum::<u64>() {
                return Err(format!("`{name}` counts {} leases of {} versions", entry.leases, entry.versions.len()));
            }
        }
        Ok(())
    }

    fn check_users(&self) -> Result<(), String> {
        let mut want = BTreeMap::<u32, [u64; 3]>::new();
        for entry in self.names.values() {
            want.entry(entry.owner.uid).or_default()[0] += 1;
        }
        for lease in self.leases.values() {
            want.entry(lease.reader.uid).or_default()[1] += 1;
        }
        for version in self.pending.values() {
            let new = u64::from(!self.names.contains_key(version.record.name.as_str()));
            want.entry(version.record.owner.uid).or_default()[0] += new;
        }
        for version in self.versions.values().chain(self.pending.values()) {
            want.entry(version.record.payer()).or_default()[2] += version.record.memory();
        }
        let kept = self.names.values().map(|name| name.kept).sum::<u64>();
        if kept != self.users.total(Resource::Kept) || self.names.values().any(|name| name.kept < name.earlier()) {
            return Err(format!("{} earlier versions are counted for {kept}", self.users.total(Resource::Kept)));
        }
        for total in self.users.totals(None, 1 << 20) {
            let bytes = total.devices.iter().map(|device| device.bytes).sum();
            let counted = [total.objects, total.leases, bytes];
            let there = want.remove(&total.uid).unwrap_or_default();
            if counted != there {
                let uid = total.uid;
                return Err(format!("uid {uid} has {there:?} objects, leases and bytes, but {counted:?} are counted"));
            }
        }
        if want.is_empty() { Ok(()) } else { Err(format!("these users are not counted: {want:?}")) }
    }

    pub(in crate::broker::server) fn owner_of(&self, name: &str) -> Option<u32> {
        self.names.get(name).map(|name| name.owner.uid)
    }

    pub(in crate::broker::server) fn user_of_lease(&self, token: Token) -> Option<u32> {
        self.leases.get(&token).map(|held| held.reader.uid)
    }

    /// Whether a version with this id exists, and clients of the previous server may resume leases of it.
    pub(in crate::broker::server) fn awaits(&self, id: &str) -> bool {
        self.ids.get(id).is_some_and(|key| self.is_awaited(*key) && self.versions.contains_key(key))
    }

    /// The entries that the keeper must have: key, manifest, number of descriptors.
    pub(in crate::broker::server) fn entries(&self) -> impl Iterator<Item = (u64, Vec<u8>, usize)> {
        let versions = self.versions.keys().chain(self.pending.keys()).copied();
        let keys = std::iter::once(BROKER).chain(self.events.keys()).chain(versions);
        keys.filter_map(|key| self.manifest(key).map(|(manifest, fds)| (key, manifest, fds)))
    }

    /// Whether a user may not have `more` of a resource.
    pub(in crate::broker::server) fn lacks_room(&self, uid: u32, resource: Resource, more: u64) -> bool {
        !self.users.has_room(uid, resource, more)
    }

    /// The descriptors of unpublished versions that the keeper does not have yet, as counted.
    pub(in crate::broker::server) fn reserved(&self) -> usize {
        let held = self.versions.values().chain(self.pending.values()).map(|version| version.fds.len());
        let counted = [Resource::Connections, Resource::Closing, Resource::Blocking].map(|of| self.users.total(of));
        let others = counted.iter().sum::<u64>() as usize + self.own.len() + held.sum::<usize>();
        self.users.total(Resource::Descriptors) as usize - others
    }
}
