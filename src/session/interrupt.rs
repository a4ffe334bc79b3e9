//! Driver calls that a cancellation leaves behind.

use std::{
    io,
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::Duration,
};

use crate::error::{Error, Result};

/// Runs `work`, which can't be interrupted, in a thread, and calls `tick` every 5 ms until it returns. If `tick` fails, the thread is left
/// behind.
///
/// # Errors
/// The errors of `work` and `tick`; [`Error::System`] if no thread can be started, or `work` panics.
pub fn interruptibly<T: Send + 'static>(
    tick: &mut dyn FnMut() -> Result<()>,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let (sender, receiver) = mpsc::channel();
    let spawned = thread::Builder::new().name("driver".to_owned()).spawn(move || {
        // A send fails if the caller has given up.
        let _ = sender.send(work());
    });
    spawned.map_err(|error| Error::system("start a thread", error))?;
    loop {
        match receiver.recv_timeout(Duration::from_millis(5)) {
            Ok(result) => return result,
            Err(RecvTimeoutError::Timeout) => tick()?,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Error::system("start the driver", io::Error::other("its thread panicked")));
            }
        }
    }
}
