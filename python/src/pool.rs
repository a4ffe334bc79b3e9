//! Memory pools that can be shared, as cuda.core's `DeviceMemoryResource`.

use std::sync::{Arc, Mutex, Weak};

use pyo3::prelude::*;
use vmmfd::{
    Error,
    array::{ArrayDescriptor, Order},
    bindings::lock,
    error::MemoryError,
    memory::{Device, Pool, Region, Shared},
};

use crate::{
    array::{self, Array},
    device::{PyDevice, Wanted},
    driver, dtype,
    error::{Failure, Outcome},
    memory::Owned,
    reaper::Reaped,
    text::Text,
};

/// A memory pool created by this process.
#[pyclass(name = "_Pool", module = "vmmfd._native", frozen)]
pub(crate) struct PyPool {
    pool: Mutex<Option<Reaped<Arc<Pool>>>>,
    device: Device,
    max_size: Option<u64>,
    buffers: Mutex<Buffers>,
}

#[derive(Default)]
struct Buffers {
    /// The live allocations.
    made: Vec<Weak<Owned>>,
    /// The bytes of allocations in progress.
    coming: u64,
}

impl Buffers {
    /// The bytes of all allocations, including those in progress.
    fn bytes(&mut self) -> u64 {
        self.made.retain(|buffer| buffer.strong_count() > 0);
        let made: u64 = self.made.iter().filter_map(Weak::upgrade).map(|buffer| buffer.size()).sum();
        made.saturating_add(self.coming)
    }
}

impl PyPool {}

#[pymethods]
impl PyPool {
    #[new]
    #[pyo3(signature = (max_size, device, backend))]
    fn new(py: Python<'_>, max_size: Option<u64>, device: Option<Wanted>, backend: Option<Text>) -> Outcome<Self> {
        py.detach(|| {
            let device = driver::open_device(backend.as_deref(), device)?;
            let pool = Reaped::new(&device, Pool::create(&device)?);
            Ok(Self { pool: Mutex::new(Some(pool)), device, max_size, buffers: Mutex::default() })
        })
    }

    #[getter]
    fn max_size(&self) -> Option<u64> {
        self.max_size
    }

    #[getter]
    fn used(&self) -> u64 {
        lock(&self.buffers).bytes()
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
                let pool = lock(&self.pool);
                let closed = || Failure::invalid("the pool is closed");
                Arc::clone(&**pool.as_ref().ok_or_else(closed)?)
            };
            {
                let mut buffers = lock(&self.buffers);
                let free = self.max_size.map_or(u64::MAX, |most| most.saturating_sub(buffers.bytes()));
                if size > free {
                    let device =
                        format!("the pool of at most {} bytes on {}", self.max_size.unwrap_or_default(), self.device);
                    return Err(Error::Memory(MemoryError::OutOfMemory { device, size, free }).into());
                }
                buffers.coming += size;
            }
            let made = Shared::in_pool(&pool, size).map(|shared| Owned::new(Arc::new(shared)));
            let mut buffers = lock(&self.buffers);
            buffers.coming -= size;
            let memory = made?;
            buffers.made.push(Arc::downgrade(&memory));
            drop(buffers);
            Array::new(memory, descriptor)
        })
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| {
            let pool = lock(&self.pool).take();
            drop(pool);
        });
    }
}
