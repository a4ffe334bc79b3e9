//! An allocator of blocks in shared memory, for other libraries.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use super::{Device, Rdma, Region, Shared, Spec, round_up};
use crate::{driver::Access, error::Result};

/// Allocates blocks from arenas, which are pieces of shared memory. A library such as PyTorch can allocate through it, and its memory can
/// then be handed to other processes without a copy, with one descriptor per arena, not per block.
///
/// Each arena is one [`Shared`] with a single allocation. An arena without blocks is freed after waiting for the device's work. No block
/// is allocated from a closed arena ([`Arenas::close`]), so that its contents do not change under the processes that read it. The same
/// holds for a read-only arena ([`Shared::make_read_only`]).
///
/// In a fork of the process that created it, an allocator is empty, and [`Arenas::allocate`] fails.
///
/// As with `cudaFree`, a block may be freed while queued work uses it: its memory is not reused before that work has finished.
///
/// All methods may be called from several threads at once.
#[derive(Debug)]
pub struct Arenas {
    device: Device,
    granularity: u64,
    arena_size: AtomicU64,
    state: Mutex<ArenaState>,
}

/// The size limit of arenas that grow with demand or with [`Arenas::expect`].
const MAX_GROWN: u64 = 1 << 30;

#[derive(Debug, Default)]
struct ArenaState {
    rdma: Rdma,
    arenas: Vec<Arena>,
    /// Bytes announced by [`Arenas::expect`] and not in an arena yet.
    expected: Option<u64>,
    /// Counts the freed blocks.
    freed: u64,
    /// No device work uses the blocks that were freed up to this count.
    finished: u64,
}

/// One piece of shared memory and its blocks.
#[derive(Debug)]
struct Arena {
    memory: Arc<Shared>,
    /// Block sizes by offset.
    blocks: BTreeMap<u64, u64>,
    closed: bool,
    /// The value of [`ArenaState::freed`] when a block was last freed: work that was queued earlier may still use the block.
    freed: u64,
}

/// The current contents of [`Arenas`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ArenaFigures {
    /// Number of arenas. Each has one descriptor.
    pub arenas: u64,
    /// Number of closed arenas.
    pub closed: u64,
    /// Total size of the arenas, in bytes.
    pub bytes: u64,
    /// Number of allocated blocks.
    pub blocks: u64,
    /// Total size of the blocks, in bytes.
    pub used: u64,
}

impl Arena {
    fn contains(&self, address: u64) -> bool {
        address.checked_sub(self.memory.address()).is_some_and(|offset| offset < self.memory.size())
    }

    /// The offset of the first free gap of `size` bytes, if such blocks may be allocated from this arena.
    fn gap(&self, size: u64, rdma: Rdma) -> Option<u64> {
        let differs = match rdma {
            Rdma::Auto => false,
            Rdma::Never | Rdma::Required => self.memory.is_gpu_direct_rdma() != (rdma == Rdma::Required),
        };
        if self.closed || differs || self.memory.access() != Access::ReadWrite {
            return None;
        }
        let mut start = 0;
        for (&offset, &length) in &self.blocks {
            if offset - start >= size {
                return Some(start);
            }
            start = offset + length;
        }
        (self.memory.size() - start >= size).then_some(start)
    }

    /// Allocates a block if there is a gap, and returns its address.
    fn allocate(&mut self, size: u64, rdma: Rdma) -> Option<u64> {
        let offset = self.gap(size, rdma)?;
        self.blocks.insert(offset, size);
        Some(self.memory.address() + offset)
    }
}

impl Arenas {
    /// Creates an allocator for a device, with arenas of `arena` bytes, or of one block's size if that is larger. Allocates nothing yet.
    ///
    /// # Errors
    /// [`MemoryError::InvalidSize`](crate::error::MemoryError::InvalidSize) if `arena` is 0; the errors of [`Device::require_sharing`];
    /// [`Error::Driver`](crate::Error::Driver).
    ///
    /// Driver calls: `cuDeviceGetAttribute`, `cuMemGetAllocationGranularity`.
    #[doc(alias("cuDeviceGetAttribute", "cuMemGetAllocationGranularity"))]
    pub fn new(device: &Device, arena: u64) -> Result<Self> {
        device.require_sharing()?;
        let granularity = device.granularity()?;
        let arena_size = AtomicU64::new(round_up(arena, granularity)?);
        Ok(Self { device: device.clone(), granularity, arena_size, state: Mutex::default() })
    }

    /// The device of the memory.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The size of an arena in bytes: a multiple of the granularity.
    pub fn arena_size(&self) -> u64 {
        self.arena_size.load(Ordering::Relaxed)
    }

