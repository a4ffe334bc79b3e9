//! The trait that a backend implements: a method for each driver call.

#![allow(unsafe_code)]

use std::{
    fmt,
    os::fd::{BorrowedFd, OwnedFd},
    sync::Arc,
};

use super::{
    Access, Attribute, Backend, Checkpoints, DeviceUuid, Diagnosis, Granularity, Handle, Kernels, LegacyIpc, Location,
    MemoryInfo, PageLocked, Pools, Properties, Retained, Streams, Window,
};
use crate::error::Result;

/// A driver, with a method for each call.
///
/// Addresses are of this process; sizes and offsets are in bytes. In a fork of the process that initialized the driver, every call fails
/// with [`Error::Forked`](crate::Error::Forked). Otherwise calls fail with [`Error::Driver`](crate::Error::Driver) and the driver's code.
/// A handle or an address that this driver object has not returned, or that was released, fails with `CUDA_ERROR_INVALID_VALUE` and
/// reaches neither the driver nor memory: no call from safe code can corrupt anything.
///
/// Not for users: [`crate::memory`] owns the resources, and a safe caller must not be able to free memory that another owner uses. The
/// trait can therefore only be named in this crate, and by the project's tests (feature `internals`), which obtain it through an `unsafe`
/// function.
///
/// # Safety
/// Memory that an implementation reports as mapped is mapped, until it is unmapped, and has no other owner. Returned handles
/// and addresses stay valid until they are released, and are never returned twice at the same time.
pub unsafe trait Verbs: fmt::Debug + Send + Sync {
    /// The driver's backend.
    fn backend(&self) -> Backend;

    /// The newest CUDA version that the driver supports, as 1000 * major + 10 * minor. `cuDriverGetVersion`.
    fn version(&self) -> Result<i32>;

    /// The number of devices. `cuDeviceGetCount`.
    fn device_count(&self) -> Result<i32>;

    /// A device's name. `cuDeviceGetName`.
    fn device_name(&self, ordinal: i32) -> Result<String>;

    /// A device's UUID. `cuDeviceGetUuid_v2`.
    fn device_uuid(&self, ordinal: i32) -> Result<DeviceUuid>;

    /// An attribute of a device. `cuDeviceGetAttribute`.
    fn device_attribute(&self, ordinal: i32, attribute: Attribute) -> Result<i32>;

    /// A device's memory. Needs the device's context. `cuMemGetInfo`.
    fn memory_info(&self, ordinal: i32) -> Result<MemoryInfo>;

    /// Makes the device ready for copies: on CUDA, retains the primary context, which takes 55 to 95 ms the first time. Calls that need the
    /// context do this themselves. `cuDevicePrimaryCtxRetain`.
    fn activate(&self, ordinal: i32) -> Result<()>;

    /// The granularity: sizes of such allocations must be multiples of it. `cuMemGetAllocationGranularity`.
    fn granularity(&self, properties: &Properties, which: Granularity) -> Result<u64>;

    /// Allocates physical memory. `cuMemCreate`.
    fn create(&self, size: u64, properties: &Properties) -> Result<Handle>;

    /// Releases a handle. Memory that is still mapped, or referenced by a descriptor in any process, is not freed. `cuMemRelease`.
    fn release(&self, handle: Handle) -> Result<()>;

    /// Reserves addresses. `alignment` is a power of two, or 0 for the default. `cuMemAddressReserve`.
    fn reserve(&self, size: u64, alignment: u64) -> Result<u64>;

    /// Frees a whole reservation, in which nothing is mapped. `cuMemAddressFree`.
    fn free(&self, address: u64, size: u64) -> Result<()>;

    /// Maps a whole allocation at an address; `offset` must be 0. Inaccessible until [`Verbs::set_access`]. `cuMemMap`.
    fn map(&self, address: u64, size: u64, offset: u64, handle: Handle) -> Result<()>;

    /// Like [`Verbs::map`] with offset 0, with copy-on-write pages: this process may write to the mapping, and no other process sees the
    /// written data. CUDA has no such mapping: fails with `CUDA_ERROR_NOT_SUPPORTED`. mmap(2), `MAP_PRIVATE`.
    fn map_private(&self, address: u64, size: u64, handle: Handle) -> Result<()>;

    /// Replaces a whole mapping with a mapping of another whole allocation of the same size, with the same access, atomically: the kernel
    /// never gives the addresses to another thread, and no thread finds them unmapped. The result of [`Verbs::map_private`] remains private,
    /// and loses the written data. Fails while a [`Window`] is open on the mapping. CUDA has no such call: fails with
    /// `CUDA_ERROR_NOT_SUPPORTED`. After a failure, the old mapping remains, or nothing is mapped. mmap(2), `MAP_FIXED`.
    fn replace(&self, address: u64, size: u64, handle: Handle) -> Result<()>;

    /// Unmaps every mapping in the range. Fails if a mapping is only partly in it, or has an open [`Window`]. `cuMemUnmap`.
    fn unmap(&self, address: u64, size: u64) -> Result<()>;

    /// Fails like [`Verbs::unmap`] while a [`Window`] is open in the range, and changes nothing. No driver call.
    fn check_unused(&self, address: u64, size: u64) -> Result<()>;

    /// Sets the access of a device, or of the CPUs of a NUMA node, to a range of whole mappings. `None` removes all access. Fails while a
    /// [`Window`] is open in the range. `cuMemSetAccess`.
    fn set_access(&self, address: u64, size: u64, location: Location, access: Option<Access>) -> Result<()>;

    /// Exports an allocation as a new, close-on-exec descriptor. `cuMemExportToShareableHandle`.
    fn export(&self, handle: Handle) -> Result<OwnedFd>;

