//! Virtual memory management: physical memory, reserved addresses, and the one mapped at the other.

use std::{
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    sync::{Arc, OnceLock},
};

use super::{
    Device, Placement, Region, check_range,
    offered::{OpenError, Step},
    report, round_up,
};
use crate::{
    driver::{Access, Handle, Location, Properties, code},
    error::{DeviceError, Error, MemoryError, Result},
};

/// Physical memory that can be shared, or that was.
///
/// Dropping it gives the handle back (`cuMemRelease`) and closes the exported descriptor; the memory itself lives until
/// the last handle, mapping and descriptor of it, in any process, is gone.
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
    /// Allocates at least `size` bytes on a device, exportable as a descriptor. The size is rounded up to the granularity.
    ///
    /// # Errors
    /// [`MemoryError::InvalidSize`] for zero and for what rounds up beyond 64 bits; [`MemoryError::OutOfMemory`] with both figures;
    /// [`Error::Driver`].
    ///
    /// Driver calls: `cuMemGetAllocationGranularity`, `cuMemCreate`.
    #[doc(alias("cuMemGetAllocationGranularity", "cuMemCreate"))]
    pub fn create(device: &Device, size: u64) -> Result<Arc<Self>> {
        Self::create_at(device, Placement::Device, size)
    }

    /// As [`Allocation::create`], in a device's own memory or in that of the CPU's NUMA node next to it.
    ///
    /// # Errors
    /// Those of [`Allocation::create`]; [`DeviceError::Unsupported`](crate::error::DeviceError::Unsupported) where the driver has
    /// no host-NUMA memory.
    ///
    /// Driver calls: those of [`Allocation::create`]; for host memory also `cuDeviceGetAttribute`.
    #[doc(alias = "cuDeviceGetAttribute")]
    pub fn create_at(device: &Device, placement: Placement, size: u64) -> Result<Arc<Self>> {
        Self::create_with(device, &device.shareable(placement)?, size)
    }

    /// As [`Allocation::create`], made so that RDMA can reach it: `gpuDirectRDMACapable`, which can't be changed later.
    ///
    /// # Errors
    /// Those of [`Allocation::create`] and of [`Device::require_gpu_direct_rdma`];
    /// [`DeviceError::Unsupported`](crate::error::DeviceError::Unsupported) also where the driver creates it without.
    ///
    /// Driver calls: `cuDeviceGetAttribute`, those of [`Allocation::create`], `cuMemGetAllocationPropertiesFromHandle`.
    #[doc(alias("cuDeviceGetAttribute", "cuMemGetAllocationPropertiesFromHandle"))]
    pub fn create_gpu_direct_rdma(device: &Device, size: u64) -> Result<Arc<Self>> {
        Self::create_with(device, &device.shareable_for(Placement::Device, true)?, size)
    }

    /// As [`Allocation::create`], with properties of [`Device::shareable_for`].
    pub(super) fn create_with(device: &Device, properties: &Properties, size: u64) -> Result<Arc<Self>> {
        let rounded = round_up(size, device.granularity_of(properties)?)?;
        match device.verbs().create(rounded, properties) {
            Ok(handle) => {
                // From here on dropping it releases the handle.
                let mut created = Self::own(device, handle, rounded, *properties);
                if properties.gpu_direct_rdma {
                    created.properties = device.verbs().properties(handle)?;
                    created.require_gpu_direct_rdma()?;
                }
                Ok(Arc::new(created))
            }
            // The device's figures say nothing of the host's memory.
            Err(error) if properties.location.host_node().is_some() => Err(error),
            Err(error) => Err(device.out_of_memory(rounded, error)),
        }
    }

    /// Imports an allocation that another process exported.
    ///
    /// `size` is the exporter's, in bytes: a GPU's descriptor does not carry it. The host backend checks it here and CUDA
    /// when it is mapped; a wrong one never maps. `fd` is closed on success and on failure: the memory needs it no more.
    ///
    /// # Errors
    /// [`MemoryError::Unaligned`] if `size` is no multiple of the granularity (no driver call is made);
    /// [`MemoryError::NotImported`] if `fd` is no such memory; [`Error::Driver`].
    ///
    /// Driver calls: `cuMemImportFromShareableHandle`, `cuMemGetAllocationPropertiesFromHandle`.
    #[doc(alias("cuMemImportFromShareableHandle", "cuMemGetAllocationPropertiesFromHandle"))]
    pub fn import(device: &Device, fd: OwnedFd, size: u64) -> Result<Arc<Self>> {
        let imported = Self::import_offered(device, fd.as_fd(), size);
        imported.map(Arc::new).map_err(|failed| not_imported(&fd, failed.into()))
    }

    /// As [`Allocation::import`]; `fd` stays the caller's, to be closed when it likes.
    pub(super) fn import_offered(device: &Device, fd: BorrowedFd<'_>, size: u64) -> Result<Self, OpenError> {
        let granularity = device.granularity()?;
        if size == 0 || !size.is_multiple_of(granularity) {
            return Err(Error::Memory(MemoryError::Unaligned { size, granularity }).into());
        }
        let handle = device.verbs().import(fd, size).map_err(OpenError::at(Step::Open))?;
        // From here on dropping it releases the handle.
        let mut imported = Self::own(device, handle, size, device.shareable(Placement::Device)?);
        imported.properties = device.verbs().properties(handle)?;
        Ok(imported)
    }

    fn own(device: &Device, handle: Handle, size: u64, properties: Properties) -> Self {
        Self { device: device.clone(), handle, size, properties, exported: OnceLock::new() }
    }

    /// The descriptor that gives another process this memory, with full rights unless it is sealed. It stays the
    /// allocation's and is the same every time: exporting once and sending it again costs a twentieth of exporting for
    /// each receiver.
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
        // If two threads come here at once, one descriptor too many is made, and closed.
        let fd = self.device.verbs().export(self.handle)?;
        Ok(self.exported.get_or_init(|| fd).as_fd())
    }

    /// Exports it for an owner who needs no more than the descriptor.
    pub(super) fn into_descriptor(self: Arc<Self>) -> Result<OwnedFd> {
        self.device.verbs().export(self.handle)
    }

    /// Makes it immutable for good, and says whether that holds for everybody: on the host backend the kernel refuses every
    /// holder of the descriptor to write; on CUDA the descriptor conveys full rights, and nothing is done.
    ///
    /// # Errors
    /// [`Error::Driver`] with `CUDA_ERROR_INVALID_VALUE` while it is mapped, or once it was exported.
    ///
    /// See memfd_create(2), `F_SEAL_WRITE` in fcntl(2).
    pub fn seal(&self) -> Result<bool> {
        self.device.verbs().seal(self.handle)
    }

    /// Its size in bytes: a multiple of the granularity.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The device that it was created on, or imported for.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Checks that the driver made it as it was asked to: the flag is a request.
    fn require_gpu_direct_rdma(&self) -> Result<()> {
        if self.properties.gpu_direct_rdma {
            return Ok(());
        }
        let feature = "memory that RDMA can reach: its driver made it without gpuDirectRDMACapable";
        Err(Error::Device(DeviceError::Unsupported { device: self.device.to_string(), feature }))
    }

    /// What the driver said of it when it was created or imported.
    pub fn properties(&self) -> Properties {
        self.properties
    }
}

