//! Arrays by legacy handles (`CUipcMemHandle`), as Numba's `get_ipc_handle` and `open_ipc_array` have them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use pyo3::prelude::*;
use vmmfd::{
    Error, Result,
    array::ArrayDescriptor,
    memory::{Device, LegacyMemory, Pointer, Region, Sharing, Spec},
};

use crate::{
    array::{self, Array},
    array_new, device, driver, dtype,
    error::{Failure, Outcome},
    memory::{Export, Memory},
    reaper::Kept,
};

/// Memory that was opened and can be closed while arrays of it are about: they are then arrays of nothing.
struct Closable {
    memory: RwLock<Option<Kept<Arc<LegacyMemory>>>>,
    device: Device,
    address: u64,
    size: u64,
    /// Held for some instructions at a time, also with the GIL held: the lock of the memory may be held over a long copy.
    state: Mutex<State>,
}

struct State {
    open: bool,
    /// Held by each managed tensor and each view.
    exports: Arc<()>,
}

impl Closable {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes it, unless something was exported, or in any case. Waits for copies and for the device. Where that fails it stays open.
    fn close(&self, force: bool) -> Outcome<()> {
        {
            let mut state = self.state();
            let exports = Export::count(&state.exports);
            if !state.open {
                return Ok(());
            }
            if exports > 0 && !force {
                return Err(Failure::export(format!(
                    "other libraries have views of the array ({exports}): drop them first, or say exported=\"valid\" if none is used any more"
                )));
            }
            state.open = false;
        }
        let mut held = self.memory.write().unwrap_or_else(PoisonError::into_inner);
        // Its owner may free it as soon as this returns.
        if let Err(error) = self.device.wait_for_work() {
            drop(held);
            self.state().open = true;
            return Err(error.into());
        }
        let memory = held.take();
        drop(held);
        if let Some(memory) = memory {
            memory.let_go_now();
        }
        Ok(())
    }

    fn with<T>(&self, call: impl FnOnce(&LegacyMemory) -> Result<T>) -> Result<T> {
        let memory = self.memory.read().unwrap_or_else(PoisonError::into_inner);
        match memory.as_ref() {
            Some(memory) => call(memory),
            None => Err(closed()),
        }
    }
}

fn closed() -> Error {
    Error::Misuse { problem: "the handle was closed: its memory is not open here any more".to_owned() }
}

impl Memory for Closable {
    fn device(&self) -> &Device {
        &self.device
    }

    fn address(&self) -> u64 {
        self.address
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn check_mapped(&self) -> Result<()> {
        if self.state().open { Ok(()) } else { Err(closed()) }
    }

    fn export(&self) -> Result<Export> {
        let state = self.state();
        if state.open { Ok(Export::counted(&state.exports)) } else { Err(closed()) }
    }

    fn export_by_interface(&self) -> Result<Export> {
        // As with Numba, who reads the interface has to know when the handle is closed.
        Ok(Export::default())
    }

    fn copy_out(&self, offset: u64, to: &mut [u8]) -> Result<()> {
        self.with(|memory| memory.copy_out(offset, to))
    }

    fn copy_in(&self, offset: u64, from: &[u8]) -> Result<()> {
        self.with(|memory| memory.copy_in(offset, from))
    }
}

/// A legacy handle that was opened.
#[pyclass(name = "_OpenedHandle", module = "vmmfd._native", frozen)]
pub(crate) struct Opened {
    memory: Arc<Closable>,
    descriptor: ArrayDescriptor,
}

#[pymethods]
impl Opened {
    /// The array.
    #[getter]
    fn array(&self) -> Outcome<Array> {
        Array::new(Arc::clone(&self.memory) as Arc<dyn Memory>, self.descriptor.clone())
    }

    /// Closes the handle.
    fn close(&self, py: Python<'_>, force: bool) -> Outcome<()> {
        py.detach(|| self.memory.close(force))
    }
}

/// Makes an array in memory that is shared by a legacy handle.
#[pyfunction]
#[pyo3(name = "_legacy_empty", signature = (shape, dtype, device, backend))]
pub(crate) fn empty(
    py: Python<'_>,
    shape: &Bound<'_, PyAny>,
    dtype: &Bound<'_, PyAny>,
    device: Option<&Bound<'_, PyAny>>,
    backend: &str,
) -> Outcome<Array> {
    array_new::made(py, shape, dtype, device, backend, Spec::legacy)
}

/// The handle of an array that [`empty`] made, and where the array begins behind what it opens.
#[pyfunction]
#[pyo3(name = "_legacy_handle")]
pub(crate) fn handle(py: Python<'_>, array: &Bound<'_, Array>) -> Outcome<([u8; 64], u64)> {
    let array = array.get();
    array.check()?;
    let wrong = || {
        Failure::invalid(
            "only arrays of vmmfd.legacy.empty() have a legacy handle: serve others, or put them into a broker",
        )
    };
    let owner = array.owner().ok_or_else(wrong)?;
    py.detach(|| {
        let description = owner.describe()?;
        let Sharing::Legacy { pointer, offset } = description.sharing else { return Err(wrong()) };
        owner.device().wait_for_work()?;
        Ok((pointer.0, offset + array.descriptor().offset))
    })
}

/// Opens a handle of another process.
#[pyfunction]
#[pyo3(name = "_legacy_open", signature = (handle, shape, dtype, strides, offset, device, backend))]
#[allow(clippy::too_many_arguments, reason = "as Numba's has them")]
pub(crate) fn open(
    py: Python<'_>,
    handle: &[u8],
    shape: &Bound<'_, PyAny>,
    dtype: &Bound<'_, PyAny>,
    strides: Option<Vec<i64>>,
    offset: u64,
    device: Option<&Bound<'_, PyAny>>,
    backend: &str,
) -> Outcome<Opened> {
    let pointer: [u8; 64] = handle
        .try_into()
        .map_err(|_| Failure::invalid(format!("a legacy handle has 64 bytes, and this one {}", handle.len())))?;
    let descriptor = ArrayDescriptor { dtype: dtype::extract(dtype)?, shape: array::shape(shape)?, strides, offset };
    let wanted = device.map(device::selector).transpose()?;
    py.detach(|| {
        let device = driver::device(&driver::driver(backend)?, wanted)?;
        let memory = LegacyMemory::open(&device, &Pointer(pointer))?;
        let (address, size) = (memory.address(), memory.size());
        let kept = Kept::new(&device, memory);
        descriptor.check(size)?;
        let state = Mutex::new(State { open: true, exports: Arc::default() });
        let memory = Closable { memory: RwLock::new(Some(kept)), device, address, size, state };
        Ok(Opened { memory: Arc::new(memory), descriptor })
    })
}
