//! A buffer of one or more allocations side by side, which can be shared in part and sealed.

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

use super::{Allocation, Device, Mapping, Placement, Rdma, Region, Reservation, Run, check_range, round_up, timed};
use crate::{
    driver::Access,
    error::{DeviceError, Error, MemoryError, Result},
};

/// Allocations mapped side by side at one address range.
#[derive(Debug)]
pub(super) struct Chunks {
    device: Device,
    placement: Placement,
    /// Whether RDMA can reach all of it.
    gpu_direct_rdma: bool,
    /// Bytes of data.
    size: u64,
    /// Number of allocations.
    segments: u64,
    /// Whether another library of this process allocated the memory, and can write to it.
    lent: bool,
    /// Whether the allocations are exported only after sealing.
    export_after_seal: bool,
    reservation: Arc<Reservation>,
    /// False after a failure to seal.
    usable: AtomicBool,
    /// Empty before sealing, if `export_after_seal`.
    exported: OnceLock<Vec<Arc<Chunk>>>,
    /// The durations of creating and mapping.
    timings: Timings,
    export_time: OnceLock<Duration>,
    /// Locked during long driver calls. Sizes and descriptors are readable without the lock.
    state: Mutex<SealState>,
}

/// The state that sealing and [`Chunks::make_read_only`] change.
#[derive(Debug)]
struct SealState {
    /// `None` after a failure to seal: the buffer is then unusable.
    mapping: Option<Mapping>,
    /// Allocations that are not exported yet because they are not sealed yet.
    unsealed: Vec<Arc<Allocation>>,
    /// `None` before sealing, then whether the kernel enforces the seal.
    sealed: Option<bool>,
}

/// The time spent on each step of creating memory, summed over all allocations.
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

/// An exported allocation of a buffer.
#[derive(Debug)]
pub struct Chunk {
    size: u64,
    fd: OwnedFd,
}

impl Chunk {
    /// Exports an allocation and releases its handle: the mapping and the descriptor keep the memory.
    fn of(allocation: Arc<Allocation>) -> Result<Arc<Self>> {
        Ok(Arc::new(Self { size: allocation.size(), fd: allocation.into_descriptor()? }))
    }

    /// The size in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }
}

impl AsFd for Chunk {
    /// The descriptor that another process imports.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Chunks {
    /// See [`super::Shared::create`]. `chunk` is the size of each allocation; `None` creates a single allocation.
    pub(super) fn create(
        device: &Device,
        size: u64,
        chunk: Option<u64>,
        placement: Placement,
        rdma: Rdma,
        export_after_seal: bool,
    ) -> Result<Self> {
        device.require_sharing()?;
        let properties = device.shareable_for(placement, rdma)?;
        let unit = device.granularity_of(&properties)?;
        let chunk = chunk.map(|chunk| round_up(chunk, unit)).transpose()?;
        let bytes = round_up(size, unit)?;
        check_resources(device, placement, bytes, chunk)?;
        let chunk = chunk.unwrap_or(bytes);
        let reservation = Reservation::new(device, bytes)?;
        let mut mapping = Mapping::empty(&reservation, 0, device, Access::ReadWrite)?;
        let mut chunks = Vec::new();
        let mut unsealed = Vec::new();
        let mut timings = Timings::default();
        let mut gpu_direct_rdma = properties.gpu_direct_rdma;
        while mapping.size() < bytes {
            let size = chunk.min(bytes - mapping.size());
            let allocation = timed(&mut timings.create, || Allocation::create_with(device, &properties, rdma, size))?;
            gpu_direct_rdma &= allocation.properties().gpu_direct_rdma;
            timed(&mut timings.map, || mapping.push(&allocation))?;
            match export_after_seal {
                true => unsealed.push(allocation),
                false => chunks.push(timed(&mut timings.export, || Chunk::of(allocation))?),
            }
        }
        timed(&mut timings.map, || mapping.allow(properties.location.host_node()))?;
        let segments = (chunks.len() + unsealed.len()) as u64;
        let state = Mutex::new(SealState { mapping: Some(mapping), unsealed, sealed: None });
        let exported = if export_after_seal { OnceLock::new() } else { OnceLock::from(chunks) };
        let device = device.clone();
        let usable = AtomicBool::new(true);
        let export_time = OnceLock::new();
        Ok(Self {
            device,
            placement,
            gpu_direct_rdma,
            size,
            segments,
            lent: false,
            export_after_seal,
            reservation,
            usable,
            exported,
            timings,
            export_time,
            state,
        })
    }

