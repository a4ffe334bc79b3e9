//! A buffer of one or more allocations side by side: it can be shared in part, and sealed.

use std::{
    mem,
    ops::Range,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use nix::sys::resource::{Resource, getrlimit};

use super::{Allocation, Device, Mapping, Part, Placement, Region, Reservation, check_range, round_up, timed};
use crate::{
    driver::Access,
    error::{Error, MemoryError, Result},
};

/// Allocations at one range of addresses.
#[derive(Debug)]
pub(super) struct Chunks {
    device: Device,
    placement: Placement,
    /// How many bytes hold data.
    size: u64,
    /// In how many allocations.
    segments: u64,
    /// Whether they are exported only once they are sealed.
    to_be_sealed: bool,
    reservation: Arc<Reservation>,
    /// Not after a failure to seal.
    usable: AtomicBool,
    /// Empty until they are sealed, if they are to be.
    exported: OnceLock<Vec<Arc<Chunk>>>,
    /// How long creating and mapping took.
    timings: Timings,
    export_time: OnceLock<Duration>,
    /// Held during driver calls that may be long: whoever only reads sizes and descriptors does not need it.
    state: Mutex<SealState>,
}

/// What sealing and taking access change.
#[derive(Debug)]
struct SealState {
    /// None after a failure to seal: nothing can be used then.
    mapping: Option<Mapping>,
    /// Those that are not exported yet, because they are still to be sealed.
    unsealed: Vec<Arc<Allocation>>,
    /// Whether they are sealed, and whether the kernel enforces it.
    sealed: Option<bool>,
}

/// How long the steps of making memory took, each for all allocations together.
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub struct Timings {
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
    /// As [`super::Shared::create`], with the allocations' size where there are several.
    pub(super) fn create(
        device: &Device,
        size: u64,
        chunk: Option<u64>,
        placement: Placement,
        gpu_direct_rdma: bool,
        to_be_sealed: bool,
    ) -> Result<Self> {
        device.require_sharing()?;
        let properties = device.shareable_for(placement, gpu_direct_rdma)?;
        let unit = device.granularity_of(&properties)?;
        let chunk = chunk.map(|chunk| round_up(chunk, unit)).transpose()?;
        let bytes = round_up(size, unit)?;
        require(device, placement, bytes, chunk)?;
        let chunk = chunk.unwrap_or(bytes);
        let reservation = Reservation::new(device, bytes)?;
        let mut mapping = Mapping::empty(&reservation, 0, device, Access::ReadWrite)?;
        let (mut chunks, mut unsealed) = (Vec::new(), Vec::new());
        let mut timings = Timings::default();
        while mapping.size() < bytes {
            let size = chunk.min(bytes - mapping.size());
            let allocation = timed(&mut timings.create, || Allocation::create_with(device, &properties, size))?;
            timed(&mut timings.map, || mapping.push(&allocation))?;
            match to_be_sealed {
                true => unsealed.push(allocation),
                false => chunks.push(timed(&mut timings.export, || Chunk::of(allocation))?),
            }
        }
        timed(&mut timings.map, || mapping.allow(properties.location.host_node()))?;
        let segments = (chunks.len() + unsealed.len()) as u64;
        let state = Mutex::new(SealState { mapping: Some(mapping), unsealed, sealed: None });
        let exported = if to_be_sealed { OnceLock::new() } else { OnceLock::from(chunks) };
        let (device, usable, export_time) = (device.clone(), AtomicBool::new(true), OnceLock::new());
        Ok(Self {
            device,
            placement,
            size,
            segments,
            to_be_sealed,
            reservation,
            usable,
            exported,
            timings,
            export_time,
            state,
        })
    }

    /// As [`super::Shared::seal`].
    pub(super) fn seal(&self) -> Result<bool> {
        let mut state = self.state()?;
        if let Some(enforced) = state.sealed {
            return Ok(enforced);
        }
        if !self.to_be_sealed {
            let problem = "the memory was not made to be sealed, and is exported already: ask for it in its Spec";
            return Err(Error::Misuse { problem: problem.to_owned() });
        }
        // No writable mapping may be left: it would go on writing.
        if let Some(mapping) = &mut state.mapping {
            mapping.unmap()?;
        }
        state.mapping = None;
        let resealed = self.map_sealed(mem::take(&mut state.unsealed));
        self.usable.store(resealed.is_ok(), Ordering::Release);
        let (mapping, enforced) = resealed?;
        state.mapping = Some(mapping);
        state.sealed = Some(enforced);
        Ok(enforced)
    }

    /// Seals allocations, exports them, and maps them to be read. Returns whether the kernel enforces the seal.
    fn map_sealed(&self, unsealed: Vec<Arc<Allocation>>) -> Result<(Mapping, bool)> {
        let mut mapping = Mapping::empty(&self.reservation, 0, &self.device, Access::ReadOnly)?;
        let node = unsealed.first().and_then(|first| first.properties().location.host_node());
        let (mut chunks, mut enforced, mut time) = (Vec::with_capacity(unsealed.len()), true, Duration::ZERO);
        for allocation in unsealed {
            enforced &= allocation.seal()?;
            mapping.push(&allocation)?;
            chunks.push(timed(&mut time, || Chunk::of(allocation))?);
        }
        mapping.allow(node)?;
        // They are sealed once only.
        let _ = self.export_time.set(time);
        let _ = self.exported.set(chunks);
        Ok((mapping, enforced))
    }

    /// As [`super::Shared::make_read_only`].
    pub(super) fn make_read_only(&self) -> Result<()> {
        let mut state = self.state()?;
        if !state.unsealed.is_empty() {
            let problem = "memory that is still to be sealed becomes read-only when it is: call Shared::seal";
            return Err(Error::Misuse { problem: problem.to_owned() });
        }
        match &mut state.mapping {
            Some(mapping) => mapping.make_read_only(self.node()?),
            None => Ok(()),
        }
    }

    /// The NUMA node whose CPUs may use it too.
    fn node(&self) -> Result<Option<i32>> {
        Ok(self.device.shareable(self.placement)?.location.host_node())
    }

    /// Writes zeros behind the data, to the end of the last allocation.
    pub(super) fn clear_padding(&self) -> Result<()> {
        match &self.state()?.mapping {
            Some(mapping) => super::clear(mapping, self.size..mapping.size()),
            None => Ok(()),
        }
    }

    /// As [`super::Shared::chunks`].
    pub(super) fn part(&self, range: Range<u64>) -> Result<(Part, Vec<Arc<Chunk>>)> {
        let length = range.end.checked_sub(range.start);
        let length =
            length.ok_or(Error::Memory(MemoryError::OutOfRange { offset: range.start, length: 0, size: self.size }))?;
        check_range(range.start, length, self.size)?;
        let chunks = self.exported.get().map_or(&[][..], Vec::as_slice);
        let (mut chosen, mut part, mut offset) = (Vec::new(), Part::default(), 0);
        for (index, chunk) in (0..).zip(chunks) {
            let end = offset + chunk.size;
            if length > 0 && end > range.start && offset < range.end {
                if chosen.is_empty() {
                    part = Part { first: index, offset, ..part };
                }
                part.size += chunk.size;
                part.segments += 1;
                chosen.push(Arc::clone(chunk));
            }
            offset = end;
        }
        Ok((part, chosen))
    }

    /// How many bytes hold data: none after a failure to seal.
    pub(super) fn size(&self) -> u64 {
        if self.is_usable() { self.size } else { 0 }
    }

    /// How many bytes there are.
    pub(super) fn mapped_size(&self) -> u64 {
        if self.is_usable() { self.reservation.size() } else { 0 }
    }

    /// In how many allocations.
    pub(super) fn segments(&self) -> u64 {
        self.segments
    }

    pub(super) fn timings(&self) -> Timings {
        Timings { export: self.export_time.get().copied().unwrap_or(self.timings.export), ..self.timings }
    }

    pub(super) fn placement(&self) -> Placement {
        self.placement
    }

    pub(super) fn address(&self) -> u64 {
        self.reservation.address()
    }

    fn is_usable(&self) -> bool {
        self.usable.load(Ordering::Acquire)
    }

    fn state(&self) -> Result<MutexGuard<'_, SealState>> {
        self.device.driver().check_fork()?;
        Ok(self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// What this process needs beside the descriptors of its memory.
const SPARE_DESCRIPTORS: u64 = 64;

/// Checks that there is memory, and room for descriptors, for chunks of so many bytes together, before any is allocated. One
/// allocation can't fail half-way.
fn require(device: &Device, placement: Placement, bytes: u64, chunk: Option<u64>) -> Result<()> {
    let Some(chunk) = chunk.filter(|&chunk| chunk < bytes) else { return Ok(()) };
    let limit = getrlimit(Resource::RLIMIT_NOFILE);
    let (limit, _) = limit.map_err(|errno| Error::system("read the limit of open files", errno))?;
    let open = std::fs::read_dir("/proc/self/fd").map_or(0, |open| open.count() as u64);
    let needed = bytes.div_ceil(chunk).saturating_add(open + SPARE_DESCRIPTORS);
    if needed > limit {
        return Err(Error::Memory(MemoryError::TooManyDescriptors { needed, limit }));
    }
    if placement == Placement::Host && !device.is_host() {
        // The device's figures say nothing of the host's memory.
        return Ok(());
    }
    match device.memory_info()?.free {
        free if bytes > free => {
            Err(Error::Memory(MemoryError::OutOfMemory { device: device.to_string(), size: bytes, free }))
        }
        _ => Ok(()),
    }
}
