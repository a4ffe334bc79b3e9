//! The descriptors that the server keeps: each open file once, counted by references.

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

/// A descriptor that was not kept. It is the caller's to close.
#[derive(Debug)]
pub(crate) struct NotKept {
    /// The descriptor that was to be added.
    pub(crate) fd: OwnedFd,
    /// Why.
    pub(crate) reason: Reason,
}

/// Why a descriptor was not kept.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Reason {
    /// The same open file is kept with another size: one of the claims is wrong.
    #[error("{claimed} bytes are claimed for memory that is kept here as {kept} bytes")]
    Contradiction {
        /// The size that is claimed now, in bytes.
        claimed: u64,
        /// The size that was claimed when it was first added.
        kept: u64,
    },

    /// Every name is taken.
    #[error("{most} segments are kept, and no more can be", most = SegmentId::COUNT)]
    Full,

    /// The kernel does not say which file it is.
    #[error("the file behind the descriptor can't be examined")]
    System(#[source] io::Error),
}

/// The kept descriptors.
#[derive(Debug, Default)]
pub(crate) struct Segments {
    slots: Vec<Option<Segment>>,
    /// The empty ones of them.
    free: Vec<SegmentId>,
    /// By inode, in the kernel's order of open files. A memfd's inode has one open file, or one for each time that it was opened
    /// through `/proc`; those of a GPU's memory all have the inode of `/dev/nvidiactl`. Without those that can't be compared.
    files: BTreeMap<Inode, Vec<SegmentId>>,
}

#[derive(Debug)]
struct Segment {
    fd: OwnedFd,
    size: u64,
    references: u64,
    inode: Inode,
    /// Whether it is in `files`.
    ordered: bool,
}

/// Where an open file is among those of its inode.
enum Place {
    /// It is the one of this segment, at this index.
    Known { id: SegmentId, index: usize },
    /// It is new, and belongs at this index.
    New(usize),
    /// The kernel refuses to compare.
    Unknown,
}

impl Segments {
    /// Keeps a descriptor of `size` bytes of memory, which was inspected; or counts another reference to the same open file, and
    /// returns the duplicate for the caller to close. Does not block: one statx(2), and as many kcmp(2) as the logarithm of the
    /// number of kept descriptors of its inode.
    ///
    /// Where the kernel does not let this process compare open files, each descriptor is a segment of its own.
    ///
    /// # Errors
    /// [`NotKept`], with the descriptor.
    pub(crate) fn add(&mut self, fd: OwnedFd, size: u64) -> Result<(SegmentId, Option<OwnedFd>), NotKept> {
        let inode = match inode(fd.as_fd()) {
            Ok(inode) => inode,
            Err(error) => return Err(NotKept { fd, reason: Reason::System(error) }),
        };
        let place = self.place(fd.as_fd(), inode);
        if let Place::Known { id, .. } = place
            && let Some(segment) = self.slots[id.index()].as_mut()
        {
            if segment.size != size {
                let reason = Reason::Contradiction { claimed: size, kept: segment.size };
                return Err(NotKept { fd, reason });
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
                None => return Err(NotKept { fd, reason: Reason::Full }),
            },
        };
        let ordered = match place {
            Place::New(index) => {
                self.files.entry(inode).or_default().insert(index, id);
                true
            }
            _ => false,
        };
        self.slots[id.index()] = Some(Segment { fd, size, references: 1, inode, ordered });
        Ok((id, None))
    }

    /// The descriptor of a segment.
    ///
    /// # Panics
    /// If it is not kept.
    pub(crate) fn get(&self, id: SegmentId) -> BorrowedFd<'_> {
        self.segment(id).fd.as_fd()
    }

    /// The descriptor of a segment, if it is kept.
    pub(crate) fn find(&self, id: SegmentId) -> Option<BorrowedFd<'_>> {
        Some(self.slots.get(id.index())?.as_ref()?.fd.as_fd())
    }

    /// How many bytes it was claimed to have.
    ///
    /// # Panics
    /// If it is not kept.
    #[cfg(test)]
    pub(crate) fn size(&self, id: SegmentId) -> u64 {
        self.segment(id).size
    }

    /// Takes one reference away. With the last one it returns the descriptor, which the caller closes where that may block.
    ///
    /// # Panics
    /// If it is not kept.
    pub(crate) fn release(&mut self, id: SegmentId) -> Option<OwnedFd> {
        let segment = self.segment_mut(id);
        segment.references -= 1;
        if segment.references > 0 {
            return None;
        }
        let Segment { inode, ordered, .. } = *self.segment(id);
        // Searched as it was inserted: the memory of GPUs has one inode for all.
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

    /// Takes over a descriptor that a server before this one kept under this number, with one reference to it.
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
        self.slots[id.index()] = Some(Segment { fd, size, references: 1, inode, ordered });
    }

    /// Counts another reference to a segment.
    pub(crate) fn refer(&mut self, id: SegmentId) {
        self.segment_mut(id).references += 1;
    }

    /// Finds the numbers that are free after [`Segments::restore`].
    pub(crate) fn collect_free(&mut self) {
        let free = self.slots.iter().enumerate().rev().filter(|(_, slot)| slot.is_none());
        self.free = free.filter_map(|(index, _)| SegmentId::at(index)).collect();
    }

    /// The numbers of all that are kept.
    pub(crate) fn ids(&self) -> impl Iterator<Item = SegmentId> {
        self.slots.iter().enumerate().filter_map(|(index, slot)| slot.as_ref().and(SegmentId::at(index)))
    }

    /// How many descriptors are kept.
    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// All of them, by number, with their sizes.
    #[cfg(test)]
    pub(crate) fn iter<'a>(&'a self) -> impl Iterator<Item = (SegmentId, BorrowedFd<'a>, u64)> {
        let kept = |(index, slot): (usize, &'a Option<Segment>)| {
            let segment = slot.as_ref()?;
            Some((SegmentId::at(index)?, segment.fd.as_fd(), segment.size))
        };
        self.slots.iter().enumerate().filter_map(kept)
    }

    fn segment(&self, id: SegmentId) -> &Segment {
        self.slots.get(id.index()).and_then(Option::as_ref).expect("a segment that is kept")
    }

    fn segment_mut(&mut self, id: SegmentId) -> &mut Segment {
        self.slots.get_mut(id.index()).and_then(Option::as_mut).expect("a segment that is kept")
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
                    tracing::debug!(%error, "open files can't be compared: a descriptor that came before is kept again");
                    return Place::Unknown;
                }
            }
        }
        Place::New(low)
    }
}
