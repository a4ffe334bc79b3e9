//! Times that callers give.

use std::time::Duration;

use pyo3::{prelude::*, types::PyBool};

use crate::error::{Failure, Outcome, shown, tolerant};

/// The longest wait, in place of every longer one and of `inf`.
const FOREVER: Duration = Duration::from_secs(u32::MAX as u64);

/// A time that a caller gives in seconds, as a number or a `timedelta`; `inf` is for ever. What `None` means is the caller's to say.
///
/// # Errors
/// `ValueError` for what is no number of seconds, a `bool` included, and for one that is negative; what its methods raise of another kind.
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
        _ => Err(Failure::invalid(format!(
            "{name}={} is no time: give seconds, from 0 on, or a timedelta",
            shown(given)?
        ))),
    }
}
