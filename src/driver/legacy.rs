//! CUDA's oldest sharing mechanism: a handle of 64 bytes, without a descriptor.

use std::fmt::Debug;

use crate::error::Result;

/// Memory of `cuMemAlloc`, shared with legacy handles (`cuIpc*`).
///
/// The rules of [`super::Verbs`] apply: an address that this driver object did not return fails with `CUDA_ERROR_INVALID_VALUE` and
/// does not reach the driver, and freeing and closing wait for copies in progress. `ordinal` is the device whose primary context is
/// used. Memory is freed or closed on the device that it was allocated or opened on.
///
/// A handle (`CUipcMemHandle`) contains the allocation's identity and size, which the driver does not verify. A process that has a handle
/// has all rights. Memory can't be opened in the process that allocated it.
pub trait LegacyIpc: Debug + Send + Sync {
    /// Allocates exactly `size` bytes of device memory. An allocation of up to 1 MiB shares a block with other small allocations, and a
    /// process that opens its handle may be able to access those. `cuMemAlloc_v2`.
    fn allocate(&self, ordinal: i32, size: u64) -> Result<u64>;

    /// Frees memory of [`LegacyIpc::allocate`] when all work of the device has finished. Processes that have it open keep the bytes.
    /// `cuCtxSynchronize`, `cuMemFree_v2`.
    fn deallocate(&self, ordinal: i32, address: u64) -> Result<()>;

    /// The handle of the allocation that contains an address. `cuIpcGetMemHandle`.
    fn handle(&self, ordinal: i32, address: u64) -> Result<[u8; 64]>;

    /// Opens another process's memory; [`super::Verbs::extent`] reports its size. Memory that is already open has the same address again,
    /// and must be closed once more. `cuIpcOpenMemHandle_v2` with `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`.
    fn open(&self, ordinal: i32, handle: &[u8; 64]) -> Result<u64>;

    /// Closes memory of [`LegacyIpc::open`], once for each opening. `cuIpcCloseMemHandle`.
    fn close(&self, ordinal: i32, address: u64) -> Result<()>;
}
