//! Restores the previous server's objects: its catalogue, joined with the keeper's descriptors.

use std::{
    collections::{HashMap, HashSet},
    os::fd::OwnedFd,
};

use super::{
    Journal, Objects,
    journal::catalogue_error,
    remove::{segments_of, sized_segments_of},
};
use crate::{
    broker::{
        catalogue::{Record, Records, SegmentId},
        keeper::{Name, Store},
        server::state::{caller::ConnectionId, quota::Rules, time::Time},
    },
    error::Result,
};

impl Objects {
    /// Restores the objects that the keeper held, if any.
    ///
    /// # Errors
    /// If the catalogue was written by a newer build or can't be used.
    pub(crate) fn restore(
        now: Time,
        rules: Rules,
        mut store: Store,
        catalogues: [Option<OwnedFd>; 2],
        segments: HashMap<SegmentId, OwnedFd>,
    ) -> Result<Self> {
        let catalogue_names = [false, true].into_iter().zip(&catalogues).filter(|(_, fd)| fd.is_some());
        let catalogue_names: Vec<Name> = catalogue_names.map(|(second, _)| Name::Catalogue(second)).collect();
        store.count(catalogue_names.len());
        store.count(segments.len());
        let Some((journal, records)) = Journal::open(catalogues)? else {
            // Without a catalogue, no segment has a name.
            catalogue_names
                .into_iter()
                .chain(segments.keys().map(|id| Name::Segment(*id)))
                .for_each(|name| store.remove(name));
            let journal = Journal::create(&mut store)?;
            let mut objects = Self::empty(now, rules, journal, store);
            objects.garbage.extend(segments.into_values());
            return Ok(objects);
        };
        let mut objects = Self::empty(now, rules, journal, store);
        objects.replay(records)?;
        objects.join(segments);
        objects.journal.start(&mut objects.store)?;
        objects.finish_cleanup();
        Ok(objects)
    }

    /// Replays a log in memory, one record at a time: memory may be scarce, as it may have been for the previous server.
    fn replay(&mut self, mut records: Records) -> Result<()> {
        // Events of the initial records were published before the log was written.
        let mut old = true;
        for record in &mut records {
            let record = record.map_err(catalogue_error)?;
            let seen = if old { None } else { self.event_of(&record) };
            self.journal.replay_record(&record);
            self.journal.publish_event(seen);
            match record {
                Record::Whole { .. } => old = false,
                Record::Published(version) => self.add_version(*version),
                Record::Deleted(deleted) => {
                    self.journal.note_deleted(&deleted);
                    self.forget_name(&deleted.name);
                }
                Record::Dropped { key } => {
                    self.forget_leases_of(key);
                    if let Some(version) = self.forget_version(key)
                        && let Some(entry) = self.names.get_mut(version.record.name.as_str())
                    {
                        entry.forget(version.record.version, key);
                        // The keeper lacked part of it.
                        if entry.versions.is_empty() {
                            self.forget_name(&version.record.name);
                        }
                    }
                }
                Record::Leased(lease) => {
                    if self.versions.contains_key(&lease.key) {
                        self.add_lease(lease, None);
                    }
                }
                Record::Ended { token, .. } => {
                    self.forget_lease(token);
                }
                Record::Reported(report) => self.add_report(report),
                Record::Recalled { key, .. } => self.mark_recalled(key),
                Record::Begin { .. } | Record::Seen(_) | Record::Completed(_) | Record::Started => {}
            }
        }
        self.journal.append_after(&records);
        for entry in self.names.values_mut() {
            entry.maker = Some(ConnectionId::PREVIOUS_SERVER);
        }
        Ok(())
    }

    /// Attaches descriptors to the versions. Versions without all descriptors are lost; unreferenced descriptors are removed.
    fn join(&mut self, mut segments: HashMap<SegmentId, OwnedFd>) {
        let lacks = |key: &u64| {
            let record = &self.versions[key].record;
            segments_of(record).any(|id| !segments.contains_key(&id))
        };
        let mut keys: Vec<u64> = self.versions.keys().copied().collect();
        keys.sort_unstable();
        let lost: Vec<u64> = keys.iter().copied().filter(lacks).collect();
        for key in lost {
            self.drop_lost(key);
        }
        let mut given = HashSet::new();
        for version in self.versions.values() {
            for (id, size) in sized_segments_of(&version.record) {
                match segments.remove(&id) {
                    Some(fd) => {
                        given.insert(id);
                        self.segments.restore(id, fd, size);
                    }
                    None if given.contains(&id) => self.segments.add_reference(id),
                    None => continue,
                }
                self.users.add_segment(version.payer(), id);
            }
        }
        if !segments.is_empty() {
            tracing::info!(descriptors = segments.len(), "removing descriptors that no version uses");
        }
        for (id, fd) in segments {
            self.store.remove(Name::Segment(id));
            self.garbage.push(fd);
        }
        self.segments.rebuild_free_list();
    }

    /// Drops a version of which the keeper lacked some descriptors.
    fn drop_lost(&mut self, key: u64) {
        self.forget_leases_of(key);
        if let Err(error) = self.write(&Record::Dropped { key }) {
            tracing::error!(%error, "cannot record that a version is lost");
        }
        let Some(version) = self.forget_version(key) else { return };
        let (name, number) = (version.record.name, version.record.version);
        self.lost.add(&name, number);
        tracing::error!(name, version = number, "a version is lost: the keeper lacked some of its memory");
        if let Some(entry) = self.names.get_mut(name.as_str()).filter(|_| version.named) {
            entry.forget(number, key);
            if entry.versions.is_empty() {
                // `Dropped` also removes the name: no further record is needed.
                self.forget_name(&name);
            }
        }
    }

    fn forget_leases_of(&mut self, key: u64) {
        if self.versions.get(&key).is_none_or(|version| version.leases == 0) {
            return;
        }
        let tokens = self.leases.iter().filter(|(_, held)| held.record.key == key).map(|(token, _)| *token);
        for token in tokens.collect::<Vec<_>>() {
            self.forget_lease(token);
        }
    }

    /// Finishes cleanup that the previous server did not complete.
    fn finish_cleanup(&mut self) {
        let unnamed = self.versions.iter().filter(|(_, version)| !version.named && version.leases == 0);
        let unnamed: Vec<u64> = unnamed.map(|(key, _)| *key).collect();
        unnamed.into_iter().for_each(|key| self.drop_if_unused(key));
        for name in self.names.keys().cloned().collect::<Vec<_>>() {
            if let Some(entry) = self.names.get_mut(&name) {
                entry.idle_since = self.now.at;
            }
            self.drop_old(&name, usize::MAX);
            self.note_expiry(&name);
        }
    }
}
