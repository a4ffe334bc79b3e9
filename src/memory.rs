//! What the driver counts, each with one owner: [`Allocation`], [`Reservation`], [`Mapping`], over a [`Device`].
//!
//! Dropping gives back; a dependent holds what it depends on, so that everything goes in the right order. A failure
//! at any step leaves nothing behind. A destructor that meets an error reports it through `tracing` and goes on.

use std::{
    fmt,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    str::FromStr,
    sync::{Arc, OnceLock},
};

use crate::{
    driver::{
        Access, Attribute, Backend, DeviceUuid, Driver, Granularity, Handle, Location, MemoryInfo, Properties, code,
    },
    error::{Error, Result},
};

/// A device of a backend. Clones are the same device.
#[derive(Debug, Clone)]
pub struct Device(Arc<DeviceParts>);

#[derive(Debug)]
struct DeviceParts {
    driver: Arc<dyn Driver>,
    ordinal: i32,
    name: String,
    uuid: DeviceUuid,
}

/// Which device: by ordinal among those visible to this process, or by UUID.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Selector {
    /// The number of a device in this process.
    Ordinal(u32),
    /// The identity of a device.
    Uuid(DeviceUuid),
}

impl Default for Selector {
    fn default() -> Self {
        Self::Ordinal(0)
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ordinal(ordinal) => ordinal.fmt(f),
            Self::Uuid(uuid) => uuid.fmt(f),
        }
    }
}

impl FromStr for Selector {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok(ordinal) = text.parse() {
            return Ok(Self::Ordinal(ordinal));
        }
        let uuid = text.parse();
        uuid.map(Self::Uuid).map_err(|_| {
            format!(
                "`{text}` is neither an ordinal such as 0 nor a UUID such as nvidia-smi -L prints: GPU-xxxxxxxx-..."
            )
        })
    }
}

impl Device {
    /// All devices of a driver, by ordinal.
    ///
    /// # Errors
    /// [`Error::Driver`].
    ///
    /// Driver calls: `cuDeviceGetCount`, and for each `cuDeviceGet`, `cuDeviceGetName`, `cuDeviceGetUuid_v2`.
    pub fn all(driver: &Arc<dyn Driver>) -> Result<Vec<Self>> {
        (0..driver.device_count()?).map(|ordinal| Self::open(driver, ordinal)).collect()
    }

    /// The device that a selector names.
    ///
    /// # Errors
    /// [`Error::NoSuchDevice`] with what there is instead; [`Error::Driver`].
    ///
    /// Driver calls: those of [`Device::all`].
    pub fn find(driver: &Arc<dyn Driver>, selector: Selector) -> Result<Self> {
        let devices = Self::all(driver)?;
        let wanted = |device: &&Self| match selector {
            Selector::Ordinal(ordinal) => i64::from(device.ordinal()) == i64::from(ordinal),
            Selector::Uuid(uuid) => device.uuid() == uuid,
        };
        devices.iter().find(wanted).cloned().ok_or_else(|| {
            let available: Vec<String> =
                devices.iter().map(|device| format!("{} is {device}", device.ordinal())).collect();
            Error::NoSuchDevice {
                backend: driver.backend().as_str(),
                wanted: selector.to_string(),
                available: available.join(", "),
            }
        })
    }

    fn open(driver: &Arc<dyn Driver>, ordinal: i32) -> Result<Self> {
        let (name, uuid) = (driver.device_name(ordinal)?, driver.device_uuid(ordinal)?);
        Ok(Self(Arc::new(DeviceParts { driver: Arc::clone(driver), ordinal, name, uuid })))
    }

