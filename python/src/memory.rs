//! The memory of arrays. Rust alone owns it, so that it is released on any thread, with or without an interpreter.

use std::{
    ffi::OsString,
    ops::Deref,
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{Ordering, fence},
    },
    time::Duration,
};

use pyo3::Python;
use vmmfd::{
    Error, Result,
    driver::Access,
    error::MemoryError,
    memory::{Device, Region, Shared, Spec},
};

use crate::{
    error::{Failure, Outcome},
    reaper::{self, Kept},
};

/// Memory that arrays are in. Arrays, the managed tensors of DLPack and views of the buffer protocol hold it by `Arc<dyn Memory>`, and it
/// goes with the last of them.
///
/// An owner of a GPU's memory itself keeps it in a [`Kept`], as [`Whole`] does: a view may be dropped on any
/// thread, and while kernels still use it.
pub(crate) trait Memory: Send + Sync {
    /// The device that uses it.
    fn device(&self) -> &Device;

    /// Its first address, the same for all its life.
    fn address(&self) -> u64;

    /// Its size in bytes.
    fn size(&self) -> u64;

    /// Whether this process may only read it. On CUDA a kernel's write then ends the context; on host memory it is a fault.
    fn is_read_only(&self) -> bool;

    /// Fails while there is nothing at its addresses.
    fn check_mapped(&self) -> Result<()> {
        Ok(())
    }

    /// Stands for one export to another library, until it is dropped: what is mapped must not change under it unasked. Whether the memory
    /// is read-only is to be asked afterwards: another thread may have made it so until now. May block for a switch, without the GIL.
    ///
    /// # Errors
    /// As [`Memory::check_mapped`], of the very moment at which it begins to count.
    fn export(&self) -> Result<Export> {
        self.check_mapped()?;
        Ok(Export::default())
    }

    /// As [`Memory::export`], to a reader of an array interface, which holds the array and says nothing when it is done.
    fn export_by_interface(&self) -> Result<Export> {
        self.export()
    }

    /// Copies bytes out of it.
    fn copy_out(&self, offset: u64, to: &mut [u8]) -> Result<()>;

    /// Copies bytes into it.
    fn copy_in(&self, offset: u64, from: &[u8]) -> Result<()>;

    /// It, if this process made it and can publish it.
    fn owner(self: Arc<Self>) -> Option<Arc<Owned>> {
        None
    }

    /// Where another process gets it, if it is of a broker. May block for a switch: release the GIL.
    fn origin(&self) -> Option<Origin> {
        None
    }
}

/// Where memory of a broker is: for other processes.
#[derive(Debug)]
pub(crate) struct Origin {
    pub(crate) broker: Arc<Place>,
    pub(crate) name: String,
    pub(crate) version: u64,
    pub(crate) id: String,
    pub(crate) part: String,
    /// Where it begins in the part, and how many bytes it has.
    pub(crate) start: u64,
    pub(crate) length: u64,
}

/// A broker, as a client connects to it.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) path: PathBuf,
    pub(crate) backend: String,
    pub(crate) timeout: Duration,
    /// The users that it may be of, besides this process's and root.
    pub(crate) trust: Vec<u32>,
}

/// A [`Place`] as Python pickles it: path, backend, timeout in seconds, and users.
pub(crate) type SentPlace = (OsString, String, f64, Vec<u32>);

impl Place {
    pub(crate) fn sent(&self) -> SentPlace {
        (self.path.clone().into(), self.backend.clone(), self.timeout.as_secs_f64(), self.trust.clone())
    }
}

