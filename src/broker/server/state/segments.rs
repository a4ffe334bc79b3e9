//! The kept descriptors: one per open file, reference-counted.

#[cfg(test)]
mod tests;

use std::{
    cmp::Ordering,
    collections::{BTreeMap, btree_map::Entry},
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use super::inspect::{Inode, inode};
use crate::{broker::catalogue::SegmentId, sys};

/// A descriptor that was not kept. The caller closes it.
#[derive(Debug)]
pub(crate) struct NotHeld {
    pub(crate) fd: OwnedFd,
    pub(crate) reason: Reason,
}

/// Why a descriptor was not kept.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Reason {
    /// The same open file is kept with another size: one claim is wrong.
    #[error("{claimed} bytes are claimed, but this memory is already held as {held} bytes")]
    SizeMismatch {
        /// The size claimed now, in bytes.
        claimed: u64,
        /// The size claimed when it was first added.
        held: u64,
    },

    /// No segment number is free.
    #[error("{max} segments are held, which is the limit: delete objects", max = SegmentId::COUNT)]
    Full,

    /// statx(2) failed.
    #[error("the descriptor's file can't be examined")]
    System(#[source] io::Error),
}

#[derive(Debug, Default)]
pub(crate) struct SegmentTable {
    slots: Vec<Option<StoredSegment>>,
    free: Vec<SegmentId>,
    /// By inode, in the kernel's order of open files, without files that can't be compared. A memfd's inode has one open file, plus one for
    /// each open through `/proc`. All GPU memory shares the inode of `/dev/nvidiactl`.
    files: BTreeMap<Inode, Vec<SegmentId>>,
}

#[derive(Debug)]
struct StoredSegment {
    fd: OwnedFd,
    size: u64,
    references: u64,
    inode: Inode,
    ordered: bool,
}

/// Position of an open file in its inode's list.
enum Place {
    /// Already kept as this segment, at this index.
    Known { id: SegmentId, index: usize },
    /// New; belongs at this index.
    New(usize),
    /// The kernel refuses to compare.
    Unknown,
}

impl SegmentTable {
    /// Holds a descriptor of `size` bytes of inspected memory. If the same open file is already held, adds a reference and returns the
    /// duplicate for the caller to close. Does not block: one statx(2), and O(log n) kcmp(2) for n kept descriptors of the inode.
    ///
    /// If the kernel does not let this process compare open files, each descriptor becomes a separate segment.
    ///
    /// # Errors
    /// [`NotHeld`], which holds the descriptor.
    pub(crate) fn add(&mut self, fd: OwnedFd, size: u64) -> Result<(SegmentId, Option<OwnedFd>), NotHeld> {
        let inode = match inode(fd.as_fd()) {
            Ok(inode) => inode,
            Err(error) => return Err(NotHeld { fd, reason: Reason::System(error) }),
        };
        let place = self.place(fd.as_fd(), inode);
        if let Place::Known { id, .. } = place
            && let Some(segment) = self.slots[id.index()].as_mut()
        {
            if segment.size != size {
                let reason = Reason::SizeMismatch { claimed: size, held: segment.size };
                return Err(NotHeld { fd, reason });
            }
            segment.references += 1;
            return Ok((id, Some(fd)));
        }
        let id = match self.free.pop() {
            Some(id) => id,
            None => match SegmentId::at(self.slots.len()) {
                Some(id) => {
                    self.slots.push(None);
                    id
                }
                None => return Err(NotHeld { fd, reason: Reason::Full }),
            },
        };
        let ordered = match place {
            Place::New(index) => {
                self.files.entry(inode).or_default().insert(index, id);
                true
            }
            _ => false,
        };
        self.slots[id.index()] = Some(StoredSegment { fd, size, references: 1, inode, ordered });
        Ok((id, None))
    }

    /// The descriptor of a segment.
    ///
    /// # Panics
    /// If the segment is not kept.
    pub(crate) fn get(&self, id: SegmentId) -> BorrowedFd<'_> {
        self.segment(id).fd.as_fd()
    }

    pub(crate) fn find(&self, id: SegmentId) -> Option<BorrowedFd<'_>> {
        Some(self.slots.get(id.index())?.as_ref()?.fd.as_fd())
    }

    #[cfg(test)]
    pub(crate) fn size(&self, id: SegmentId) -> u64 {
        self.segment(id).size
    }

    /// Removes a reference. After the last one, returns the descriptor; the caller closes it where blocking is allowed.
    ///
    /// # Panics
    /// If the segment is not kept.
    pub(crate) fn release(&mut self, id: SegmentId) -> Option<OwnedFd> {
        let segment = self.segment_mut(id);
        segment.references -= 1;
        if segment.references > 0 {
            return None;
        }
        let StoredSegment { inode, ordered, .. } = *self.segment(id);
        // Binary search as in `add`: all GPU memory shares one inode.
        let index = match self.place(self.get(id), inode) {
            Place::Known { index, .. } => Some(index),
            _ => self.files.get(&inode).and_then(|ids| ids.iter().position(|&other| other == id)),
        };
        let fd = self.slots[id.index()].take()?.fd;
        self.free.push(id);
        if ordered && let Entry::Occupied(mut entry) = self.files.entry(inode) {
            let ids = entry.get_mut();
            if let Some(index) = index.filter(|&index| ids.get(index) == Some(&id)) {
                ids.remove(index);
            }
            if ids.is_empty() {
                entry.remove();
            }
        }
        Some(fd)
    }

    /// Takes over a descriptor of the previous server under the same number, with one reference.
    pub(crate) fn restore(&mut self, id: SegmentId, fd: OwnedFd, size: u64) {
        if self.slots.len() <= id.index() {
            self.slots.resize_with(id.index() + 1, || None);
        }
        let inode = inode(fd.as_fd());
        let place = inode.as_ref().map_or(Place::Unknown, |inode| self.place(fd.as_fd(), *inode));
        let inode = inode.unwrap_or_default();
        let ordered = matches!(place, Place::New(_));
        if let Place::New(index) = place {
            self.files.entry(inode).or_default().insert(index, id);
        }
        self.slots[id.index()] = Some(StoredSegment { fd, size, references: 1, inode, ordered });
    }

    pub(crate) fn add_reference(&mut self, id: SegmentId) {
        self.segment_mut(id).references += 1;
    }

    /// Rebuilds the list of free numbers after [`SegmentTable::restore`].
    pub(crate) fn rebuild_free_list(&mut self) {
        let free = self.slots.iter().enumerate().rev().filter(|(_, slot)| slot.is_none());
        self.free = free.filter_map(|(index, _)| SegmentId::at(index)).collect();
    }

    /// The numbers of all kept segments.
    pub(crate) fn ids(&self) -> impl Iterator<Item = SegmentId> {
        self.slots.iter().enumerate().filter_map(|(index, slot)| slot.as_ref().and(SegmentId::at(index)))
    }

    /// The number of kept descriptors.
    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// All segments with their sizes, by number.
    #[cfg(test)]
    pub(crate) fn iter<'a>(&'a self) -> impl Iterator<Item = (SegmentId, BorrowedFd<'a>, u64)> {
        let held = |(index, slot): (usize, &'a Option<StoredSegment>)| {
            let segment = slot.as_ref()?;
            Some((SegmentId::at(index)?, segment.fd.as_fd(), segment.size))
        };
        self.slots.iter().enumerate().filter_map(held)
    }

    fn segment(&self, id: SegmentId) -> &StoredSegment {
        self.slots.get(id.index()).and_then(Option::as_ref).expect("the segment is held")
    }

    fn segment_mut(&mut self, id: SegmentId) -> &mut StoredSegment {
        self.slots.get_mut(id.index()).and_then(Option::as_mut).expect("the segment is held")
    }

    fn place(&self, fd: BorrowedFd<'_>, inode: Inode) -> Place {
        let Some(ids) = self.files.get(&inode) else { return Place::New(0) };
        let (mut low, mut high) = (0, ids.len());
        while low < high {
            let middle = low.midpoint(high);
            match sys::kcmp(self.get(ids[middle]), fd) {
                Ok(Ordering::Equal) => return Place::Known { id: ids[middle], index: middle },
                Ok(Ordering::Less) => low = middle + 1,
                Ok(Ordering::Greater) => high = middle,
                Err(error) => {
                    tracing::debug!(%error, "open files can't be compared: a duplicate is held as a separate segment");
                    return Place::Unknown;
                }
            }
        }
        Place::New(low)
    }
}
