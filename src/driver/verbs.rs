//! One verb for each driver call: what a backend implements.

#![allow(unsafe_code)]

use std::{
    fmt,
    os::fd::{BorrowedFd, OwnedFd},
};

use super::{
    Access, Attribute, Backend, Bare, DeviceUuid, Diagnosis, Granularity, Handle, Kernels, LegacyIpc, Location,
    MemoryInfo, PageLocked, Pools, Properties, Window,
};
use crate::error::Result;

/// The driver, a verb for each call.
///
/// Addresses are of this process; sizes and offsets are bytes. Every call fails with [`Error::Forked`](crate::Error::Forked) in a fork of the
/// process that initialised the driver, and with [`Error::Driver`](crate::Error::Driver) and the driver's own code otherwise. A handle or an
/// address that this driver object did not give out, or took back, is answered with `CUDA_ERROR_INVALID_VALUE` and
/// reaches neither the driver nor memory: so no call of safe code can corrupt anything.
///
/// Not for users: [`crate::memory`] owns what these calls count, and a safe caller must not be able to take memory from under an
/// owner. So the trait can't be named outside this crate, except by the project's own tests (feature `internals`), which reach it
/// through an `unsafe` function.
///
/// # Safety
/// The memory that an implementation says is mapped is mapped, for as long as it says so, and belongs to no other owner. What
/// it gave out stays valid until it is given back, and is never given out twice at a time.
pub unsafe trait Verbs: fmt::Debug + Send + Sync {
    /// Where the memory is.
    fn backend(&self) -> Backend;

    /// The newest CUDA that the driver supports, as 1000 * major + 10 * minor. `cuDriverGetVersion`.
    fn version(&self) -> Result<i32>;

    /// How many devices there are. `cuDeviceGetCount`.
    fn device_count(&self) -> Result<i32>;

    /// A device's name. `cuDeviceGetName`.
    fn device_name(&self, ordinal: i32) -> Result<String>;

    /// A device's UUID. `cuDeviceGetUuid_v2`.
    fn device_uuid(&self, ordinal: i32) -> Result<DeviceUuid>;

    /// An attribute of a device. `cuDeviceGetAttribute`.
    fn device_attribute(&self, ordinal: i32, attribute: Attribute) -> Result<i32>;

    /// A device's memory. `cuMemGetInfo`; it needs the device's context.
    fn memory_info(&self, ordinal: i32) -> Result<MemoryInfo>;

    /// Makes the device ready for copies: on CUDA it retains the primary context, which costs 55 to 95 ms once.
    /// Every call that needs it does it. `cuDevicePrimaryCtxRetain`.
    fn activate(&self, ordinal: i32) -> Result<()>;

    /// What sizes of such allocations must be a multiple of. `cuMemGetAllocationGranularity`.
    fn granularity(&self, properties: &Properties, which: Granularity) -> Result<u64>;

    /// Allocates physical memory. `cuMemCreate`.
    fn create(&self, size: u64, properties: &Properties) -> Result<Handle>;

    /// Gives a handle back. Memory still mapped, or held by a descriptor anywhere, stays. `cuMemRelease`.
    fn release(&self, handle: Handle) -> Result<()>;

    /// Reserves addresses; `alignment` is a power of two, or 0 for the default. `cuMemAddressReserve`.
    fn reserve(&self, size: u64, alignment: u64) -> Result<u64>;

    /// Frees a reservation, whole and with nothing mapped in it. `cuMemAddressFree`.
    fn free(&self, address: u64, size: u64) -> Result<()>;

    /// Maps a whole allocation at an address; `offset` must be 0. It can't be used before [`Verbs::set_access`].
    /// `cuMemMap`.
    fn map(&self, address: u64, size: u64, offset: u64, handle: Handle) -> Result<()>;

    /// As [`Verbs::map`] with an offset of 0, with copy-on-write pages: this process may write to it, and no other process sees what it
    /// writes. CUDA has no such mapping and answers `CUDA_ERROR_NOT_SUPPORTED`. mmap(2), `MAP_PRIVATE`.
    fn map_private(&self, address: u64, size: u64, handle: Handle) -> Result<()>;

    /// Maps a whole allocation in the place of a whole mapping of the same size, with the same access, in one step: at no moment is
    /// another thread given the addresses, or finds them empty. A mapping of [`Verbs::map_private`] stays one, and loses what
    /// was written to it. Refused while a [`Window`] is open on it. CUDA has no such call and answers `CUDA_ERROR_NOT_SUPPORTED`. After a
    /// failure the addresses hold what they held, or nothing. mmap(2), `MAP_FIXED`.
    fn replace(&self, address: u64, size: u64, handle: Handle) -> Result<()>;

    /// Unmaps every mapping in the range, none of them in part, and none that a [`Window`] is open on. `cuMemUnmap`.
    fn unmap(&self, address: u64, size: u64) -> Result<()>;

    /// Fails as [`Verbs::unmap`] does while a [`Window`] is open on any of the range, and changes nothing. No driver call.
    fn check_unused(&self, address: u64, size: u64) -> Result<()>;

    /// Sets what a device, or the CPUs of a NUMA node, may do with a range of whole mappings; `None` takes all access.
    /// It is refused while a [`Window`] is open on any of it. `cuMemSetAccess`.
    fn set_access(&self, address: u64, size: u64, location: Location, access: Option<Access>) -> Result<()>;

