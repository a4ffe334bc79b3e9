//! Memory pools: one descriptor for the pool, then 64 bytes for each pointer.

use std::{
    fmt::Debug,
    os::fd::{BorrowedFd, OwnedFd},
};

use crate::error::Result;

/// A memory pool. Only a backend creates handles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PoolHandle(pub(super) u64);

/// Memory pools that can be shared (`cuMemPool*`).
///
/// The rules of [`super::Verbs`] apply: a pool or an address that this driver object did not return fails with
/// `CUDA_ERROR_INVALID_VALUE` and does not reach the driver, and freeing waits for copies in progress. `ordinal` is the device whose
/// default stream is used. Memory is freed on the device that it was allocated or imported on.
pub trait Pools: Debug + Send + Sync {
    /// Creates an exportable pool in a device's memory. `cuMemPoolCreate`.
    fn create(&self, ordinal: i32) -> Result<PoolHandle>;

    /// Destroys a created or imported pool in this process. Fails with `CUDA_ERROR_INVALID_VALUE` while its memory is allocated or
    /// imported here. `cuMemPoolDestroy`.
    fn destroy(&self, pool: PoolHandle) -> Result<()>;

    /// Exports a created pool as a new, close-on-exec descriptor. `cuMemPoolExportToShareableHandle`.
    fn export(&self, pool: PoolHandle) -> Result<OwnedFd>;

    /// Imports a pool. The caller keeps the descriptor. `cuMemPoolImportFromShareableHandle`.
    fn import(&self, fd: BorrowedFd<'_>) -> Result<PoolHandle>;

    /// Gives a device read-write access to the pool's memory; there is no read-only access. The pool's own device always has access.
    /// `cuMemPoolSetAccess`.
    fn allow(&self, pool: PoolHandle, ordinal: i32) -> Result<()>;

    /// Allocates exactly `size` bytes, usable on return. `cuMemAllocFromPoolAsync`, `cuStreamSynchronize`.
    fn allocate(&self, pool: PoolHandle, ordinal: i32, size: u64) -> Result<u64>;

    /// Frees allocated memory, or releases an imported pointer. A pointer imported several times is freed with the last.
    /// `cuMemFreeAsync`, `cuStreamSynchronize`.
    fn free(&self, ordinal: i32, address: u64) -> Result<()>;

    /// Returns the data that another process needs to import this pointer, the start of an allocation, from the imported pool:
    /// `CUmemPoolPtrExportData`. `cuMemPoolExportPointer`.
    fn export_pointer(&self, ordinal: i32, address: u64) -> Result<[u8; 64]>;

    /// Imports a pointer. The driver does not verify the offset and size in `data`, and [`super::Verbs::extent`] reports them. A pointer
    /// that is already imported has the same address again. `cuMemPoolImportPointer`.
    fn import_pointer(&self, pool: PoolHandle, ordinal: i32, data: &[u8; 64]) -> Result<u64>;
}
