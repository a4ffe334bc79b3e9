//! CUDA's first way to share memory: a handle of 64 bytes, with no descriptor.

use std::fmt::Debug;

use crate::error::Result;

/// Memory of `cuMemAlloc`, shared by legacy handles (`cuIpc*`).
///
/// The rules of [`super::Verbs`] hold here too: an address that this driver object did not give out is answered with
/// `CUDA_ERROR_INVALID_VALUE` and does not reach the driver, and giving back waits for copies under way. `ordinal` is the
/// device whose primary context the call is made in; memory is given back on the one that it was taken on.
///
/// A handle is `CUipcMemHandle`. It says by itself which memory it means and how large: a process that has it has full rights, and
/// what it says is believed. Memory is opened in another process than its own alone.
pub trait LegacyIpc: Debug + Send + Sync {
    /// Allocates device memory of exactly `size` bytes. Up to 1 MiB it lies in one block with other small ones, and who
    /// opens its handle may reach those. `cuMemAlloc_v2`.
    fn allocate(&self, ordinal: i32, size: u64) -> Result<u64>;

    /// Frees what [`LegacyIpc::allocate`] gave, once all work of the device is done. Who has it open keeps the bytes.
    /// `cuCtxSynchronize`, `cuMemFree_v2`.
    fn deallocate(&self, ordinal: i32, address: u64) -> Result<()>;

    /// The handle of the allocation that an address is in. `cuIpcGetMemHandle`.
    fn handle(&self, ordinal: i32, address: u64) -> Result<[u8; 64]>;

    /// Opens memory of another process; [`super::Verbs::extent`] tells its size. What is open already has the same
    /// address again, and is to be closed once more. `cuIpcOpenMemHandle_v2` with `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`.
    fn open(&self, ordinal: i32, handle: &[u8; 64]) -> Result<u64>;

    /// Closes what [`LegacyIpc::open`] gave, once for each opening. `cuIpcCloseMemHandle`.
    fn close(&self, ordinal: i32, address: u64) -> Result<()>;
}
