//! Other memory at the same addresses.

use std::mem;

use super::{Device, Imported, Mapping, Region, Remains, report};
use crate::error::{Error, MemoryError, Result};

/// Memory that is imported and mapped nowhere: its handles and descriptors, with which it can be mapped at the addresses of other
/// memory. Dropping it releases and closes them.
#[derive(Debug)]
pub(crate) struct Spare {
    size: u64,
    immutable: bool,
    node: Option<i32>,
    segments: Remains,
}

impl Spare {
    /// Unmaps memory, and keeps what it is mapped with again.
    ///
    /// # Errors
    /// [`Error::Driver`]; [`Error::Misuse`] for memory that is not of segments. Driver calls: `cuMemUnmap`, `cuMemAddressFree`.
    pub(crate) fn of(mut memory: Imported, segments: Remains) -> Result<Self> {
        memory.mapping()?.unmap()?;
        Ok(Self { size: memory.size(), immutable: memory.immutable, node: memory.node, segments })
    }

    fn map(&self, mapping: &mut Mapping) -> Result<()> {
        map(mapping, &self.segments, self.node)
    }
}

/// Addresses, and what is to be there.
#[derive(Debug)]
pub(crate) struct Place<'a> {
    memory: &'a mut Imported,
    /// The handles of what is mapped there, and nothing if it is parked.
    segments: &'a mut Remains,
    /// What is to be there; nothing to park it.
    next: Option<&'a mut Spare>,
    /// Whether the mapping may be another than it was.
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

    /// Maps again what was there.
    fn restore(&mut self) -> Result<()> {
        let (parked, node) = (self.memory.parked, self.memory.node);
        let mapping = self.memory.mapping()?;
        mapping.unmap()?;
        if parked { Ok(()) } else { map(mapping, self.segments, node) }
    }

    /// Enters what was done: what was there is the spare one now.
    fn settle(&mut self) {
        match self.next.as_deref_mut() {
            Some(next) => {
                mem::swap(&mut self.memory.size, &mut next.size);
                mem::swap(&mut self.memory.immutable, &mut next.immutable);
                mem::swap(&mut self.memory.node, &mut next.node);
                mem::swap(self.segments, &mut next.segments);
                self.memory.parked = false;
            }
            None => self.give_up(),
        }
    }

    /// Parks it, and releases what was there.
    fn give_up(&mut self) {
        self.memory.parked = true;
        *self.segments = Remains::default();
    }
}

/// Puts other memory at the addresses of each place, in all of them or in none. Where nothing is to come, the addresses stay
/// reserved, and what was there is released. What was there else is in the spare memory then.
///
/// On CUDA the old memory is unmapped, the new one mapped, and its access set once for each place: between them the addresses are
/// empty. On the host backend each segment takes the place of one of the same size in one step. In neither can other memory of this
/// process get the addresses. Waits until all work in the devices' primary contexts is done; blocks for as long as that takes.
///
/// # Errors
/// [`Error::Misuse`] if a mirror of any of the memory is open, and [`Error::Driver`] if the work before failed, and where nothing was
/// mapped before: then nothing is changed.
/// [`MemoryError::NotExchanged`] else: what was there is mapped again, or if it says so, nothing is any more.
///
/// Driver calls: `cuCtxSynchronize`, `cuMemUnmap`, `cuMemMap`, `cuMemSetAccess`; where nothing is to come, `cuMemRelease`. On the host
/// backend: mmap(2) with `MAP_FIXED`.
pub(crate) fn exchange(places: &mut [Place<'_>]) -> Result<()> {
    // All of them before the first is changed: what was changed could not be restored beside an open mirror.
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
        places.iter_mut().for_each(Place::settle);
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
                report(unmapped, "memory that is to be parked can't be unmapped");
                place.give_up();
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
