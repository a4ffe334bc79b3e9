//! Memory from `cuMemAlloc`, shared by a legacy IPC handle.

use std::sync::Arc;

use super::{
    Device, Pointer,
    offered::{OpenError, Step},
    region, report, round_up,
};
use crate::{
    driver::{Access, code},
    error::{Error, MemoryError, Result},
};

/// The granularity of legacy memory. A handle opens the whole 2 MiB block that contains an allocation; smaller allocations share a block,
/// and a peer would see its neighbours.
const BLOCK: u64 = 2 << 20;

/// Memory that this process shares by a `CUipcMemHandle`, or opened from one. Always readable and writable.
///
/// Dropping it frees memory that this process allocated, and closes memory that it opened. A process must close
/// opened memory before its owner frees it.
#[doc(alias("cuMemAlloc", "cuMemFree", "cuIpcOpenMemHandle", "cuIpcCloseMemHandle"))]
#[derive(Debug)]
pub struct LegacyMemory {
    device: Device,
    address: u64,
    size: u64,
    opened: bool,
}

impl LegacyMemory {
    /// Allocates `size` bytes, rounded up to a multiple of 2 MiB, in their own block.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`](crate::error::DeviceError::Unsupported) on the host backend; [`MemoryError::InvalidSize`];
    /// [`MemoryError::OutOfMemory`], with the requested and the free bytes; [`Error::Driver`].
    ///
    /// Driver call: `cuMemAlloc`.
    #[doc(alias = "cuMemAlloc")]
    pub fn allocate(device: &Device, size: u64) -> Result<Arc<Self>> {
        let legacy = device.verbs().legacy()?;
        let size = round_up(size, BLOCK)?;
        let address = legacy.allocate(device.ordinal(), size).map_err(|error| device.out_of_memory(size, error))?;
        Ok(Arc::new(Self { device: device.clone(), address, size, opened: false }))
    }

    /// Opens a handle of another process, like Numba's `open_ipc_array` without the array.
    ///
    /// The size in the handle is not checked: open handles only from processes that you would allow to write to your memory.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`](crate::error::DeviceError::Unsupported) on the host backend; [`MemoryError::OwnHandle`] in the
    /// process that created the handle; [`Error::Driver`]: with `CUDA_ERROR_INVALID_VALUE` if the handle is invalid or its memory was
    /// freed, with `CUDA_ERROR_INVALID_HANDLE` if its owner has exited.
    ///
    /// Driver calls: `cuIpcOpenMemHandle`, `cuMemGetAddressRange`.
    #[doc(alias("cuIpcOpenMemHandle", "cuMemGetAddressRange"))]
    pub fn open(device: &Device, handle: &Pointer) -> Result<Arc<Self>> {
        Self::open_offered(device, handle).map_err(Error::from)
    }

    /// Like [`LegacyMemory::open`], but the error contains the failed step.
    pub(super) fn open_offered(device: &Device, handle: &Pointer) -> Result<Arc<Self>, OpenError> {
        let driver = device.verbs();
        let ordinal = device.ordinal();
        let address = driver.legacy()?.open(ordinal, &handle.0).map_err(|error| match error {
            Error::Driver { code: code::INVALID_CONTEXT, .. } => Error::Memory(MemoryError::OwnHandle).into(),
            error => OpenError::at(Step::Open)(error),
        })?;
        // From here on, dropping `memory` closes it.
        let mut memory = Self { device: device.clone(), address, size: 0, opened: true };
        let (base, size) = driver.extent(ordinal, address)?;
        memory.size = size.saturating_sub(address.saturating_sub(base));
        Ok(Arc::new(memory))
    }

    /// The handle that opens the memory in another process.
    ///
    /// # Errors
    /// [`Error::Driver`]: with `CUDA_ERROR_INVALID_VALUE` for memory that was opened from a handle.
    ///
    /// Driver call: `cuIpcGetMemHandle`.
    #[doc(alias = "cuIpcGetMemHandle")]
    pub fn handle(&self) -> Result<Pointer> {
        self.device.verbs().legacy()?.handle(self.device.ordinal(), self.address).map(Pointer)
    }
}

region!(LegacyMemory, |this| &this.device, this.address, this.size, Access::ReadWrite, false);

impl Drop for LegacyMemory {
    fn drop(&mut self) {
        let ordinal = self.device.ordinal();
        let address = self.address;
        let result = self.device.verbs().legacy().and_then(|legacy| match self.opened {
            true => legacy.close(ordinal, address),
            false => legacy.deallocate(ordinal, address),
        });
        report(result, "legacy memory can't be freed or closed");
    }
}
