//! Drivers: a method for each driver call, on two backends.
//!
//! The methods are low-level on purpose. Rounding, ordering, rollback and lifetimes are implemented once, in [`crate::memory`], for all
//! backends. Terms, rules and numbers are CUDA's: the host backend also returns `CUresult` codes, so that one contract holds for both.
//!
//! A program opens a [`Driver`] and passes it to [`crate::memory::Device`]. The methods are not public, because they could free memory
//! that another owner still uses.

pub(crate) mod checkpoints;
pub(crate) mod copy;
pub(crate) mod cuda;
pub(crate) mod diagnosis;
mod failure;
pub(crate) mod host;
pub(crate) mod kernels;
pub(crate) mod legacy;
pub(crate) mod nvml;
pub(crate) mod pool;
pub(crate) mod streams;
pub(crate) mod ties;
pub(crate) mod types;
pub(crate) mod verbs;
pub(crate) mod window;
pub(crate) mod wsl;

use std::{
    fmt,
    str::FromStr,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use crate::{
    error::{Error, LoadError, ParseError, Result},
    sys::{
        Words,
        fork::{PerProcess, ProcessIdentity},
    },
};

pub(crate) use self::{
    checkpoints::{Checkpoints, ProcessState},
    diagnosis::{Diagnosis, EventHandle, MadeFor},
    kernels::Kernels,
};
pub(crate) use self::{
    failure::{failure, failure_with},
    legacy::LegacyIpc,
    pool::{PoolHandle, Pools},
    streams::{Operation, Registered, Streams, has_reached},
    types::{Granularity, Handle, Identity, Location, Properties, Retained},
    verbs::{Verbs, cover},
    window::{PageLocked, Window},
};
pub use self::{
    host::GRANULARITY,
    streams::Stream,
    types::{Attribute, MemoryInfo},
};
pub use crate::{
    base::{Access, Backend, DEVICE_NAME, DeviceUuid},
    error::code,
};

/// An opened driver: CUDA's or the host backend's. Clones share the driver object.
///
/// Devices, memory and all other objects made with the driver keep it open.
#[derive(Clone)]
pub struct Driver {
    verbs: Arc<dyn Verbs>,
    opened_by: ProcessIdentity,
}

impl Driver {
    /// A driver that this process opened.
    pub(crate) fn of(verbs: Arc<dyn Verbs>) -> Self {
        Self { verbs, opened_by: ProcessIdentity::current() }
    }

    pub(crate) fn verbs(&self) -> &dyn Verbs {
        &*self.verbs
    }

    /// Fails with [`Error::Forked`] in a fork of the process that opened the driver. Owners with locks call this first: in a fork, a lock
    /// may be held forever.
    pub(crate) fn check_fork(&self) -> Result<()> {
        self.opened_by.check()
    }

    /// The driver's backend.
    pub fn backend(&self) -> Backend {
        self.verbs().backend()
    }

    /// Copies ranges between device memory of this crate and other device memory, for example another library's. Each range is
    /// (destination, source, size in bytes). Blocks until all bytes are copied. The copies are ordered after work on the default stream.
    ///
    /// # Errors
    /// [`Error::Driver`]: with `CUDA_ERROR_INVALID_VALUE` if neither the destination nor the source of a range is this crate's memory, and
    /// with `CUDA_ERROR_NOT_SUPPORTED` on the host backend; [`Error::Forked`].
    ///
    /// Driver calls: `cuMemcpyDtoD` for each range, `cuStreamSynchronize`.
    ///
    /// # Safety
    /// Destination and source of each range are valid for its size until this returns. This process may write to the destination, and no
    /// Rust object is stored there.
    #[doc(alias("cuMemcpyDtoD", "cuStreamSynchronize"))]
    #[allow(unsafe_code)]
    pub unsafe fn copy_device(&self, ordinal: i32, ranges: &[(u64, u64, u64)]) -> Result<()> {
        // SAFETY: upheld by the caller.
        unsafe { self.verbs().copy_device(ordinal, ranges) }
    }

    /// Creates a stream of a device, which is not ordered with the default stream.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`](crate::error::DeviceError::Unsupported) on the host backend; [`Error::Driver`]; [`Error::Forked`].
    ///
    /// Driver call: `cuStreamCreate`.
    #[doc(alias = "cuStreamCreate")]
    pub fn create_stream(&self, ordinal: i32) -> Result<Stream> {
        Stream::create(self.verbs().streams()?, ordinal)
    }

    /// Refers to a stream of another library: `number` is its `CUstream`. 0, 1 and 2 are the default streams of the device `ordinal`.
    ///
    /// # Errors
    /// The errors of [`Driver::create_stream`]. Driver calls: `cuStreamGetCtx`, `cuCtxGetDevice`.
    ///
    /// # Safety
    /// The stream exists as long as the result, its clones, and the samples and turns that use it.
    #[doc(alias("cuStreamGetCtx", "cuCtxGetDevice"))]
    #[allow(unsafe_code)]
    pub unsafe fn stream(&self, ordinal: i32, number: u64) -> Result<Stream> {
        // SAFETY: upheld by the caller.
        unsafe { Stream::of(self.verbs().streams()?, ordinal, number) }
    }

    /// Lets the streams of this process use words.
    pub(crate) fn register(&self, ordinal: i32, words: Arc<Words>) -> Result<Registered> {
        Registered::new(self.verbs().streams()?, ordinal, words)
    }

    /// Returns the ordinal of the device with memory at `address`, which may be any library's memory of this process. Does not block.
    ///
    /// # Errors
    /// [`Error::Driver`]: with `CUDA_ERROR_INVALID_VALUE` for an address that the driver does not know, and with
    /// `CUDA_ERROR_NOT_SUPPORTED` on the host backend; [`Error::Forked`]. Driver call: `cuPointerGetAttribute`.
    #[doc(alias = "cuPointerGetAttribute")]
    pub fn device_of(&self, address: u64) -> Result<i32> {
        self.verbs().device_of(address)
    }

    /// The newest CUDA version that the driver supports, as 1000 * major + 10 * minor. 0 on the host backend. Does not block.
    ///
    /// # Errors
    /// [`Error::Driver`]; [`Error::Forked`] in a fork of the process that opened the driver.
    ///
    /// Driver call: `cuDriverGetVersion`.
    #[doc(alias = "cuDriverGetVersion")]
    pub fn version(&self) -> Result<i32> {
        self.verbs().version()
    }
}

/// Compares driver objects: clones are equal.
impl PartialEq for Driver {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.verbs, &other.verbs)
    }
}

