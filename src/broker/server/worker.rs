//! What may take long or block, away from the event loop.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc::{self, Receiver, Sender},
    },
    thread,
};

use mio::Waker;

use super::{
    inspect::{Kind, kind},
    reactor::Reactor,
};
use crate::error::{Error, Result};

/// What the event loop does with what a job found.
pub(super) type Outcome = Box<dyn FnOnce(&mut Reactor) + Send>;

/// Work that returns what to do with its result.
type Job = Box<dyn FnOnce() -> Option<Outcome> + Send>;

/// The most files whose close blocks: with as many the broker takes no more connections.
const MOST_STUCK: usize = 256;

/// Two threads: one for work that ends soon, and one that closes what other processes may keep from closing.
#[derive(Debug)]
pub(super) struct Worker {
    jobs: Sender<Job>,
    outcomes: Receiver<Outcome>,
    foreign: Sender<OwnedFd>,
    stuck: Arc<AtomicUsize>,
    closing: Arc<AtomicUsize>,
}

impl Worker {
    /// # Errors
    /// [`Error::System`] if no thread can be started.
    pub(super) fn start(waker: Arc<Waker>) -> Result<Self> {
        let (jobs, to_do) = mpsc::channel::<Job>();
        let (done, outcomes) = mpsc::channel();
        let failed = |error| Error::system("start a thread", error);
        let work = move || {
            for job in to_do {
                // Fails if the loop has ended.
                if let Some(outcome) = job()
                    && done.send(outcome).is_ok()
                    && let Err(error) = waker.wake()
                {
                    tracing::error!(%error, "cannot wake the event loop");
                }
            }
        };
        thread::Builder::new().name("worker".to_owned()).spawn(work).map_err(failed)?;
        let (foreign, to_close) = mpsc::channel::<OwnedFd>();
        let stuck = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&stuck);
        let close = move || {
            for fd in to_close {
                drop(fd);
                counted.fetch_sub(1, Ordering::Relaxed);
            }
        };
        thread::Builder::new().name("closer".to_owned()).spawn(close).map_err(failed)?;
        Ok(Self { jobs, outcomes, foreign, stuck, closing: Arc::default() })
    }

    /// Does something elsewhere, and then what it returns on the event loop.
    pub(super) fn run(&self, job: impl FnOnce() -> Option<Outcome> + Send + 'static) {
        // Fails if the thread has ended, which it does not before the loop.
        let _ = self.jobs.send(Box::new(job));
    }

    /// What is to be done now.
    pub(super) fn outcomes(&self) -> Vec<Outcome> {
        self.outcomes.try_iter().collect()
    }

    /// Closes memory, whose last close takes as long as it is large.
    pub(super) fn close(&self, fds: Vec<OwnedFd>) {
        if !fds.is_empty() {
            let (count, closing) = (fds.len(), Arc::clone(&self.closing));
            closing.fetch_add(count, Ordering::Relaxed);
            self.run(move || {
                drop(fds);
                closing.fetch_sub(count, Ordering::Relaxed);
                None
            });
        }
    }

    /// How many descriptors are not closed yet.
    pub(super) fn closing(&self) -> usize {
        self.closing.load(Ordering::Relaxed) + self.stuck.load(Ordering::Relaxed)
    }

    /// Closes what came from a peer and was not taken over. What is no memory goes where no other work waits for it.
    pub(super) fn reject(&self, fds: Vec<OwnedFd>) {
        let (foreign, memory): (Vec<_>, Vec<_>) = fds.into_iter().partition(|fd| kind(fd.as_fd()) == Kind::Foreign);
        for fd in foreign {
            self.stuck.fetch_add(1, Ordering::Relaxed);
            // Fails if the thread has ended; then this closes it.
            let _ = self.foreign.send(fd);
        }
        self.close(memory);
    }

    /// Closes a socket. Where records are queued on it that were not read, their descriptors are closed with it, and may be of any
    /// file: then elsewhere.
    pub(super) fn close_socket(&self, socket: OwnedFd) {
        let unread = rustix::io::ioctl_fionread(&socket).unwrap_or(0);
        if unread > 0 {
            // The peer sees the end at once.
            let _ = rustix::net::shutdown(&socket, rustix::net::Shutdown::Both);
            self.reject(vec![socket]);
        }
    }

    /// Whether so many files of others can't be closed that no more may come.
    pub(super) fn is_stuck(&self) -> bool {
        self.stuck.load(Ordering::Relaxed) >= MOST_STUCK
    }
}
