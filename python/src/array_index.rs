//! Array indices: integers, slices and one ellipsis.

use pyo3::{
    exceptions::{PyIndexError, PyTypeError},
    prelude::*,
    types::{PyBool, PyEllipsis, PySlice, PyTuple},
};
use vmmfd::array::ArrayDescriptor;

use crate::error::{Failure, shown, tolerant};

/// Applies an index to an array.
///
/// # Errors
/// `IndexError` for an index out of range, `TypeError` for other kinds of index.
pub(crate) fn select(whole: &ArrayDescriptor, index: &Bound<'_, PyAny>) -> PyResult<ArrayDescriptor> {
    let items: Vec<Bound<'_, PyAny>> = match index.cast::<PyTuple>() {
        Ok(items) => items.iter().collect(),
        Err(_) => vec![index.clone()],
    };
    let dimensions = whole.shape.len();
    let named = items.iter().filter(|item| !item.is_instance_of::<PyEllipsis>()).count();
    if items.len() - named > 1 {
        return Err(PyIndexError::new_err("an index can have one ellipsis (...)"));
    }
    if named > dimensions {
        return Err(PyIndexError::new_err(format!("{named} indices are too many for {dimensions} dimensions")));
    }
    let mut array = whole.clone();
    let mut axis = 0;
    for item in &items {
        if item.is_instance_of::<PyEllipsis>() {
            axis += dimensions - named;
        } else if let Ok(slice) = item.cast::<PySlice>() {
            let found = slice.indices(isize::try_from(array.shape[axis]).unwrap_or(isize::MAX))?;
            let start = found.start as i64;
            let step = found.step as i64;
            let count = found.slicelength as i64;
            let range = match count {
                0 => 0..0,
                _ if step > 0 => start as u64..(start + (count - 1) * step + 1) as u64,
                _ => (start + (count - 1) * step) as u64..start as u64 + 1,
            };
            array = array.slice(axis, range, step).map_err(Failure::from)?;
            axis += 1;
        } else {
            let length = array.shape[axis];
            let at = integer(item)?;
            let inside = if at < 0 { at + i128::from(length) } else { at };
            match u64::try_from(inside) {
                Ok(inside) if inside < length => array = array.index(axis, inside).map_err(Failure::from)?,
                _ => {
                    return Err(PyIndexError::new_err(format!(
                        "index {at} is out of range for a dimension of length {length}"
                    )));
                }
            }
        }
    }
    Ok(array)
}

fn integer(item: &Bound<'_, PyAny>) -> PyResult<i128> {
    if !item.is_instance_of::<PyBool>()
        && let Some(index) = tolerant(item.py(), item.extract::<i64>())?
    {
        return Ok(i128::from(index));
    }
    Err(PyTypeError::new_err(format!(
        "{} is not a supported index: use integers, slices and one ellipsis (...), or a view in NumPy or PyTorch",
        shown(item)?
    )))
}
