//! The interpreter that this module works in.

use pyo3::{exceptions::PyImportError, ffi, prelude::*};

/// Fails in any but the main interpreter: threads of this module come back to that one, and its classes are of the first that has them.
///
/// # Errors
/// `ImportError`.
#[pyfunction(name = "_check_interpreter")]
#[allow(unsafe_code)]
pub(crate) fn check_interpreter(_py: Python<'_>) -> PyResult<()> {
    // SAFETY: this thread is attached to an interpreter, which is what the first call returns.
    let number = unsafe { ffi::PyInterpreterState_GetID(ffi::PyInterpreterState_Get()) };
    match number {
        0 => Ok(()),
        _ => Err(PyImportError::new_err(format!(
            "vmmfd works in the main interpreter alone, and this is sub-interpreter {number}: import it in the main one, or in a process \
             of its own"
        ))),
    }
}
