//! Virtual memory management: physical memory, address reservations and mappings.

use std::{
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    sync::{Arc, OnceLock},
};

use super::{
    Device, Placement, Rdma, check_range,
    offered::{OpenError, Step},
    region, report, round_up,
};
use crate::{
    driver::{Access, Handle, Location, Properties, code},
    error::{DeviceError, Error, MemoryError, Result},
};

/// Physical memory that this process can share, or that it imported.
///
/// Dropping it releases the handle (`cuMemRelease`) and closes the exported descriptor. The memory itself is freed when the last handle,
/// mapping and descriptor in any process is gone.
#[doc(alias("cuMemCreate", "cuMemRelease"))]
#[derive(Debug)]
pub struct Allocation {
    device: Device,
    handle: Handle,
    size: u64,
    properties: Properties,
    exported: OnceLock<OwnedFd>,
}

impl Allocation {
    /// Allocates `size` bytes of device memory, rounded up to the granularity. The memory can be exported as a descriptor.
    ///
    /// # Errors
    /// [`MemoryError::InvalidSize`] if the size is zero or its rounding exceeds 64 bits; [`MemoryError::OutOfMemory`], with the requested
    /// and the free bytes; [`Error::Driver`].
    ///
    /// Driver calls: `cuMemGetAllocationGranularity`, `cuMemCreate`.
    #[doc(alias("cuMemGetAllocationGranularity", "cuMemCreate"))]
    pub fn create(device: &Device, size: u64) -> Result<Arc<Self>> {
        Self::create_at(device, Placement::Device, size)
    }

    /// Like [`Allocation::create`], in device memory or in host memory on the NUMA node closest to the device.
    ///
    /// # Errors
    /// The errors of [`Allocation::create`]; [`DeviceError::Unsupported`](crate::error::DeviceError::Unsupported) if the driver does not
    /// support host-NUMA memory.
    ///
    /// Driver calls: those of [`Allocation::create`]; for host memory also `cuDeviceGetAttribute`.
    #[doc(alias = "cuDeviceGetAttribute")]
    pub fn create_at(device: &Device, placement: Placement, size: u64) -> Result<Arc<Self>> {
        Self::create_with(device, &device.shareable(placement)?, Rdma::Never, size)
    }

    /// Like [`Allocation::create`], for memory that RDMA can reach: `gpuDirectRDMACapable`, which can't be changed later.
    ///
    /// # Errors
    /// The errors of [`Allocation::create`] and [`Device::require_gpu_direct_rdma`];
    /// [`DeviceError::Unsupported`](crate::error::DeviceError::Unsupported) also if the driver ignores the flag.
    ///
    /// Driver calls: `cuDeviceGetAttribute`, those of [`Allocation::create`], `cuMemGetAllocationPropertiesFromHandle`.
    #[doc(alias("cuDeviceGetAttribute", "cuMemGetAllocationPropertiesFromHandle"))]
    pub fn create_gpu_direct_rdma(device: &Device, size: u64) -> Result<Arc<Self>> {
        let properties = device.shareable_for(Placement::Device, Rdma::Required)?;
        Self::create_with(device, &properties, Rdma::Required, size)
    }

    /// Like [`Allocation::create`], with properties from [`Device::shareable_for`] for the same `rdma`.
    pub(super) fn create_with(device: &Device, properties: &Properties, rdma: Rdma, size: u64) -> Result<Arc<Self>> {
        let rounded = round_up(size, device.granularity_of(properties)?)?;
        match device.verbs().create(rounded, properties) {
            Ok(handle) => {
                // From here on, dropping `created` releases the handle.
                let mut created = Self::own(device, handle, rounded, *properties);
                if properties.gpu_direct_rdma {
                    created.properties = device.verbs().properties(handle)?;
                    if rdma == Rdma::Required {
                        created.require_gpu_direct_rdma()?;
                    }
                }
                Ok(Arc::new(created))
            }
            Err(Error::Driver { code: code::NOT_SUPPORTED | code::INVALID_VALUE, .. })
                if properties.gpu_direct_rdma && rdma == Rdma::Auto =>
            {
                Self::create_with(device, &Properties { gpu_direct_rdma: false, ..*properties }, Rdma::Never, size)
            }
            // The device's free memory is irrelevant for host memory.
            Err(error) if properties.location.host_node().is_some() => Err(error),
            Err(error) => Err(device.out_of_memory(rounded, error)),
        }
    }

