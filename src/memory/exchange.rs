//! Replacing the memory at an address range.

use std::mem;

use super::{Device, Imported, Mapping, Region, Remains, report};
use crate::error::{Error, MemoryError, Result};

/// Imported memory that is not mapped: handles and descriptors, to map it at the addresses of other memory. Dropping it releases the
/// handles and closes the descriptors.
#[derive(Debug)]
pub(crate) struct Spare {
    size: u64,
    node: Option<i32>,
    segments: Remains,
}

impl Spare {
    /// Unmaps memory and keeps its segments.
    ///
    /// # Errors
    /// [`Error::Driver`]; [`Error::Misuse`] for memory without segments. Driver calls: `cuMemUnmap`, `cuMemAddressFree`.
    pub(crate) fn of(mut memory: Imported, segments: Remains) -> Result<Self> {
        memory.mapping()?.unmap()?;
        Ok(Self { size: memory.size(), node: memory.node, segments })
    }

    fn map(&self, mapping: &mut Mapping) -> Result<()> {
        map(mapping, &self.segments, self.node)
    }
}

/// An address range, and the memory to map there.
#[derive(Debug)]
pub(crate) struct Place<'a> {
    memory: &'a mut Imported,
    /// The handles of the mapped memory; empty if parked.
    segments: &'a mut Remains,
    /// The new memory; `None` to park the range.
    next: Option<&'a mut Spare>,
    /// Whether the mapping may have changed.
    changed: bool,
}

impl<'a> Place<'a> {
    pub(crate) fn new(memory: &'a mut Imported, segments: &'a mut Remains, next: Option<&'a mut Spare>) -> Self {
        Self { memory, segments, next, changed: false }
    }

    fn change(&mut self) -> Result<()> {
        let in_one_step = self.memory.device().is_host() && !self.memory.parked;
        let mapping = self.memory.mapping()?;
        if let Some(next) = self.next.as_deref().filter(|_| in_one_step)
            && sizes(&next.segments).eq(sizes(self.segments))
        {
            self.changed = true;
            return mapping.replace(next.segments.allocations());
        }
        mapping.unmap()?;
        self.changed = true;
        self.next.as_deref().map_or(Ok(()), |next| next.map(mapping))
    }

    /// Maps the old memory again.
    fn restore(&mut self) -> Result<()> {
        let parked = self.memory.parked;
        let node = self.memory.node;
        let mapping = self.memory.mapping()?;
        mapping.unmap()?;
        if parked { Ok(()) } else { map(mapping, self.segments, node) }
    }

    /// Updates the state after success: the old memory becomes the spare memory.
    fn commit(&mut self) {
        match self.next.as_deref_mut() {
            Some(next) => {
                mem::swap(&mut self.memory.size, &mut next.size);
                mem::swap(&mut self.memory.node, &mut next.node);
                mem::swap(self.segments, &mut next.segments);
                self.memory.parked = false;
            }
            None => self.park(),
        }
    }

    /// Marks the range as parked, and releases the old memory.
    fn park(&mut self) {
        self.memory.parked = true;
        *self.segments = Remains::default();
    }
}

/// Replaces the memory at every place, or at none. The old memory becomes the spare memory. If a place has no new memory, the old memory
/// is released and the addresses stay reserved.
///
/// On CUDA, each place is unmapped, mapped, and given access once, so its addresses are briefly unmapped. On the host backend, a
/// segment of the same size replaces each segment in one step. In both cases the addresses stay reserved, so no other mapping in this
/// process can take them. Waits until all work in the devices' primary contexts has finished.
///
/// # Errors
/// [`Error::Misuse`] if a mirror of the memory is open; [`Error::Driver`] if earlier device work failed, or if all places were parked
/// and mapping failed: in these cases nothing is changed. Otherwise [`MemoryError::NotExchanged`]: the old memory is mapped again, or,
/// if `back` holds an error, nothing is mapped.
///
/// Driver calls: `cuCtxSynchronize`, `cuMemUnmap`, `cuMemMap`, `cuMemSetAccess`; to park, `cuMemRelease`. On the host backend: mmap(2)
/// with `MAP_FIXED`.
pub(crate) fn exchange(places: &mut [Place<'_>]) -> Result<()> {
    // Check every place before changing the first: an open mirror would prevent restoring it.
    for place in places.iter_mut() {
        place.memory.mapping()?.check_unused()?;
    }
    let mut waited: Vec<Device> = Vec::new();
    for place in places.iter() {
        let device = place.memory.device();
        if waited.iter().all(|other| other.ordinal() != device.ordinal()) {
            device.verbs().synchronize(device.ordinal())?;
            waited.push(device.clone());
        }
    }
    let Err(source) = places.iter_mut().try_for_each(Place::change) else {
        places.iter_mut().for_each(Place::commit);
        return Ok(());
    };
    let was_parked = places.iter().all(|place| place.memory.parked);
    let restored = places.iter_mut().filter(|place| place.changed).try_for_each(Place::restore);
    let back = match restored {
        Ok(()) if was_parked => return Err(source),
        Ok(()) => None,
        Err(error) => {
            for place in places.iter_mut() {
                let unmapped = place.memory.mapping().and_then(Mapping::unmap);
                report(unmapped, "parked memory can't be unmapped");
                place.park();
            }
            Some(Box::new(error))
        }
    };
    Err(Error::Memory(MemoryError::NotExchanged { back, source: Box::new(source) }))
}

fn map(mapping: &mut Mapping, segments: &Remains, node: Option<i32>) -> Result<()> {
    segments.allocations().try_for_each(|allocation| mapping.push(allocation))?;
    mapping.allow(node)
}

fn sizes(segments: &Remains) -> impl Iterator<Item = u64> {
    segments.allocations().map(super::Allocation::size)
}
