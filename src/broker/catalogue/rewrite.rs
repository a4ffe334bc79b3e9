//! Compacts a log in slices, while records are still appended to the old log.
//!
//! Writing a log of 100,000 objects takes hundreds of milliseconds. The new log contains records of the state, each as of the time when its
//! slice was written, and then all records appended to the old log during the compaction. If an object changes after its slice was written,
//! the appended record repeats the change. If it changes before, the appended record has no effect when it is read.

use std::{
    fs::File,
    os::{fd::OwnedFd, unix::fs::FileExt},
};

use super::{CHUNK, Catalogue, CatalogueError, HEADER, Record, encode, header};

/// A compaction in progress. The new log has no header, and so is not valid, until it is finished.
#[derive(Debug)]
pub(in crate::broker) struct Rewrite {
    new: Catalogue,
    buffer: Vec<u8>,
    /// How many bytes of the old log the new log covers.
    copied: u64,
    /// The length of the old log at the last call of `copy_appended`.
    seen: Option<u64>,
}

impl Catalogue {
    /// Starts to compact this log into another memfd, whose contents are discarded.
    ///
    /// # Errors
    /// [`CatalogueError`]. See ftruncate(2).
    pub(in crate::broker) fn rewrite(&self, memfd: OwnedFd) -> Result<Rewrite, CatalogueError> {
        let file = File::from(memfd);
        // No remains of a killed writer may pass for records.
        file.set_len(0).map_err(CatalogueError::system("empty"))?;
        let (length, generation) = (HEADER as u64, self.generation + 1);
        let new = Self { file, generation, length, torn: false, base: 0, limit: self.limit, buffer: Vec::new() };
        Ok(Rewrite { new, buffer: Vec::new(), copied: self.length, seen: None })
    }
}

impl Rewrite {
    /// Adds a record of the state.
    ///
    /// # Errors
    /// [`CatalogueError`]: abandon the compaction.
    pub(in crate::broker) fn add(&mut self, record: &Record) -> Result<(), CatalogueError> {
        encode(&mut self.buffer, record)?;
        if self.buffer.len() >= CHUNK { self.flush() } else { Ok(()) }
    }

    /// The length of the new log so far.
    pub(in crate::broker) fn length(&self) -> u64 {
        self.new.length + self.buffer.len() as u64
    }

    /// Copies some of the records appended to the old log. Returns whether all are copied.
    ///
    /// # Errors
    /// [`CatalogueError`]: abandon the compaction.
    pub(in crate::broker) fn copy_appended(&mut self, old: &Catalogue) -> Result<bool, CatalogueError> {
        self.flush()?;
        // Copy at least twice the bytes appended since the last call, so that the copy catches up under constant load.
        let appended = old.length - self.seen.replace(old.length).unwrap_or(old.length);
        let some = (old.length - self.copied).min((CHUNK as u64).max(2 * appended));
        self.buffer.resize(some as usize, 0);
        old.file.read_exact_at(&mut self.buffer, self.copied).map_err(CatalogueError::system("read"))?;
        self.flush()?;
        self.copied += some;
        Ok(self.copied == old.length)
    }

    /// Completes the new log and replaces the old log by it. Returns the old memfd.
    ///
    /// # Errors
    /// [`CatalogueError`]: the old log remains valid.
    pub(in crate::broker) fn finish(mut self, old: &mut Catalogue) -> Result<OwnedFd, CatalogueError> {
        self.flush()?;
        let mut new = self.new;
        new.base = new.length;
        new.file.write_all_at(&header(new.generation), 0).map_err(CatalogueError::system("write"))?;
        Ok(std::mem::replace(old, new).file.into())
    }

    fn flush(&mut self) -> Result<(), CatalogueError> {
        let written = self.new.write_at_end(&self.buffer);
        self.buffer.clear();
        written
    }
}