    /// Maps and exports existing allocations, side by side and read-only: see [`super::Shared::from_addresses`].
    pub(super) fn existing(device: &Device, allocations: Vec<Arc<Allocation>>) -> Result<Self> {
        check_descriptors(allocations.len() as u64)?;
        let size = allocations.iter().map(|allocation| allocation.size()).sum();
        if size == 0 {
            return Err(Error::Memory(MemoryError::InvalidSize { size, max: u64::MAX }));
        }
        let segments = allocations.len() as u64;
        let gpu_direct_rdma = allocations.iter().all(|allocation| allocation.properties().gpu_direct_rdma);
        let mut timings = Timings::default();
        let reservation = Reservation::new(device, size)?;
        let mapping =
            timed(&mut timings.map, || Mapping::side_by_side(&reservation, 0, &allocations, device, Access::ReadOnly))?;
        let chunks = timed(&mut timings.export, || allocations.into_iter().map(Chunk::of).collect::<Result<Vec<_>>>())?;
        Ok(Self {
            device: device.clone(),
            placement: Placement::Device,
            gpu_direct_rdma,
            size,
            segments,
            lent: true,
            export_after_seal: false,
            reservation,
            usable: AtomicBool::new(true),
            exported: OnceLock::from(chunks),
            timings,
            export_time: OnceLock::new(),
            state: Mutex::new(SealState { mapping: Some(mapping), unsealed: Vec::new(), sealed: None }),
        })
    }

