//! Memory of this process's own, to be shared: what arrays are made in, and what objects of the broker are made of.

use std::{
    ops::Deref,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use pyo3::prelude::*;
use vmmfd::{
    Error, Result,
    array::ArrayDescriptor,
    driver::Access,
    error::MemoryError,
    memory::{Device, Region, Selector, Shared, Spec},
};

use crate::{
    array::{self, Array},
    device, driver, dtype,
    error::{Failure, Outcome},
    memory::{Export, Memory},
    reaper::{self, Kept},
};

/// How long memory that was dropped is waited for where there is none left.
const SETTLES: Duration = Duration::from_secs(5);

/// Memory that this process made, let go of by the reaper whichever thread drops it.
#[derive(Debug)]
pub(crate) struct Owned {
    memory: Kept<Arc<Shared>>,
    /// Held for some instructions at a time, also by threads that Python waits for.
    exports: Mutex<Exports>,
}

#[derive(Debug, Default)]
struct Exports {
    /// Counts what was exported to other libraries. What was exported while it could be written they may write for as long as they have it.
    alive: Arc<()>,
    /// How many have made it read-only, or are about to: what is exported from the first one on must not be written.
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

    /// Memory as a [`Spec`] says. What was dropped and not given back yet is waited for if there is none left. Blocks.
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

    /// The memory. Clones are not let go of by the reaper: keep this object for as long as the device may use them.
    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.memory
    }

    fn exports(&self) -> MutexGuard<'_, Exports> {
        self.exports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this process's right to write it can be taken: no other library has a view that may be written, or `promised` that none is.
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

    /// As [`Shared::make_read_only`], once [`Owned::check_views`] allows it. Blocks without the GIL.
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
        // Counted in any case: to make it read-only may fail, and it can be written again.
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

/// Memory of this process's own, that the broker can be given.
#[pyclass(name = "Memory", module = "vmmfd._native", frozen, weakref)]
#[derive(Debug)]
pub(crate) struct Buffer(pub(crate) Arc<Owned>);

#[pymethods]
impl Buffer {
    /// Allocates memory, in bytes.
    #[new]
    #[pyo3(signature = (size, *, device=None, backend="auto"))]
    fn new(py: Python<'_>, size: u64, device: Option<&Bound<'_, PyAny>>, backend: &str) -> Outcome<Self> {
        let wanted: Option<Selector> = device.map(device::selector).transpose()?;
        py.detach(|| {
            let device = driver::device(&driver::driver(backend)?, wanted)?;
            Owned::create(&device, size).map(Self)
        })
    }

    /// Its first address.
    #[getter]
    fn address(&self) -> u64 {
        self.0.address()
    }

    /// Its size in bytes.
    #[getter]
    fn size(&self) -> u64 {
        self.0.size()
    }

    /// How many bytes a receiver maps: its size, rounded up.
    #[getter]
    fn mapped_size(&self) -> u64 {
        self.0.mapped_size()
    }

    /// The device that uses it.
    #[getter]
    fn device(&self) -> device::PyDevice {
        device::PyDevice(self.0.device().clone())
    }

    /// An array in it, `offset` bytes from its beginning.
    #[pyo3(signature = (dtype, shape, strides=None, offset=0))]
    fn array(
        &self,
        dtype: &Bound<'_, PyAny>,
        shape: &Bound<'_, PyAny>,
        strides: Option<Vec<i64>>,
        offset: u64,
    ) -> Outcome<Array> {
        let (dtype, shape) = (dtype::extract(dtype)?, array::shape(shape)?);
        Array::new(Arc::clone(&self.0) as Arc<dyn Memory>, ArrayDescriptor { dtype, shape, strides, offset })
    }

    fn __repr__(&self) -> String {
        format!("<vmmfd memory: {} bytes at {:#x} on {}>", self.0.size(), self.0.address(), self.0.device())
    }
}
