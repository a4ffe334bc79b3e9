//! The interpreter in which this module works.

use pyo3::{exceptions::PyImportError, ffi, prelude::*};

/// Fails outside the main interpreter: this module's threads attach to that interpreter, and its classes belong to the first
/// interpreter that imports them.
///
/// # Errors
/// `ImportError`.
#[pyfunction(name = "_check_interpreter")]
#[allow(unsafe_code)]
pub(crate) fn check_interpreter(_py: Python<'_>) -> PyResult<()> {
    // SAFETY: this thread is attached to an interpreter, which the inner call returns.
    let number = unsafe { ffi::PyInterpreterState_GetID(ffi::PyInterpreterState_Get()) };
    match number {
        0 => Ok(()),
        _ => Err(PyImportError::new_err(format!(
            "vmmfd only works in the main interpreter, and this is sub-interpreter {number}: import it in the main interpreter, or in a \
             separate process"
        ))),
    }
}
