//! Writing a log anew in slices, while records are still appended to the old one.
//!
//! A log of 100,000 objects takes hundreds of milliseconds to write. The new log has, in this order: records of the state, each as it is
//! when its slice is written; then all records that were appended to the old log meanwhile. A change of an object that the slices had
//! already passed is thus made by its record, and the record of a change that a slice had already seen changes nothing when it is read.

use std::{
    fs::File,
    os::{fd::OwnedFd, unix::fs::FileExt},
};

use super::{CHUNK, Catalogue, CatalogueError, HEADER, Record, encode, header};

/// A log that is written anew. Until it is finished it has no header, and so is none.
#[derive(Debug)]
pub(in crate::broker) struct Rewrite {
    new: Catalogue,
    buffer: Vec<u8>,
    /// How much of the old log is in the new one, as records of the state or as they are.
    copied: u64,
    /// How long the old log was when the last slice of it was copied.
    seen: Option<u64>,
}

impl Catalogue {
    /// Begins to write this log anew into another memfd, whatever is in that.
    ///
    /// # Errors
    /// [`CatalogueError`]. See ftruncate(2).
    pub(in crate::broker) fn rewrite(&self, memfd: OwnedFd) -> Result<Rewrite, CatalogueError> {
        let file = File::from(memfd);
        // Of what a writer left that was killed, nothing may be taken for a record.
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
    /// [`CatalogueError`]: the rewrite must be given up.
    pub(in crate::broker) fn add(&mut self, record: &Record) -> Result<(), CatalogueError> {
        encode(&mut self.buffer, record)?;
        if self.buffer.len() >= CHUNK { self.flush() } else { Ok(()) }
    }

    /// How many bytes the new log has so far.
    pub(in crate::broker) fn length(&self) -> u64 {
        self.new.length + self.buffer.len() as u64
    }

    /// Copies some of the records that were appended to the old log since this began. Returns whether these were all.
    ///
    /// # Errors
    /// [`CatalogueError`]: the rewrite must be given up.
    pub(in crate::broker) fn copy_appended(&mut self, old: &Catalogue) -> Result<bool, CatalogueError> {
        self.flush()?;
        // Twice what was appended since the last slice, so that no load keeps this from its end.
        let appended = old.length - self.seen.replace(old.length).unwrap_or(old.length);
        let some = (old.length - self.copied).min((CHUNK as u64).max(2 * appended));
        self.buffer.resize(some as usize, 0);
        old.file.read_exact_at(&mut self.buffer, self.copied).map_err(CatalogueError::system("read"))?;
        self.flush()?;
        self.copied += some;
        Ok(self.copied == old.length)
    }

    /// Ends the new log, which takes the place of the old one. Returns the old one.
    ///
    /// # Errors
    /// [`CatalogueError`]: the old log is still the valid one.
    pub(in crate::broker) fn finish(mut self, old: &mut Catalogue) -> Result<OwnedFd, CatalogueError> {
        self.flush()?;
        let mut new = self.new;
        new.base = new.length;
        new.file.write_all_at(&header(new.generation), 0).map_err(CatalogueError::system("write"))?;
        Ok(std::mem::replace(old, new).file.into())
    }

    fn flush(&mut self) -> Result<(), CatalogueError> {
        let written = self.new.write_behind(&self.buffer);
        self.buffer.clear();
        written
    }
}
