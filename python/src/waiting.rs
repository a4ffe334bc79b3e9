//! Waits that Ctrl-C ends.

use std::{
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::Duration,
};

use pyo3::{prelude::*, types::PyBool};
use vmmfd::{Error, channel::Cancel};

use crate::error::{Failure, Outcome, shown, tolerant};

/// How often the waiting thread looks for signals.
const TICK: Duration = Duration::from_millis(20);

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

/// Runs what waits in a thread of its own, with the GIL released, while this one looks for signals: an exception that a handler raises
/// ends the wait, and is what this raises.
///
/// # Errors
/// Those of `work`; what a handler raises; [`Error::System`] if there can be no thread.
pub(crate) fn interruptibly<T: Send>(py: Python<'_>, work: impl FnOnce(&Cancel) -> Outcome<T> + Send) -> Outcome<T> {
    let cancel = Cancel::new()?;
    py.detach(|| {
        thread::scope(|scope| {
            let (sender, receiver) = mpsc::channel();
            let cancel = &cancel;
            let spawned = thread::Builder::new().name("vmmfd-wait".to_owned()).spawn_scoped(scope, move || {
                // The other end is there until this has ended.
                let _ = sender.send(work(cancel));
            });
            spawned.map_err(|error| Failure::from(Error::System { action: "start a thread".into(), source: error }))?;
            loop {
                match receiver.recv_timeout(TICK) {
                    Ok(result) => return result,
                    Err(RecvTimeoutError::Timeout) => {
                        // `None` of an interpreter that ends: it has no handlers any more.
                        if let Some(Err(raised)) = Python::try_attach(|py| py.check_signals()) {
                            cancel.cancel(0);
                            return Err(raised.into());
                        }
                    }
                    Err(RecvTimeoutError::Disconnected) => {
                        return Err(Failure::invalid("the thread that waits has panicked"));
                    }
                }
            }
        })
    })
}