    /// Imports an allocation that another process exported.
    ///
    /// `size` is the exporter's size in bytes: a GPU memory descriptor does not carry it. The host backend checks the size here, CUDA
    /// when the memory is mapped; memory with a wrong size never maps. `fd` is closed on success and on failure: the handle keeps the
    /// memory.
    ///
    /// # Errors
    /// [`MemoryError::Unaligned`] if `size` is not a multiple of the granularity (no driver call is made); [`MemoryError::NotImported`]
    /// if `fd` does not refer to such memory; [`Error::Driver`].
    ///
    /// Driver calls: `cuMemImportFromShareableHandle`, `cuMemGetAllocationPropertiesFromHandle`.
    #[doc(alias("cuMemImportFromShareableHandle", "cuMemGetAllocationPropertiesFromHandle"))]
    pub fn import(device: &Device, fd: OwnedFd, size: u64) -> Result<Arc<Self>> {
        let imported = Self::import_offered(device, fd.as_fd(), size);
        imported.map(Arc::new).map_err(|failed| not_imported(&fd, failed.into()))
    }

    /// Like [`Allocation::import`], but the caller keeps `fd` and may close it at any time.
    pub(super) fn import_offered(device: &Device, fd: BorrowedFd<'_>, size: u64) -> Result<Self, OpenError> {
        let granularity = device.granularity()?;
        if size == 0 || !size.is_multiple_of(granularity) {
            return Err(Error::Memory(MemoryError::Unaligned { size, granularity }).into());
        }
        let handle = device.verbs().import(fd, size).map_err(OpenError::at(Step::Open))?;
        Ok(Self::existing(device, handle, size)?)
    }

    /// An existing allocation, with the properties that the driver reports. Takes ownership of the handle, also after a failure.
    pub(super) fn existing(device: &Device, handle: Handle, size: u64) -> Result<Self> {
        // From here on, dropping `existing` releases the handle.
        let mut existing = Self::own(device, handle, size, device.shareable(Placement::Device)?);
        existing.properties = device.verbs().properties(handle)?;
        Ok(existing)
    }

    fn own(device: &Device, handle: Handle, size: u64, properties: Properties) -> Self {
        Self { device: device.clone(), handle, size, properties, exported: OnceLock::new() }
    }

    /// Exports the memory as a descriptor. Its receiver can read and write the memory, unless it is sealed.
    ///
    /// The allocation owns the descriptor, and every call returns the same one. Sending one descriptor to many receivers takes a twentieth
    /// of the time of an export for each.
    ///
    /// # Errors
    /// [`Error::Driver`]: with `CUDA_ERROR_INVALID_VALUE` for an imported allocation, which can't be exported again.
    ///
    /// Driver call: `cuMemExportToShareableHandle`, the first time.
    #[doc(alias = "cuMemExportToShareableHandle")]
    pub fn export(&self) -> Result<BorrowedFd<'_>> {
        if let Some(fd) = self.exported.get() {
            return Ok(fd.as_fd());
        }
        // If two threads export at once, the second descriptor is closed.
        let fd = self.device.verbs().export(self.handle)?;
        Ok(self.exported.get_or_init(|| fd).as_fd())
    }

    /// Exports the memory and releases the handle.
    pub(super) fn into_descriptor(self: Arc<Self>) -> Result<OwnedFd> {
        self.device.verbs().export(self.handle)
    }

    /// Seals the memory permanently against writing, and returns whether the seal is enforced for every process. On the host backend the
    /// kernel refuses writes by every holder of the descriptor. On CUDA this has no effect: a descriptor always gives full access.
    ///
    /// # Errors
    /// [`Error::Driver`] with `CUDA_ERROR_INVALID_VALUE` while the memory is mapped, or after it was exported.
    ///
    /// See memfd_create(2), `F_SEAL_WRITE` in fcntl(2).
    pub fn seal(&self) -> Result<bool> {
        self.device.verbs().seal(self.handle)
    }

    /// The size in bytes: a multiple of the granularity.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The device that the memory was created on or imported for.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Checks that the driver honoured the flag, which is only a request.
    fn require_gpu_direct_rdma(&self) -> Result<()> {
        if self.properties.gpu_direct_rdma {
            return Ok(());
        }
        let feature = "memory that RDMA can reach: its driver ignored gpuDirectRDMACapable";
        Err(Error::Device(DeviceError::Unsupported { device: self.device.to_string(), feature }))
    }

    /// The properties that the driver reported when the memory was created or imported.
    pub fn properties(&self) -> Properties {
        self.properties
    }
}

