//! Memory that is shared with other processes, by any mechanism.

use std::{
    mem,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use super::{
    Chunk, Description, Device, LegacyMemory, Part, Pool, PoolBuffer, Region, Sharing, Spec, Timings, check_range,
    chunks::Chunks, clear, spec::Kind,
};
use crate::{
    driver::Access,
    error::{DeviceError, Error, Result},
};

/// Memory that this process owns and shares with others. Its size is fixed. Dropping it frees it.
///
/// [`Region::size`] is the bytes of data; [`Shared::mapped_size`] is what receivers map. Receivers must have closed memory of a
/// pool and legacy memory before it is dropped.
#[derive(Debug)]
pub struct Shared {
    device: Device,
    memory: SharedBacking,
    /// Whether it is never written any more.
    sealed: AtomicBool,
    /// Whether this process can't write it any more. Others may.
    read_only: AtomicBool,
    timings: Timings,
}

#[derive(Debug)]
enum SharedBacking {
    Vmm(Chunks),
    Pool {
        buffer: Arc<PoolBuffer>,
    },
    /// `padded` if all of the memory is this buffer's: what lies behind the data is then its own too.
    Legacy {
        memory: Arc<LegacyMemory>,
        offset: u64,
        size: u64,
        padded: bool,
    },
}

impl Shared {
    /// Allocates memory, maps it for its device, and exports it unless it is still to be sealed.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] for what the device or the mechanism can't do;
    /// [`MemoryError::TooManyDescriptors`](crate::error::MemoryError::TooManyDescriptors) before anything is
    /// allocated if this process could not hold one for each chunk;
    /// [`MemoryError::InvalidSize`](crate::error::MemoryError::InvalidSize);
    /// [`MemoryError::OutOfMemory`](crate::error::MemoryError::OutOfMemory) with both
    /// figures; [`Error::Driver`].
    ///
    /// Driver calls: those of [`super::Allocation::create_at`] or [`super::Allocation::create_gpu_direct_rdma`], [`super::Mapping::side_by_side`] and
    /// [`super::Allocation::export`]; those of [`Pool::create`] and [`PoolBuffer::allocate`]; that of
    /// [`LegacyMemory::allocate`].
    pub fn create(device: &Device, spec: impl Into<Spec>) -> Result<Self> {
        let Spec { size, sealed, kind } = spec.into();
        let begun = Instant::now();
        let mut shared = match kind {
            Kind::Vmm { chunk, placement, gpu_direct_rdma } => {
                let chunks = Chunks::create(device, size, chunk, placement, gpu_direct_rdma, sealed)?;
                return Ok(Self::of(device, SharedBacking::Vmm(chunks)));
            }
            Kind::Pool => Self::in_pool(&Pool::create(device)?, size)?,
            Kind::Legacy => {
                let memory = LegacyMemory::allocate(device, size)?;
                Self::of(device, SharedBacking::Legacy { memory, offset: 0, size, padded: true })
            }
        };
        shared.timings.create = begun.elapsed();
        Ok(shared)
    }

    /// Allocates memory of a pool that other buffers may be of too. A receiver of one of them can reach them all.
    ///
    /// # Errors
    /// Those of [`PoolBuffer::allocate`].
    ///
    /// Driver calls: those of [`PoolBuffer::allocate`].
    pub fn in_pool(pool: &Arc<Pool>, size: u64) -> Result<Self> {
        let buffer = PoolBuffer::allocate(pool, size)?;
        Ok(Self::of(&buffer.device().clone(), SharedBacking::Pool { buffer }))
    }

    /// Shares a part of legacy memory: `size` bytes from `offset` on. A receiver of it can reach all of the memory.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`](crate::error::MemoryError::OutOfRange) if there are not as many.
    pub fn in_legacy(memory: &Arc<LegacyMemory>, offset: u64, size: u64) -> Result<Self> {
        check_range(offset, size, memory.size())?;
        Ok(Self::of(memory.device(), SharedBacking::Legacy { memory: Arc::clone(memory), offset, size, padded: false }))
    }

    fn of(device: &Device, memory: SharedBacking) -> Self {
        let (sealed, read_only) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { device: device.clone(), memory, sealed, read_only, timings: Timings::default() }
    }

    /// Leaves the memory allocated for as long as this process lives, because a peer has it open and does not close it. The end of
    /// the process does no harm: what is open elsewhere was seen to stay.
    pub(crate) fn abandon(&self) {
        match &self.memory {
            SharedBacking::Vmm(_) => {}
            SharedBacking::Pool { buffer } => mem::forget(Arc::clone(buffer)),
            SharedBacking::Legacy { memory, .. } => mem::forget(Arc::clone(memory)),
        }
    }

    /// Ends all writing, for good, and exports what was to be sealed. Returns whether the kernel enforces it.
    ///
    /// On the host backend the kernel then refuses every holder of a descriptor to write. On CUDA it is an agreement: this side
    /// maps it read-only and offers it so, but a holder of the descriptor, or a process that opened a pool's pointer or a
    /// legacy handle, can write all the same.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] for memory that was not made to be sealed;
    /// [`Error::Driver`]: with `CUDA_ERROR_INVALID_VALUE`, and
    /// nothing changed, while a [`super::Mirror`] is open on it; after another it can't be used any more.
    ///
    /// Driver calls: `cuMemUnmap`, `cuMemMap`, `cuMemSetAccess`, `cuMemExportToShareableHandle`. See
    /// [`super::Allocation::seal`].
    #[doc(alias("cuMemUnmap", "cuMemMap", "cuMemSetAccess", "cuMemExportToShareableHandle"))]
    pub fn seal(&self) -> Result<bool> {
        let enforced = match &self.memory {
            SharedBacking::Vmm(chunks) => chunks.seal()?,
            _ => false,
        };
        self.sealed.store(true, Ordering::Release);
        Ok(enforced)
    }

    /// Takes this process's own right to write it, for good, so that a mistake here does not change what others read. Its address stays.
    /// What other processes may do with it does not change: unlike [`Shared::seal`] it says nothing to them, and is possible once the
    /// memory is handed out. Waits for all work in the device's primary context; does nothing the second time.
    ///
    /// A write by address is then a fault: on CUDA a kernel's write ends the context (Xid 31).
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] for memory of a pool and legacy memory; [`Error::Misuse`] for memory that is still to be sealed;
    /// [`Error::Driver`], also while a [`super::Mirror`] of it is open: nothing is changed then.
    ///
    /// Driver calls: those of [`Device::wait_for_work`], `cuMemSetAccess`.
    #[doc(alias = "cuMemSetAccess")]
    pub fn make_read_only(&self) -> Result<()> {
        let SharedBacking::Vmm(chunks) = &self.memory else {
            let feature = "memory of a pool, or legacy memory, that this process only reads";
            return Err(Error::Device(DeviceError::Unsupported { device: self.device.to_string(), feature }));
        };
        chunks.make_read_only()?;
        self.read_only.store(true, Ordering::Release);
        Ok(())
    }

    /// Writes zeros behind the data, to the end of what a receiver maps: it must not see what was there before. Blocks until
    /// they are there.
    ///
    /// # Errors
    /// [`Error::Driver`]. Driver calls: those of [`Region::copy_in`].
    pub(crate) fn clear_padding(&self) -> Result<()> {
        match &self.memory {
            SharedBacking::Vmm(chunks) => chunks.clear_padding(),
            SharedBacking::Legacy { memory, size, padded: true, .. } => clear(&**memory, *size..memory.size()),
            SharedBacking::Pool { .. } | SharedBacking::Legacy { .. } => Ok(()),
        }
    }

    /// How many bytes a receiver maps: at least [`Region::size`], rounded up as the mechanism rounds.
    pub fn mapped_size(&self) -> u64 {
        match &self.memory {
            SharedBacking::Vmm(chunks) => chunks.mapped_size(),
            SharedBacking::Pool { buffer } => buffer.size(),
            SharedBacking::Legacy { memory, padded: true, .. } => memory.size(),
            SharedBacking::Legacy { size, .. } => *size,
        }
    }

    /// What another process needs to open it, besides the descriptors.
    ///
    /// # Errors
    /// [`Error::Driver`] where the driver does not give the 64 bytes out.
    ///
    /// Driver calls: `cuMemPoolExportPointer`, `cuIpcGetMemHandle`.
    #[doc(alias("cuMemPoolExportPointer", "cuIpcGetMemHandle"))]
    pub fn describe(&self) -> Result<Description> {
        let sharing = match &self.memory {
            SharedBacking::Vmm(chunks) => Sharing::Vmm { placement: chunks.placement(), segments: chunks.segments() },
            SharedBacking::Pool { buffer } => {
                Sharing::Pool { pool: buffer.pool().number(), pointer: buffer.pointer()?, offset: 0 }
            }
            SharedBacking::Legacy { memory, offset, .. } => {
                Sharing::Legacy { pointer: memory.handle()?, offset: *offset }
            }
        };
        Ok(Description {
            device: self.device.identity(),
            sharing,
            size: self.size(),
            mapped_size: self.mapped_size(),
            immutable: self.sealed.load(Ordering::Acquire),
        })
    }

    /// The allocations that cover a range of bytes, and which these are; `None` for memory that is not shared by vmm. An empty
    /// range has none.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`](crate::error::MemoryError::OutOfRange) if the data has not as many bytes, and for a range that
    /// ends before it begins.
    pub fn chunks(&self, range: Range<u64>) -> Result<Option<(Part, Vec<Arc<Chunk>>)>> {
        match &self.memory {
            SharedBacking::Vmm(chunks) => chunks.part(range).map(Some),
            _ => Ok(None),
        }
    }

    /// How long the steps of making it took.
    pub fn timings(&self) -> Timings {
        match &self.memory {
            SharedBacking::Vmm(chunks) => chunks.timings(),
            _ => self.timings,
        }
    }

    /// The pool that it is of, if it is of one.
    pub fn pool(&self) -> Option<&Arc<Pool>> {
        match &self.memory {
            SharedBacking::Pool { buffer } => Some(buffer.pool()),
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
            SharedBacking::Vmm(chunks) => chunks.address(),
            SharedBacking::Pool { buffer } => buffer.address(),
            SharedBacking::Legacy { memory, offset, .. } => memory.address() + offset,
        }
    }

    fn size(&self) -> u64 {
        match &self.memory {
            SharedBacking::Vmm(chunks) => chunks.size(),
            SharedBacking::Pool { buffer } => buffer.size(),
            SharedBacking::Legacy { size, .. } => *size,
        }
    }

    fn access(&self) -> Access {
        let read_only = self.sealed.load(Ordering::Acquire) || self.read_only.load(Ordering::Acquire);
        if read_only { Access::ReadOnly } else { Access::ReadWrite }
    }

    fn is_protected(&self) -> bool {
        matches!(self.memory, SharedBacking::Vmm(_))
    }
}
