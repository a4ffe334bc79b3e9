//! The ground: one verb for each driver call, on two backends.
//!
//! [`Driver`] is cut low on purpose. Rounding, ordering, rollback and lifetimes live once, above it (in
//! [`crate::memory`]), and so run the same on every backend. Its nouns, its rules and its numbers are CUDA's: the
//! host backend answers with `CUresult` codes too, so that one contract holds for both.

pub mod bare;
mod copy;
pub mod cuda;
pub mod diagnosis;
pub mod host;
pub mod kernels;
pub mod legacy;
pub mod pool;
pub mod window;

use std::{
    borrow::Cow,
    fmt, io,
    os::fd::{BorrowedFd, OwnedFd},
    process,
    str::FromStr,
    sync::Arc,
};

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::error::{Error, Result};

pub use self::{
    bare::Bare,
    diagnosis::{Diagnosis, EventHandle, MadeFor},
    kernels::Kernels,
    legacy::LegacyIpc,
    pool::{PoolHandle, Pools},
    window::{PageLocked, Window},
};
pub use crate::error::code;

/// Where the memory really is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// Memory of an NVIDIA GPU, through the CUDA driver.
    Cuda,
    /// Ordinary memory of this machine (memfd). No GPU takes part.
    Host,
}

impl Backend {
    /// Its name, as in options and on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Cuda => "cuda",
            Self::Host => "host",
        }
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// What a mapping allows its own process to do.
///
/// It protects this process from itself only: whoever holds the descriptor may map the memory either way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Access {
    /// Read only: `CU_MEM_ACCESS_FLAGS_PROT_READ`.
    #[serde(rename = "ro")]
    ReadOnly,
    /// Read and write: `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
    #[serde(rename = "rw")]
    ReadWrite,
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::ReadOnly => "ro",
            Self::ReadWrite => "rw",
        })
    }
}

impl FromStr for Access {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "ro" => Ok(Self::ReadOnly),
            "rw" => Ok(Self::ReadWrite),
            _ => Err(format!("no access is called `{text}`: write ro or rw")),
        }
    }
}

/// A device's UUID: the only name of a device that means the same in two processes.
///
/// It is read in any case, bare or with the driver's prefix (`GPU-`, `MIG-`) or the host's (`HOST-`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DeviceUuid(Uuid);

impl DeviceUuid {
    /// The UUID of these bytes, in the order that `cuDeviceGetUuid_v2` gives them.
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(Uuid::from_bytes(bytes))
    }
}

impl fmt::Display for DeviceUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for DeviceUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for DeviceUuid {
    type Err = uuid::Error;

    fn from_str(text: &str) -> Result<Self, uuid::Error> {
        let bare = ["gpu-", "mig-", "host-"]
            .iter()
            .find_map(|prefix| text.get(..prefix.len()).filter(|p| p.eq_ignore_ascii_case(prefix)))
            .map_or(text, |prefix| &text[prefix.len()..]);
        Uuid::try_parse(bare).map(Self)
    }
}

impl TryFrom<String> for DeviceUuid {
    type Error = uuid::Error;

    fn try_from(text: String) -> Result<Self, uuid::Error> {
        text.parse()
    }
}

impl From<DeviceUuid> for String {
    fn from(uuid: DeviceUuid) -> Self {
        uuid.to_string()
    }
}

/// A physical allocation, as the backend numbers it. Only a backend makes one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Handle(u64);

/// Where physical memory is, or who accesses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Location {
    /// A device, by ordinal: `CU_MEM_LOCATION_TYPE_DEVICE`. On an imported allocation it is this process's ordinal of the
    /// owner, or negative if the owner is not visible here.
    Device(i32),
    /// A NUMA node of this machine, or its CPUs: `CU_MEM_LOCATION_TYPE_HOST_NUMA`.
    HostNuma(i32),
}

impl Location {
    /// The NUMA node, if it is one.
    pub fn host_node(self) -> Option<i32> {
        match self {
            Self::HostNuma(node) => Some(node),
            Self::Device(_) => None,
        }
    }
}

