//! The memory of arrays. Rust alone owns it, so that it can be released on any thread, with or without an interpreter.

use std::{
    any::Any,
    ffi::OsString,
    ops::Deref,
    path::PathBuf,
    sync::{
        Arc, LazyLock, Mutex,
        atomic::{Ordering, fence},
    },
    time::Duration,
};

use pyo3::{
    prelude::*,
    types::{PyBool, PyString},
};
use vmmfd::{
    Error, Result,
    bindings::lock,
    driver::Access,
    error::MemoryError,
    memory::{Device, Rdma, Region, Shared, Spec},
};

use crate::{
    error::{Failure, Outcome, shown},
    reaper::{self, Reaped},
    stream_user::StreamUser,
};

/// The memory of arrays. Arrays, DLPack tensors and buffer protocol views hold it by `Arc<dyn Memory>`; the last of them releases it.
///
/// An implementation that owns GPU memory keeps it in a [`Reaped`], as [`RegionMemory`] does: a view may be dropped on any thread, while
/// kernels still use the memory.
pub(crate) trait Memory: Send + Sync {
    /// The device that uses it, its first address, which never changes, and its size in bytes.
    fn extent(&self) -> (&Device, u64, u64);

    fn device(&self) -> &Device {
        self.extent().0
    }

    fn address(&self) -> u64 {
        self.extent().1
    }

    fn size(&self) -> u64 {
        self.extent().2
    }

    /// Whether this process may only read it. A write destroys the CUDA context, or on host memory faults.
    fn is_read_only(&self) -> bool;

    /// Fails while no memory is mapped at its addresses.
    fn check_mapped(&self) -> Result<()> {
        Ok(())
    }

    /// Counts one export to another library until the result is dropped. Until then, the mapping must not change without the caller's
    /// promise. Check `is_read_only` after the export, because another thread may have sealed the memory in between. May block for a
    /// switch, without the GIL.
    ///
    /// # Errors
    /// As [`Memory::check_mapped`], at the moment at which the export counts.
    fn export(&self) -> Result<Export> {
        self.check_mapped()?;
        Ok(Export::default())
    }

    /// As [`Memory::export`], for a reader of an array interface, which holds the array and does not report when it is done.
    fn export_by_interface(&self) -> Result<Export> {
        self.export()
    }

    /// Passes the mapped memory to a function, and keeps it mapped during the call.
    fn with(&self, work: &mut dyn FnMut(&dyn Region) -> Result<()>) -> Result<()>;

    fn copy_out(&self, offset: u64, to: &mut [u8]) -> Result<()> {
        self.with(&mut |region| region.copy_out(offset, to))
    }

    fn copy_in(&self, offset: u64, from: &[u8]) -> Result<()> {
        self.with(&mut |region| region.copy_in(offset, from))
    }

    /// Returns this memory, if this process created it and can publish it.
    fn owner(self: Arc<Self>) -> Option<Arc<Owned>> {
        None
    }

    /// Returns the stream that uses it, if it is a sample for a stream: other work must wait for the stream first.
    fn user(&self) -> Option<&StreamUser> {
        None
    }

    /// Returns the memory's position in the broker, if it is leased. May block for a switch: release the GIL.
    fn origin(&self) -> Option<Origin> {
        None
    }
}

/// The position of leased memory, for other processes.
#[derive(Debug)]
pub(crate) struct Origin {
    pub(crate) broker: Arc<BrokerAddress>,
    pub(crate) name: String,
    pub(crate) version: u64,
    pub(crate) id: String,
    pub(crate) part: String,
    /// Its offset in the part, and its size in bytes.
    pub(crate) start: u64,
    pub(crate) length: u64,
}

/// The address of a broker, and the options to connect to it.
#[derive(Debug)]
pub(crate) struct BrokerAddress {
    pub(crate) path: PathBuf,
    pub(crate) backend: String,
    pub(crate) timeout: Duration,
    /// The user ids that the broker may run as, besides root and this process's own.
    pub(crate) trust: Vec<u32>,
}

/// A [`BrokerAddress`] as pickled by Python: path, backend, timeout in seconds, and user ids.
pub(crate) type PickledAddress = (OsString, String, f64, Vec<u32>);

impl BrokerAddress {
    pub(crate) fn sent(&self) -> PickledAddress {
        (self.path.clone().into(), self.backend.clone(), self.timeout.as_secs_f64(), self.trust.clone())
    }
}

