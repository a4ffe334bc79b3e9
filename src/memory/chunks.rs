//! A buffer of many allocations side by side: it can grow, be shared in part, and be sealed.

use std::{
    mem,
    ops::Range,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
    time::Duration,
};

use nix::sys::resource::{Resource, getrlimit};

use super::{Allocation, Device, Mapping, Region, Reservation, Spec, check_range, round_up, timed};
use crate::{
    driver::Access,
    error::{Error, Result},
    wire::{Part, Placement},
};

/// Allocations at one range of addresses, and room for more.
#[derive(Debug)]
pub(super) struct Chunks {
    device: Device,
    location: Placement,
    chunk: Option<u64>,
    /// Whether they are exported only once they are sealed.
    to_be_sealed: bool,
    reservation: Arc<Reservation>,
    state: RwLock<State>,
}

/// Allocations side by side.
#[derive(Debug, Default)]
struct State {
    /// How many bytes hold data.
    size: u64,
    chunks: Vec<Arc<Chunk>>,
    mappings: Vec<Mapping>,
    /// Those that are not exported yet, because they are still to be sealed.
    unsealed: Vec<Arc<Allocation>>,
    /// Whether they are sealed, and whether for everybody.
    sealed: Option<bool>,
    took: Took,
}

impl State {
    fn mapped(&self) -> u64 {
        self.mappings.iter().map(Region::size).sum()
    }
}

/// How long the steps of making memory took, each for all allocations together.
#[derive(Debug, Clone, Copy, Default)]
pub struct Took {
    /// Allocating.
    pub create: Duration,
    /// Mapping, and setting access.
    pub map: Duration,
    /// Exporting.
    pub export: Duration,
}

/// One allocation of a buffer, exported.
#[derive(Debug)]
pub struct Chunk {
    size: u64,
    fd: OwnedFd,
}

impl Chunk {
    /// Exports an allocation and gives its handle back: the mapping and the descriptor keep the memory.
    fn of(allocation: Arc<Allocation>) -> Result<Arc<Self>> {
        Ok(Arc::new(Self { size: allocation.size(), fd: allocation.into_descriptor()? }))
    }

    /// Its size in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }
}

impl AsFd for Chunk {
    /// The descriptor that gives another process the memory.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Chunks {
    /// As [`super::Shared::create`].
    pub(super) fn create(device: &Device, spec: &Spec) -> Result<Self> {
        device.require_sharing()?;
        let unit = device.granularity_of(&device.shareable(spec.location)?)?;
        let chunk = spec.chunk.map(|chunk| round_up(chunk, unit)).transpose()?;
        require(device, spec.location, round_up(spec.size, unit)?, chunk)?;
        let capacity = round_up(spec.capacity.max(spec.size), unit)?;
        let chunks = Self {
            device: device.clone(),
            location: spec.location,
            chunk,
            to_be_sealed: spec.sealed,
            reservation: Reservation::new(device, capacity)?,
            state: RwLock::default(),
        };
        let size = chunks.make_room(spec.size)?;
        chunks.publish(size);
        Ok(chunks)
    }

    /// As [`super::Shared::make_room`].
    pub(super) fn make_room(&self, size: u64) -> Result<u64> {
        let mut state = self.write();
        if state.sealed.is_some() {
            return self.unsupported("growing memory that is sealed");
        }
        let (data, room) = (state.size, self.reservation.size());
        check_range(data, size, room)?;
        if data + size > state.mapped() {
            let missing = data + size - state.mapped();
            self.add(&mut state, missing)?;
        }
        Ok(data + size)
    }

    /// As [`super::Shared::publish`].
    pub(super) fn publish(&self, size: u64) {
        self.write().size = size;
    }

    fn unsupported<T>(&self, feature: &'static str) -> Result<T> {
        Err(Error::Unsupported { device: self.device.to_string(), feature })
    }

    /// Adds allocations of so many bytes, rounded up.
    fn add(&self, state: &mut State, bytes: u64) -> Result<()> {
        let device = &self.device;
        let properties = device.shareable(self.location)?;
        let bytes = round_up(bytes, device.granularity_of(&properties)?)?;
        let chunk = self.chunk.unwrap_or(bytes);
        require(device, self.location, bytes, self.chunk)?;
        let mut mapping = Mapping::empty(&self.reservation, state.mapped(), device, Access::ReadWrite)?;
        let (mut chunks, mut unsealed) = (Vec::new(), Vec::new());
        let took = &mut state.took;
        while mapping.size() < bytes {
            let size = chunk.min(bytes - mapping.size());
            let allocation = timed(&mut took.create, || Allocation::create_at(device, self.location, size))?;
            timed(&mut took.map, || mapping.push(&allocation))?;
            match self.to_be_sealed {
                true => unsealed.push(allocation),
                false => chunks.push(timed(&mut took.export, || Chunk::of(allocation))?),
            }
        }
        timed(&mut took.map, || mapping.allow(properties.location.host_node()))?;
        state.mappings.push(mapping);
        state.chunks.append(&mut chunks);
        state.unsealed.append(&mut unsealed);
        Ok(())
    }