/// What an allocation is made of and for: the part of `CUmemAllocationProp` that this crate uses, and how it is sealed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Properties {
    /// What holds the memory.
    pub location: Location,
    /// Whether it can be exported as a POSIX file descriptor. It must be asked for at creation, and reads `false` on an
    /// imported allocation, which can't be exported again.
    pub exportable: bool,
    /// Whether no holder of it, in any process, can write to it any more: see [`Driver::seal`]. Nothing is made so: at
    /// creation it must be `false`.
    pub immutable: bool,
}

/// A device's memory, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryInfo {
    /// What could be allocated now.
    pub free: u64,
    /// All of it.
    pub total: u64,
}

/// A device attribute, of those that matter to sharing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Attribute {
    /// 1 if the device has virtual memory management.
    VirtualMemoryManagement,
    /// 1 if allocations can be exported as POSIX file descriptors.
    PosixFileDescriptor,
    /// 1 if the driver claims fabric handles. It may claim them and still refuse: try.
    FabricHandle,
    /// 1 if allocations can be made for GPUDirect RDMA.
    GpuDirectRdma,
    /// 0 if any process may use the device, else one of the exclusive modes.
    ComputeMode,
    /// 1 if the device has memory pools.
    MemoryPools,
    /// What pools can be exported as, a bit each: 1 is a POSIX file descriptor.
    PoolHandleTypes,
    /// The NUMA node of the CPUs next to the device, or negative.
    HostNumaId,
    /// 1 if allocations can be made in host memory, on a NUMA node.
    HostNumaVirtualMemoryManagement,
}

/// Which of the driver's two granularities.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Granularity {
    /// What sizes must be a multiple of.
    Minimum,
    /// What gives the best performance.
    Recommended,
}

/// The driver, a verb for each call.
///
/// Addresses are of this process; sizes and offsets are bytes. Every call fails with [`Error::Forked`] in a fork of the
/// process that initialised the driver, and with [`Error::Driver`] and the driver's own code otherwise. A handle or an
/// address that this driver object did not give out, or took back, is answered with `CUDA_ERROR_INVALID_VALUE` and
/// reaches neither the driver nor memory: so no call of safe code can corrupt anything.
///
/// Programs use [`crate::memory`], which owns what these calls count.
pub trait Driver: fmt::Debug + Send + Sync {
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

    /// Maps a whole allocation at an address; `offset` must be 0. It can't be used before [`Driver::set_access`].
    /// `cuMemMap`.
    fn map(&self, address: u64, size: u64, offset: u64, handle: Handle) -> Result<()>;

    /// Unmaps every mapping in the range, none of them in part, and none that a [`Window`] is open on. `cuMemUnmap`.
    fn unmap(&self, address: u64, size: u64) -> Result<()>;

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

    /// Waits until all work of the device's primary context is done. `cuCtxSynchronize`.
    fn synchronize(&self, ordinal: i32) -> Result<()>;

    /// Whether a device can access another's memory. Itself it always can. `cuDeviceCanAccessPeer`.
    fn can_access_peer(&self, ordinal: i32, peer: i32) -> Result<bool>;

    /// First address and size of what an address is in: of a mapping as it was mapped, and of memory from [`LegacyIpc`] and
    /// [`Pools`] as the driver tells, which believes the exporter. `cuMemGetAddressRange_v2`, for the latter.
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
    /// [`Error::Unsupported`] on the host backend.
    fn legacy(&self) -> Result<&dyn LegacyIpc>;

    /// Sharing by memory pools. Whether a device has them is [`Attribute::MemoryPools`] and
    /// [`Attribute::PoolHandleTypes`].
    ///
    /// # Errors
    /// [`Error::Unsupported`] on the host backend.
    fn pools(&self) -> Result<&dyn Pools>;

    /// A handoff by the driver's calls alone, to measure the library against.
    fn bare(&self) -> Result<&dyn Bare>;

    /// Kernels that write and check the pattern.
    ///
    /// # Errors
    /// [`Error::Unsupported`] on the host backend.
    fn kernels(&self) -> Result<&dyn Kernels>;

