//! Memory that is given to others, whichever way it travels.

use std::{
    mem,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use super::{Chunk, Device, LegacyMemory, Pool, PoolBuffer, Region, Took, check_range, chunks::Chunks};
use crate::{
    driver::Access,
    error::{Error, Result},
    wire::{Description, Mechanism, OfferedDevice, Part, Placement},
};

/// What memory to share, and how.
#[derive(Debug, Clone, Copy, Default)]
pub struct Spec {
    /// How many bytes of data it is to hold.
    pub size: u64,
    /// The way it is shared.
    pub mechanism: Mechanism,
    /// In whose memory it is.
    pub location: Placement,
    /// The size of each allocation, rounded up to the granularity; `None` is one for all. With [`Mechanism::Vmm`] only.
    pub chunk: Option<u64>,
    /// To how many bytes it may grow: so many addresses are reserved. With [`Mechanism::Vmm`] only.
    pub capacity: u64,
    /// Whether it is to be filled and then sealed: it can't be handed to others before. See [`Shared::seal`].
    pub sealed: bool,
}

/// Memory that this process owns and gives to others. Dropping it gives it back.
///
/// Memory of a pool and legacy memory must be let go of by all others before.
#[derive(Debug)]
pub struct Shared {
    device: Device,
    memory: Memory,
    /// Whether nobody is to write any more.
    sealed: AtomicBool,
    took: Took,
}

#[derive(Debug)]
enum Memory {
    Vmm(Chunks),
    Pool { buffer: Arc<PoolBuffer> },
    Legacy { memory: Arc<LegacyMemory>, offset: u64, size: u64 },
}

impl Shared {
    /// Allocates memory, maps it for its device, and exports it unless it is still to be sealed.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for what the device or the mechanism can't do; [`Error::TooManyDescriptors`] before anything is
    /// allocated if this process could not hold one for each chunk; [`Error::InvalidSize`]; [`Error::OutOfMemory`] with both
    /// figures; [`Error::Driver`].
    ///
    /// Driver calls: those of [`super::Allocation::create_at`], [`super::Mapping::side_by_side`] and
    /// [`super::Allocation::export`]; those of [`Pool::create`] and [`PoolBuffer::allocate`]; that of
    /// [`LegacyMemory::allocate`].
    pub fn create(device: &Device, spec: &Spec) -> Result<Self> {
        let unsupported = |feature| Err(Error::Unsupported { device: device.to_string(), feature });
        if spec.mechanism != Mechanism::Vmm {
            // What the driver has none of comes first.
            match spec.mechanism {
                Mechanism::Pool => drop(device.verbs().pools()?),
                _ => drop(device.verbs().legacy()?),
            }
            if spec.chunk.is_some() || spec.capacity > spec.size {
                return unsupported("a buffer of several allocations that is not shared by vmm");
            }
            if spec.location != Placement::Device {
                return unsupported("memory of the host that is not shared by vmm");
            }
        }
        let begun = Instant::now();
        let mut shared = match spec.mechanism {
            Mechanism::Vmm => Ok(Self::of(device, Memory::Vmm(Chunks::create(device, spec)?))),
            Mechanism::Pool => Self::in_pool(&Pool::create(device)?, spec.size),
            Mechanism::Legacy => Self::in_legacy(&LegacyMemory::allocate(device, spec.size)?, 0, spec.size),
            Mechanism::Unknown => unsupported("a mechanism that this version does not know"),
        }?;
        shared.took.create = begun.elapsed();
        Ok(shared)
    }

    /// Allocates memory of a pool that other buffers may be of too. Whoever is given one of them can reach them all.
    ///
    /// # Errors
    /// Those of [`PoolBuffer::allocate`].
    ///
    /// Driver calls: those of [`PoolBuffer::allocate`].
    pub fn in_pool(pool: &Arc<Pool>, size: u64) -> Result<Self> {
        let buffer = PoolBuffer::allocate(pool, size)?;
        Ok(Self::of(&buffer.device().clone(), Memory::Pool { buffer }))
    }

    /// Shares a part of legacy memory: `size` bytes from `offset` on. Whoever is given it can reach all of the memory.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if there are not as many.
    pub fn in_legacy(memory: &Arc<LegacyMemory>, offset: u64, size: u64) -> Result<Self> {
        check_range(offset, size, memory.size())?;
        Ok(Self::of(memory.device(), Memory::Legacy { memory: Arc::clone(memory), offset, size }))
    }

    fn of(device: &Device, memory: Memory) -> Self {
        Self { device: device.clone(), memory, sealed: AtomicBool::new(false), took: Took::default() }
    }

    /// Lets it hold `size` more bytes of data: behind the same address, in new allocations where the old ones have no room.
    /// The new bytes hold anything. Others get the new allocations when they ask again.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] beyond the capacity; [`Error::Unsupported`] for memory that can't grow, sealed memory too; those
    /// of [`Shared::create`].
    ///
    /// Driver calls: those of [`Shared::create`].
    pub fn grow(&self, size: u64) -> Result<()> {
        let size = self.make_room(size)?;
        self.publish(size);
        Ok(())
    }

    /// The first half of growing: memory for `size` more bytes, which are no data yet. Returns how many bytes of data it can hold
    /// then.
    pub(crate) fn make_room(&self, size: u64) -> Result<u64> {
        match &self.memory {
            Memory::Vmm(chunks) => chunks.make_room(size),
            _ => {
                let feature = "growing memory that is not shared by vmm";
                Err(Error::Unsupported { device: self.device.to_string(), feature })
            }
        }
    }

    /// The second half: what was written there is data.
    pub(crate) fn publish(&self, size: u64) {
        if let Memory::Vmm(chunks) = &self.memory {
            chunks.publish(size);
        }
    }

    /// Leaves the memory allocated for as long as the process lives, because somebody has it open who does not let go of it. When
    /// the process ends that does no harm: what is open elsewhere was seen to stay.
    pub(crate) fn abandon(&self) {
        match &self.memory {
            Memory::Vmm(_) => {}
            Memory::Pool { buffer } => mem::forget(Arc::clone(buffer)),
            Memory::Legacy { memory, .. } => mem::forget(Arc::clone(memory)),
        }
    }

    /// Ends all writing, for good, and exports what was to be sealed. Says whether that holds for everybody.
    ///
    /// On the host backend the kernel then refuses every holder of a descriptor to write. On CUDA it is an agreement: this side
    /// maps it read-only and offers it so, but whoever holds the descriptor, or opened a pool's pointer or a legacy handle,
    /// may write all the same.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for memory that was not made to be sealed; [`Error::Driver`]: with `CUDA_ERROR_INVALID_VALUE`, and
    /// nothing changed, while a [`super::Mirror`] is open on it; after another it can't be used any more.
    ///
    /// Driver calls: `cuMemUnmap`, `cuMemMap`, `cuMemSetAccess`, `cuMemExportToShareableHandle`. See
    /// [`super::Allocation::seal`].
    pub fn seal(&self) -> Result<bool> {
        let enforced = match &self.memory {
            Memory::Vmm(chunks) => chunks.seal()?,
            _ => false,
        };
        self.sealed.store(true, Ordering::Release);
        Ok(enforced)
    }

    /// How many bytes hold data.
    pub fn data_size(&self) -> u64 {
        match &self.memory {
            Memory::Vmm(chunks) => chunks.sizes().0,
            Memory::Pool { buffer } => buffer.size(),
            Memory::Legacy { size, .. } => *size,
        }
    }

    /// What others must be told to open it, besides the descriptors.
    ///
    /// # Errors
    /// [`Error::Driver`] where the driver does not give the 64 bytes out.
    ///
    /// Driver calls: `cuMemPoolExportPointer`, `cuIpcGetMemHandle`.
    pub fn describe(&self) -> Result<Description> {
        let device = OfferedDevice { uuid: self.device.uuid(), name: self.device.name().to_owned() };
        let description = Description {
            mechanism: Mechanism::Vmm,
            device,
            location: Placement::Device,
            size: self.data_size(),
            mapped_size: self.size(),
            segments: 0,
            capacity: None,
            pool: None,
            pointer: None,
            offset: 0,
            immutable: self.access() == Access::ReadOnly,
        };
        Ok(match &self.memory {
            Memory::Vmm(chunks) => {
                let (size, mapped_size, segments) = chunks.sizes();
                let capacity = Some(chunks.reservation().size());
                Description { location: chunks.location(), size, mapped_size, segments, capacity, ..description }
            }
            Memory::Pool { buffer } => {
                let (pool, pointer) = (Some(buffer.pool().number()), Some(buffer.pointer()?));
                Description { mechanism: Mechanism::Pool, pool, pointer, ..description }
            }
            Memory::Legacy { memory, offset, .. } => {
                let pointer = Some(memory.handle()?);
                Description { mechanism: Mechanism::Legacy, pointer, offset: *offset, ..description }
            }
        })
    }

    /// The allocations that cover a range of bytes, less the first `have`, and which these are; `None` for memory that is not
    /// shared by vmm.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if the memory has not as many bytes, or allocations.
    pub fn chunks(&self, range: Range<u64>, have: u64) -> Result<Option<(Part, Vec<Arc<Chunk>>)>> {
        match &self.memory {
            Memory::Vmm(chunks) => chunks.part(range, have).map(Some),
            _ => Ok(None),
        }
    }

    /// How long it took to make it, so far.
    pub fn took(&self) -> Took {
        match &self.memory {
            Memory::Vmm(chunks) => chunks.took(),
            _ => self.took,
        }
    }

    /// The pool that it is of, if it is of one.
    pub fn pool(&self) -> Option<&Arc<Pool>> {
        match &self.memory {
            Memory::Pool { buffer } => Some(buffer.pool()),
            _ => None,
        }
    }
}

impl super::sealed::Sealed for Shared {}

impl Region for Shared {
    fn device(&self) -> &Device {
        &self.device
    }

    fn address(&self) -> u64 {
        match &self.memory {
            Memory::Vmm(chunks) => chunks.reservation().address(),
            Memory::Pool { buffer } => buffer.address(),
            Memory::Legacy { memory, offset, .. } => memory.address() + offset,
        }
    }

    fn size(&self) -> u64 {
        match &self.memory {
            Memory::Vmm(chunks) => chunks.sizes().1,
            Memory::Pool { buffer } => buffer.size(),
            Memory::Legacy { memory, offset, .. } => memory.size() - offset,
        }
    }

    fn access(&self) -> Access {
        if self.sealed.load(Ordering::Acquire) { Access::ReadOnly } else { Access::ReadWrite }
    }

    fn is_protected(&self) -> bool {
        matches!(self.memory, Memory::Vmm(_))
    }
}
