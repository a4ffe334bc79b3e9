//! Devices of a backend.

use std::{
    fmt,
    sync::{Arc, OnceLock},
};

use super::{DeviceIdentity, Placement, Rdma, Selector};
use crate::{
    driver::{Attribute, Backend, DeviceUuid, Driver, Granularity, Location, MemoryInfo, Properties, Verbs, code, wsl},
    error::{DeviceError, Error, ErrorCode, MemoryError, PeerError, Result},
};

/// A device of a backend. Clones refer to the same device.
///
/// ```
/// use vmmfd::{driver::{Backend, Choice, open}, memory::Device};
///
/// let driver = open(Choice::Only(Backend::Host))?.driver;
/// for device in Device::all(&driver)? {
///     println!("{device}: {} bytes are free", device.memory_info()?.free);
/// }
/// # Ok::<(), vmmfd::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Device(Arc<DeviceParts>);

#[derive(Debug)]
struct DeviceParts {
    driver: Driver,
    ordinal: i32,
    name: String,
    uuid: DeviceUuid,
    granularity: OnceLock<u64>,
}

impl Device {
    /// All devices of a driver, by ordinal.
    ///
    /// # Errors
    /// [`Error::Driver`].
    ///
    /// Driver calls: `cuDeviceGetCount`, and for each `cuDeviceGet`, `cuDeviceGetName`, `cuDeviceGetUuid_v2`.
    #[doc(alias("cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetUuid_v2"))]
    pub fn all(driver: &Driver) -> Result<Vec<Self>> {
        (0..driver.verbs().device_count()?).map(|ordinal| Self::open(driver, ordinal)).collect()
    }

    /// Finds the device of a selector.
    ///
    /// # Errors
    /// [`DeviceError::NotFound`], which lists the devices; [`DeviceError::Ambiguous`] if several UUIDs match; [`Error::Driver`].
    ///
    /// Driver calls: those of [`Device::all`].
    pub fn find(driver: &Driver, selector: Selector) -> Result<Self> {
        let devices = Self::all(driver)?;
        let identity = |device: &Self| (device.ordinal(), device.uuid(), device.to_string());
        selector.choose(driver.backend(), &devices, identity).cloned()
    }

    fn open(driver: &Driver, ordinal: i32) -> Result<Self> {
        let name = driver.verbs().device_name(ordinal)?;
        let uuid = driver.verbs().device_uuid(ordinal)?;
        let granularity = OnceLock::new();
        Ok(Self(Arc::new(DeviceParts { driver: driver.clone(), ordinal, name, uuid, granularity })))
    }

    /// The driver of the device.
    pub fn driver(&self) -> &Driver {
        &self.0.driver
    }

    pub(crate) fn verbs(&self) -> &dyn Verbs {
        self.driver().verbs()
    }

    /// Checks that another device belongs to the same driver object.
    pub(crate) fn check_driver(&self, other: &Self) -> Result<()> {
        if self.driver() == other.driver() {
            return Ok(());
        }
        let problem =
            format!("{self} and {other} belong to two driver objects, which share neither handles nor addresses");
        Err(Error::Misuse { problem })
    }

    /// The device's backend.
    pub fn backend(&self) -> Backend {
        self.driver().backend()
    }

    /// The ordinal in this process. Other processes may use another ordinal for the same device.
    pub fn ordinal(&self) -> i32 {
        self.0.ordinal
    }

    /// The device's name, such as `NVIDIA H200`.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The device's UUID, the same in every process.
    pub fn uuid(&self) -> DeviceUuid {
        self.0.uuid
    }

    /// The UUID and the name, which identify the device in other processes.
    pub fn identity(&self) -> DeviceIdentity {
        DeviceIdentity { uuid: self.uuid(), name: self.name().to_owned() }
    }

    /// A device attribute. Attributes are claims: a driver may still refuse an operation that it claims to support.
    ///
    /// # Errors
    /// [`Error::Driver`]. Driver call: `cuDeviceGetAttribute`.
    #[doc(alias = "cuDeviceGetAttribute")]
    pub fn attribute(&self, attribute: Attribute) -> Result<i32> {
        self.verbs().device_attribute(self.ordinal(), attribute)
    }

    /// Free and total memory. On CUDA this retains the primary context.
    ///
    /// # Errors
    /// [`Error::Driver`]. Driver call: `cuMemGetInfo`.
    #[doc(alias = "cuMemGetInfo")]
    pub fn memory_info(&self) -> Result<MemoryInfo> {
        self.verbs().memory_info(self.ordinal())
    }

    /// The granularity of shareable allocations: their sizes are multiples of it, in bytes.
    ///
    /// # Errors
    /// [`Error::Driver`]. Driver call: `cuMemGetAllocationGranularity`, the first time.
    #[doc(alias = "cuMemGetAllocationGranularity")]
    pub fn granularity(&self) -> Result<u64> {
        if let Some(&granularity) = self.0.granularity.get() {
            return Ok(granularity);
        }
        let granularity = self.verbs().granularity(&self.shareable(Placement::Device)?, Granularity::Minimum)?;
        Ok(*self.0.granularity.get_or_init(|| granularity))
    }