impl Eq for Driver {}

/// Shows only the backend: the driver's tables have hundreds of entries, and all devices and memory show their driver.
impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").field("backend", &self.backend()).finish_non_exhaustive()
    }
}

/// The backend to open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Choice {
    /// CUDA. The host backend if no driver library can be loaded, or the driver reports no device.
    #[default]
    Auto,
    /// This backend only.
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

/// An opened driver.
#[derive(Debug)]
#[non_exhaustive]
pub struct Opened {
    /// The driver.
    pub driver: Driver,
    /// Why the host backend was opened although CUDA was preferred. Show it to the user.
    pub fallback: Option<Error>,
}

/// Opens a backend and initializes it, or returns the driver object that is already open. Each process has at most one driver object for
/// each backend, until its last user is dropped. A fork of the process opens its own host backend.
///
/// Blocks while the CUDA driver starts: 50 to 95 ms, the first time.
///
/// # Errors
/// - [`LoadError::NoLibrary`]: no library (`libcuda.so.1`, else `libcuda.so`) can be loaded.
/// - [`LoadError::Stub`]: the loaded library is the toolkit's stub.
/// - [`LoadError::NoDevice`]: the driver works but reports no device.
/// - [`LoadError::MissingSymbol`]: the library is not a driver, or too old.
/// - [`Error::Forked`]: this process is a fork of a process that initialized the driver.
/// - [`Error::Driver`]: the driver fails.
/// - [`Error::System`]: the host backend can't read the machine's boot ID.
///
/// With [`Choice::Auto`], [`LoadError::NoLibrary`] and [`LoadError::NoDevice`] select the host backend. Any other failure of the driver
/// is returned: it never causes a fallback.
///
/// Driver calls: `cuInit`, `cuDeviceGetCount`.
///
/// ```
/// use vmmfd::driver::{Backend, Choice, open};
///
/// let opened = open(Choice::Auto)?;
/// if let Some(reason) = &opened.fallback {
///     eprintln!("no GPU is used: {reason}");
/// }
/// let host = open(Choice::Only(Backend::Host))?;
/// assert_eq!(host.driver.backend(), Backend::Host);
/// # Ok::<(), vmmfd::Error>(())
/// ```
#[doc(alias("cuInit", "cuDeviceGetCount"))]
pub fn open(choice: Choice) -> Result<Opened> {
    let cuda = |driver| Opened { driver, fallback: None };
    match choice {
        Choice::Only(Backend::Host) => Ok(Opened { driver: open_host()?, fallback: None }),
        Choice::Only(Backend::Cuda) => open_cuda().map(cuda),
        Choice::Auto => match open_cuda() {
            Ok(driver) => Ok(cuda(driver)),
            Err(reason @ (Error::Load(LoadError::NoLibrary { .. }) | Error::Load(LoadError::NoDevice))) => {
                Ok(Opened { driver: open_host()?, fallback: Some(reason) })
            }
            Err(error) => Err(error),
        },
    }
}

/// The open driver object of a backend in this process.
type Open<T> = PerProcess<Mutex<Weak<T>>>;

fn open_host() -> Result<Driver> {
    static OPEN: Open<host::HostDriver> = PerProcess::new(Mutex::default);
    let mut open = OPEN.get().lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(driver) = open.upgrade() {
        return Ok(Driver::of(driver));
    }
    let driver = Arc::new(host::HostDriver::new()?);
    *open = Arc::downgrade(&driver);
    Ok(Driver::of(driver))
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