    /// Exports an allocation as a new, close-on-exec descriptor. `cuMemExportToShareableHandle`.
    fn export(&self, handle: Handle) -> Result<OwnedFd>;

    /// Imports an allocation. `size` is what the exporter claims: CUDA checks it when the handle is mapped, the host
    /// backend at once. The descriptor stays the caller's. `cuMemImportFromShareableHandle`.
    fn import(&self, fd: BorrowedFd<'_>, size: u64) -> Result<Handle>;

    /// What an allocation was made with. `cuMemGetAllocationPropertiesFromHandle`.
    fn properties(&self, handle: Handle) -> Result<Properties>;

    /// Copies from this process's memory into a mapping; the bytes are there when it returns. `cuMemcpyHtoD`,
    /// `cuStreamSynchronize`.
    fn copy_in(&self, ordinal: i32, address: u64, from: &[u8]) -> Result<()>;

    /// Copies from a mapping into this process's memory. `cuMemcpyDtoH`.
    fn copy_out(&self, ordinal: i32, address: u64, to: &mut [u8]) -> Result<()>;

    /// Copies ranges, each given as where to, where from and how many bytes, between a device's memory and other memory of a device:
    /// another library's, say. The bytes are there when it returns. The host backend, where that is any memory, refuses it with
    /// `CUDA_ERROR_NOT_SUPPORTED`. `cuMemcpyDtoD`, `cuStreamSynchronize`.
    ///
    /// # Safety
    /// Of each range this driver object mapped one end; the other one is valid for as many bytes until this returns, and both allow
    /// what is done with them.
    unsafe fn copy_device(&self, ordinal: i32, ranges: &[(u64, u64, u64)]) -> Result<()>;

    /// The device that memory of any library is on, by its address. `cuPointerGetAttribute`.
    fn device_of(&self, address: u64) -> Result<i32>;

    /// Waits until all work of the device's primary context is done. `cuCtxSynchronize`.
    fn synchronize(&self, ordinal: i32) -> Result<()>;

    /// The same, but a stream that another thread captures meanwhile is not disturbed, where `cuCtxSynchronize` would end its capture. Costs
    /// 0.1 to 0.2 ms. `cuThreadExchangeStreamCaptureMode`, `cuMemHostAlloc`, `cuMemFreeHost`, which waits.
    fn wait_for_work(&self, ordinal: i32) -> Result<()>;

    /// Whether a device can access another's memory. Itself it always can. `cuDeviceCanAccessPeer`.
    fn can_access_peer(&self, ordinal: i32, peer: i32) -> Result<bool>;

    /// First address and size of what an address is in: of a mapping as it was mapped, and of memory from [`LegacyIpc`] and
    /// [`Pools`] as the driver reports it, which does not check what the exporter claimed. `cuMemGetAddressRange_v2`, for the latter.
    fn extent(&self, ordinal: i32, address: u64) -> Result<(u64, u64)>;

    /// Makes an allocation immutable for good, and returns whether that is enforced against every holder of a descriptor. On
    /// CUDA nothing can: it returns `false` and does nothing. The host backend refuses it with `CUDA_ERROR_INVALID_VALUE`
    /// while the memory is mapped and once it was exported, and for what is imported and not sealed yet; what is sealed
    /// already stays so. `F_ADD_SEALS`.
    fn seal(&self, handle: Handle) -> Result<bool>;

    /// Allocates private memory that a device copies from and to at full speed; any device may. `cuMemHostAlloc` with
    /// `CU_MEMHOSTALLOC_PORTABLE`.
    fn page_lock(&self, ordinal: i32, size: u64) -> Result<PageLocked>;

    /// Opens a window on mapped memory for this process's CPU, writable if the access is. On CUDA the whole range needs
    /// access for [`Location::HostNuma`]; on the host backend any access will do. No driver call.
    fn window(&self, address: u64, size: u64) -> Result<Window>;

    /// Sharing by legacy handles.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`](crate::error::DeviceError::Unsupported) on the host backend.
    fn legacy(&self) -> Result<&dyn LegacyIpc>;

    /// Sharing by memory pools. Whether a device has them is [`Attribute::MemoryPools`] and
    /// [`Attribute::PoolHandleTypes`].
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`](crate::error::DeviceError::Unsupported) on the host backend.
    fn pools(&self) -> Result<&dyn Pools>;

    /// A handoff by the driver's calls alone, to measure the library against.
    fn bare(&self) -> Result<&dyn Bare>;

    /// Kernels that write and check the pattern.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`](crate::error::DeviceError::Unsupported) on the host backend.
    fn kernels(&self) -> Result<&dyn Kernels>;

    /// What is asked only to find out what the driver can do.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`](crate::error::DeviceError::Unsupported) on the host backend.
    fn diagnosis(&self) -> Result<&dyn Diagnosis>;
}

/// Whether mappings, given as addresses and sizes in ascending order, cover a range without a gap.
pub(crate) fn cover(mapped: impl Iterator<Item = (u64, u64)>, address: u64, size: u64) -> bool {
    let Some(end) = address.checked_add(size) else { return false };
    let reached = mapped
        .fold(address, |reached, (start, size)| if start <= reached { reached.max(start + size) } else { reached });
    reached >= end
}