    /// See [`super::Shared::seal`].
    pub(super) fn seal(&self) -> Result<bool> {
        let mut state = self.state()?;
        if let Some(enforced) = state.sealed {
            return Ok(enforced);
        }
        if !self.export_after_seal {
            let problem = "the memory is already exported and can't be sealed: create it with Spec::sealed";
            return Err(Error::Misuse { problem: problem.to_owned() });
        }
        // A remaining writable mapping would still allow writes.
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

    /// Seals and exports allocations and maps them read-only. Returns whether the kernel enforces the seal.
    fn map_sealed(&self, unsealed: Vec<Arc<Allocation>>) -> Result<(Mapping, bool)> {
        let mut mapping = Mapping::empty(&self.reservation, 0, &self.device, Access::ReadOnly)?;
        let node = unsealed.first().and_then(|first| first.properties().location.host_node());
        let mut chunks = Vec::with_capacity(unsealed.len());
        let mut enforced = true;
        let mut time = Duration::ZERO;
        for allocation in unsealed {
            enforced &= allocation.seal()?;
            mapping.push(&allocation)?;
            chunks.push(timed(&mut time, || Chunk::of(allocation))?);
        }
        mapping.allow(node)?;
        // The caller holds the lock and seals only once, so both cells are empty.
        let _ = self.export_time.set(time);
        let _ = self.exported.set(chunks);
        Ok((mapping, enforced))
    }

    /// See [`super::Shared::make_read_only`].
    pub(super) fn make_read_only(&self) -> Result<()> {
        if self.lent {
            let feature = "removing the write access of the library that allocated the memory";
            return Err(Error::Device(DeviceError::Unsupported { device: self.device.to_string(), feature }));
        }
        let mut state = self.state()?;
        if !state.unsealed.is_empty() {
            let problem = "the memory is not sealed yet: call Shared::seal, which also makes it read-only";
            return Err(Error::Misuse { problem: problem.to_owned() });
        }
        match &mut state.mapping {
            Some(mapping) => mapping.make_read_only(self.node()?),
            None => Ok(()),
        }
    }

    /// The NUMA node of host memory, whose CPUs also get access.
    fn node(&self) -> Result<Option<i32>> {
        Ok(self.device.shareable(self.placement)?.location.host_node())
    }

    /// See [`super::Shared::clear_padding`].
    pub(super) fn clear_padding(&self) -> Result<()> {
        match &self.state()?.mapping {
            Some(mapping) => super::clear(mapping, self.size..mapping.size()),
            None => Ok(()),
        }
    }

    /// See [`super::Shared::chunks`].
    pub(super) fn part(&self, range: Range<u64>) -> Result<(Run, Vec<Arc<Chunk>>)> {
        let length = range.end.checked_sub(range.start);
        let length =
            length.ok_or(Error::Memory(MemoryError::OutOfRange { offset: range.start, length: 0, size: self.size }))?;
        check_range(range.start, length, self.size)?;
        let chunks = self.exported.get().map_or(&[][..], Vec::as_slice);
        let mut chosen = Vec::new();
        let mut part = Run::default();
        let mut offset = 0;
        for (index, chunk) in (0..).zip(chunks) {
            let end = offset + chunk.size;
            if length > 0 && end > range.start && offset < range.end {
                if chosen.is_empty() {
                    part = Run { first: index, offset, ..part };
                }
                part.size += chunk.size;
                part.segments += 1;
                chosen.push(Arc::clone(chunk));
            }
            offset = end;
        }
        Ok((part, chosen))
    }

    /// Bytes of data; 0 after a failure to seal.
    pub(super) fn size(&self) -> u64 {
        if self.is_usable() { self.size } else { 0 }
    }

    /// Bytes of memory; 0 after a failure to seal.
    pub(super) fn mapped_size(&self) -> u64 {
        if self.is_usable() { self.reservation.size() } else { 0 }
    }

    pub(super) fn segments(&self) -> u64 {
        self.segments
    }

    pub(super) fn timings(&self) -> Timings {
        Timings { export: self.export_time.get().copied().unwrap_or(self.timings.export), ..self.timings }
    }

    pub(super) fn placement(&self) -> Placement {
        self.placement
    }

    pub(super) fn is_gpu_direct_rdma(&self) -> bool {
        self.gpu_direct_rdma
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

/// Descriptors to leave free for the rest of the program.
const SPARE_DESCRIPTORS: u64 = 64;

/// Checks that enough memory is free and that the open-file limit allows a descriptor per chunk, before the first chunk is
/// allocated. A single allocation needs no check, because it can't fail half-way.
fn check_resources(device: &Device, placement: Placement, bytes: u64, chunk: Option<u64>) -> Result<()> {
    let Some(chunk) = chunk.filter(|&chunk| chunk < bytes) else { return Ok(()) };
    check_descriptors(bytes.div_ceil(chunk))?;
    if placement == Placement::Host && !device.is_host() {
        // The device's free memory is irrelevant for host memory.
        return Ok(());
    }
    match device.memory_info()?.free {
        free if bytes > free => {
            Err(Error::Memory(MemoryError::OutOfMemory { device: device.to_string(), size: bytes, free }))
        }
        _ => Ok(()),
    }
}

/// Checks that the open-file limit allows `more` descriptors.
fn check_descriptors(more: u64) -> Result<()> {
    let limit = getrlimit(Resource::RLIMIT_NOFILE);
    let (limit, _) = limit.map_err(|errno| Error::system("read the open-file limit", errno))?;
    let open = std::fs::read_dir("/proc/self/fd").map_or(0, |open| open.count() as u64);
    let needed = more.saturating_add(open + SPARE_DESCRIPTORS);
    if needed > limit { Err(Error::Memory(MemoryError::TooManyDescriptors { needed, limit })) } else { Ok(()) }
}