    /// What is asked only to find out what the driver can do.
    ///
    /// # Errors
    /// [`Error::Unsupported`] on the host backend.
    fn diagnosis(&self) -> Result<&dyn Diagnosis>;
}

/// The error of a call that returned `code`, with no more known about it.
fn failure(call: &'static str, code: u32) -> Error {
    failure_with(call, code, None)
}

/// The error of a call that returned `code` because of what the operating system said.
fn failure_with(call: &'static str, code: u32, source: Option<io::Error>) -> Error {
    let name = code::name(code).map_or(Cow::Borrowed("an error that this build does not know"), Cow::Borrowed);
    Error::Driver { call, code, name, source }
}

/// Whether mappings, given as addresses and sizes in ascending order, cover a range without a gap.
fn cover(mapped: impl Iterator<Item = (u64, u64)>, address: u64, size: u64) -> bool {
    let Some(end) = address.checked_add(size) else { return false };
    let reached = mapped
        .fold(address, |reached, (start, size)| if start <= reached { reached.max(start + size) } else { reached });
    reached >= end
}

/// The process that initialised a driver: no other may use it.
#[derive(Debug, Clone, Copy)]
struct Origin(u32);

impl Origin {
    fn here() -> Self {
        Self(process::id())
    }

    fn check(self) -> Result<()> {
        match process::id() {
            pid if pid == self.0 => Ok(()),
            pid => Err(Error::Forked { initialised_by: self.0, pid }),
        }
    }
}

/// Which backend to open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Choice {
    /// CUDA; the host only if no driver library loads or the driver says that there is no device.
    #[default]
    Auto,
    /// This one, or fail.
    Only(Backend),
}

impl FromStr for Choice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "cuda" => Ok(Self::Only(Backend::Cuda)),
            "host" => Ok(Self::Only(Backend::Host)),
            _ => Err(format!("no backend is called `{text}`: write auto, cuda or host")),
        }
    }
}

/// A driver that was opened.
#[derive(Debug)]
pub struct Opened {
    /// The driver.
    pub driver: Arc<dyn Driver>,
    /// Why it is the host backend although CUDA was preferred: a person must be told.
    pub fallback: Option<Error>,
}

/// Opens a backend and initialises it.
///
/// # Errors
/// Those of [`cuda::CudaDriver::load`], but with [`Choice::Auto`] neither [`Error::NoDriver`] nor [`Error::NoDevice`]:
/// they lead to the host backend. A driver that is there and fails is never a reason to fall back.
pub fn open(choice: Choice) -> Result<Opened> {
    let host = || Arc::new(host::HostDriver::new()) as Arc<dyn Driver>;
    let cuda = |driver| Opened { driver: Arc::new(driver), fallback: None };
    match choice {
        Choice::Only(Backend::Host) => Ok(Opened { driver: host(), fallback: None }),
        Choice::Only(Backend::Cuda) => cuda::CudaDriver::load().map(cuda),
        Choice::Auto => match cuda::CudaDriver::load() {
            Ok(driver) => Ok(cuda(driver)),
            Err(reason @ (Error::NoDriver { .. } | Error::NoDevice)) => {
                Ok(Opened { driver: host(), fallback: Some(reason) })
            }
            Err(error) => Err(error),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_read_with_any_prefix_and_case() {
        let bare = "53e9a7d2-1f0c-5b7e-9c55-0123456789ab";
        let want: DeviceUuid = bare.parse().unwrap();
        for text in [format!("GPU-{bare}"), format!("gpu-{}", bare.to_uppercase()), format!("HOST-{bare}")] {
            assert_eq!(text.parse::<DeviceUuid>().unwrap(), want);
        }
        for text in ["", "GPU-", "GPU-53e9", "\u{df}pu-", "xyz-53e9a7d2-1f0c-5b7e-9c55-0123456789ab"] {
            assert!(text.parse::<DeviceUuid>().is_err(), "{text:?}");
        }
    }
}
