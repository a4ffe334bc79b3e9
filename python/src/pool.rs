//! Memory pools that can be shared, as cuda.core's `DeviceMemoryResource` has them.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use pyo3::prelude::*;
use vmmfd::{
    Error,
    array::{ArrayDescriptor, Order},
    error::MemoryError,
    memory::{Device, Pool, Region, Shared},
};

use crate::{
    array::{self, Array},
    device::{self, PyDevice},
    driver, dtype,
    error::{Failure, Outcome},
    reaper::Kept,
    shared::Owned,
};

/// A memory pool of this process's own.
#[pyclass(name = "_Pool", module = "vmmfd._native", frozen)]
pub(crate) struct PyPool {
    pool: Mutex<Option<Kept<Arc<Pool>>>>,
    device: Device,
    max_size: Option<u64>,
    /// What was allocated, and is still there.
    buffers: Mutex<Vec<Weak<Owned>>>,
}

impl PyPool {
    /// How many bytes are allocated.
    fn bytes(&self) -> u64 {
        let mut buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        buffers.retain(|buffer| buffer.strong_count() > 0);
        buffers.iter().filter_map(Weak::upgrade).map(|buffer| buffer.size()).sum()
    }
}

#[pymethods]
impl PyPool {
    #[new]
    #[pyo3(signature = (max_size, device, backend))]
    fn new(py: Python<'_>, max_size: Option<u64>, device: Option<&Bound<'_, PyAny>>, backend: &str) -> Outcome<Self> {
        let wanted = device.map(device::selector).transpose()?;
        py.detach(|| {
            let device = driver::device(&driver::driver(backend)?, wanted)?;
            let pool = Kept::new(&device, Pool::create(&device)?);
            Ok(Self { pool: Mutex::new(Some(pool)), device, max_size, buffers: Mutex::default() })
        })
    }

    #[getter]
    fn max_size(&self) -> Option<u64> {
        self.max_size
    }

    #[getter]
    fn used(&self) -> u64 {
        self.bytes()
    }

    #[getter]
    fn device(&self) -> PyDevice {
        PyDevice(self.device.clone())
    }

    fn empty(&self, py: Python<'_>, shape: &Bound<'_, PyAny>, dtype: &Bound<'_, PyAny>) -> Outcome<Array> {
        let descriptor = ArrayDescriptor::new(dtype::extract(dtype)?, array::shape(shape)?, Order::C)?;
        let size = descriptor.bytes()?.max(1);
        py.detach(|| {
            let pool = {
                let pool = self.pool.lock().unwrap_or_else(PoisonError::into_inner);
                let closed = || Failure::invalid("the pool was closed");
                Arc::clone(&**pool.as_ref().ok_or_else(closed)?)
            };
            if let Some(most) = self.max_size {
                let free = most.saturating_sub(self.bytes());
                if size > free {
                    let device = format!("the pool of at most {most} bytes on {}", self.device);
                    return Err(Error::Memory(MemoryError::OutOfMemory { device, size, free }).into());
                }
            }
            let memory = Owned::new(Arc::new(Shared::in_pool(&pool, size)?));
            self.buffers.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(&memory));
            Array::new(memory, descriptor)
        })
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| {
            let pool = self.pool.lock().unwrap_or_else(PoisonError::into_inner).take();
            drop(pool);
        });
    }
}
