//! A thread for work that takes long or may block.

use std::{
    collections::VecDeque,
    os::fd::OwnedFd,
    panic::{self, AssertUnwindSafe},
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
        mpsc::Sender,
    },
    thread,
};

use mio::Waker;

use super::finished::Finished;
use crate::{
    broker::server::{
        state::root::State,
        verbs::{
            connection::work_failed,
            effects::{Effects, Step, Work},
        },
    },
    error::{Error, Result},
};

/// The most memory descriptors that wait to be closed before their users' puts are delayed. Until then they hold memory without a name.
pub(super) const MAX_CLOSING: usize = 256;

enum Task {
    Work(Work),
    Close(Arc<Closing>),
}

/// Tasks per user, next turn first. The server's own tasks have no user.
#[derive(Default)]
struct Turns {
    users: VecDeque<(Option<u32>, VecDeque<Task>)>,
    ended: bool,
}

/// The worker's queue. Users take turns step by step: one user's large tables delay another user by at most one table.
#[derive(Default)]
struct Queue {
    turns: Mutex<Turns>,
    changed: Condvar,
}

impl Queue {
    fn add(&self, user: Option<u32>, task: Task) {
        let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        match turns.users.iter_mut().find(|(of, _)| *of == user) {
            Some((_, tasks)) => tasks.push_back(task),
            None => turns.users.push_back((user, VecDeque::from([task]))),
        }
        // If the lock is held during the notification, the worker wakes only to wait for the lock.
        drop(turns);
        self.changed.notify_one();
    }

    /// The next step and its user, whose next turn follows all other users' turns. Blocks until there is a step; `None` after the end.
    fn next(&self) -> Option<(Option<u32>, Task)> {
        let turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        let waits = |turns: &mut Turns| turns.users.is_empty() && !turns.ended;
        let mut turns = self.changed.wait_while(turns, waits).unwrap_or_else(PoisonError::into_inner);
        let (user, mut tasks) = turns.users.pop_front()?;
        let task = tasks.pop_front()?;
        if !tasks.is_empty() {
            turns.users.push_back((user, tasks));
        }
        Some((user, task))
    }

    /// Stops the worker after the queue is empty.
    fn end(&self) {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner).ended = true;
        self.changed.notify_one();
    }
}

/// A thread for bounded work, including the close of memory.
pub(super) struct Worker {
    queue: Arc<Queue>,
    closing: Arc<Closing>,
}

/// Memory to close.
#[derive(Debug, Default)]
struct Closing {
    waiting: Mutex<Vec<OwnedFd>>,
    /// Including descriptors being closed.
    count: AtomicUsize,
}

impl Closing {
    /// Closes the waiting memory. Returns whether users may now send again.
    fn close(&self) -> bool {
        let fds = std::mem::take(&mut *self.waiting.lock().unwrap_or_else(PoisonError::into_inner));
        let count = fds.len();
        drop(fds);
        let before = self.count.fetch_sub(count, Ordering::Relaxed);
        before > MAX_CLOSING && before - count <= MAX_CLOSING
    }
}

/// Runs a step of work. Returns a result for the event loop, if any. A panic fails the request but not the worker.
fn run(queue: &Queue, task: Task) -> Option<Finished> {
    let Work { client, uid, reserved, job } = match task {
        Task::Close(closing) => return closing.close().then_some(Finished::CaughtUp),
        Task::Work(work) => work,
    };
    match panic::catch_unwind(AssertUnwindSafe(job)) {
        Ok(Step::More(job)) => {
            queue.add(Some(uid), Task::Work(Work { client, uid, reserved, job }));
            None
        }
        Ok(Step::Done(outcome)) => Some(Finished::Work(client, outcome)),
        Err(_) => {
            tracing::error!(uid, "the worker panicked during a request");
            let outcome = move |state: &mut State, effects: &mut Effects| {
                work_failed(state, effects, client, uid, reserved);
            };
            Some(Finished::Work(client, Box::new(outcome)))
        }
    }
}

impl Worker {
    /// # Errors
    /// [`Error::System`] if no thread can be started.
    pub(super) fn start(done: Sender<Finished>, waker: Arc<Waker>) -> Result<Self> {
        let queue = Arc::new(Queue::default());
        let to_do = Arc::clone(&queue);
        let work = move || {
            while let Some((_, task)) = to_do.next() {
                // Fails if the event loop has ended.
                if let Some(finished) = run(&to_do, task)
                    && done.send(finished).is_ok()
                    && let Err(error) = waker.wake()
                {
                    tracing::error!(%error, "cannot wake the event loop");
                }
            }
        };
        let started = thread::Builder::new().name("worker".to_owned()).spawn(work);
        started.map_err(|error| Error::system("start a thread", error))?;
        Ok(Self { queue, closing: Arc::default() })
    }

    /// Queues work for a user's turn.
    pub(super) fn run(&self, work: Work) {
        self.queue.add(Some(work.uid), Task::Work(work));
    }

    /// Queues memory for closing, which takes time in proportion to its size. The worker closes all waiting memory in one step.
    pub(super) fn close(&self, fds: Vec<OwnedFd>) {
        if fds.is_empty() {
            return;
        }
        self.closing.count.fetch_add(fds.len(), Ordering::Relaxed);
        let mut waiting = self.closing.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let begins = waiting.is_empty();
        waiting.extend(fds);
        drop(waiting);
        if begins {
            let closing = Arc::clone(&self.closing);
            self.queue.add(None, Task::Close(closing));
        }
    }

    /// The number of unclosed memory descriptors. [`Finished::CaughtUp`] follows once at most [`MAX_CLOSING`] are left.
    pub(super) fn closing(&self) -> usize {
        self.closing.count.load(Ordering::Relaxed)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.queue.end();
    }
}
