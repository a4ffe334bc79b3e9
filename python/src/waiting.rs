//! Waits of a handoff, which Ctrl-C interrupts as a whole.
//!
//! The check of [`signals`](crate::signals) is not enough: it cancels only one wait, and the next wait, for the peer to disconnect, would
//! block again. While a peer keeps sending `busy`, or the driver starts, no wait checks for signals.

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

/// The interval between signal checks.
const TICK: Duration = Duration::from_millis(20);

/// Runs `work` in a separate thread, with the GIL released, while this thread checks for signals. An exception of a handler cancels the
/// work and is returned.
///
/// # Errors
/// As `work`; the handler's exception; [`Error::System`] if the thread cannot start.
pub(crate) fn interruptibly<T: Send>(py: Python<'_>, work: impl FnOnce(&Cancel) -> Outcome<T> + Send) -> Outcome<T> {
    let cancel = Cancel::new()?;
    py.detach(|| {
        thread::scope(|scope| {
            let (sender, receiver) = mpsc::channel();
            let cancel = &cancel;
            let spawned = thread::Builder::new().name("vmmfd-wait".to_owned()).spawn_scoped(scope, move || {
                // The receiver lives until this thread has exited.
                let _ = sender.send(work(cancel));
            });
            spawned.map_err(|error| Failure::from(Error::System { action: "start a thread".into(), source: error }))?;
            loop {
                match receiver.recv_timeout(TICK) {
                    Ok(result) => return result,
                    Err(RecvTimeoutError::Timeout) => {
                        // `None` during interpreter shutdown: there are no handlers.
                        if let Some(Err(raised)) = Python::try_attach(|py| py.check_signals()) {
                            cancel.cancel(CancelReason::Program);
                            return Err(raised.into());
                        }
                    }
                    Err(RecvTimeoutError::Disconnected) => {
                        return Err(Failure::invalid("the waiting thread panicked"));
                    }
                }
            }
        })
    })
}
