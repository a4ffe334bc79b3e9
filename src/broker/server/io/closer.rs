//! Closes descriptors in threads.
//!
//! The close of memory takes time in proportion to its size. Other descriptors that a client sent can block it: a TCP socket with
//! `SO_LINGER`, or a file whose FUSE daemon does not answer. This also applies to a connection with such descriptors in its queue, because
//! the kernel closes them in the thread that closes the connection. So these have their own threads.

use std::{
    collections::{HashMap, hash_map::Entry},
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{self, Receiver, Sender},
    },
    thread,
};

use mio::Waker;

use crate::broker::server::admit::Resource;

type Batch = (u32, Vec<OwnedFd>);

/// Reported to the event loop: a user's descriptors are closed.
pub(super) struct Closed {
    pub(super) resource: Resource,
    pub(super) uid: u32,
    pub(super) count: u64,
}

/// Threads that close descriptors of one kind. At most one closes the descriptors of a user, so a blocked close delays its sender alone.
pub(super) struct Closer {
    resource: Resource,
    max_threads: usize,
    threads: usize,
    /// Users with a batch, and the descriptors that follow it.
    users: HashMap<u32, Vec<OwnedFd>>,
    batches: Sender<Batch>,
    /// The threads end when the last batch is closed and this closer is dropped.
    queue: Arc<Mutex<Receiver<Batch>>>,
    done: Sender<Closed>,
    waker: Arc<Waker>,
}

impl Closer {
    pub(super) fn new(resource: Resource, max_threads: usize, done: Sender<Closed>, waker: Arc<Waker>) -> Self {
        let (batches, queue) = mpsc::channel();
        let queue = Arc::new(Mutex::new(queue));
        Self { resource, max_threads, threads: 0, users: HashMap::new(), batches, queue, done, waker }
    }

    /// Closes a user's descriptors. [`Closed`] follows.
    pub(super) fn close(&mut self, uid: u32, fds: Vec<OwnedFd>) {
        match self.users.entry(uid) {
            Entry::Occupied(mut waiting) => waiting.get_mut().extend(fds),
            Entry::Vacant(entry) => {
                entry.insert(Vec::new());
                // Does not fail: this closer holds the receiver.
                let _ = self.batches.send((uid, fds));
                self.start_threads();
            }
        }
    }

    /// Continues with a user's next descriptors after a batch.
    pub(super) fn closed(&mut self, uid: u32) {
        if let Some(fds) = self.users.remove(&uid).filter(|fds| !fds.is_empty()) {
            self.close(uid, fds);
        }
    }

    /// Whether a thread is missing because it could not be started.
    pub(super) fn lacks_threads(&self) -> bool {
        self.threads < self.max_threads.min(self.users.len())
    }

    /// Starts a thread for each user with a batch, as far as allowed. They wait for further batches.
    pub(super) fn start_threads(&mut self) {
        while self.lacks_threads() {
            let (resource, done, waker) = (self.resource, self.done.clone(), Arc::clone(&self.waker));
            let queue = Arc::clone(&self.queue);
            let next = move || queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
            let close = move || {
                while let Ok((uid, fds)) = next() {
                    let count = fds.len() as u64;
                    drop(fds);
                    // Fails if the event loop has ended.
                    if done.send(Closed { resource, uid, count }).is_ok()
                        && let Err(error) = waker.wake()
                    {
                        tracing::error!(%error, "cannot wake the event loop");
                    }
                }
            };
            if let Err(error) = thread::Builder::new().name("closer".to_owned()).spawn(close) {
                return tracing::error!(%error, "cannot start a thread to close descriptors: retrying");
            }
            self.threads += 1;
        }
    }
}
