//! Threads of the library inside programs.

use std::{
    io,
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::Duration,
};

use nix::sys::signal::{SigSet, SigmaskHow, Signal};

use crate::error::{Error, Result};

/// Starts a thread that blocks all signals except its own faults: signals are for the program's threads.
///
/// # Errors
/// See pthread_create(3).
pub fn spawn<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<thread::JoinHandle<T>> {
    let mut signals = SigSet::all();
    for fault in [Signal::SIGSEGV, Signal::SIGBUS, Signal::SIGFPE, Signal::SIGILL, Signal::SIGTRAP, Signal::SIGABRT] {
        signals.remove(fault);
    }
    let before = signals.thread_swap_mask(SigmaskHow::SIG_BLOCK);
    let started = thread::Builder::new().name(name.to_owned()).spawn(work);
    if let Ok(before) = before {
        // Restores the mask, which was valid before.
        let _ = before.thread_set_mask();
    }
    started
}

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
