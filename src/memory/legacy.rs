//! Memory of `cuMemAlloc`, shared by a legacy handle.

use std::sync::Arc;

use super::{
    Device, Pointer, Region,
    offered::{OpenError, Step},
    report, round_up,
};
use crate::{
    driver::{Access, code},
    error::{Error, MemoryError, Result},
};

/// What legacy memory is rounded to. A handle opens the whole block that an allocation lies in, and smaller ones lie in one
/// block side by side: a peer would see the neighbours.
const BLOCK: u64 = 2 << 20;

/// Memory that is shared by a `CUipcMemHandle`, or that was. Always readable and writable.
///
/// Dropping it frees it, or closes what was opened. A process that opened it must close it before its owner frees it.
#[doc(alias("cuMemAlloc", "cuMemFree", "cuIpcOpenMemHandle", "cuIpcCloseMemHandle"))]
#[derive(Debug)]
pub struct LegacyMemory {
    device: Device,
    address: u64,
    size: u64,
    opened: bool,
}

impl LegacyMemory {
    /// Allocates at least `size` bytes in a block of their own, of 2 MiB or a multiple.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`](crate::error::DeviceError::Unsupported) on the host backend; [`MemoryError::InvalidSize`];
    /// [`MemoryError::OutOfMemory`] with both figures;
    /// [`Error::Driver`].
    ///
    /// Driver call: `cuMemAlloc`.
    #[doc(alias = "cuMemAlloc")]
    pub fn allocate(device: &Device, size: u64) -> Result<Arc<Self>> {
        let legacy = device.verbs().legacy()?;
        let size = round_up(size, BLOCK)?;
        let address = legacy.allocate(device.ordinal(), size).map_err(|error| device.out_of_memory(size, error))?;
        Ok(Arc::new(Self { device: device.clone(), address, size, opened: false }))
    }

    /// Opens a handle that another process made: what Numba calls `open_ipc_array`, less the array.
    ///
    /// Its size is what the handle says, and is not checked: do not open a handle of a process that you would not let
    /// write into your memory.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`](crate::error::DeviceError::Unsupported) on the host backend; [`MemoryError::OwnHandle`] in
    /// the process that made it; [`Error::Driver`]:
    /// with `CUDA_ERROR_INVALID_VALUE` for no such handle, or one of freed memory, with `CUDA_ERROR_INVALID_HANDLE` if its
    /// owner has gone.
    ///
    /// Driver calls: `cuIpcOpenMemHandle`, `cuMemGetAddressRange`.
    #[doc(alias("cuIpcOpenMemHandle", "cuMemGetAddressRange"))]
    pub fn open(device: &Device, handle: &Pointer) -> Result<Arc<Self>> {
        Self::open_offered(device, handle).map_err(Error::from)
    }

    /// As [`LegacyMemory::open`], with the step that failed.
    pub(super) fn open_offered(device: &Device, handle: &Pointer) -> Result<Arc<Self>, OpenError> {
        let (driver, ordinal) = (device.verbs(), device.ordinal());
        let address = driver.legacy()?.open(ordinal, &handle.0).map_err(|error| match error {
            Error::Driver { code: code::INVALID_CONTEXT, .. } => Error::Memory(MemoryError::OwnHandle).into(),
            error => OpenError::at(Step::Open)(error),
        })?;
        // From here on dropping it closes it.
        let mut memory = Self { device: device.clone(), address, size: 0, opened: true };
        let (base, size) = driver.extent(ordinal, address)?;
        memory.size = size.saturating_sub(address.saturating_sub(base));
        Ok(Arc::new(memory))
    }

    /// The handle that opens it in another process.
    ///
    /// # Errors
    /// [`Error::Driver`]: with `CUDA_ERROR_INVALID_VALUE` for memory that was opened itself.
    ///
    /// Driver call: `cuIpcGetMemHandle`.
    #[doc(alias = "cuIpcGetMemHandle")]
    pub fn handle(&self) -> Result<Pointer> {
        self.device.verbs().legacy()?.handle(self.device.ordinal(), self.address).map(Pointer)
    }
}

impl super::sealed::Sealed for LegacyMemory {}

impl Region for LegacyMemory {
    fn device(&self) -> &Device {
        &self.device
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

impl Drop for LegacyMemory {
    fn drop(&mut self) {
        let (ordinal, address) = (self.device.ordinal(), self.address);
        let result = self.device.verbs().legacy().and_then(|legacy| match self.opened {
            true => legacy.close(ordinal, address),
            false => legacy.deallocate(ordinal, address),
        });
        report(result, "legacy memory can't be given back");
    }
}
