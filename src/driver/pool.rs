//! Memory pools: one descriptor for the pool, then 64 bytes for each pointer.

use std::{
    fmt::Debug,
    os::fd::{BorrowedFd, OwnedFd},
};

use crate::error::Result;

/// A memory pool, as the driver numbers it. Only a backend makes one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PoolHandle(pub(super) u64);

/// Memory pools that can be shared (`cuMemPool*`).
///
/// The rules of [`super::Verbs`] hold here too: a pool or an address that this driver object did not give out is answered
/// with `CUDA_ERROR_INVALID_VALUE` and does not reach the driver, and freeing waits for copies under way. `ordinal` is the
/// device whose default stream the call is made on; memory is freed on the one that it was taken on.
pub trait Pools: Debug + Send + Sync {
    /// Makes a pool of a device's memory that can be exported as a descriptor. `cuMemPoolCreate`.
    fn create(&self, ordinal: i32) -> Result<PoolHandle>;

    /// Gives a pool back, created or imported. It is refused with `CUDA_ERROR_INVALID_VALUE` while memory of it is
    /// allocated or imported here. `cuMemPoolDestroy`.
    fn destroy(&self, pool: PoolHandle) -> Result<()>;

    /// Exports a created pool as a new, close-on-exec descriptor. `cuMemPoolExportToShareableHandle`.
    fn export(&self, pool: PoolHandle) -> Result<OwnedFd>;

    /// Imports a pool. The descriptor stays the caller's. `cuMemPoolImportFromShareableHandle`.
    fn import(&self, fd: BorrowedFd<'_>) -> Result<PoolHandle>;

    /// Lets a device read and write the pool's memory. Its own device may from the start; there is no reading alone.
    /// `cuMemPoolSetAccess`.
    fn allow(&self, pool: PoolHandle, ordinal: i32) -> Result<()>;

    /// Allocates exactly `size` bytes, usable when it returns. `cuMemAllocFromPoolAsync`, `cuStreamSynchronize`.
    fn allocate(&self, pool: PoolHandle, ordinal: i32, size: u64) -> Result<u64>;

    /// Frees allocated memory, or gives back an imported pointer: as often as it was imported, and the last time counts.
    /// `cuMemFreeAsync`, `cuStreamSynchronize`.
    fn free(&self, ordinal: i32, address: u64) -> Result<()>;

    /// What another process needs to import this pointer, the start of an allocation, from the imported pool:
    /// `CUmemPoolPtrExportData`. `cuMemPoolExportPointer`.
    fn export_pointer(&self, ordinal: i32, address: u64) -> Result<[u8; 64]>;

    /// Imports a pointer. What the bytes say of its place and size is believed, and [`super::Verbs::extent`] tells the
    /// same. What is imported already has the same address again. `cuMemPoolImportPointer`.
    fn import_pointer(&self, pool: PoolHandle, ordinal: i32, data: &[u8; 64]) -> Result<u64>;
}