    /// The driver that it is a device of.
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.0.driver
    }

    /// Where its memory is.
    pub fn backend(&self) -> Backend {
        self.driver().backend()
    }

    /// Its number in this process. Another process may know it by another number.
    pub fn ordinal(&self) -> i32 {
        self.0.ordinal
    }

    /// Its name, such as `NVIDIA H200`.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Its identity, the same in every process.
    pub fn uuid(&self) -> DeviceUuid {
        self.0.uuid
    }

    /// One of its attributes. Attributes are claims: a driver may claim what it then refuses.
    ///
    /// # Errors
    /// [`Error::Driver`]. Driver call: `cuDeviceGetAttribute`.
    pub fn attribute(&self, attribute: Attribute) -> Result<i32> {
        self.driver().device_attribute(self.ordinal(), attribute)
    }

    /// Its memory. On CUDA this retains the primary context.
    ///
    /// # Errors
    /// [`Error::Driver`]. Driver call: `cuMemGetInfo`.
    pub fn memory_info(&self) -> Result<MemoryInfo> {
        self.driver().memory_info(self.ordinal())
    }

    /// What the sizes of shareable allocations are multiples of, in bytes.
    ///
    /// # Errors
    /// [`Error::Driver`]. Driver call: `cuMemGetAllocationGranularity`.
    pub fn granularity(&self) -> Result<u64> {
        self.driver().granularity(&self.shareable(), Granularity::Minimum)
    }

    /// Checks that the device claims what sharing by descriptor needs.
    ///
    /// # Errors
    /// [`Error::Unsupported`] names what it lacks; [`Error::Driver`].
    ///
    /// Driver call: `cuDeviceGetAttribute`.
    pub fn require_sharing(&self) -> Result<()> {
        for (attribute, feature) in [
            (Attribute::VirtualMemoryManagement, "virtual memory management (cuMemCreate)"),
            (Attribute::PosixFileDescriptor, "export of memory as a POSIX file descriptor"),
        ] {
            if self.attribute(attribute)? == 0 {
                return Err(Error::Unsupported { device: self.to_string(), feature });
            }
        }
        Ok(())
    }

    /// Makes the device ready for copies, which on CUDA takes 55 to 95 ms the first time.
    ///
    /// # Errors
    /// [`Error::Driver`]. Driver call: `cuDevicePrimaryCtxRetain`.
    pub fn activate(&self) -> Result<()> {
        self.driver().activate(self.ordinal())
    }

    fn shareable(&self) -> Properties {
        Properties { location: Location::Device(self.ordinal()), exportable: true, immutable: false }
    }
}

/// The name, and the UUID as people paste it: `NVIDIA H200 GPU-53e9...`.
impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name(), self.prefixed_uuid())
    }
}

impl Device {
    /// The UUID with the prefix that says of what it is: `GPU-` as in `CUDA_VISIBLE_DEVICES`, or `HOST-`.
    pub fn prefixed_uuid(&self) -> String {
        let prefix = match self.backend() {
            Backend::Cuda => "GPU",
            Backend::Host => "HOST",
        };
        format!("{prefix}-{}", self.uuid())
    }
}

/// Physical memory that can be shared, or that was.
///
/// Dropping it gives the handle back (`cuMemRelease`) and closes the exported descriptor; the memory itself lives until
/// the last handle, mapping and descriptor of it, in any process, is gone.
#[derive(Debug)]
pub struct Allocation {
    device: Device,
    handle: Handle,
    size: u64,
    exported: OnceLock<OwnedFd>,
}

