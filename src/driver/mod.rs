//! The ground: one verb for each driver call, on two backends.
//!
//! The verbs are cut low on purpose. Rounding, ordering, rollback and lifetimes live once, above them (in [`crate::memory`]), and
//! so run the same on every backend. Their nouns, rules and numbers are CUDA's: the host backend answers with `CUresult` codes
//! too, so that one contract holds for both.
//!
//! A program opens a [`Driver`] and hands it to [`crate::memory::Device`]; the verbs themselves are not public, since they could
//! take memory from under its owner.

pub(crate) mod bare;
pub(crate) mod copy;
pub(crate) mod cuda;
pub(crate) mod diagnosis;
mod failure;
pub(crate) mod host;
pub(crate) mod kernels;
pub(crate) mod legacy;
pub mod nvml;
pub(crate) mod pool;
pub(crate) mod types;
pub(crate) mod verbs;
pub(crate) mod window;
pub mod wsl;

use std::{
    fmt,
    str::FromStr,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use crate::{
    error::{Error, LoadError, ParseError, Result},
    sys::fork::{PerProcess, ProcessIdentity},
};

pub(crate) use self::{
    bare::Bare,
    diagnosis::{Diagnosis, EventHandle, MadeFor},
    kernels::Kernels,
};
pub(crate) use self::{
    failure::{failure, failure_with},
    legacy::LegacyIpc,
    pool::{PoolHandle, Pools},
    types::{Granularity, Handle, Identity, Location, Properties},
    verbs::{Verbs, cover},
    window::{PageLocked, Window},
};
pub use self::{
    host::{DEVICE_NAME, GRANULARITY},
    types::{Attribute, MemoryInfo},
};
pub use crate::{
    base::{Access, Backend, DeviceUuid},
    error::code,
};

/// An opened driver: CUDA's, or the host backend. Clones are the same one.
///
/// Devices, memory and everything else made from it keep it open.
#[derive(Clone)]
pub struct Driver {
    verbs: Arc<dyn Verbs>,
    opened_by: ProcessIdentity,
}

impl Driver {
    /// A driver of these verbs, which this process opened.
    pub(crate) fn of(verbs: Arc<dyn Verbs>) -> Self {
        Self { verbs, opened_by: ProcessIdentity::current() }
    }

    pub(crate) fn verbs(&self) -> &dyn Verbs {
        &*self.verbs
    }

    /// Fails with [`Error::Forked`] in a fork of the process that opened it. For owners with locks: a fork may find them locked for good,
    /// so they check this first.
    pub(crate) fn check_fork(&self) -> Result<()> {
        self.opened_by.check()
    }

    /// Where the memory is.
    pub fn backend(&self) -> Backend {
        self.verbs().backend()
    }

    /// Copies ranges between memory of a device and other memory of a device: another library's, say. Each is where to, where from and
    /// how many bytes. Blocks until the bytes are there; the copies are ordered behind what is on the default stream.
    ///
    /// # Errors
    /// [`Error::Driver`]: with `CUDA_ERROR_INVALID_VALUE` if neither end of a range is memory of this crate's owners, and with
    /// `CUDA_ERROR_NOT_SUPPORTED` on the host backend; [`Error::Forked`].
    ///
    /// Driver calls: `cuMemcpyDtoD` for each range, `cuStreamSynchronize`.
    ///
    /// # Safety
    /// Both ends of each range are valid for as many bytes until this returns. Where the range goes to may be written by this process,
    /// and nothing of Rust's lies there.
    #[doc(alias("cuMemcpyDtoD", "cuStreamSynchronize"))]
    #[allow(unsafe_code)]
    pub unsafe fn copy_device(&self, ordinal: i32, ranges: &[(u64, u64, u64)]) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.verbs().copy_device(ordinal, ranges) }
    }

    /// The number of the device that memory of any library of this process is on, by an address in it. Does not block.
    ///
    /// # Errors
    /// [`Error::Driver`]: with `CUDA_ERROR_INVALID_VALUE` for an address that the driver does not know, and with
    /// `CUDA_ERROR_NOT_SUPPORTED` on the host backend; [`Error::Forked`]. Driver call: `cuPointerGetAttribute`.
    #[doc(alias = "cuPointerGetAttribute")]
    pub fn device_of(&self, address: u64) -> Result<i32> {
        self.verbs().device_of(address)
    }

    /// The newest CUDA that the driver supports, as 1000 * major + 10 * minor; 0 on the host backend. Does not block.
    ///
    /// # Errors
    /// [`Error::Driver`]; [`Error::Forked`] in a fork of the process that opened it.
    ///
    /// Driver call: `cuDriverGetVersion`.
    #[doc(alias = "cuDriverGetVersion")]
    pub fn version(&self) -> Result<i32> {
        self.verbs().version()
    }
}