    /// Sets the size of later arenas, rounded up to the granularity. Existing arenas do not change.
    ///
    /// # Errors
    /// [`MemoryError::InvalidSize`](crate::error::MemoryError::InvalidSize) if `arena` is 0.
    pub fn set_arena_size(&self, arena: u64) -> Result<()> {
        self.arena_size.store(round_up(arena, self.granularity)?, Ordering::Relaxed);
        Ok(())
    }

    /// Selects whether RDMA can reach later blocks; by default [`Rdma::Never`]. Existing blocks do not change, and no later block is
    /// allocated from an arena that does not match.
    ///
    /// # Errors
    /// With [`Rdma::Required`] the errors of [`Device::require_gpu_direct_rdma`]; [`Error::Forked`](crate::Error::Forked) in a fork of the
    /// process that created the allocator.
    pub fn set_rdma(&self, rdma: Rdma) -> Result<()> {
        if rdma == Rdma::Required {
            self.device.require_gpu_direct_rdma()?;
        }
        self.state()?.rdma = rdma;
        Ok(())
    }

    /// Announces the number of bytes that will be allocated from now on.
    ///
    /// Later arenas then have exactly this size in total, with at most 1 GiB each; further arenas have [`Arenas::arena_size`]. With
    /// `None`, the default, arenas grow: each has [`Arenas::arena_size`], or a quarter of the size of all arenas (at most 1 GiB) if that
    /// is larger.
    ///
    /// # Errors
    /// [`Error::Forked`](crate::Error::Forked) in a fork of the process that created the allocator.
    pub fn expect(&self, bytes: Option<u64>) -> Result<()> {
        self.state()?.expected = bytes;
        Ok(())
    }

    /// The size of a new arena that must hold a block of `block` bytes.
    fn next_arena(&self, block: u64) -> Result<u64> {
        let state = self.state()?;
        let size = match state.expected {
            Some(expected) if expected >= self.granularity => {
                return Ok(round_up(expected.min(MAX_GROWN), self.granularity)?.max(block));
            }
            Some(_) => self.arena_size(),
            None => {
                let all: u64 = state.arenas.iter().map(|arena| arena.memory.size()).sum();
                self.arena_size().max(MAX_GROWN.min(all / 4))
            }
        };
        Ok((size / block).max(1) * block)
    }

    /// Allocates a block of `size` bytes, rounded up to the granularity, and returns its address. The block is mapped for the device;
    /// its contents are undefined. It lives until [`Arenas::free`].
    ///
    /// Before the memory of freed blocks is reused, waits until the work in the device's primary context has finished.
    ///
    /// If no arena has room, creates an arena of the size that [`Arenas::expect`] describes. Unless bytes are expected, that size is
    /// rounded down to a multiple of the block, so that blocks of one size fill the arena. Creating an arena blocks for the duration of
    /// the driver calls.
    ///
    /// # Errors
    /// [`MemoryError::InvalidSize`](crate::error::MemoryError::InvalidSize) if `size` is 0; the errors of [`Shared::create`].
    ///
    /// Driver calls: those of [`Device::wait_for_work`]; those of [`Shared::create`]; if memory runs out, those of [`Arenas::free`].
    pub fn allocate(&self, size: u64) -> Result<u64> {
        let size = round_up(size, self.granularity)?;
        if let Some(address) = self.reuse(size)? {
            return Ok(address);
        }
        // Not under the lock, which `free` and `find` need. Two threads may therefore create one arena too many.
        let bytes = self.next_arena(size)?;
        let rdma = self.state()?.rdma;
        let create = |bytes| Shared::create(&self.device, Spec::vmm(bytes).rdma(rdma));
        let created = create(bytes).or_else(|error| match error {
            // Free arenas that could not be freed earlier, or create a smaller arena.
            _ if self.free_empty_arenas() => create(bytes),
            _ if bytes > size => create(size),
            error => Err(error),
        });
        let memory = Arc::new(created?);
        let address = memory.address();
        let mut state = self.state()?;
        state.expected = state.expected.map(|expected| expected.saturating_sub(memory.size()));
        state.arenas.push(Arena { memory, blocks: BTreeMap::from([(0, size)]), closed: false, freed: 0 });
        Ok(address)
    }

