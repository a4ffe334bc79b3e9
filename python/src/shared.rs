//! The class of memory that this process created, for arrays and for the broker.

use std::sync::Arc;

use pyo3::prelude::*;
use vmmfd::{
    array::ArrayDescriptor,
    memory::{Rdma, Region, Spec},
    weights,
};

use crate::{
    array::{self, Array},
    device::{PyDevice, Wanted, short},
    driver, dtype,
    error::Outcome,
    memory::{Memory, Owned},
    signals,
    text::Text,
};

/// Memory created by this process. A put passes it to the broker.
#[pyclass(name = "Memory", module = "vmmfd._native", frozen, weakref)]
#[derive(Debug)]
pub(crate) struct PyMemory {
    pub(crate) owned: Arc<Owned>,
    /// Whether a put made it, for copies.
    pub(crate) copied: bool,
}

impl PyMemory {
    /// Memory that a put shares as it is.
    pub(crate) fn shared(owned: Arc<Owned>) -> Self {
        Self { owned, copied: false }
    }
}

#[pymethods]
impl PyMemory {
    /// Allocates `size` bytes, in segments of `segment` bytes if given. With `sealed`, it can be put once `seal` is called.
    #[new]
    #[pyo3(signature = (size, *, device=None, backend=None, segment=None, sealed=false))]
    fn new(
        py: Python<'_>,
        size: u64,
        device: Option<Wanted>,
        backend: Option<Text>,
        segment: Option<u64>,
        sealed: bool,
    ) -> Outcome<Self> {
        signals::run(py, &[], || {
            let device = driver::open_device(backend.as_deref(), device)?;
            let spec = Spec::vmm(size.max(1)).rdma(Rdma::Auto);
            let spec = segment.into_iter().fold(spec, |spec, segment| spec.chunk(segment));
            let spec = if sealed { spec.sealed() } else { spec };
            Owned::make(&device, spec.into()).map(Self::shared)
        })
    }

    /// Makes the memory read-only for this process, and on the host backend for every process.
    fn seal(&self, py: Python<'_>) -> Outcome<()> {
        py.detach(|| self.owned.shared().seal())?;
        Ok(())
    }

    #[getter]
    fn address(&self) -> u64 {
        self.owned.address()
    }

    #[getter]
    fn size(&self) -> u64 {
        self.owned.size()
    }

    /// The size that a receiver maps: the rounded-up size.
    #[getter]
    fn mapped_size(&self) -> u64 {
        self.owned.mapped_size()
    }

    /// Whether RDMA can reach it, as the driver reported.
    #[getter]
    fn rdma(&self) -> bool {
        self.owned.is_gpu_direct_rdma()
    }

    /// Whether a put made it, for copies of arrays that can't be shared.
    #[getter]
    fn copied(&self) -> bool {
        self.copied
    }

    #[getter]
    fn device(&self) -> PyDevice {
        PyDevice(self.owned.device().clone())
    }

    /// Returns an array at a byte offset in it.
    #[pyo3(signature = (dtype, shape, strides=None, offset=0))]
    fn array(
        &self,
        dtype: &Bound<'_, PyAny>,
        shape: &Bound<'_, PyAny>,
        strides: Option<Vec<i64>>,
        offset: u64,
    ) -> Outcome<Array> {
        let dtype = dtype::extract(dtype)?;
        let shape = array::shape(shape)?;
        Array::new(Arc::clone(&self.owned) as Arc<dyn Memory>, ArrayDescriptor { dtype, shape, strides, offset })
    }

    fn __repr__(&self) -> String {
        format!(
            "<vmmfd memory: {} bytes at {:#x} on {}>",
            self.owned.size(),
            self.owned.address(),
            short(self.owned.device())
        )
    }
}

/// Returns the BLAKE3 digest of adjacent memories, in the format of `load_safetensors`.
#[pyfunction]
pub(crate) fn digest_of(py: Python<'_>, memories: Vec<Py<PyMemory>>) -> Outcome<String> {
    let memories: Vec<Arc<Owned>> = memories.iter().map(|memory| Arc::clone(&memory.get().owned)).collect();
    py.detach(|| Ok(weights::digest_of_memory(memories.iter().map(|memory| &**memory.shared() as &dyn Region))?))
}