    /// As [`super::Shared::seal`].
    pub(super) fn seal(&self) -> Result<bool> {
        let mut state = self.write();
        if let Some(enforced) = state.sealed {
            return Ok(enforced);
        }
        if !self.to_be_sealed {
            return self.unsupported("sealing memory that was not made to be sealed, and so is out already");
        }
        // No writable mapping may be left: it would go on writing.
        for mapping in &mut state.mappings {
            mapping.unmap()?;
        }
        state.mappings.clear();
        let mut mapping = Mapping::empty(&self.reservation, 0, &self.device, Access::ReadOnly)?;
        let node = state.unsealed.first().and_then(|first| first.properties().location.host_node());
        let mut enforced = true;
        for allocation in mem::take(&mut state.unsealed) {
            enforced &= allocation.seal()?;
            mapping.push(&allocation)?;
            let chunk = timed(&mut state.took.export, || Chunk::of(allocation))?;
            state.chunks.push(chunk);
        }
        mapping.allow(node)?;
        state.mappings.push(mapping);
        state.sealed = Some(enforced);
        Ok(enforced)
    }

    /// As [`super::Shared::chunks`].
    pub(super) fn part(&self, range: Range<u64>, have: u64) -> Result<(Part, Vec<Arc<Chunk>>)> {
        let state = self.read();
        check_range(range.start, range.end.saturating_sub(range.start), state.mapped())?;
        check_range(have, 0, state.chunks.len() as u64)?;
        let mut chosen = Vec::new();
        let mut part = Part { first: have, segments: 0, offset: 0, size: 0 };
        let mut offset = 0;
        for (index, chunk) in (0..).zip(&state.chunks) {
            let held = index < have || offset + chunk.size <= range.start;
            if !held && offset < range.end {
                if chosen.is_empty() {
                    part = Part { first: index, offset, ..part };
                }
                part.size += chunk.size;
                chosen.push(Arc::clone(chunk));
            } else if held && index < have {
                part.offset = offset + chunk.size;
            }
            offset += chunk.size;
        }
        part.segments = chosen.len() as u64;
        Ok((part, chosen))
    }

    /// How many bytes hold data, how many there are, and in how many allocations.
    pub(super) fn sizes(&self) -> (u64, u64, u64) {
        let state = self.read();
        (state.size, state.mapped(), (state.chunks.len() + state.unsealed.len()) as u64)
    }

    pub(super) fn took(&self) -> Took {
        self.read().took
    }

    pub(super) fn location(&self) -> Placement {
        self.location
    }

    pub(super) fn reservation(&self) -> &Reservation {
        &self.reservation
    }

    fn read(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What this process needs beside the descriptors of its memory.
const SPARE_DESCRIPTORS: u64 = 64;

/// Checks that there is memory, and room for descriptors, for chunks of so many bytes together: what will not be enough is told
/// now, and not when most of it is taken. One allocation can't fail half-way.
fn require(device: &Device, location: Placement, bytes: u64, chunk: Option<u64>) -> Result<()> {
    let Some(chunk) = chunk.filter(|&chunk| chunk < bytes) else { return Ok(()) };
    let limit = getrlimit(Resource::RLIMIT_NOFILE);
    let (limit, _) = limit.map_err(|errno| Error::system("read the limit of open files", errno))?;
    let open = std::fs::read_dir("/proc/self/fd").map_or(0, |open| open.count() as u64);
    let needed = bytes.div_ceil(chunk).saturating_add(open + SPARE_DESCRIPTORS);
    if needed > limit {
        return Err(Error::TooManyDescriptors { needed, limit });
    }
    if location == Placement::Host && !device.is_host() {
        // The device's figures say nothing of the host's memory.
        return Ok(());
    }
    match device.memory_info()?.free {
        free if bytes > free => Err(Error::OutOfMemory { device: device.to_string(), size: bytes, free }),
        _ => Ok(()),
    }
}