    /// Allocates a block from an existing arena. Prefers arenas without recently freed blocks. For other arenas it waits for the device's
    /// work first; if that fails, they are not used.
    fn reuse(&self, size: u64) -> Result<Option<u64>> {
        let freed = {
            let mut state = self.state()?;
            let block = state.allocate(size);
            if block.is_some() || state.arenas.iter().all(|arena| arena.gap(size, state.rdma).is_none()) {
                return Ok(block);
            }
            state.freed
        };
        // Not under the lock: the wait may be long.
        if let Err(error) = self.device.wait_for_work() {
            tracing::debug!(%error, "freed blocks can't be reused yet");
            return Ok(None);
        }
        let mut state = self.state()?;
        state.finished = freed.max(state.finished);
        Ok(state.allocate(size))
    }

    /// Frees the block at an address, without waiting for work that uses it. Returns whether there was such a block.
    ///
    /// If the arena has no other block, waits until the work in the device's primary context has finished and drops the arena.
    /// Other processes that have the arena keep its memory. If the wait fails, a later call drops the arena.
    ///
    /// Work that uses the block must be in the primary context, or finished.
    ///
    /// Driver calls: those of [`Device::wait_for_work`], `cuMemUnmap`, `cuMemAddressFree`.
    #[doc(alias("cuMemUnmap", "cuMemAddressFree"))]
    pub fn free(&self, address: u64) -> bool {
        let (freed, empty) = {
            let Ok(mut state) = self.state() else { return false };
            let ArenaState { arenas, freed, .. } = &mut *state;
            let Some(arena) = arenas.iter_mut().find(|arena| arena.contains(address)) else { return false };
            let block = arena.blocks.remove(&(address - arena.memory.address()));
            if block.is_some() {
                *freed += 1;
                arena.freed = *freed;
            }
            (block.is_some(), arena.blocks.is_empty())
        };
        if empty {
            self.free_empty_arenas();
        }
        freed
    }

    /// The arena that contains an address, and the address's offset in it, in bytes.
    pub fn find(&self, address: u64) -> Option<(Arc<Shared>, u64)> {
        let state = self.state().ok()?;
        let arena = state.arenas.iter().find(|arena| arena.contains(address))?;
        Some((Arc::clone(&arena.memory), address - arena.memory.address()))
    }

    /// Closes the arena that contains an address: no further block is allocated from it, so that later blocks do not overwrite the data
    /// that other processes see. Its freed blocks are never reused. Returns whether there is such an arena.
    pub fn close(&self, address: u64) -> bool {
        let Ok(mut state) = self.state() else { return false };
        let arena = state.arenas.iter_mut().find(|arena| arena.contains(address));
        arena.map(|arena| arena.closed = true).is_some()
    }

    /// The current numbers and sizes of arenas and blocks.
    pub fn figures(&self) -> ArenaFigures {
        let mut figures = ArenaFigures::default();
        let Ok(state) = self.state() else { return figures };
        for arena in &state.arenas {
            figures.arenas += 1;
            figures.closed += u64::from(arena.closed);
            figures.bytes += arena.memory.size();
            figures.blocks += arena.blocks.len() as u64;
            figures.used += arena.blocks.values().sum::<u64>();
        }
        figures
    }

    /// Drops the arenas without blocks after waiting for the device's work. Returns whether it dropped any.
    fn free_empty_arenas(&self) -> bool {
        // Remove them from the list first: the wait may be long, and no block may be allocated from them during it.
        let Ok(mut state) = self.state() else { return false };
        let empty: Vec<Arena> = state.arenas.extract_if(.., |arena| arena.blocks.is_empty()).collect();
        drop(state);
        if empty.is_empty() {
            return false;
        }
        match self.device.wait_for_work() {
            Ok(()) => true,
            Err(error) => {
                tracing::warn!(%error, arenas = empty.len(), "empty arenas can't be freed yet");
                if let Ok(mut state) = self.state() {
                    state.arenas.extend(empty);
                }
                false
            }
        }
    }

    fn state(&self) -> Result<MutexGuard<'_, ArenaState>> {
        self.device.driver().check_fork()?;
        Ok(self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl ArenaState {
    /// Allocates a block from an arena whose freed blocks are no longer in use by device work.
    fn allocate(&mut self, size: u64) -> Option<u64> {
        let finished = self.finished;
        let rdma = self.rdma;
        self.arenas.iter_mut().filter(|arena| arena.freed <= finished).find_map(|arena| arena.allocate(size, rdma))
    }
}

impl Drop for Arenas {
    /// Waits for the work that uses the remaining blocks before their memory is freed.
    fn drop(&mut self) {
        if self.state().is_ok_and(|state| !state.arenas.is_empty()) {
            super::report(self.device.wait_for_work(), "waiting for the device's work failed");
        }
    }
}