    /// Like [`Device::granularity`], for allocations with these properties.
    pub(super) fn granularity_of(&self, properties: &Properties) -> Result<u64> {
        match properties {
            Properties { location: Location::Device(_), gpu_direct_rdma: false, .. } => self.granularity(),
            _ => self.verbs().granularity(properties, Granularity::Minimum),
        }
    }

    /// Checks that the device claims to support sharing by descriptor.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`], which names the missing feature; [`Error::Driver`].
    ///
    /// Driver call: `cuDeviceGetAttribute`.
    #[doc(alias = "cuDeviceGetAttribute")]
    pub fn require_sharing(&self) -> Result<()> {
        for (attribute, feature) in [
            (Attribute::VirtualMemoryManagement, "virtual memory management (cuMemCreate)"),
            (Attribute::PosixFileDescriptor, "export of memory as a POSIX file descriptor"),
        ] {
            if self.attribute(attribute)? == 0 {
                return Err(Error::Device(DeviceError::Unsupported { device: self.to_string(), feature }));
            }
        }
        Ok(())
    }

    /// Checks that the device claims to support memory pools that are shared by descriptor.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`]; [`Error::Driver`]. Driver call: `cuDeviceGetAttribute`.
    #[doc(alias = "cuDeviceGetAttribute")]
    pub fn require_pools(&self) -> Result<()> {
        self.verbs().pools()?;
        const POSIX_FD: i32 = 1;
        let by_descriptor = self.attribute(Attribute::PoolHandleTypes)? & POSIX_FD != 0;
        if self.attribute(Attribute::MemoryPools)? != 0 && by_descriptor {
            return Ok(());
        }
        let feature = "memory pools that are shared by descriptor";
        Err(Error::Device(DeviceError::Unsupported { device: self.to_string(), feature }))
    }

    /// Checks that the device supports memory that RDMA can reach. On WSL2 this always fails, whatever the device claims: in tests, such
    /// memory could be created there but not used. Does not block.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] if not, on WSL2 and on the host backend; [`Error::Driver`].
    ///
    /// Driver call: `cuDeviceGetAttribute`.
    #[doc(alias = "cuDeviceGetAttribute")]
    pub fn require_gpu_direct_rdma(&self) -> Result<()> {
        let feature = match self.backend() {
            Backend::Cuda if wsl::is_here() => {
                "memory that RDMA can reach (gpuDirectRDMACapable): this is WSL2, where such memory can't be used"
            }
            _ if self.attribute(Attribute::GpuDirectRdma)? == 0 => "memory that RDMA can reach (gpuDirectRDMACapable)",
            _ => return Ok(()),
        };
        Err(Error::Device(DeviceError::Unsupported { device: self.to_string(), feature }))
    }

    /// Selects the device of this process to map memory of `owner` for: `wanted` if there is one, otherwise the owner itself, otherwise
    /// (if this process does not see the owner) the first device, which may still reach the memory.
    ///
    /// # Errors
    /// [`DeviceError::NoPeerAccess`] if `wanted` can't reach the owner's memory; [`PeerError::Mismatch`] on the host backend for
    /// memory of another machine; [`DeviceError::NotFound`]; [`Error::Driver`].
    ///
    /// Driver calls: those of [`Device::find`], `cuDeviceCanAccessPeer`.
    #[doc(alias = "cuDeviceCanAccessPeer")]
    pub fn for_memory_of(driver: &Driver, owner: &DeviceIdentity, wanted: Option<&Self>) -> Result<Self> {
        let visible = match wanted {
            Some(wanted) if wanted.uuid() == owner.uuid => return Ok(wanted.clone()),
            _ => Self::find_owner(driver, owner)?,
        };
        match (wanted, visible) {
            (Some(wanted), Some(visible)) if !wanted.can_access(&visible)? => {
                let device = wanted.to_string();
                let owner = visible.to_string();
                Err(Error::Device(DeviceError::NoPeerAccess { device, owner, source: None }))
            }
            (Some(wanted), _) => Ok(wanted.clone()),
            (None, Some(visible)) => Ok(visible),
            (None, None) => {
                let first = Self::find(driver, Selector::default())?;
                if first.is_host() {
                    let message = format!("the buffer is on {owner}, but this process has only {first}");
                    return Err(Error::Peer(PeerError::Mismatch { code: ErrorCode::Device, message }));
                }
                Ok(first)
            }
        }
    }

