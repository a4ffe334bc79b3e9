//! Blocks cut from shared memory, for the allocator of another library.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use super::{Device, Region, Shared, Spec, round_up};
use crate::{driver::Access, error::Result};

/// An allocator that cuts blocks from pieces of shared memory, the arenas: what a library like PyTorch allocates can then be handed to
/// other processes as it is, with one descriptor for each arena and not for each block.
///
/// Each arena is one [`Shared`] of one allocation. An arena without blocks is given back, after waiting for the device's work. An arena
/// that is closed ([`Arenas::close`]), because other processes read it, is never cut again: what they see stays as it is, whatever is
/// freed and allocated here. Nor is an arena that was made read-only ([`Shared::make_read_only`]).
///
/// In a fork of the process that made it, it holds nothing and [`Arenas::allocate`] fails.
///
/// A block may be freed while work that is queued uses it, as with `cudaFree`: nothing is cut in its place before that work is done.
///
/// All calls may be made by several threads at once.
#[derive(Debug)]
pub struct Arenas {
    device: Device,
    granularity: u64,
    arena: AtomicU64,
    state: Mutex<ArenaState>,
}

/// The largest arena that is made because there are many others, or because so much is expected.
const LARGEST: u64 = 1 << 30;

#[derive(Debug, Default)]
struct ArenaState {
    arenas: Vec<Arena>,
    /// How many bytes of those that [`Arenas::expect`] announced are in no arena yet.
    expected: Option<u64>,
    /// Counts what was freed.
    freed: u64,
    /// What was freed up to this count is used by no work of the device any more.
    finished: u64,
}

/// One piece of shared memory, and what is cut from it.
#[derive(Debug)]
struct Arena {
    memory: Arc<Shared>,
    /// Sizes by offset.
    blocks: BTreeMap<u64, u64>,
    closed: bool,
    /// When a block of it was freed last, by the count of [`ArenaState`]: work that was queued before may still use it.
    freed: u64,
}

/// What [`Arenas`] hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ArenaFigures {
    /// How many arenas there are: each is one descriptor.
    pub arenas: u64,
    /// How many of them are closed.
    pub closed: u64,
    /// The bytes of all arenas.
    pub bytes: u64,
    /// How many blocks are cut from them.
    pub blocks: u64,
    /// The bytes of these blocks.
    pub used: u64,
}

impl Arena {
    fn holds(&self, address: u64) -> bool {
        address.checked_sub(self.memory.address()).is_some_and(|offset| offset < self.memory.size())
    }

    /// Whether blocks may be cut from it: not where others read it, and not where this process can't write.
    fn can_be_cut(&self) -> bool {
        !self.closed && self.memory.access() == Access::ReadWrite
    }

    /// The first offset with so many bytes free.
    fn gap(&self, size: u64) -> Option<u64> {
        let mut begin = 0;
        for (&offset, &length) in &self.blocks {
            if offset - begin >= size {
                return Some(begin);
            }
            begin = offset + length;
        }
        (self.memory.size() - begin >= size).then_some(begin)
    }

    /// Cuts a block out, if there is room.
    fn cut(&mut self, size: u64) -> Option<u64> {
        if !self.can_be_cut() {
            return None;
        }
        let offset = self.gap(size)?;
        self.blocks.insert(offset, size);
        Some(self.memory.address() + offset)
    }
}

impl Arenas {
    /// Arenas of a device's memory, each of `arena` bytes, or of what one block takes if that is more. None is made yet.
    ///
    /// # Errors
    /// [`MemoryError::InvalidSize`](crate::error::MemoryError::InvalidSize) for arenas of no bytes; those of
    /// [`Device::require_sharing`]; [`Error::Driver`](crate::Error::Driver).
    ///
    /// Driver calls: `cuDeviceGetAttribute`, `cuMemGetAllocationGranularity`.
    #[doc(alias("cuDeviceGetAttribute", "cuMemGetAllocationGranularity"))]
    pub fn new(device: &Device, arena: u64) -> Result<Self> {
        device.require_sharing()?;
        let granularity = device.granularity()?;
        let arena = AtomicU64::new(round_up(arena, granularity)?);
        Ok(Self { device: device.clone(), granularity, arena, state: Mutex::default() })
    }

