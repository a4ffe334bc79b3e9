//! Memory that this process shares with others, by any mechanism.

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
    Chunk, Description, Device, LegacyMemory, Pool, PoolBuffer, Region, Run, Sharing, Spec, Timings, check_range,
    chunks::Chunks, clear, spec::Kind,
};
use crate::{
    driver::Access,
    error::{DeviceError, Error, Result},
};

/// Memory that this process owns and shares with others. Its size is fixed. Dropping the value frees the memory.
///
/// [`Region::size`] is the size of the data; receivers map [`Shared::mapped_size`] bytes. Receivers must close pool buffers and legacy
/// memory before the owner drops them.
///
/// ```
/// # use vmmfd::{driver::{Backend, Choice, open}, memory::{Device, Region, Selector, Shared, Spec}};
/// # let driver = open(Choice::Only(Backend::Host))?.driver;
/// # let device = Device::find(&driver, Selector::default())?;
/// let memory = Shared::create(&device, Spec::vmm(1 << 20))?;
/// memory.copy_in(0, b"weights")?;
/// memory.synchronize()?;  // Before another process receives it: waits for all work on the device.
/// assert!(memory.mapped_size() >= memory.size());
/// # Ok::<(), vmmfd::Error>(())
/// ```
#[derive(Debug)]
pub struct Shared {
    device: Device,
    memory: SharedBacking,
    sealed: AtomicBool,
    /// Whether this process has given up its write access. Other processes may still write.
    read_only: AtomicBool,
    timings: Timings,
    /// The number of checkpoints of this process that were made before.
    checkpoints: u64,
}

#[derive(Debug)]
enum SharedBacking {
    Vmm(Chunks),
    Pool {
        buffer: Arc<PoolBuffer>,
    },
    /// `padded` if this buffer owns the whole memory, including the padding behind the data.
    Legacy {
        memory: Arc<LegacyMemory>,
        offset: u64,
        size: u64,
        padded: bool,
    },
}

impl Shared {
    /// Allocates memory and maps it for its device. Exports it too, unless the spec asks for memory that is sealed later.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] if the device or the mechanism lacks a feature;
    /// [`MemoryError::TooManyDescriptors`](crate::error::MemoryError::TooManyDescriptors), before any allocation, if this process
    /// can't hold a descriptor for each chunk; [`MemoryError::InvalidSize`](crate::error::MemoryError::InvalidSize);
    /// [`MemoryError::OutOfMemory`](crate::error::MemoryError::OutOfMemory), with the requested and the free bytes; [`Error::Driver`].
    ///
    /// Driver calls: with [`Spec::vmm`] as for [`super::Allocation::create_at`] or [`super::Allocation::create_gpu_direct_rdma`],
    /// [`super::Mapping::side_by_side`] and [`super::Allocation::export`]; with [`Spec::pool`] as for [`Pool::create`] and
    /// [`PoolBuffer::allocate`]; with [`Spec::legacy`] as for [`LegacyMemory::allocate`].
    pub fn create(device: &Device, spec: impl Into<Spec>) -> Result<Self> {
        let Spec { size, sealed, kind } = spec.into();
        let started = Instant::now();
        let mut shared = match kind {
            Kind::Vmm { chunk, placement, rdma } => {
                let chunks = Chunks::create(device, size, chunk, placement, rdma, sealed)?;
                return Ok(Self::of(device, SharedBacking::Vmm(chunks)));
            }
            Kind::Pool => Self::in_pool(&Pool::create(device)?, size)?,
            Kind::Legacy => {
                let memory = LegacyMemory::allocate(device, size)?;
                Self::of(device, SharedBacking::Legacy { memory, offset: 0, size, padded: true })
            }
        };
        shared.timings.create = started.elapsed();
        Ok(shared)
    }

    /// Allocates a buffer in an existing pool. A receiver of one buffer can reach all buffers of the pool.
    ///
    /// # Errors
    /// The errors of [`PoolBuffer::allocate`].
    ///
    /// Driver calls: those of [`PoolBuffer::allocate`].
    pub fn in_pool(pool: &Arc<Pool>, size: u64) -> Result<Self> {
        let buffer = PoolBuffer::allocate(pool, size)?;
        Ok(Self::of(&buffer.device().clone(), SharedBacking::Pool { buffer }))
    }

    /// Shares `size` bytes of legacy memory, starting at `offset`. A receiver can reach all of the memory.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`](crate::error::MemoryError::OutOfRange) if the range exceeds the memory.
    pub fn in_legacy(memory: &Arc<LegacyMemory>, offset: u64, size: u64) -> Result<Self> {
        check_range(offset, size, memory.size())?;
        Ok(Self::of(memory.device(), SharedBacking::Legacy { memory: Arc::clone(memory), offset, size, padded: false }))
    }

    fn of(device: &Device, memory: SharedBacking) -> Self {
        let sealed = AtomicBool::new(false);
        let read_only = AtomicBool::new(false);
        let checkpoints = device.verbs().checkpoint_count();
        Self { device: device.clone(), memory, sealed, read_only, timings: Timings::default(), checkpoints }
    }

