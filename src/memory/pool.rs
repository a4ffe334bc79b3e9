//! Shareable memory pools.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

use super::{
    Device, Pointer,
    offered::{OpenError, Step},
    region, report,
};
use crate::{
    driver::{Access, PoolHandle},
    error::{DeviceError, Error, MemoryError, Result},
};

/// A shareable memory pool that this process created or imported. Dropping it destroys the pool in this process.
///
/// A process that has the pool's descriptor can reach all of the pool, not only the buffers that it received.
#[doc(alias("cuMemPoolCreate", "cuMemPoolDestroy"))]
#[derive(Debug)]
pub struct Pool {
    device: Device,
    handle: PoolHandle,
    /// Unique in this process. Unlike the handle, it is never reused.
    number: u64,
    exported: OnceLock<OwnedFd>,
}

impl Pool {
    /// Creates a pool of device memory that can be shared by descriptor.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] on the host backend, and if the device does not support such pools; [`Error::Driver`].
    ///
    /// Driver calls: `cuDeviceGetAttribute`, `cuMemPoolCreate`.
    #[doc(alias("cuDeviceGetAttribute", "cuMemPoolCreate"))]
    pub fn create(device: &Device) -> Result<Arc<Self>> {
        device.require_pools()?;
        let pools = device.verbs().pools()?;
        Ok(Arc::new(Self::own(device, pools.create(device.ordinal())?)))
    }

    /// Imports another process's pool for a device, which may differ from the pool's device (peer access). `fd` is closed on success and
    /// on failure.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] as for [`Pool::create`]; [`Error::Driver`]: with `CUDA_ERROR_UNKNOWN` or
    /// `CUDA_ERROR_NOT_SUPPORTED` if `fd` is not a pool.
    ///
    /// Driver calls: `cuMemPoolImportFromShareableHandle`, `cuMemPoolSetAccess`.
    #[doc(alias("cuMemPoolImportFromShareableHandle", "cuMemPoolSetAccess"))]
    pub fn import(device: &Device, fd: OwnedFd) -> Result<Arc<Self>> {
        Self::import_offered(device, fd).map_err(Error::from)
    }

    /// Like [`Pool::import`], but the error contains the failed step.
    pub(super) fn import_offered(device: &Device, fd: OwnedFd) -> Result<Arc<Self>, OpenError> {
        device.require_pools()?;
        let pools = device.verbs().pools()?;
        // From here on, dropping `pool` destroys it.
        let pool = Self::own(device, pools.import(fd.as_fd()).map_err(OpenError::at(Step::Open))?);
        pools.allow(pool.handle, device.ordinal())?;
        Ok(Arc::new(pool))
    }

    fn own(device: &Device, handle: PoolHandle) -> Self {
        static NUMBERS: AtomicU64 = AtomicU64::new(0);
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        Self { device: device.clone(), handle, number, exported: OnceLock::new() }
    }

    /// The device that uses the pool in this process.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// A number that is unique in this process.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Exports the pool as a descriptor. The pool owns the descriptor, and every call returns the same one.
    ///
    /// # Errors
    /// [`Error::Driver`]: with `CUDA_ERROR_INVALID_VALUE` for an imported pool.
    ///
    /// Driver call: `cuMemPoolExportToShareableHandle`, the first time.
    #[doc(alias = "cuMemPoolExportToShareableHandle")]
    pub fn export(&self) -> Result<BorrowedFd<'_>> {
        if let Some(fd) = self.exported.get() {
            return Ok(fd.as_fd());
        }
        // If two threads export at once, the second descriptor is closed.
        let fd = self.device.verbs().pools()?.export(self.handle)?;
        Ok(self.exported.get_or_init(|| fd).as_fd())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let result = self.device.verbs().pools().and_then(|pools| pools.destroy(self.handle));
        report(result, "a memory pool can't be destroyed");
    }
}

/// A buffer in a pool. Always readable and writable. Dropping it frees the buffer.
///
/// A process that imported a buffer must drop it before its owner frees it.
#[doc(alias("cuMemAllocFromPoolAsync", "cuMemFreeAsync"))]
#[derive(Debug)]
pub struct PoolBuffer {
    address: u64,
    size: u64,
    // Dropped after `Drop::drop` has freed the memory.
    pool: Arc<Pool>,
}

