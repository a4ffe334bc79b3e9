//! What may take long or block, away from the event loop.

use std::{
    collections::VecDeque,
    os::fd::OwnedFd,
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
        mpsc::{self, Receiver},
    },
    thread,
};

use mio::Waker;

use crate::broker::server::{io::closer::Closers, io::reactor::Reactor};
use crate::error::{Error, Result};

/// How many descriptors of memory may wait to be closed before a user's puts wait for that, and how many more each user may send then.
/// What waits holds memory that has no name any more.
const MOST_CLOSING: usize = 256;
pub(crate) const MOST_WHILE_BEHIND: usize = 64;

/// What the event loop does with what a job found.
pub(crate) type Outcome = Box<dyn FnOnce(&mut Reactor) + Send>;

/// A step of some work.
pub(crate) type Job = Box<dyn FnOnce() -> Step + Send>;

/// What a step of some work leads to.
pub(crate) enum Step {
    /// The work goes on with this, after the steps of other users.
    More(Job),
    /// The event loop does this with the result.
    Done(Outcome),
    /// It is done.
    Nothing,
}

/// The work of each user that has some, the user whose turn is next first. The server's own work has no user.
#[derive(Default)]
struct Turns {
    users: VecDeque<(Option<u32>, VecDeque<Job>)>,
    ended: bool,
}

/// Work that waits for the worker. Users take turns, step by step: one user's large tables delay another user by one table.
#[derive(Default)]
struct Queue {
    turns: Mutex<Turns>,
    changed: Condvar,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue").finish_non_exhaustive()
    }
}

impl Queue {
    fn add(&self, user: Option<u32>, job: Job) {
        let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        match turns.users.iter_mut().find(|(of, _)| *of == user) {
            Some((_, jobs)) => jobs.push_back(job),
            None => turns.users.push_back((user, VecDeque::from([job]))),
        }
        self.changed.notify_one();
    }

    /// The next step, and its user, whose turn comes again after those of all others. Waits for one; `None` at the end.
    fn next(&self) -> Option<(Option<u32>, Job)> {
        let turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        let waits = |turns: &mut Turns| turns.users.is_empty() && !turns.ended;
        let mut turns = self.changed.wait_while(turns, waits).unwrap_or_else(PoisonError::into_inner);
        let (user, mut jobs) = turns.users.pop_front()?;
        let job = jobs.pop_front()?;
        if !jobs.is_empty() {
            turns.users.push_back((user, jobs));
        }
        Some((user, job))
    }

    /// Ends the worker, once nothing waits.
    fn end(&self) {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner).ended = true;
        self.changed.notify_one();
    }
}

/// A thread for work that ends soon, the close of memory included.
#[derive(Debug)]
pub(crate) struct Worker {
    queue: Arc<Queue>,
    outcomes: Receiver<Outcome>,
    closing: Arc<Closing>,
}

/// Memory that the worker closes.
#[derive(Debug, Default)]
struct Closing {
    waiting: Mutex<Vec<OwnedFd>>,
    /// Those that are being closed included.
    count: AtomicUsize,
}

impl Closing {
    fn close(&self) -> Step {
        let fds = std::mem::take(&mut *self.waiting.lock().unwrap_or_else(PoisonError::into_inner));
        let count = fds.len();
        drop(fds);
        let before = self.count.fetch_sub(count, Ordering::Relaxed);
        if before > MOST_CLOSING && before - count <= MOST_CLOSING {
            return Step::Done(Box::new(Reactor::receive_again));
        }
        Step::Nothing
    }
}

impl Worker {
    /// # Errors
    /// [`Error::System`] if no thread can be started.
    pub(crate) fn start(waker: Arc<Waker>) -> Result<(Self, Closers)> {
        let queue = Arc::new(Queue::default());
        let (done, outcomes) = mpsc::channel();
        let closers = Closers::new(done.clone(), Arc::clone(&waker));
        let to_do = Arc::clone(&queue);
        let work = move || {
            while let Some((user, job)) = to_do.next() {
                match job() {
                    Step::More(job) => to_do.add(user, job),
                    // Fails if the loop has ended.
                    Step::Done(outcome) => {
                        if done.send(outcome).is_ok()
                            && let Err(error) = waker.wake()
                        {
                            tracing::error!(%error, "cannot wake the event loop");
                        }
                    }
                    Step::Nothing => {}
                }
            }
        };
        let started = thread::Builder::new().name("worker".to_owned()).spawn(work);
        started.map_err(|error| Error::system("start a thread", error))?;
        Ok((Self { queue, outcomes, closing: Arc::default() }, closers))
    }

    /// Does a user's work elsewhere, when it is that user's turn.
    pub(crate) fn run(&self, uid: u32, job: Job) {
        self.queue.add(Some(uid), job);
    }

    /// What is to be done now.
    pub(crate) fn outcomes(&self) -> Vec<Outcome> {
        self.outcomes.try_iter().collect()
    }

    /// Closes memory, whose last close takes as long as it is large. All that waits is closed in one step.
    pub(crate) fn close(&self, fds: Vec<OwnedFd>) {
        if fds.is_empty() {
            return;
        }
        self.closing.count.fetch_add(fds.len(), Ordering::Relaxed);
        let mut waiting = self.closing.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let begins = waiting.is_empty();
        waiting.extend(fds);
        if begins {
            let closing = Arc::clone(&self.closing);
            self.queue.add(None, Box::new(move || closing.close()));
        }
    }

    /// Whether much memory waits to be closed, so that users may send little more: [`Reactor::receive_again`] follows.
    pub(crate) fn is_behind(&self) -> bool {
        self.closing() > MOST_CLOSING
    }

    /// How many descriptors of memory are not closed yet.
    pub(crate) fn closing(&self) -> usize {
        self.closing.count.load(Ordering::Relaxed)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.queue.end();
    }
}

impl Reactor {
    /// Runs a user's work: here if it is small, else in the worker.
    pub(crate) fn work(&mut self, uid: u32, small: bool, mut next: Job) {
        if !small {
            return self.worker.run(uid, next);
        }
        loop {
            match next() {
                Step::More(job) => next = job,
                Step::Done(outcome) => return outcome(self),
                Step::Nothing => return,
            }
        }
    }
}