/// The error of a descriptor that a driver can't import: the driver's own code says of every cause that it is unknown.
fn not_imported(fd: &OwnedFd, error: Error) -> Error {
    let Error::Driver { call, code: code::UNKNOWN, name, source } = error else { return error };
    let reason = match source {
        // The host backend has looked at it.
        Some(reason) => reason.to_string(),
        None => {
            let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()));
            let of = link.map_or("an unknown file".to_owned(), |path| format!("`{}`", path.display()));
            format!(
                "the driver knows no memory of it. It is a descriptor of {of}: either not of a GPU's memory, or of memory that was lost"
            )
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

/// A range of addresses of this process, kept free for mappings. Dropping it frees them.
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

    /// Its first address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its size in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        report(self.device.verbs().free(self.address, self.size), "reserved addresses can't be freed");
    }
}

/// Allocations at addresses of this process, side by side. Dropping it unmaps them, then drops the reservation.
///
/// It keeps the memory alive, also when the [`Allocation`]s are dropped. Other processes, and other mappings, see the same
/// bytes and may write them at any time. Work of your own on a GPU stream must be finished before it is dropped: unmapping
/// does not always wait for it.
#[doc(alias("cuMemMap", "cuMemUnmap"))]
#[derive(Debug)]
pub struct Mapping {
    device: Device,
    address: u64,
    size: u64,
    access: Access,
    /// Whether its pages are copied when this process writes to them.
    private: bool,
    // Let go of after the unmapping in `drop`.
    reservation: Arc<Reservation>,
}