    /// Fails if a checkpoint has made the memory a private copy.
    fn check_shareable(&self) -> Result<()> {
        if self.device.verbs().checkpoint_count() == self.checkpoints {
            return Ok(());
        }
        let problem = "this process was suspended after it had created the memory, which is now a copy that no other process can get: create it again";
        Err(Error::Misuse { problem: problem.to_owned() })
    }

    /// Memory that this process has no write access to, through its own addresses.
    pub(super) fn read_only(device: &Device, chunks: Chunks) -> Self {
        Self { read_only: AtomicBool::new(true), ..Self::of(device, SharedBacking::Vmm(chunks)) }
    }

    /// Leaks the memory until this process exits, because a peer has it open and does not close it. The exit itself is safe: in tests,
    /// the memory remained valid in processes that had it open.
    pub(crate) fn abandon(&self) {
        match &self.memory {
            SharedBacking::Vmm(_) => {}
            SharedBacking::Pool { buffer } => mem::forget(Arc::clone(buffer)),
            SharedBacking::Legacy { memory, .. } => mem::forget(Arc::clone(memory)),
        }
    }

    /// Whether RDMA can reach the memory: the driver reported `gpuDirectRDMACapable` for each allocation when it was created.
    pub fn is_gpu_direct_rdma(&self) -> bool {
        matches!(&self.memory, SharedBacking::Vmm(chunks) if chunks.is_gpu_direct_rdma())
    }

    /// Seals the memory permanently against writing and exports it. Returns whether the kernel enforces the seal.
    ///
    /// On the host backend the kernel then refuses writes by every holder of a descriptor. On CUDA the seal is a convention: this
    /// process maps and offers the memory read-only, but a holder of the descriptor, of a pool pointer or of a legacy handle can still
    /// write.
    ///
    /// # Errors
    /// [`Error::Misuse`] if the memory was not allocated with [`Spec::sealed`]; [`Error::Driver`] with `CUDA_ERROR_INVALID_VALUE` while
    /// a [`super::Mirror`] of it is open, and then nothing is changed. After any other [`Error::Driver`] the memory is unusable.
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

    /// Permanently removes this process's write access, so that a bug here can't change the data that others read. Keeps the address.
    ///
    /// The access of other processes does not change. Unlike [`Shared::seal`], this also works after the memory was handed out, and
    /// receivers are not notified. Waits for all work in the device's primary context. A second call has no effect.
    ///
    /// Afterwards a write by address is a fault: on CUDA, a kernel's write destroys the context (Xid 31).
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] for pool buffers, legacy memory and the result of [`Shared::from_addresses`]; [`Error::Misuse`] for memory from [`Spec::sealed`] before it is
    /// sealed; [`Error::Driver`], also while a [`super::Mirror`] of it is open, and then nothing is changed.
    ///
    /// Driver calls: those of [`Device::wait_for_work`], `cuMemSetAccess`.
    #[doc(alias = "cuMemSetAccess")]
    pub fn make_read_only(&self) -> Result<()> {
        let SharedBacking::Vmm(chunks) = &self.memory else {
            let feature = "read-only access of the owner to pool buffers and legacy memory";
            return Err(Error::Device(DeviceError::Unsupported { device: self.device.to_string(), feature }));
        };
        chunks.make_read_only()?;
        self.read_only.store(true, Ordering::Release);
        Ok(())
    }

    /// Writes zeros to the padding behind the data, so that a receiver does not see old contents. Blocks until the write is complete.
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

    /// The number of bytes that a receiver maps: [`Region::size`], rounded up by the mechanism.
    pub fn mapped_size(&self) -> u64 {
        match &self.memory {
            SharedBacking::Vmm(chunks) => chunks.mapped_size(),
            SharedBacking::Pool { buffer } => buffer.size(),
            SharedBacking::Legacy { memory, padded: true, .. } => memory.size(),
            SharedBacking::Legacy { size, .. } => *size,
        }
    }

    /// Describes the memory for another process. Together with the descriptors, this is enough to open it.
    ///
    /// # Errors
    /// [`Error::Driver`] if the driver does not return the 64 bytes of a pool buffer or of legacy memory; [`Error::Misuse`] as for
    /// [`Shared::chunks`].
    ///
    /// Driver calls: `cuMemPoolExportPointer`, `cuIpcGetMemHandle`.
    #[doc(alias("cuMemPoolExportPointer", "cuIpcGetMemHandle"))]
    pub fn describe(&self) -> Result<Description> {
        self.check_shareable()?;
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

    /// The allocations that cover a range of the data, and their position. `None` for memory that is not shared by
    /// [`super::Mechanism::Vmm`]. An empty range has no allocations.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`](crate::error::MemoryError::OutOfRange) if the range exceeds the data, or its start exceeds its end;
    /// [`Error::Misuse`] if a checkpoint has made the memory a private copy (`vmmfd suspend --own-copies`).
    pub fn chunks(&self, range: Range<u64>) -> Result<Option<(Run, Vec<Arc<Chunk>>)>> {
        self.check_shareable()?;
        match &self.memory {
            SharedBacking::Vmm(chunks) => chunks.part(range).map(Some),
            _ => Ok(None),
        }
    }

    /// The durations of the steps that created the memory.
    pub fn timings(&self) -> Timings {
        match &self.memory {
            SharedBacking::Vmm(chunks) => chunks.timings(),
            _ => self.timings,
        }
    }

    /// The pool of the buffer, if the memory is a pool buffer.
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