/// Equal are clones of the same driver object.
impl PartialEq for Driver {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.verbs, &other.verbs)
    }
}

impl Eq for Driver {}

/// The backend alone: every device and all memory show their driver, which holds tables of hundreds of entries.
impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").field("backend", &self.backend()).finish_non_exhaustive()
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
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        match text {
            "auto" => Ok(Self::Auto),
            "cuda" => Ok(Self::Only(Backend::Cuda)),
            "host" => Ok(Self::Only(Backend::Host)),
            _ => Err(ParseError::new(text, "a backend", "auto, cuda or host")),
        }
    }
}

/// A driver that was opened.
#[derive(Debug)]
#[non_exhaustive]
pub struct Opened {
    /// The driver.
    pub driver: Driver,
    /// Why it is the host backend although CUDA was preferred: show it to the user.
    pub fallback: Option<Error>,
}

/// Opens a backend and initialises it, or returns the one of this process that is open already: there is one driver object for each
/// backend and process, until its last user is dropped. A fork of the process gets a host backend of its own.
///
/// Blocks while the CUDA driver starts: 50 to 95 ms, the first time.
///
/// # Errors
/// - [`LoadError::NoLibrary`]: no library (`libcuda.so.1`, else `libcuda.so`) loads.
/// - [`LoadError::Stub`]: what loads is the toolkit's stub.
/// - [`LoadError::NoDevice`]: the driver works and has no device to offer.
/// - [`LoadError::MissingSymbol`]: the library is no driver, or too old.
/// - [`Error::Forked`]: this process is a fork of one that initialised the driver.
/// - [`Error::Driver`]: the driver is there and fails.
///
/// With [`Choice::Auto`] neither [`LoadError::NoLibrary`] nor [`LoadError::NoDevice`]: they lead to the host backend. A driver
/// that is
/// there and fails is never a reason to fall back.
///
/// Driver calls: `cuInit`, `cuDeviceGetCount`.
#[doc(alias("cuInit", "cuDeviceGetCount"))]
pub fn open(choice: Choice) -> Result<Opened> {
    let cuda = |driver| Opened { driver, fallback: None };
    match choice {
        Choice::Only(Backend::Host) => Ok(Opened { driver: open_host(), fallback: None }),
        Choice::Only(Backend::Cuda) => open_cuda().map(cuda),
        Choice::Auto => match open_cuda() {
            Ok(driver) => Ok(cuda(driver)),
            Err(reason @ (Error::Load(LoadError::NoLibrary { .. }) | Error::Load(LoadError::NoDevice))) => {
                Ok(Opened { driver: open_host(), fallback: Some(reason) })
            }
            Err(error) => Err(error),
        },
    }
}

/// The driver object of a backend that is open in this process.
type Open<T> = PerProcess<Mutex<Weak<T>>>;

fn open_host() -> Driver {
    static OPEN: Open<host::HostDriver> = PerProcess::new(Mutex::default);
    let mut open = OPEN.get().lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(driver) = open.upgrade() {
        return Driver::of(driver);
    }
    let driver = Arc::new(host::HostDriver::new());
    *open = Arc::downgrade(&driver);
    Driver::of(driver)
}

fn open_cuda() -> Result<Driver> {
    static OPEN: Open<cuda::CudaDriver> = PerProcess::new(Mutex::default);
    let mut open = OPEN.get().lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(driver) = open.upgrade() {
        return Ok(Driver::of(driver));
    }
    let driver = Arc::new(cuda::CudaDriver::load()?);
    *open = Arc::downgrade(&driver);
    Ok(Driver::of(driver))
}
