//! Waits of a handoff, which Ctrl-C ends for good.
//!
//! Not by a check inside of the library's waits, as [`signals`](crate::signals) ends those for a broker: it ends one wait alone, and the
//! next would be for the peer to leave; and a peer that says without a pause that it is busy, or a driver that starts, leaves no wait in
//! which to check.

use std::{
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::Duration,
};

use pyo3::prelude::*;
use vmmfd::{
    Error,
    channel::{Cancel, CancelReason},
};

use crate::error::{Failure, Outcome};

/// How often the waiting thread looks for signals.
const TICK: Duration = Duration::from_millis(20);

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
                            cancel.cancel(CancelReason::Program);
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