/// An export to another library, counted where that matters.
#[derive(Debug, Clone, Default)]
pub(crate) struct Export(#[allow(dead_code, reason = "counted by its owner")] Option<Arc<()>>);

impl Export {
    /// One more that `of` counts.
    pub(crate) fn counted(of: &Arc<()>) -> Self {
        Self(Some(Arc::clone(of)))
    }

    /// How many are alive of those that `of` counts. Under a lock with which they are made it stays 0.
    pub(crate) fn count(of: &Arc<()>) -> usize {
        let count = Arc::strong_count(of) - 1;
        // What was written through those that were dropped is there.
        fence(Ordering::Acquire);
        count
    }
}

/// Memory of a region of the library: memory of this process's own, or imported once and for all.
#[derive(Debug)]
pub(crate) struct Whole(Kept<Arc<dyn Region>>);

impl Whole {
    pub(crate) fn new(region: Arc<dyn Region>) -> Arc<Self> {
        let device = region.device().clone();
        Arc::new(Self(Kept::new(&device, region)))
    }
}

impl Memory for Whole {
    fn device(&self) -> &Device {
        self.0.device()
    }

    fn address(&self) -> u64 {
        self.0.address()
    }

    fn size(&self) -> u64 {
        self.0.size()
    }

    fn is_read_only(&self) -> bool {
        self.0.access() == Access::ReadOnly
    }

    fn copy_out(&self, offset: u64, to: &mut [u8]) -> Result<()> {
        self.0.copy_out(offset, to)
    }

    fn copy_in(&self, offset: u64, from: &[u8]) -> Result<()> {
        self.0.copy_in(offset, from)
    }
}

/// How long an allocation waits for dropped memory if none is left.
const SETTLES: Duration = Duration::from_secs(5);

/// Memory that this process made. The reaper releases it, whichever thread drops it.
#[derive(Debug)]
pub(crate) struct Owned {
    memory: Kept<Arc<Shared>>,
    /// Held for a few instructions at a time, also with the GIL held.
    exports: Mutex<Exports>,
}

#[derive(Debug, Default)]
struct Exports {
    /// Counts the exports to other libraries. A library may write through a writable export for as long as it has it.
    alive: Arc<()>,
    /// How many calls have made the memory read-only, or are about to. Exports after the first such call are read-only.
    closing: usize,
}

impl Owned {
    /// Takes memory over.
    pub(crate) fn new(shared: Arc<Shared>) -> Arc<Self> {
        let device = shared.device().clone();
        Arc::new(Self { memory: Kept::new(&device, shared), exports: Mutex::default() })
    }

    /// Memory of `size` bytes, at least 1, of one allocation. Blocks for as long as the driver takes: release the GIL.
    ///
    /// # Errors
    /// Those of [`Shared::create`].
    pub(crate) fn create(device: &Device, size: u64) -> Outcome<Arc<Self>> {
        Self::make(device, Spec::vmm(size.max(1)).into())
    }

    /// Memory of this [`Spec`]. If no memory is left, waits for dropped memory to be released. Blocks.
    ///
    /// # Errors
    /// Those of [`Shared::create`].
    pub(crate) fn make(device: &Device, spec: Spec) -> Outcome<Arc<Self>> {
        match Shared::create(device, spec) {
            Err(Error::Memory(MemoryError::OutOfMemory { .. })) if reaper::settle(SETTLES) => {}
            made => return Ok(Self::new(Arc::new(made?))),
        }
        Ok(Self::new(Arc::new(Shared::create(device, spec)?)))
    }

    /// The memory. The reaper does not release clones: keep this object for as long as the device may use them.
    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.memory
    }

    fn exports(&self) -> MutexGuard<'_, Exports> {
        self.exports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks that the memory can become read-only: no other library has a writable view, or `promised` says that none is written.
    ///
    /// # Errors
    /// `BufferError`.
    pub(crate) fn check_views(&self, promised: bool) -> Outcome<()> {
        self.check(&self.exports(), promised)
    }

    fn check(&self, exports: &Exports, promised: bool) -> Outcome<()> {
        let views = Export::count(&exports.alive);
        if promised || views == 0 || exports.closing > 0 || self.memory.access() == Access::ReadOnly {
            return Ok(());
        }
        Err(Failure::export(format!(
            "other libraries have {views} views of the memory through which it can be written, which would be a fault once it is read-only: \
             drop them first, or say exported=\"valid\" if none is written any more"
        )))
    }

    /// [`Shared::make_read_only`], if [`Owned::check_views`] allows it. Blocks without the GIL.
    ///
    /// # Errors
    /// Those of both.
    pub(crate) fn make_read_only(&self, py: Python<'_>, promised: bool) -> Outcome<()> {
        {
            let mut exports = self.exports();
            self.check(&exports, promised)?;
            exports.closing += 1;
        }
        let made = py.detach(|| self.memory.make_read_only());
        Ok(made.inspect_err(|_| self.exports().closing -= 1)?)
    }
}

impl Deref for Owned {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.memory
    }
}

impl Memory for Owned {
    fn device(&self) -> &Device {
        self.memory.device()
    }

    fn address(&self) -> u64 {
        self.memory.address()
    }

    fn size(&self) -> u64 {
        self.memory.size()
    }

    fn is_read_only(&self) -> bool {
        self.exports().closing > 0 || self.memory.access() == Access::ReadOnly
    }

    fn export(&self) -> Result<Export> {
        // Read-only exports count too: if `make_read_only` fails, the memory is writable again.
        Ok(Export::counted(&self.exports().alive))
    }

    fn copy_out(&self, offset: u64, to: &mut [u8]) -> Result<()> {
        self.memory.copy_out(offset, to)
    }

    fn copy_in(&self, offset: u64, from: &[u8]) -> Result<()> {
        self.memory.copy_in(offset, from)
    }

    fn owner(self: Arc<Self>) -> Option<Arc<Owned>> {
        Some(self)
    }
}