/// An export to another library, counted if its owner counts exports.
#[derive(Debug, Clone, Default)]
pub(crate) struct Export(#[allow(dead_code, reason = "counted by its owner")] Option<Arc<()>>);

impl Export {
    /// Adds an export to the count of `of`.
    pub(crate) fn counted(of: &Arc<()>) -> Self {
        Self(Some(Arc::clone(of)))
    }

    /// Returns the number of live exports that `of` counts. A result of 0 is stable under a lock that every export takes.
    pub(crate) fn count(of: &Arc<()>) -> usize {
        let count = Arc::strong_count(of) - 1;
        // Makes writes through dropped exports visible.
        fence(Ordering::Acquire);
        count
    }
}

/// A way, besides a lease, in which this process shares GPU memory with others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tie {
    Taken,
    Opened,
    Created,
    Lent,
    Subscribed,
    Published,
    Timed,
}

static TIES: LazyLock<[Arc<()>; 7]> = LazyLock::new(Default::default);

impl Tie {
    /// Memory of other processes, and its name for users.
    pub(crate) const IMPORTED: [(Self, &str); 3] = [
        (Self::Taken, "arrays of vmmfd.take"),
        (Self::Opened, "opened legacy handles"),
        (Self::Subscribed, "subscribers, followers and samples of streams"),
    ];

    /// Memory of this process, and its name for users.
    pub(crate) const OWN: [(Self, &str); 4] = [
        (Self::Created, "allocations of vmmfd.empty, asarray, load_safetensors, legacy.empty or a pool"),
        (Self::Lent, "allocations of vmmfd.share"),
        (Self::Published, "publishers and loans of vmmfd.publish"),
        (Self::Timed, "timelines"),
    ];

    /// Counts memory until the result is dropped. Host memory does not count.
    pub(crate) fn counted(self, device: &Device) -> Export {
        if device.is_host() { Export::default() } else { Export::counted(&TIES[self as usize]) }
    }

    pub(crate) fn count(self) -> usize {
        Export::count(&TIES[self as usize])
    }
}

/// A memory region that another process created, imported and never switched.
#[derive(Debug)]
pub(crate) struct RegionMemory(Reaped<Arc<dyn Region>>, #[allow(dead_code, reason = "counted")] Export);

impl RegionMemory {
    pub(crate) fn new(region: Arc<dyn Region>) -> Arc<Self> {
        let device = region.device().clone();
        let tie = Tie::Taken.counted(&device);
        Arc::new(Self(Reaped::new(&device, region), tie))
    }
}

impl Memory for RegionMemory {
    fn extent(&self) -> (&Device, u64, u64) {
        (self.0.device(), self.0.address(), self.0.size())
    }

    fn is_read_only(&self) -> bool {
        self.0.access() == Access::ReadOnly
    }

    fn with(&self, work: &mut dyn FnMut(&dyn Region) -> Result<()>) -> Result<()> {
        work(&**self.0)
    }
}

/// The option `rdma`: `"auto"`, `True` or `False`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RdmaOption(pub(crate) Rdma);

impl<'a, 'py> FromPyObject<'a, 'py> for RdmaOption {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        match object.cast::<PyBool>() {
            Ok(required) if required.is_true() => Ok(Self(Rdma::Required)),
            Ok(_) => Ok(Self(Rdma::Never)),
            Err(_) if object.extract::<&str>().is_ok_and(|text| text == "auto") => Ok(Self(Rdma::Auto)),
            Err(_) => {
                let problem = format!("rdma={} is not \"auto\", True or False", shown(&object)?);
                let is_text = object.is_instance_of::<PyString>();
                Err(if is_text { Failure::invalid(problem) } else { Failure::wrong_type(problem) }.into())
            }
        }
    }
}

/// The longest time that an allocation waits for dropped memory when memory is short.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(5);

/// Memory that this process created. The reaper releases it, whichever thread drops it.
#[derive(Debug)]
pub(crate) struct Owned {
    memory: Reaped<Arc<Shared>>,
    /// The owners of the memory, if another library of this process allocated it.
    lenders: Option<Box<dyn Any + Send + Sync>>,
    /// Held for a few instructions at a time, also with the GIL held.
    exports: Mutex<Exports>,
    _tie: Export,
}

#[derive(Debug, Default)]
struct Exports {
    /// Counts the exports to other libraries. A library may write through a writable export until it drops it.
    alive: Arc<()>,
    /// The number of calls that have made the memory read-only, or are about to. Exports after the first such call are read-only.
    sealing: usize,
}