/// Adds a reason to the error of a descriptor that the driver can't import: the driver's own code is `UNKNOWN` for every cause.
fn not_imported(fd: &OwnedFd, error: Error) -> Error {
    let Error::Driver { call, code: code::UNKNOWN, name, source } = error else { return error };
    let reason = match source {
        // The host backend has inspected the descriptor.
        Some(reason) => reason.to_string(),
        None => {
            let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()));
            let file = link.map_or("an unknown file".to_owned(), |path| format!("`{}`", path.display()));
            format!("the driver finds no memory behind {file}: it is not GPU memory, or the memory was lost")
        }
    };
    let source = Box::new(Error::Driver { call, code: code::UNKNOWN, name, source: None });
    Error::Memory(MemoryError::NotImported { reason, source })
}

impl Drop for Allocation {
    fn drop(&mut self) {
        report(self.device.verbs().release(self.handle), "an allocation can't be released");
    }
}

/// A reserved range of addresses in this process, for mappings. Dropping it frees the addresses.
#[doc(alias("cuMemAddressReserve", "cuMemAddressFree"))]
#[derive(Debug)]
pub struct Reservation {
    device: Device,
    address: u64,
    size: u64,
}

impl Reservation {
    /// Reserves `size` bytes of addresses, a multiple of the granularity.
    ///
    /// # Errors
    /// [`Error::Driver`]. Driver call: `cuMemAddressReserve`.
    #[doc(alias = "cuMemAddressReserve")]
    pub fn new(device: &Device, size: u64) -> Result<Arc<Self>> {
        let address = device.verbs().reserve(size, 0)?;
        Ok(Arc::new(Self { device: device.clone(), address, size }))
    }

    /// The first address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The size in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        report(self.device.verbs().free(self.address, self.size), "reserved addresses can't be freed");
    }
}

/// Allocations mapped side by side at addresses of this process. Dropping it unmaps them, then drops the reservation.
///
/// A mapping keeps the memory alive even if the [`Allocation`]s are dropped. Other processes and other mappings share the same bytes and
/// may write to them at any time. Finish your own work on GPU streams before you drop a mapping: unmapping does not always wait for it.
#[doc(alias("cuMemMap", "cuMemUnmap"))]
#[derive(Debug)]
pub struct Mapping {
    device: Device,
    address: u64,
    size: u64,
    access: Access,
    /// Whether the pages are copy-on-write.
    private: bool,
    // Dropped after `Drop::drop` has unmapped the memory.
    reservation: Arc<Reservation>,
}

impl Mapping {
    /// Maps a whole allocation for its device, at an address that the driver chooses.
    ///
    /// # Errors
    /// [`Error::Driver`]: with `CUDA_ERROR_NOT_SUPPORTED` if an imported allocation does not have the claimed size.
    ///
    /// Driver calls: `cuMemAddressReserve`, `cuMemMap`, `cuMemSetAccess`.
    #[doc(alias("cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"))]
    pub fn new(allocation: &Arc<Allocation>, access: Access) -> Result<Self> {
        let reservation = Reservation::new(allocation.device(), allocation.size())?;
        Self::at(&reservation, 0, allocation, access)
    }

    /// Maps a whole allocation for its device, `offset` bytes into a reservation.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`] if the allocation does not fit; [`Error::Misuse`] if reservation, allocation and device belong to
    /// different driver objects; [`Error::Driver`] as for [`Mapping::new`], and with `CUDA_ERROR_INVALID_VALUE` if the addresses are in
    /// use.
    ///
    /// Driver calls: `cuMemMap`, `cuMemSetAccess`.
    #[doc(alias("cuMemMap", "cuMemSetAccess"))]
    pub fn at(
        reservation: &Arc<Reservation>,
        offset: u64,
        allocation: &Arc<Allocation>,
        access: Access,
    ) -> Result<Self> {
        Self::side_by_side(reservation, offset, std::slice::from_ref(allocation), allocation.device(), access)
    }

    /// Maps whole allocations side by side, starting `offset` bytes into a reservation. `device` may differ from the allocations' device
    /// (peer access). Host-NUMA memory is mapped for the CPU too.
    ///
    /// # Errors
    /// The errors of [`Mapping::at`]; [`Error::Driver`] with `CUDA_ERROR_PEER_ACCESS_UNSUPPORTED` if the device can't reach the memory.
    ///
    /// Driver calls: `cuMemMap` for each allocation, `cuMemSetAccess` once.
    #[doc(alias("cuMemMap", "cuMemSetAccess"))]
    pub fn side_by_side(
        reservation: &Arc<Reservation>,
        offset: u64,
        allocations: &[Arc<Allocation>],
        device: &Device,
        access: Access,
    ) -> Result<Self> {
        let mut mapping = Self::empty(reservation, offset, device, access)?;
        for allocation in allocations {
            mapping.push(allocation)?;
        }
        let node = allocations.first().and_then(|first| first.properties.location.host_node());
        mapping.allow(node)?;
        Ok(mapping)
    }

