//! The entries of a broker, and the records that carry them.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    ops::Range,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use super::message::{MAX_CHUNK, Message, Piece};
use crate::wire::MAX_FDS;

/// An object: its manifest and its descriptors.
#[derive(Debug, Default)]
pub(in crate::broker) struct Entry {
    pub(in crate::broker) manifest: Vec<u8>,
    pub(in crate::broker) fds: Vec<OwnedFd>,
}

/// Entries by key. An entry that arrives in several records appears with the last one, and replaces an older entry as a whole.
#[derive(Debug, Default)]
pub(super) struct Entries {
    all: BTreeMap<u64, Entry>,
    arriving: Option<(u64, Entry)>,
    /// Keys that the server has not sent again yet.
    unsent: BTreeSet<u64>,
    /// Whether the server has sent everything.
    pub(super) is_whole: bool,
    /// The report of the last server that exited on request.
    pub(super) last_report: String,
}

impl Entries {
    /// The complete set of a new broker.
    pub(super) fn none() -> Self {
        Self { is_whole: true, ..Self::default() }
    }

    /// Takes a record.
    ///
    /// # Errors
    /// If the record continues another entry, or changes an entry that is not held.
    pub(super) fn take(&mut self, piece: Piece, fds: Vec<OwnedFd>) -> io::Result<()> {
        let Piece { key, is_first, is_last, is_update, manifest, .. } = piece;
        let mut entry = match self.arriving.take() {
            _ if is_first => Entry::default(),
            Some((arriving, entry)) if arriving == key => entry,
            _ => return Err(io::Error::other(format!("it sent the rest of entry {key} without its beginning"))),
        };
        entry.manifest.extend(manifest);
        entry.fds.extend(fds);
        if !is_last {
            self.arriving = Some((key, entry));
            return Ok(());
        }
        if is_update {
            let Some(held) = self.all.get_mut(&key) else {
                return Err(io::Error::other(format!("it changed entry {key}, which is not held")));
            };
            held.manifest = entry.manifest;
        } else {
            self.all.insert(key, entry);
        }
        self.unsent.remove(&key);
        Ok(())
    }

    pub(super) fn remove(&mut self, key: u64) {
        self.unsent.remove(&key);
        self.all.remove(&key);
        self.arriving.take_if(|(arriving, _)| *arriving == key);
    }

    pub(super) fn iter(&self) -> impl ExactSizeIterator<Item = (u64, &Entry)> {
        self.all.iter().map(|(key, entry)| (*key, entry))
    }

    /// The number of descriptors.
    pub(super) fn descriptors(&self) -> usize {
        self.iter().map(|(_, entry)| entry.fds.len()).sum()
    }

    /// The last entry of a version.
    #[cfg(test)]
    pub(super) fn last_mut(&mut self) -> Option<(u64, &mut Entry)> {
        self.all.last_entry().map(|last| (*last.key(), last.into_mut())).filter(|(key, _)| *key > 0)
    }

    pub(super) fn into_all(self) -> BTreeMap<u64, Entry> {
        self.all
    }

    /// A server starts to send everything again.
    pub(super) fn begin_resend(&mut self) {
        self.arriving = None;
        self.unsent = self.all.keys().copied().collect();
        self.is_whole = false;
    }

    /// No server continues to send everything again: the previous one may have died meanwhile.
    pub(super) fn end_resend(&mut self) {
        self.arriving = None;
        self.unsent.clear();
    }

    /// The server has sent everything: drops entries that it did not send again.
    pub(super) fn complete(&mut self) {
        std::mem::take(&mut self.unsent).into_iter().for_each(|key| self.remove(key));
        if !std::mem::replace(&mut self.is_whole, true) {
            tracing::info!("all {} descriptors of the server are held", self.descriptors());
        }
    }
}

/// An entry that is being sent.
#[derive(Debug)]
pub(super) struct Sending {
    pub(super) key: u64,
    is_update: bool,
    manifest: Vec<u8>,
    descriptors: usize,
    /// How much was sent.
    bytes: usize,
    fds: usize,
}

impl Sending {
    pub(super) fn new(key: u64, manifest: Vec<u8>, descriptors: usize) -> Self {
        Self { key, is_update: false, manifest, descriptors, bytes: 0, fds: 0 }
    }

    /// A new manifest for an entry that is held.
    pub(super) fn update(key: u64, manifest: Vec<u8>) -> Self {
        Self { is_update: true, ..Self::new(key, manifest, 0) }
    }

    /// The next record, with at most `room` descriptors: the positions of its descriptors. `None` if it needs more room.
    pub(super) fn next(&self, room: usize) -> Option<(Message, Range<usize>)> {
        let bytes = (self.manifest.len() - self.bytes).min(MAX_CHUNK);
        let fds = (self.descriptors - self.fds).min(room).min(MAX_FDS);
        if fds == 0 && self.fds < self.descriptors {
            return None;
        }
        let (end, last) = (self.bytes + bytes, self.fds + fds);
        let piece = Piece {
            key: self.key,
            is_first: self.bytes == 0 && self.fds == 0,
            is_last: end == self.manifest.len() && last == self.descriptors,
            is_update: self.is_update,
            descriptors: fds,
            manifest: self.manifest[self.bytes..end].to_vec(),
        };
        Some((Message::Entry(piece), self.fds..last))
    }

    /// Records that the record of [`Sending::next`] was sent. Returns whether it was the last one.
    pub(super) fn sent(&mut self, message: &Message, fds: usize) -> bool {
        let Message::Entry(piece) = message else { return false };
        self.bytes += piece.manifest.len();
        self.fds += fds;
        piece.is_last
    }
}

/// The descriptors of an entry at some positions.
pub(super) fn borrowed(entry: &Entry, at: Range<usize>) -> Vec<BorrowedFd<'_>> {
    entry.fds[at].iter().map(AsFd::as_fd).collect()
}