impl Owned {
    /// Takes ownership.
    pub(crate) fn new(shared: Arc<Shared>) -> Arc<Self> {
        Self::of(shared, None)
    }

    /// As [`Owned::new`], for memory of other libraries. It keeps `lenders`, their arrays.
    pub(crate) fn lent(shared: Arc<Shared>, lenders: impl Any + Send + Sync) -> Arc<Self> {
        Self::of(shared, Some(Box::new(lenders)))
    }

    fn of(shared: Arc<Shared>, lenders: Option<Box<dyn Any + Send + Sync>>) -> Arc<Self> {
        let device = shared.device().clone();
        let tie = if lenders.is_some() { Tie::Lent } else { Tie::Created };
        let _tie = tie.counted(&device);
        Arc::new(Self { memory: Reaped::new(&device, shared), lenders, exports: Mutex::default(), _tie })
    }

    /// Allocates `size` bytes, at least 1, in one allocation, which RDMA can reach where the device supports it. Blocks for the driver:
    /// release the GIL.
    ///
    /// # Errors
    /// As [`Shared::create`].
    pub(crate) fn create(device: &Device, size: u64) -> Outcome<Arc<Self>> {
        Self::make(device, Spec::vmm(size.max(1)).rdma(Rdma::Auto).into())
    }

    /// Allocates memory as specified. If memory is short, waits for dropped memory to be released. Blocks.
    ///
    /// # Errors
    /// As [`Shared::create`].
    pub(crate) fn make(device: &Device, spec: Spec) -> Outcome<Arc<Self>> {
        match Shared::create(device, spec) {
            Err(Error::Memory(MemoryError::OutOfMemory { .. })) if reaper::settle(SETTLE_TIMEOUT) => {}
            made => return Ok(Self::new(Arc::new(made?))),
        }
        Ok(Self::new(Arc::new(Shared::create(device, spec)?)))
    }

    /// The memory. The reaper does not release clones: keep this object for as long as the device may use them.
    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.memory
    }

    /// Checks that the memory can become read-only: no other library has a writable view, or the caller promised that none is used.
    ///
    /// # Errors
    /// `BufferError`.
    pub(crate) fn check_views(&self, promised: bool) -> Outcome<()> {
        self.check(&lock(&self.exports), promised)
    }

    fn check(&self, exports: &Exports, promised: bool) -> Outcome<()> {
        if self.lenders.is_some() {
            return Err(Failure::export(
                "another library owns the memory and can write to it: seal=True needs a copy (copy=True)",
            ));
        }
        let views = Export::count(&exports.alive);
        if promised || views == 0 || exports.sealing > 0 || self.memory.access() == Access::ReadOnly {
            return Ok(());
        }
        Err(Failure::export(format!(
            "other libraries have {views} writable views of the memory, and their writes would fault once it is read-only: drop the views \
             first, or give exports_unused=True if nothing writes through them any more"
        )))
    }

    /// [`Shared::make_read_only`], if [`Owned::check_views`] allows it. Blocks without the GIL.
    ///
    /// # Errors
    /// As both.
    pub(crate) fn make_read_only(&self, py: Python<'_>, promised: bool) -> Outcome<()> {
        {
            let mut exports = lock(&self.exports);
            self.check(&exports, promised)?;
            exports.sealing += 1;
        }
        let made = py.detach(|| self.memory.make_read_only());
        Ok(made.inspect_err(|_| lock(&self.exports).sealing -= 1)?)
    }
}

impl Deref for Owned {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.memory
    }
}

impl Memory for Owned {
    fn extent(&self) -> (&Device, u64, u64) {
        (self.memory.device(), self.memory.address(), self.memory.size())
    }

    fn is_read_only(&self) -> bool {
        lock(&self.exports).sealing > 0 || self.memory.access() == Access::ReadOnly
    }

    fn export(&self) -> Result<Export> {
        // Read-only exports count too: if `make_read_only` fails, the memory is writable again.
        Ok(Export::counted(&lock(&self.exports).alive))
    }

    fn with(&self, work: &mut dyn FnMut(&dyn Region) -> Result<()>) -> Result<()> {
        work(&**self.memory)
    }

    fn owner(self: Arc<Self>) -> Option<Arc<Owned>> {
        Some(self)
    }
}