    /// An empty mapping at an offset in a reservation.
    pub(super) fn empty(reservation: &Arc<Reservation>, offset: u64, device: &Device, access: Access) -> Result<Self> {
        device.check_driver(&reservation.device)?;
        check_range(offset, 0, reservation.size)?;
        let address = reservation.address + offset;
        Ok(Self {
            device: device.clone(),
            address,
            size: 0,
            access,
            private: false,
            reservation: Arc::clone(reservation),
        })
    }

    /// Maps later allocations with writable copy-on-write pages. Host backend only.
    pub(super) fn make_private(&mut self) {
        (self.private, self.access) = (true, Access::ReadWrite);
    }

    /// Maps one more allocation after the others. It can't be used before [`Mapping::allow`].
    pub(super) fn push(&mut self, allocation: &Allocation) -> Result<()> {
        self.device.check_driver(&allocation.device)?;
        let offset = self.address - self.reservation.address + self.size;
        check_range(offset, allocation.size, self.reservation.size)?;
        let verbs = self.device.verbs();
        let address = self.address + self.size;
        if self.private {
            verbs.map_private(address, allocation.size, allocation.handle)?;
        } else {
            verbs.map(address, allocation.size, 0, allocation.handle)?;
        }
        // From here on, dropping the mapping unmaps this allocation.
        self.size += allocation.size;
        Ok(())
    }

    /// The number of reserved bytes from the mapping's first address to the end of the reservation.
    pub(super) fn room(&self) -> u64 {
        self.reservation.size - (self.address - self.reservation.address)
    }

    /// Maps other allocations over the current ones, with the same access. Each must have the size of the allocation that it replaces.
    /// After a failure, some allocations may be replaced and some addresses may be unmapped.
    pub(super) fn replace<'a>(&mut self, allocations: impl Iterator<Item = &'a Allocation>) -> Result<()> {
        let mut address = self.address;
        for allocation in allocations {
            self.device.check_driver(&allocation.device)?;
            check_range(address - self.address, allocation.size, self.size)?;
            self.device.verbs().replace(address, allocation.size, allocation.handle)?;
            address += allocation.size;
        }
        Ok(())
    }

    pub(super) fn unmap(&mut self) -> Result<()> {
        if self.size > 0 {
            self.device.verbs().unmap(self.address, self.size)?;
            self.size = 0;
        }
        Ok(())
    }

    /// Checks that no mirror of the mapping is open.
    ///
    /// # Errors
    /// [`Error::Misuse`] if a mirror is open.
    pub(super) fn check_unused(&self) -> Result<()> {
        if self.size == 0 {
            return Ok(());
        }
        match self.device.verbs().check_unused(self.address, self.size) {
            Err(Error::Driver { code: code::INVALID_VALUE, .. }) => {
                let problem = "a mirror of the memory is open or was leaked: drop every mirror first";
                Err(Error::Misuse { problem: problem.to_owned() })
            }
            checked => checked,
        }
    }

    /// Permanently removes this process's write access. Waits for the device's work first, because it may write to the memory.
    pub(super) fn make_read_only(&mut self, node: Option<i32>) -> Result<()> {
        if self.access == Access::ReadWrite {
            self.device.wait_for_work()?;
            self.access = Access::ReadOnly;
            self.allow(node).inspect_err(|_| self.access = Access::ReadWrite)?;
        }
        Ok(())
    }

    /// Gives access to the device and, for host memory, to the CPUs of its NUMA node.
    pub(super) fn allow(&self, node: Option<i32>) -> Result<()> {
        let device = Location::Device(self.device.ordinal());
        for location in [Some(device), node.map(Location::HostNuma)].into_iter().flatten() {
            self.device.verbs().set_access(self.address, self.size, location, Some(self.access))?;
        }
        Ok(())
    }
}

region!(Mapping, |this| &this.device, this.address, this.size, this.access, true);

impl Drop for Mapping {
    fn drop(&mut self) {
        report(self.unmap(), "a mapping can't be unmapped");
    }
}
