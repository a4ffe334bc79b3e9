//! Threads of the library inside programs.

use std::{io, thread};

use nix::sys::signal::{SigSet, SigmaskHow, Signal};

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
