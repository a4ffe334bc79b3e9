//! Memory pools that can be shared.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

use super::{
    Device, Pointer, Region,
    offered::{OpenError, Step},
    report,
};
use crate::{
    driver::{Access, PoolHandle},
    error::{DeviceError, Error, MemoryError, Result},
};

/// A memory pool with a descriptor, or one that was imported. Dropping it gives it back.
///
/// A process that has the descriptor can reach all of the pool, not only the buffers that it was given.
#[doc(alias("cuMemPoolCreate", "cuMemPoolDestroy"))]
#[derive(Debug)]
pub struct Pool {
    device: Device,
    handle: PoolHandle,
    /// Unlike its handle, never used again in this process.
    number: u64,
    exported: OnceLock<OwnedFd>,
}

impl Pool {
    /// Makes a pool of a device's memory that can be shared by descriptor.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] on the host backend, and if the device has no such pools; [`Error::Driver`].
    ///
    /// Driver calls: `cuDeviceGetAttribute`, `cuMemPoolCreate`.
    #[doc(alias("cuDeviceGetAttribute", "cuMemPoolCreate"))]
    pub fn create(device: &Device) -> Result<Arc<Self>> {
        device.require_pools()?;
        let pools = device.verbs().pools()?;
        Ok(Arc::new(Self::own(device, pools.create(device.ordinal())?)))
    }

    /// Imports a pool that another process made, to be used by a device, which may be another than the pool's (peer
    /// access). `fd` is closed on success and on failure.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] as for [`Pool::create`]; [`Error::Driver`]: with `CUDA_ERROR_UNKNOWN` or
    /// `CUDA_ERROR_NOT_SUPPORTED` if `fd` is no pool.
    ///
    /// Driver calls: `cuMemPoolImportFromShareableHandle`, `cuMemPoolSetAccess`.
    #[doc(alias("cuMemPoolImportFromShareableHandle", "cuMemPoolSetAccess"))]
    pub fn import(device: &Device, fd: OwnedFd) -> Result<Arc<Self>> {
        Self::import_offered(device, fd).map_err(Error::from)
    }

    /// As [`Pool::import`], with the step that failed.
    pub(super) fn import_offered(device: &Device, fd: OwnedFd) -> Result<Arc<Self>, OpenError> {
        device.require_pools()?;
        let pools = device.verbs().pools()?;
        // From here on dropping it gives it back.
        let pool = Self::own(device, pools.import(fd.as_fd()).map_err(OpenError::at(Step::Open))?);
        pools.allow(pool.handle, device.ordinal())?;
        Ok(Arc::new(pool))
    }

    fn own(device: &Device, handle: PoolHandle) -> Self {
        static NUMBERS: AtomicU64 = AtomicU64::new(0);
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        Self { device: device.clone(), handle, number, exported: OnceLock::new() }
    }

    /// The device that uses it here.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// A number of its own in this process.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The descriptor that gives another process the pool. It stays the pool's, and is the same every time.
    ///
    /// # Errors
    /// [`Error::Driver`]: with `CUDA_ERROR_INVALID_VALUE` for a pool that was imported.
    ///
    /// Driver call: `cuMemPoolExportToShareableHandle`, the first time.
    #[doc(alias = "cuMemPoolExportToShareableHandle")]
    pub fn export(&self) -> Result<BorrowedFd<'_>> {
        if let Some(fd) = self.exported.get() {
            return Ok(fd.as_fd());
        }
        // If two threads come here at once, one descriptor too many is made, and closed.
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

/// Memory of a pool, always readable and writable. Dropping it gives it back.
///
/// A process that imported it must release it before its owner frees it.
#[doc(alias("cuMemAllocFromPoolAsync", "cuMemFreeAsync"))]
#[derive(Debug)]
pub struct PoolBuffer {
    address: u64,
    size: u64,
    // Let go of after the memory in `drop`.
    pool: Arc<Pool>,
}

/// The most bytes of a pool's buffer. From a little more on NVIDIA's driver (580.159) takes the process along that imports it:
/// 5 GiB were seen to be imported, and 5.25 GiB to be a segmentation fault in `cuMemPoolImportPointer`.
pub const MOST: u64 = 5 << 30;

/// That a pool's buffer is not larger than the driver can import.
pub(super) fn check_size(device: &Device, size: u64) -> Result<()> {
    let feature = "memory of a pool of more than 5 GiB: importing it would crash in the driver; share it by vmm";
    if size <= MOST {
        Ok(())
    } else {
        Err(Error::Device(DeviceError::Unsupported { device: device.to_string(), feature }))
    }
}

impl PoolBuffer {
    /// Allocates `size` bytes, at most [`MOST`], and waits until they are there.
    ///
    /// # Errors
    /// [`MemoryError::InvalidSize`] for zero; [`DeviceError::Unsupported`] beyond the most; [`MemoryError::OutOfMemory`] with
    /// both figures; [`Error::Driver`].
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

    /// Imports memory of an imported pool. Its size is what the exporter's data says, and is not checked.
    ///
    /// # Errors
    /// [`Error::Driver`]: with `CUDA_ERROR_INVALID_VALUE` if the pool has no such memory.
    ///
    /// Driver calls: `cuMemPoolImportPointer`, `cuMemGetAddressRange`.
    #[doc(alias("cuMemPoolImportPointer", "cuMemGetAddressRange"))]
    pub fn import(pool: &Arc<Pool>, pointer: &Pointer) -> Result<Arc<Self>> {
        Self::import_offered(pool, pointer).map_err(Error::from)
    }

    /// As [`PoolBuffer::import`], with the step that failed.
    pub(super) fn import_offered(pool: &Arc<Pool>, pointer: &Pointer) -> Result<Arc<Self>, OpenError> {
        let (driver, ordinal) = (pool.device.verbs(), pool.device.ordinal());
        let imported = driver.pools()?.import_pointer(pool.handle, ordinal, &pointer.0);
        let address = imported.map_err(OpenError::at(Step::Open))?;
        // From here on dropping it gives it back.
        let mut buffer = Self { address, size: 0, pool: Arc::clone(pool) };
        let (base, size) = driver.extent(ordinal, address)?;
        buffer.size = size.saturating_sub(address.saturating_sub(base));
        Ok(Arc::new(buffer))
    }

    /// What opens it in another process that has the pool.
    ///
    /// # Errors
    /// [`Error::Driver`]: with `CUDA_ERROR_INVALID_VALUE` for memory that was imported itself.
    ///
    /// Driver calls: `cuMemPoolExportPointer`, and before it once `cuMemPoolExportToShareableHandle`: of a pool that was not
    /// exported the driver was seen to give out no pointers.
    #[doc(alias("cuMemPoolExportPointer", "cuMemPoolExportToShareableHandle"))]
    pub fn pointer(&self) -> Result<Pointer> {
        self.pool.export()?;
        let device = &self.pool.device;
        device.verbs().pools()?.export_pointer(device.ordinal(), self.address).map(Pointer)
    }

    /// The pool that it is of.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }
}

impl super::sealed::Sealed for PoolBuffer {}

impl Region for PoolBuffer {
    fn device(&self) -> &Device {
        &self.pool.device
    }

    fn address(&self) -> u64 {
        self.address
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn access(&self) -> Access {
        Access::ReadWrite
    }
}

impl Drop for PoolBuffer {
    fn drop(&mut self) {
        let device = &self.pool.device;
        let result = device.verbs().pools().and_then(|pools| pools.free(device.ordinal(), self.address));
        report(result, "a pool's memory can't be given back");
    }
}