/// The maximum size of a pool buffer, in bytes. NVIDIA's driver (580.159) crashes in the importing process on larger buffers: in tests,
/// importing 5 GiB worked, and importing 5.25 GiB caused a segmentation fault in `cuMemPoolImportPointer`.
pub const MOST: u64 = 5 << 30;

/// Checks that the driver can import a pool buffer of this size.
pub(super) fn check_size(device: &Device, size: u64) -> Result<()> {
    let feature = "pool buffers of more than 5 GiB: importing one would crash in the driver; share it by vmm";
    if size <= MOST {
        Ok(())
    } else {
        Err(Error::Device(DeviceError::Unsupported { device: device.to_string(), feature }))
    }
}

impl PoolBuffer {
    /// Allocates `size` bytes, at most [`MOST`]. Blocks until the memory is usable.
    ///
    /// # Errors
    /// [`MemoryError::InvalidSize`] if `size` is 0; [`DeviceError::Unsupported`] if it exceeds [`MOST`]; [`MemoryError::OutOfMemory`],
    /// with the requested and the free bytes; [`Error::Driver`].
    ///
    /// Driver calls: `cuMemAllocFromPoolAsync`, `cuStreamSynchronize`.
    #[doc(alias("cuMemAllocFromPoolAsync", "cuStreamSynchronize"))]
    pub fn allocate(pool: &Arc<Pool>, size: u64) -> Result<Arc<Self>> {
        if size == 0 {
            return Err(Error::Memory(MemoryError::InvalidSize { size, max: MOST }));
        }
        let device = &pool.device;
        check_size(device, size)?;
        let allocated = device.verbs().pools()?.allocate(pool.handle, device.ordinal(), size);
        let address = allocated.map_err(|error| device.out_of_memory(size, error))?;
        Ok(Arc::new(Self { address, size, pool: Arc::clone(pool) }))
    }

    /// Imports a buffer of an imported pool. The size in the exporter's data is not checked.
    ///
    /// # Errors
    /// [`Error::Driver`]: with `CUDA_ERROR_INVALID_VALUE` if the pool has no such buffer.
    ///
    /// Driver calls: `cuMemPoolImportPointer`, `cuMemGetAddressRange`.
    #[doc(alias("cuMemPoolImportPointer", "cuMemGetAddressRange"))]
    pub fn import(pool: &Arc<Pool>, pointer: &Pointer) -> Result<Arc<Self>> {
        Self::import_offered(pool, pointer).map_err(Error::from)
    }

    /// Like [`PoolBuffer::import`], but the error contains the failed step.
    pub(super) fn import_offered(pool: &Arc<Pool>, pointer: &Pointer) -> Result<Arc<Self>, OpenError> {
        let driver = pool.device.verbs();
        let ordinal = pool.device.ordinal();
        let imported = driver.pools()?.import_pointer(pool.handle, ordinal, &pointer.0);
        let address = imported.map_err(OpenError::at(Step::Open))?;
        // From here on, dropping `buffer` releases it.
        let mut buffer = Self { address, size: 0, pool: Arc::clone(pool) };
        let (base, size) = driver.extent(ordinal, address)?;
        buffer.size = size.saturating_sub(address.saturating_sub(base));
        Ok(Arc::new(buffer))
    }

    /// The 64 bytes that open the buffer in another process that has the pool.
    ///
    /// # Errors
    /// [`Error::Driver`]: with `CUDA_ERROR_INVALID_VALUE` for an imported buffer.
    ///
    /// Driver calls: `cuMemPoolExportPointer`, and before the first `cuMemPoolExportToShareableHandle`: in tests, the driver exported
    /// pointers only of an exported pool.
    #[doc(alias("cuMemPoolExportPointer", "cuMemPoolExportToShareableHandle"))]
    pub fn pointer(&self) -> Result<Pointer> {
        self.pool.export()?;
        let device = &self.pool.device;
        device.verbs().pools()?.export_pointer(device.ordinal(), self.address).map(Pointer)
    }

    /// The pool of the buffer.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }
}

region!(PoolBuffer, |this| &this.pool.device, this.address, this.size, Access::ReadWrite, false);

impl Drop for PoolBuffer {
    fn drop(&mut self) {
        let device = &self.pool.device;
        let result = device.verbs().pools().and_then(|pools| pools.free(device.ordinal(), self.address));
        report(result, "a pool buffer can't be freed");
    }
}
