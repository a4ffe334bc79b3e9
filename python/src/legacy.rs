//! Arrays by legacy handles (`CUipcMemHandle`), as in Numba's `get_ipc_handle` and `open_ipc_array`.

use std::sync::{Arc, Mutex, PoisonError, RwLock};

use pyo3::prelude::*;
use vmmfd::{
    Error, Result,
    array::ArrayDescriptor,
    bindings::lock,
    memory::{Device, LegacyMemory, Pointer, Region, Sharing, Spec},
};

use crate::{
    array::{self, Array},
    array_new,
    device::Wanted,
    driver, dtype,
    error::{Failure, Outcome},
    memory::{Export, Memory, Tie},
    reaper::Reaped,
    text::Text,
};

/// Memory of an opened handle. It can be closed while arrays of it exist, which then have no memory.
struct Closable {
    memory: RwLock<Option<Reaped<Arc<LegacyMemory>>>>,
    device: Device,
    address: u64,
    size: u64,
    /// Held for a few instructions at a time, also with the GIL held. The lock of the memory may be held during a long copy.
    state: Mutex<OpenState>,
}

struct OpenState {
    open: bool,
    /// Held by each managed tensor and each view.
    exports: Arc<()>,
    /// Until it is closed.
    tie: Export,
}

impl Closable {
    /// Closes the handle. Fails if there are exports, unless `force`. Waits for copies and for the device. After an error the handle is
    /// still open.
    fn close(&self, force: bool) -> Outcome<()> {
        {
            let mut state = lock(&self.state);
            let exports = Export::count(&state.exports);
            if !state.open {
                return Ok(());
            }
            if exports > 0 && !force {
                return Err(Failure::export(format!(
                    "other libraries have {exports} views of the array: drop them first, or give exports_unused=True if none is used any more"
                )));
            }
            state.open = false;
        }
        let mut held = self.memory.write().unwrap_or_else(PoisonError::into_inner);
        // The owner may free the memory as soon as this returns.
        if let Err(error) = self.device.wait_for_work() {
            drop(held);
            lock(&self.state).open = true;
            return Err(error.into());
        }
        let memory = held.take();
        drop(held);
        if let Some(memory) = memory {
            memory.release_now();
        }
        lock(&self.state).tie = Export::default();
        Ok(())
    }
}

fn closed() -> Error {
    Error::Misuse { problem: "the handle is closed, and its memory is unmapped".to_owned() }
}

impl Memory for Closable {
    fn extent(&self) -> (&Device, u64, u64) {
        (&self.device, self.address, self.size)
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn check_mapped(&self) -> Result<()> {
        if lock(&self.state).open { Ok(()) } else { Err(closed()) }
    }

    fn export(&self) -> Result<Export> {
        let state = lock(&self.state);
        if state.open { Ok(Export::counted(&state.exports)) } else { Err(closed()) }
    }

    fn export_by_interface(&self) -> Result<Export> {
        // As in Numba, readers of the interface must know when the handle is closed.
        Ok(Export::default())
    }

    fn with(&self, work: &mut dyn FnMut(&dyn Region) -> Result<()>) -> Result<()> {
        let memory = self.memory.read().unwrap_or_else(PoisonError::into_inner);
        work(&***memory.as_ref().ok_or_else(closed)?)
    }
}

/// An open legacy handle.
#[pyclass(name = "_OpenedHandle", module = "vmmfd._native", frozen)]
pub(crate) struct OpenedHandle {
    memory: Arc<Closable>,
    descriptor: ArrayDescriptor,
}

#[pymethods]
impl OpenedHandle {
    #[getter]
    fn array(&self) -> Outcome<Array> {
        Array::new(Arc::clone(&self.memory) as Arc<dyn Memory>, self.descriptor.clone())
    }

    fn close(&self, py: Python<'_>, force: bool) -> Outcome<()> {
        py.detach(|| self.memory.close(force))
    }
}

/// Creates an array in memory that is shared by a legacy handle.
#[pyfunction]
#[pyo3(name = "_legacy_empty", signature = (shape, dtype, device, backend))]
pub(crate) fn legacy_empty(
    py: Python<'_>,
    shape: &Bound<'_, PyAny>,
    dtype: &Bound<'_, PyAny>,
    device: Option<Wanted>,
    backend: Option<Text>,
) -> Outcome<Array> {
    array_new::create(py, shape, dtype, device, backend, Spec::legacy)
}

/// Returns the handle of an array that [`legacy_empty`] created, and the array's offset from the opened address.
#[pyfunction]
#[pyo3(name = "_legacy_handle")]
pub(crate) fn legacy_handle(py: Python<'_>, array: &Bound<'_, Array>) -> Outcome<([u8; 64], u64)> {
    let array = array.get();
    array.check()?;
    let wrong = || {
        Failure::invalid(
            "only arrays of vmmfd.legacy.empty() have a legacy handle: serve other arrays, or put them into a broker",
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
pub(crate) fn legacy_open(
    py: Python<'_>,
    handle: &[u8],
    shape: &Bound<'_, PyAny>,
    dtype: &Bound<'_, PyAny>,
    strides: Option<Vec<i64>>,
    offset: u64,
    device: Option<Wanted>,
    backend: Option<Text>,
) -> Outcome<OpenedHandle> {
    let pointer: [u8; 64] = handle
        .try_into()
        .map_err(|_| Failure::invalid(format!("a legacy handle has 64 bytes, and this has {}", handle.len())))?;
    let descriptor = ArrayDescriptor { dtype: dtype::extract(dtype)?, shape: array::shape(shape)?, strides, offset };
    py.detach(|| {
        let device = driver::open_device(backend.as_deref(), device)?;
        let memory = LegacyMemory::open(&device, &Pointer(pointer))?;
        let address = memory.address();
        let size = memory.size();
        let kept = Reaped::new(&device, memory);
        descriptor.check(size)?;
        let tie = Tie::Opened.counted(&device);
        let state = Mutex::new(OpenState { open: true, exports: Arc::default(), tie });
        let memory = Closable { memory: RwLock::new(Some(kept)), device, address, size, state };
        Ok(OpenedHandle { memory: Arc::new(memory), descriptor })
    })
}
