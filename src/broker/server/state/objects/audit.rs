//! A copy of the objects for the simulation, and the checks that their tables agree.

use std::{collections::BTreeMap, fs::File};

use super::{Objects, segments_of};
use crate::{
    broker::{
        catalogue::{SegmentId, record},
        server::state::caller::ConnectionId,
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
    pub(in crate::broker::server) payer: u32,
    pub(in crate::broker::server) bytes: u64,
    pub(in crate::broker::server) named: bool,
    /// Whether its name keeps it, as the current version or an earlier one.
    pub(in crate::broker::server) kept: bool,
    /// How many earlier versions its name keeps.
    pub(in crate::broker::server) keep: u32,
    pub(in crate::broker::server) leases: u64,
    pub(in crate::broker::server) lifetime: Lifetime,
    pub(in crate::broker::server) requests: Vec<Token>,
    /// Each part with its segments.
    pub(in crate::broker::server) parts: Vec<(String, Vec<SegmentId>)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::broker::server) struct AuditedLease {
    pub(in crate::broker::server) key: u64,
    pub(in crate::broker::server) uid: u32,
    pub(in crate::broker::server) holder: Option<ConnectionId>,
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
    /// Checks the tables, and copies the objects. `unpublished` are the segments of puts that wait for the keeper.
    pub(in crate::broker::server) fn audit(&self, unpublished: &[SegmentId]) -> Result<Audit, String> {
        let audit = self.copy();
        self.check_leases(&audit)?;
        self.check_segments(unpublished)?;
        self.check_users(&audit)?;
        Ok(audit)
    }

    /// Copies the objects.
    pub(in crate::broker::server) fn copy(&self) -> Audit {
        let mut audit = Audit::default();
        let part = |part: &record::Part| (part.name.clone(), part.segments.iter().map(|(id, _)| *id).collect());
        for (key, version) in &self.versions {
            let record = &version.record;
            let name = self.names.get(record.name.as_str());
            let name = name.filter(|name| name.versions.get(&record.version) == Some(key));
            let audited = AuditedVersion {
                name: record.name.clone(),
                number: record.version,
                id: record.id.clone(),
                owner: name.map_or(record.owner.uid, |name| name.owner.uid),
                payer: version.payer(),
                bytes: version.bytes(),
                named: version.named && name.is_some(),
                kept: name.is_some_and(|name| name.keeps(record.version)),
                keep: name.map_or(0, |name| name.keep),
                leases: version.leases,
                lifetime: name.map_or(record.lifetime, |name| name.lifetime),
                requests: record.requests.clone(),
                parts: record.parts.iter().map(part).collect(),
            };
            audit.versions.insert(*key, audited);
        }
        let closing = self.closed_connections.iter().flat_map(|closed| &closed.leases).collect::<Vec<_>>();
        for (token, held) in &self.leases {
            let (key, uid, holder) = (held.record.key, held.record.uid, held.holder);
            audit.leases.insert(*token, AuditedLease { key, uid, holder, is_closing: closing.contains(&token) });
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
        for (name, entry) in &self.names {
            let is_named = |key| self.versions.get(key).is_some_and(|version| version.named);
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

    /// Each descriptor is held for a version, an unpublished put, or a version that was just dropped, and counts these uses.
    fn check_segments(&self, unpublished: &[SegmentId]) -> Result<(), String> {
        let mut uses = BTreeMap::<SegmentId, u64>::new();
        let used = self.versions.values().flat_map(|version| segments_of(&version.record));
        let used = used.chain(self.releasing.iter().map(|(_, id)| *id)).chain(unpublished.iter().copied());
        used.for_each(|id| *uses.entry(id).or_default() += 1);
        let held = self.segments.references().collect::<BTreeMap<_, _>>();
        if uses != held {
            return Err(format!("the segments have the uses {uses:?}, but {held:?} are counted"));
        }
        Ok(())
    }

    fn check_users(&self, audit: &Audit) -> Result<(), String> {
        let mut want = BTreeMap::<u32, [u64; 3]>::new();
        for entry in self.names.values() {
            want.entry(entry.owner.uid).or_default()[0] += 1;
        }
        for lease in audit.leases.values() {
            want.entry(lease.uid).or_default()[1] += 1;
        }
        for version in audit.versions.values() {
            want.entry(version.payer).or_default()[2] += version.bytes;
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
        self.leases.get(&token).map(|held| held.record.uid)
    }

    /// The names of all held segments in the keeper.
    pub(in crate::broker::server) fn segment_names(&self) -> impl Iterator<Item = String> {
        self.segments.ids().map(SegmentId::name)
    }

    /// Descriptors reserved for unpublished puts.
    pub(in crate::broker::server) fn reserved(&self) -> usize {
        self.users.reserved()
    }

    /// The log's memfd, and its length.
    pub(in crate::broker::server) fn log(&self) -> (File, u64) {
        let file = File::from(self.journal.log().as_fd().try_clone_to_owned().unwrap());
        let length = file.metadata().unwrap().len();
        (file, length)
    }

    /// Starts to rewrite the log, however short it is.
    pub(in crate::broker::server) fn compact_short_log(&mut self) {
        let ready = self.compaction.is_none() && self.journal.can_compact(&self.store);
        if !ready || !self.pending_drops.is_empty() {
            return;
        }
        let rewrite = self.journal.begin_compaction(&mut self.store).unwrap();
        self.compaction = Some(super::Compaction::new(rewrite, self.last_key, self.last_lease));
    }
}
