//! Conversion of callers' times.

use std::time::Duration;

use pyo3::{
    prelude::*,
    types::{PyBool, PyInt},
};

use crate::error::{Failure, Outcome, shown, tolerant};

/// The longest wait: replaces longer times and `inf`.
pub(crate) const FOREVER: Duration = Duration::from_secs(u32::MAX as u64);

/// Converts a time that must not be `None`.
///
/// # Errors
/// As [`seconds`]; `TypeError` for `None`.
pub(crate) fn required(given: &Bound<'_, PyAny>, name: &str) -> Outcome<Duration> {
    seconds(given, name)?.ok_or_else(|| {
        Failure::wrong_type(format!("{name}=None is not a time: give seconds, or float('inf') to wait for ever"))
    })
}

/// Converts a time in seconds, a number or a `timedelta`; `inf` waits forever. The caller defines the meaning of `None`.
///
/// # Errors
/// `TypeError` for anything else, including a `bool`; `ValueError` for a negative time; other exceptions of its methods.
pub(crate) fn seconds(given: &Bound<'_, PyAny>, name: &str) -> Outcome<Option<Duration>> {
    if given.is_none() {
        return Ok(None);
    }
    let py = given.py();
    let number: Option<f64> = if given.is_instance_of::<PyBool>() {
        None
    } else if let Some(number) = tolerant(py, given.extract())? {
        Some(number)
    } else if let Some(total) = tolerant(py, given.call_method0("total_seconds"))? {
        tolerant(py, total.extract())?
    } else {
        None
    };
    match number {
        Some(number) if number >= 0.0 => {
            Ok(Some(Duration::try_from_secs_f64(number).map_or(FOREVER, |time| time.min(FOREVER))))
        }
        number => {
            let problem = format!("{name}={} is not a time: give seconds, at least 0, or a timedelta", shown(given)?);
            // An int of any size is a number.
            let is_number = number.is_some() || given.is_instance_of::<PyInt>() && !given.is_instance_of::<PyBool>();
            Err(if is_number { Failure::invalid(problem) } else { Failure::wrong_type(problem) })
        }
    }
}