impl Allocation {
    /// Allocates at least `size` bytes on a device, exportable as a descriptor. The size is rounded up to the granularity.
    ///
    /// # Errors
    /// [`Error::InvalidSize`] for zero and for what rounds up beyond 64 bits; [`Error::OutOfMemory`] with both figures;
    /// [`Error::Driver`].
    ///
    /// Driver calls: `cuMemGetAllocationGranularity`, `cuMemCreate`.
    pub fn create(device: &Device, size: u64) -> Result<Arc<Self>> {
        let granularity = device.granularity()?;
        let rounded = match size.checked_next_multiple_of(granularity) {
            Some(rounded) if size > 0 => rounded,
            _ => return Err(Error::InvalidSize { size, max: u64::MAX - u64::MAX % granularity }),
        };
        match device.driver().create(rounded, &device.shareable()) {
            Ok(handle) => Ok(Arc::new(Self::own(device, handle, rounded))),
            Err(error @ Error::Driver { code: code::OUT_OF_MEMORY, .. }) => match device.memory_info() {
                Ok(MemoryInfo { free, .. }) if rounded > free => {
                    Err(Error::OutOfMemory { device: device.to_string(), size: rounded, free })
                }
                // Something else ran out.
                _ => Err(error),
            },
            Err(error) => Err(error),
        }
    }

    /// Imports an allocation that another process exported.
    ///
    /// `size` is the exporter's, in bytes: a GPU's descriptor does not carry it. The host backend checks it here and CUDA
    /// when it is mapped; a wrong one never maps. `fd` is closed on success and on failure: the memory needs it no more.
    ///
    /// # Errors
    /// [`Error::Unaligned`] if `size` is no multiple of the granularity (no driver call is made); [`Error::Driver`] with
    /// `CUDA_ERROR_UNKNOWN` if `fd` is no such memory.
    ///
    /// Driver call: `cuMemImportFromShareableHandle`.
    pub fn import(device: &Device, fd: OwnedFd, size: u64) -> Result<Arc<Self>> {
        let granularity = device.granularity()?;
        if size == 0 || !size.is_multiple_of(granularity) {
            return Err(Error::Unaligned { size, granularity });
        }
        let handle = device.driver().import(fd.as_fd(), size)?;
        Ok(Arc::new(Self::own(device, handle, size)))
    }

    fn own(device: &Device, handle: Handle, size: u64) -> Self {
        Self { device: device.clone(), handle, size, exported: OnceLock::new() }
    }

    /// The descriptor that gives another process this memory, with full rights. It stays the allocation's and is the
    /// same every time: exporting once and sending it again costs a twentieth of exporting for each receiver.
    ///
    /// # Errors
    /// [`Error::Driver`]: with `CUDA_ERROR_INVALID_VALUE` for an imported allocation, which can't be exported again.
    ///
    /// Driver call: `cuMemExportToShareableHandle`, the first time.
    pub fn export(&self) -> Result<BorrowedFd<'_>> {
        if let Some(fd) = self.exported.get() {
            return Ok(fd.as_fd());
        }
        // If two threads come here at once, one descriptor too many is made, and closed.
        let fd = self.device.driver().export(self.handle)?;
        Ok(self.exported.get_or_init(|| fd).as_fd())
    }

    /// Its size in bytes: a multiple of the granularity.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The device that it was created or imported on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// What the driver says that it is.
    ///
    /// # Errors
    /// [`Error::Driver`]. Driver call: `cuMemGetAllocationPropertiesFromHandle`.
    pub fn properties(&self) -> Result<Properties> {
        self.device.driver().properties(self.handle)
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        report(self.device.driver().release(self.handle), "an allocation can't be released");
    }
}

/// A range of addresses of this process, kept free for mappings. Dropping it frees them.
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
    pub fn new(device: &Device, size: u64) -> Result<Arc<Self>> {
        let address = device.driver().reserve(size, 0)?;
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
        report(self.device.driver().free(self.address, self.size), "reserved addresses can't be freed");
    }
}

/// An allocation at an address of this process. Dropping it unmaps, then lets go of the allocation and the reservation.
///
/// Other processes, and other mappings, see the same bytes and may write them at any time. Work of your own on a GPU stream
/// must be finished before it is dropped: unmapping does not always wait for it.
#[derive(Debug)]
pub struct Mapping {
    address: u64,
    access: Access,
    // In this order, after the unmapping in `drop`.
    allocation: Arc<Allocation>,
    _reservation: Arc<Reservation>,
}

