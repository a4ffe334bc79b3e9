//! Rewrites the log when most of it is obsolete, in slices between which clients are served.

use super::{Objects, Version};
use crate::{
    broker::catalogue::{
        CatalogueError, Record, Rewrite,
        record::{self, Deleted},
    },
    wire::broker::Token,
};

/// Bytes written per slice.
const SLICE_BYTES: u64 = 128 << 10;

/// The most versions or leases visited per slice. The simulation's few objects take several slices.
const MAX_SCANNED: usize = if cfg!(test) { 1 } else { 512 };

/// A log rewrite in progress.
#[derive(Debug)]
pub(super) struct Compaction {
    rewrite: Rewrite,
    /// The last version and lease at the start. Later ones are in records copied from the old log.
    last_key: u64,
    last_lease: u64,
    next: CompactionStep,
}

impl Compaction {
    pub(super) fn new(rewrite: Rewrite, last_key: u64, last_lease: u64) -> Self {
        Self { rewrite, last_key, last_lease, next: CompactionStep::Versions(0) }
    }
}

/// The next records to write.
#[derive(Debug, Clone, Copy)]
enum CompactionStep {
    /// Versions, from this key.
    Versions(u64),
    /// Leases, from this number.
    Leases(u64),
    /// Records appended to the old log during the rewrite.
    Appended,
}

impl Objects {
    /// Starts to rewrite the log if most of it is obsolete.
    pub(crate) fn compact(&mut self) {
        for key in std::mem::take(&mut self.pending_drops) {
            self.drop_if_unused(key);
        }
        // In the new log, a version that should be dropped would look like a named version.
        if self.compaction.is_some() || !self.pending_drops.is_empty() || !self.journal.should_compact(&self.store) {
            return;
        }
        match self.journal.begin_compaction(&mut self.store) {
            Ok(rewrite) => self.compaction = Some(Compaction::new(rewrite, self.last_key, self.last_lease)),
            Err(error) => self.postpone_compaction(&error),
        }
    }

    /// Writes one slice of the new log.
    pub(crate) fn continue_compaction(&mut self) {
        let Some(mut compaction) = self.compaction.take() else { return };
        // Restarts once the pending drops are written.
        if !self.pending_drops.is_empty() {
            return;
        }
        match self.write_slice(&mut compaction) {
            Ok(false) => self.compaction = Some(compaction),
            Ok(true) => match self.journal.finish_compaction(&mut self.store, compaction.rewrite) {
                Ok(old) => self.garbage.extend(old),
                Err(error) => self.postpone_compaction(&error),
            },
            Err(error) => self.postpone_compaction(&error),
        }
    }

    fn postpone_compaction(&mut self, error: &CatalogueError) {
        tracing::warn!(%error, "cannot rewrite the catalogue: it keeps growing");
        self.journal.postpone();
    }

    /// Writes one slice. Returns whether the new log is complete.
    fn write_slice(&self, compaction: &mut Compaction) -> Result<bool, CatalogueError> {
        let Compaction { rewrite, last_key, last_lease, next } = compaction;
        let end = rewrite.length() + SLICE_BYTES;
        match *next {
            CompactionStep::Versions(from) => {
                for (scanned, (key, version)) in self.versions.range(from..=*last_key).enumerate() {
                    if scanned == MAX_SCANNED || rewrite.length() > end {
                        *next = CompactionStep::Versions(*key);
                        return Ok(false);
                    }
                    version_records(version).try_for_each(|record| rewrite.add(&record))?;
                }
                *next = CompactionStep::Leases(0);
            }
            CompactionStep::Leases(from) => {
                for (scanned, (number, token)) in self.readers.all_leases(from).enumerate() {
                    if scanned == MAX_SCANNED || rewrite.length() > end {
                        *next = CompactionStep::Leases(number);
                        return Ok(false);
                    }
                    if number > *last_lease {
                        break;
                    }
                    if let Some(record) = self.lease_record(token) {
                        rewrite.add(&Record::Leased(record))?;
                    }
                }
                *next = CompactionStep::Appended;
            }
            CompactionStep::Appended => return rewrite.copy_appended(self.journal.log()),
        }
        Ok(false)
    }

    fn lease_record(&self, token: Token) -> Option<record::Lease> {
        self.leases.get(&token).map(|held| held.record.clone())
    }
}

/// The records that restore a version. `Deleted` removes the name from all preceding versions, so versions without a name precede the
/// named ones.
fn version_records(version: &Version) -> impl Iterator<Item = Record> {
    let unnamed = (!version.named).then(|| {
        let name = version.record.name.clone();
        Record::Deleted(Deleted { name, at_ms: 0, uid: 0, pid: 0, command: None, request: None, owner: None })
    });
    let reports = version.reports.iter().cloned().map(Record::Reported);
    std::iter::once(Record::Published(Box::new(version.record.clone()))).chain(unnamed).chain(reports)
}