    /// The device whose memory it is.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The size of an arena in bytes: a multiple of the granularity.
    pub fn arena_size(&self) -> u64 {
        self.arena.load(Ordering::Relaxed)
    }

    /// Makes later arenas of another size, rounded up to the granularity. Those that there are stay as they are.
    ///
    /// # Errors
    /// [`MemoryError::InvalidSize`](crate::error::MemoryError::InvalidSize) for no bytes.
    pub fn set_arena_size(&self, arena: u64) -> Result<()> {
        self.arena.store(round_up(arena, self.granularity)?, Ordering::Relaxed);
        Ok(())
    }

    /// Announces how many bytes will be allocated from now on. Later arenas together have exactly as many, each 1 GiB at most, and
    /// arenas beyond that have [`Arenas::arena_size`]. `None`, as at first, lets arenas grow: each has [`Arenas::arena_size`], or a
    /// quarter of what all arenas have, up to 1 GiB, if that is more.
    ///
    /// # Errors
    /// [`Error::Forked`](crate::Error::Forked) in a fork of the process that made the arenas.
    pub fn expect(&self, bytes: Option<u64>) -> Result<()> {
        self.state()?.expected = bytes;
        Ok(())
    }

    /// The size of a new arena for a block.
    fn next_arena(&self, block: u64) -> Result<u64> {
        let state = self.state()?;
        let size = match state.expected {
            Some(expected) if expected >= self.granularity => {
                return Ok(round_up(expected.min(LARGEST), self.granularity)?.max(block));
            }
            Some(_) => self.arena_size(),
            None => {
                let all: u64 = state.arenas.iter().map(|arena| arena.memory.size()).sum();
                self.arena_size().max(LARGEST.min(all / 4))
            }
        };
        Ok((size / block).max(1) * block)
    }

    /// Cuts a block of at least `size` bytes, a multiple of the granularity, and returns its address. It is mapped for the device; its
    /// contents are undefined. It stays until [`Arenas::free`].
    ///
    /// Where blocks were freed, waits until the work in the device's primary context is done, before another one is cut in their place.
    ///
    /// If no arena has room, makes one of the size that [`Arenas::expect`] describes; unless bytes are expected, it is rounded down to a
    /// multiple of this block, so that blocks of one size fill it. Blocks for the driver's calls then.
    ///
    /// # Errors
    /// [`MemoryError::InvalidSize`](crate::error::MemoryError::InvalidSize) for no bytes; those of [`Shared::create`].
    ///
    /// Driver calls: those of [`Device::wait_for_work`]; those of [`Shared::create`]; if memory runs out, those of [`Arenas::free`].
    pub fn allocate(&self, size: u64) -> Result<u64> {
        let size = round_up(size, self.granularity)?;
        if let Some(address) = self.cut(size)? {
            return Ok(address);
        }
        // Without the lock, which `free` and `find` need: two threads may make one arena more than they need.
        let bytes = self.next_arena(size)?;
        let made = Shared::create(&self.device, Spec::vmm(bytes)).or_else(|error| match error {
            // Arenas that could not be given back before, or a smaller one.
            _ if self.sweep() => Shared::create(&self.device, Spec::vmm(bytes)),
            _ if bytes > size => Shared::create(&self.device, Spec::vmm(size)),
            error => Err(error),
        });
        let memory = Arc::new(made?);
        let address = memory.address();
        let mut state = self.state()?;
        state.expected = state.expected.map(|expected| expected.saturating_sub(memory.size()));
        state.arenas.push(Arena { memory, blocks: BTreeMap::from([(0, size)]), closed: false, freed: 0 });
        Ok(address)
    }