    /// Imports an allocation. `size` is the exporter's claim: CUDA checks it when the handle is mapped, the host backend at once. The
    /// caller keeps the descriptor. `cuMemImportFromShareableHandle`.
    fn import(&self, fd: BorrowedFd<'_>, size: u64) -> Result<Handle>;

    /// Retains the allocation that is mapped at an address, whoever mapped it, so that it outlives the mapping. The handle is released like
    /// any other. Fails with `CUDA_ERROR_INVALID_VALUE` for memory that was not mapped by `cuMemMap`, and with `CUDA_ERROR_NOT_SUPPORTED` on
    /// the host backend. `cuMemRetainAllocationHandle`, `cuPointerGetAttribute`.
    fn retain(&self, address: u64) -> Result<Retained>;

    /// The properties of an allocation. `cuMemGetAllocationPropertiesFromHandle`.
    fn properties(&self, handle: Handle) -> Result<Properties>;

    /// Copies from this process's memory into a mapping. All bytes are copied when it returns. `cuMemcpyHtoD`, `cuStreamSynchronize`.
    fn copy_in(&self, ordinal: i32, address: u64, from: &[u8]) -> Result<()>;

    /// Copies from a mapping into this process's memory. `cuMemcpyDtoH`.
    fn copy_out(&self, ordinal: i32, address: u64, to: &mut [u8]) -> Result<()>;

    /// Copies ranges, given as (destination, source, size in bytes), between this driver's memory and other device memory, for example
    /// another library's. All bytes are copied when it returns. Fails with `CUDA_ERROR_NOT_SUPPORTED` on the host backend, where other
    /// device memory could be any memory. `cuMemcpyDtoD`, `cuStreamSynchronize`.
    ///
    /// # Safety
    /// This driver object mapped one side of each range. The other side is valid for the size of the range until this returns. Both allow
    /// the access.
    unsafe fn copy_device(&self, ordinal: i32, ranges: &[(u64, u64, u64)]) -> Result<()>;

    /// The device of any library's memory, by address. `cuPointerGetAttribute`.
    fn device_of(&self, address: u64) -> Result<i32>;

    /// Waits until all work in the device's primary context has finished. `cuCtxSynchronize`.
    fn synchronize(&self, ordinal: i32) -> Result<()>;

    /// Like [`Verbs::synchronize`], without invalidating a stream capture of another thread, as `cuCtxSynchronize` would. Takes 0.1 to
    /// 0.2 ms. `cuThreadExchangeStreamCaptureMode`, `cuMemHostAlloc`, and `cuMemFreeHost`, which waits.
    fn wait_for_work(&self, ordinal: i32) -> Result<()>;

    /// Whether a device can access a peer's memory. Always true for itself. `cuDeviceCanAccessPeer`.
    fn can_access_peer(&self, ordinal: i32, peer: i32) -> Result<bool>;

    /// First address and size of the memory that contains an address: for a mapping as it was mapped, and for memory of [`LegacyIpc`] and
    /// [`Pools`] as the driver reports it. The driver does not check the exporter's claim. `cuMemGetAddressRange_v2` for the latter.
    fn extent(&self, ordinal: i32, address: u64) -> Result<(u64, u64)>;

    /// Makes an allocation immutable, and returns whether this is enforced against every holder of a descriptor. CUDA can't enforce it:
    /// returns `false` and does nothing. The host backend fails with `CUDA_ERROR_INVALID_VALUE` if the memory is mapped or was exported,
    /// and for imported memory that is not sealed. A seal is permanent. `F_ADD_SEALS`.
    fn seal(&self, handle: Handle) -> Result<bool>;

    /// Allocates private memory with the fastest copies to and from all devices. `cuMemHostAlloc` with `CU_MEMHOSTALLOC_PORTABLE`.
    fn page_lock(&self, ordinal: i32, size: u64) -> Result<PageLocked>;

    /// Opens a window on mapped memory for this process's CPU, writable if the mapping is. On CUDA the whole range needs access for
    /// [`Location::HostNuma`]; on the host backend, any access. No driver call.
    fn window(&self, address: u64, size: u64) -> Result<Window>;

    /// Legacy handles.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`](crate::error::DeviceError::Unsupported) on the host backend.
    fn legacy(&self) -> Result<&dyn LegacyIpc>;

    /// Memory pools. [`Attribute::MemoryPools`] and [`Attribute::PoolHandleTypes`] report whether a device supports them.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`](crate::error::DeviceError::Unsupported) on the host backend.
    fn pools(&self) -> Result<&dyn Pools>;

    /// Kernels that write and check the test pattern.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`](crate::error::DeviceError::Unsupported) on the host backend.
    fn kernels(&self) -> Result<&dyn Kernels>;

    /// Streams.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`](crate::error::DeviceError::Unsupported) on the host backend.
    fn streams(&self) -> Result<Arc<dyn Streams>>;

    /// Calls that only diagnose the driver.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`](crate::error::DeviceError::Unsupported) on the host backend.
    fn diagnosis(&self) -> Result<&dyn Diagnosis>;

    /// How many checkpoints of this process were made. After one, memory that it shared is a private copy.
    fn checkpoint_count(&self) -> u64 {
        0
    }

    /// Checkpoints of processes.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`](crate::error::DeviceError::Unsupported) on the host backend.
    fn checkpoints(&self) -> Result<&dyn Checkpoints>;
}

/// Whether mappings, given as (address, size) in ascending order, cover a range without a gap.
pub(crate) fn cover(mapped: impl Iterator<Item = (u64, u64)>, address: u64, size: u64) -> bool {
    let Some(end) = address.checked_add(size) else { return false };
    let reached = mapped
        .fold(address, |reached, (start, size)| if start <= reached { reached.max(start + size) } else { reached });
    reached >= end
}