impl Mapping {
    /// Maps a whole allocation at an address of the driver's choice.
    ///
    /// # Errors
    /// [`Error::Driver`]: with `CUDA_ERROR_NOT_SUPPORTED` if an imported allocation does not have the size claimed.
    ///
    /// Driver calls: `cuMemAddressReserve`, `cuMemMap`, `cuMemSetAccess`.
    pub fn new(allocation: &Arc<Allocation>, access: Access) -> Result<Self> {
        let reservation = Reservation::new(allocation.device(), allocation.size())?;
        Self::at(&reservation, 0, allocation, access)
    }

    /// Maps a whole allocation `offset` bytes into a reservation. Several side by side make one buffer.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if it does not fit; [`Error::Driver`] as for [`Mapping::new`], and with
    /// `CUDA_ERROR_INVALID_VALUE` if something is mapped there.
    ///
    /// Driver calls: `cuMemMap`, `cuMemSetAccess`.
    pub fn at(
        reservation: &Arc<Reservation>,
        offset: u64,
        allocation: &Arc<Allocation>,
        access: Access,
    ) -> Result<Self> {
        let (driver, size) = (allocation.device.driver(), allocation.size);
        check_range(offset, size, reservation.size)?;
        let address = reservation.address + offset;
        driver.map(address, size, 0, allocation.handle)?;
        // From here on dropping it unmaps.
        let mapping =
            Self { address, access, allocation: Arc::clone(allocation), _reservation: Arc::clone(reservation) };
        driver.set_access(address, size, Location::Device(allocation.device.ordinal()), Some(access))?;
        Ok(mapping)
    }

    /// Its address on the device, the `CUdeviceptr`; on the host backend an address of this process.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its size in bytes.
    pub fn size(&self) -> u64 {
        self.allocation.size
    }

    /// What this process may do with it.
    pub fn access(&self) -> Access {
        self.access
    }

    /// What is mapped.
    pub fn allocation(&self) -> &Arc<Allocation> {
        &self.allocation
    }

    /// The device that it is mapped for.
    pub fn device(&self) -> &Device {
        &self.allocation.device
    }

    /// Copies bytes into it, from `offset` on.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if they do not fit; [`Error::Driver`] with `CUDA_ERROR_INVALID_VALUE` if it is mapped
    /// read-only.
    ///
    /// Driver calls: `cuMemcpyHtoD`, and `cuStreamSynchronize`, so that the bytes are there when it returns.
    pub fn copy_in(&self, offset: u64, from: &[u8]) -> Result<()> {
        check_range(offset, from.len() as u64, self.size())?;
        self.device().driver().copy_in(self.device().ordinal(), self.address + offset, from)
    }

    /// Copies bytes out of it, from `offset` on.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if there are not as many; [`Error::Driver`].
    ///
    /// Driver call: `cuMemcpyDtoH`.
    pub fn copy_out(&self, offset: u64, to: &mut [u8]) -> Result<()> {
        check_range(offset, to.len() as u64, self.size())?;
        self.device().driver().copy_out(self.device().ordinal(), self.address + offset, to)
    }

    /// Waits until all work in the device's primary context is done: to be called before another process is told.
    ///
    /// # Errors
    /// [`Error::Driver`], also for an earlier asynchronous failure. Driver call: `cuCtxSynchronize`.
    pub fn synchronize(&self) -> Result<()> {
        self.device().driver().synchronize(self.device().ordinal())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        report(self.device().driver().unmap(self.address, self.size()), "a mapping can't be unmapped");
    }
}

fn check_range(offset: u64, length: u64, size: u64) -> Result<()> {
    match offset.checked_add(length) {
        Some(end) if end <= size => Ok(()),
        _ => Err(Error::OutOfRange { offset, length, size }),
    }
}

/// A destructor has nobody to tell but the log.
fn report(result: Result<()>, what: &str) {
    if let Err(error) = result {
        tracing::error!(%error, "{what}");
    }
}