    /// Cuts a block out of an arena with room. One of which nothing was freed lately comes first; for another the device's work is
    /// waited for, and if that fails it stays as it is.
    fn cut(&self, size: u64) -> Result<Option<u64>> {
        let freed = {
            let mut state = self.state()?;
            let ArenaState { arenas, freed, finished, .. } = &mut *state;
            let ready = arenas.iter_mut().filter(|arena| arena.freed <= *finished).find_map(|arena| arena.cut(size));
            if ready.is_some() || !arenas.iter().any(|arena| arena.can_be_cut() && arena.gap(size).is_some()) {
                return Ok(ready);
            }
            *freed
        };
        // Without the lock: it may be long.
        if let Err(error) = self.device.wait_for_work() {
            tracing::debug!(%error, "freed blocks can't be used again yet");
            return Ok(None);
        }
        let mut state = self.state()?;
        let ArenaState { arenas, finished, .. } = &mut *state;
        *finished = freed.max(*finished);
        Ok(arenas.iter_mut().filter(|arena| arena.freed <= *finished).find_map(|arena| arena.cut(size)))
    }

    /// Takes a block back, without waiting for work that uses it. If it was the last one of its arena, waits until the work in the device's
    /// primary context is done and drops the arena: other processes that have it keep its memory. If the wait fails, the arena stays, and
    /// is dropped with a later one. Returns whether there is such a block.
    ///
    /// Work that uses the block must be in the primary context, or finished.
    ///
    /// Driver calls: those of [`Device::wait_for_work`], `cuMemUnmap`, `cuMemAddressFree`.
    #[doc(alias("cuMemUnmap", "cuMemAddressFree"))]
    pub fn free(&self, address: u64) -> bool {
        let (freed, empty) = {
            let Ok(mut state) = self.state() else { return false };
            let ArenaState { arenas, freed, .. } = &mut *state;
            let Some(arena) = arenas.iter_mut().find(|arena| arena.holds(address)) else { return false };
            let block = arena.blocks.remove(&(address - arena.memory.address()));
            if block.is_some() {
                *freed += 1;
                arena.freed = *freed;
            }
            (block.is_some(), arena.blocks.is_empty())
        };
        if empty {
            self.sweep();
        }
        freed
    }

    /// The arena that an address is in, and how many bytes behind its beginning.
    pub fn find(&self, address: u64) -> Option<(Arc<Shared>, u64)> {
        let state = self.state().ok()?;
        let arena = state.arenas.iter().find(|arena| arena.holds(address))?;
        Some((Arc::clone(&arena.memory), address - arena.memory.address()))
    }

    /// Closes the arena that an address is in: nothing is cut from it again, so that what other processes see of it is not overwritten by
    /// later blocks. What was freed of it stays free for good. Returns whether there is such an arena.
    pub fn close(&self, address: u64) -> bool {
        let Ok(mut state) = self.state() else { return false };
        let arena = state.arenas.iter_mut().find(|arena| arena.holds(address));
        arena.map(|arena| arena.closed = true).is_some()
    }

    /// What it holds now.
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

    /// Drops the arenas without blocks, once the device's work is done. Returns whether any was dropped.
    fn sweep(&self) -> bool {
        // Out of the list first: nothing may be cut from them meanwhile, and the wait is long.
        let Ok(mut state) = self.state() else { return false };
        let empty: Vec<Arena> = state.arenas.extract_if(.., |arena| arena.blocks.is_empty()).collect();
        drop(state);
        if empty.is_empty() {
            return false;
        }
        match self.device.wait_for_work() {
            Ok(()) => true,
            Err(error) => {
                tracing::warn!(%error, "arenas that hold nothing can't be given back yet");
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

impl Drop for Arenas {
    /// Work that uses what is left must be finished before the memory goes.
    fn drop(&mut self) {
        if self.state().is_ok_and(|state| !state.arenas.is_empty()) {
            super::report(self.device.wait_for_work(), "the device's work can't be waited for");
        }
    }
}