    /// This process's device with the owner's UUID, if the process sees it.
    pub(super) fn find_owner(driver: &Driver, owner: &DeviceIdentity) -> Result<Option<Self>> {
        match Self::find(driver, Selector::Uuid(owner.uuid)) {
            Ok(owner) => Ok(Some(owner)),
            Err(Error::Device(DeviceError::NotFound { .. })) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether the device belongs to the host backend.
    pub fn is_host(&self) -> bool {
        self.backend() == Backend::Host
    }

    /// The nearest NUMA node. The driver returns -1 on a machine without NUMA, which has only node 0.
    pub(super) fn numa_node(&self) -> Result<i32> {
        Ok(self.attribute(Attribute::HostNumaId)?.max(0))
    }

    /// Prepares the device for copies. On CUDA the first call takes 55 to 95 ms.
    ///
    /// # Errors
    /// [`Error::Driver`]. Driver call: `cuDevicePrimaryCtxRetain`.
    #[doc(alias = "cuDevicePrimaryCtxRetain")]
    pub fn activate(&self) -> Result<()> {
        self.verbs().activate(self.ordinal())
    }

    /// Waits until all work in the device's primary context has finished, whichever library queued it.
    ///
    /// # Errors
    /// [`Error::Driver`], also for an earlier asynchronous failure, and while a stream is being captured.
    ///
    /// Driver call: `cuCtxSynchronize`.
    #[doc(alias = "cuCtxSynchronize")]
    pub fn synchronize(&self) -> Result<()> {
        self.verbs().synchronize(self.ordinal())
    }

    /// Waits until all work in the device's primary context has finished. Does not disturb stream captures of other threads, and does not
    /// wait for captured work. The call itself takes 0.1 to 0.2 ms.
    ///
    /// # Errors
    /// [`Error::Driver`], also for an earlier asynchronous failure.
    ///
    /// Driver calls: `cuThreadExchangeStreamCaptureMode`, `cuMemHostAlloc`, `cuMemFreeHost`. (`cuCtxSynchronize` would abort every
    /// capture in the context. So would freeing memory in a thread's default capture mode.)
    #[doc(alias("cuThreadExchangeStreamCaptureMode", "cuMemHostAlloc", "cuMemFreeHost", "cuCtxSynchronize"))]
    pub fn wait_for_work(&self) -> Result<()> {
        self.verbs().wait_for_work(self.ordinal())
    }

    /// Whether this device claims to reach another device's memory.
    ///
    /// # Errors
    /// [`Error::Driver`]. Driver call: `cuDeviceCanAccessPeer`.
    #[doc(alias = "cuDeviceCanAccessPeer")]
    pub fn can_access(&self, owner: &Self) -> Result<bool> {
        self.check_driver(owner)?;
        self.verbs().can_access_peer(self.ordinal(), owner.ordinal())
    }

    /// The properties of shareable memory, with `gpuDirectRDMACapable` as `rdma` and the device determine it.
    pub(super) fn shareable_for(&self, placement: Placement, rdma: Rdma) -> Result<Properties> {
        let gpu_direct_rdma = match rdma {
            Rdma::Never => false,
            // An old driver does not know the attribute and fails.
            Rdma::Auto => placement == Placement::Device && self.require_gpu_direct_rdma().is_ok(),
            Rdma::Required if placement == Placement::Host && !self.is_host() => {
                let feature = "host-NUMA memory that RDMA can reach (gpuDirectRDMACapable)";
                return Err(Error::Device(DeviceError::Unsupported { device: self.to_string(), feature }));
            }
            Rdma::Required => self.require_gpu_direct_rdma().map(|()| true)?,
        };
        Ok(Properties { gpu_direct_rdma, ..self.shareable(placement)? })
    }

    /// The properties of shareable memory.
    pub(super) fn shareable(&self, placement: Placement) -> Result<Properties> {
        let location = match placement {
            Placement::Device => Location::Device(self.ordinal()),
            Placement::Host => {
                if self.attribute(Attribute::HostNumaVirtualMemoryManagement)? == 0 {
                    let feature = "host-NUMA memory that is shared by descriptor";
                    return Err(Error::Device(DeviceError::Unsupported { device: self.to_string(), feature }));
                }
                Location::HostNuma(self.numa_node()?)
            }
        };
        Ok(Properties { location, exportable: true, immutable: false, gpu_direct_rdma: false })
    }

    /// Converts the error of an allocation to [`MemoryError::OutOfMemory`] if the device has less free memory than requested.
    pub(super) fn out_of_memory(&self, size: u64, error: Error) -> Error {
        let Error::Driver { code: code::OUT_OF_MEMORY, .. } = &error else { return error };
        match self.memory_info() {
            Ok(MemoryInfo { free, .. }) if size > free => {
                Error::Memory(MemoryError::OutOfMemory { device: self.to_string(), size, free })
            }
            // Another resource is exhausted.
            _ => error,
        }
    }
}

/// The name and the prefixed UUID: `NVIDIA H200 GPU-53e9...`.
impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name(), self.prefixed_uuid())
    }
}

impl Device {
    /// The UUID with the backend's prefix: `GPU-` as in `CUDA_VISIBLE_DEVICES`, or `HOST-`.
    pub fn prefixed_uuid(&self) -> String {
        self.uuid().prefixed(self.backend())
    }
}