impl Mapping {
    /// Maps a whole allocation at an address of the driver's choice, for its device.
    ///
    /// # Errors
    /// [`Error::Driver`]: with `CUDA_ERROR_NOT_SUPPORTED` if an imported allocation does not have the size claimed.
    ///
    /// Driver calls: `cuMemAddressReserve`, `cuMemMap`, `cuMemSetAccess`.
    #[doc(alias("cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"))]
    pub fn new(allocation: &Arc<Allocation>, access: Access) -> Result<Self> {
        let reservation = Reservation::new(allocation.device(), allocation.size())?;
        Self::at(&reservation, 0, allocation, access)
    }

    /// Maps a whole allocation `offset` bytes into a reservation, for its device.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`] if it does not fit; [`Error::Misuse`] if reservation, allocation and device are not all of one
    /// driver
    /// object; [`Error::Driver`] as for [`Mapping::new`], and with `CUDA_ERROR_INVALID_VALUE` if something is mapped there.
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

    /// Maps whole allocations side by side, from `offset` bytes into a reservation on, for a device that may be another
    /// than theirs (peer access). Host-NUMA memory is mapped for the CPU too.
    ///
    /// # Errors
    /// Those of [`Mapping::at`]; [`Error::Driver`] with `CUDA_ERROR_PEER_ACCESS_UNSUPPORTED` if the device can't reach them.
    ///
    /// Driver calls: `cuMemMap` for each, `cuMemSetAccess` for all at once.
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

    /// Nothing yet, at a place in a reservation.
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

    /// Has what is pushed from now on mapped with copy-on-write pages, which this process may write to: on the host backend alone.
    pub(super) fn make_private(&mut self) {
        (self.private, self.access) = (true, Access::ReadWrite);
    }

    /// Maps one more allocation behind the others. It can't be used before [`Mapping::allow`].
    pub(super) fn push(&mut self, allocation: &Allocation) -> Result<()> {
        self.device.check_driver(&allocation.device)?;
        let offset = self.address - self.reservation.address + self.size;
        check_range(offset, allocation.size, self.reservation.size)?;
        let (verbs, address) = (self.device.verbs(), self.address + self.size);
        if self.private {
            verbs.map_private(address, allocation.size, allocation.handle)?;
        } else {
            verbs.map(address, allocation.size, 0, allocation.handle)?;
        }
        // From here on dropping it unmaps.
        self.size += allocation.size;
        Ok(())
    }

    /// How many bytes of addresses are reserved from its first on.
    pub(super) fn room(&self) -> u64 {
        self.reservation.size - (self.address - self.reservation.address)
    }

    /// Maps other allocations in the place of those that are mapped, each of which has the size of the one before it, with the same
    /// access. After a failure some of them may be there, and some addresses may be empty.
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

    /// Unmaps all of it, if it can be.
    pub(super) fn unmap(&mut self) -> Result<()> {
        if self.size > 0 {
            self.device.verbs().unmap(self.address, self.size)?;
            self.size = 0;
        }
        Ok(())
    }

    /// Checks that no mirror is open on any of it.
    ///
    /// # Errors
    /// [`Error::Misuse`] if one is.
    pub(super) fn check_unused(&self) -> Result<()> {
        if self.size == 0 {
            return Ok(());
        }
        match self.device.verbs().check_unused(self.address, self.size) {
            Err(Error::Driver { code: code::INVALID_VALUE, .. }) => {
                let problem = "a mirror of the memory is open, or was forgotten: drop every mirror first";
                Err(Error::Misuse { problem: problem.to_owned() })
            }
            checked => checked,
        }
    }

    /// Takes this process's right to write it, for good. Waits for the device's work, which may be writing.
    pub(super) fn make_read_only(&mut self, node: Option<i32>) -> Result<()> {
        if self.access == Access::ReadWrite {
            self.device.wait_for_work()?;
            self.access = Access::ReadOnly;
            self.allow(node).inspect_err(|_| self.access = Access::ReadWrite)?;
        }
        Ok(())
    }

    /// Lets the device use what is mapped, and the CPUs of a NUMA node if the memory is theirs.
    pub(super) fn allow(&self, node: Option<i32>) -> Result<()> {
        let device = Location::Device(self.device.ordinal());
        for location in [Some(device), node.map(Location::HostNuma)].into_iter().flatten() {
            self.device.verbs().set_access(self.address, self.size, location, Some(self.access))?;
        }
        Ok(())
    }
}

impl super::sealed::Sealed for Mapping {}

impl Region for Mapping {
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
        self.access
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        report(self.unmap(), "a mapping can't be unmapped");
    }
}
