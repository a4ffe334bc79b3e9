//! A thread that closes memory, which takes time in proportion to its size.

use std::{
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc::{self, Sender},
    },
    thread,
};

use mio::Waker;

use super::finished::Finished;
use crate::error::{Error, Result};

/// The most memory descriptors that wait to be closed before their users' puts are delayed. Until then they hold memory without a name.
pub(super) const MAX_CLOSING: usize = 256;

/// The thread. It ends after the queue is empty, once this is dropped.
pub(super) struct Worker {
    queue: Sender<Vec<OwnedFd>>,
    /// The number of unclosed descriptors.
    closing: Arc<AtomicUsize>,
}

impl Worker {
    /// # Errors
    /// [`Error::System`] if no thread can be started.
    pub(super) fn start(done: Sender<Finished>, waker: Arc<Waker>) -> Result<Self> {
        let (queue, waiting) = mpsc::channel::<Vec<OwnedFd>>();
        let closing = Arc::new(AtomicUsize::new(0));
        let left = Arc::clone(&closing);
        let work = move || {
            for fds in waiting {
                let count = fds.len();
                drop(fds);
                let before = left.fetch_sub(count, Ordering::Relaxed);
                let has_caught_up = before > MAX_CLOSING && before - count <= MAX_CLOSING;
                // The send fails if the event loop has ended.
                if has_caught_up
                    && done.send(Finished::CaughtUp).is_ok()
                    && let Err(error) = waker.wake()
                {
                    tracing::error!(%error, "cannot wake the event loop");
                }
            }
        };
        let started = thread::Builder::new().name("worker".to_owned()).spawn(work);
        started.map_err(|error| Error::system("start a thread", error))?;
        Ok(Self { queue, closing })
    }

    /// Queues memory for closing.
    pub(super) fn close(&self, fds: Vec<OwnedFd>) {
        if !fds.is_empty() {
            self.closing.fetch_add(fds.len(), Ordering::Relaxed);
            // Fails only if the thread has panicked. Then this thread closes the memory.
            let _ = self.queue.send(fds);
        }
    }

    /// The number of unclosed memory descriptors. [`Finished::CaughtUp`] follows once at most [`MAX_CLOSING`] are left.
    pub(super) fn closing(&self) -> usize {
        self.closing.load(Ordering::Relaxed)
    }
}
