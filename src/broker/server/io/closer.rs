//! Closes descriptors that other processes can block, away from the event loop.
//!
//! A peer can make close(2) of its descriptors block indefinitely: a TCP socket with `SO_LINGER`, or a file whose FUSE daemon does not
//! answer. This also applies to a connection with such descriptors in its queue, because the kernel closes them in the thread that closes
//! the connection.
//!
//! Each user has its own thread and limit, so blocked closes affect only their sender.

use std::{
    collections::{HashMap, VecDeque},
    io,
    os::fd::OwnedFd,
    sync::{Arc, Mutex, PoisonError, mpsc::Sender},
    thread,
};

use mio::Waker;
use rustix::net::{RecvFlags, Shutdown, recv, shutdown, sockopt};

use super::finished::{Closed, Finished};
use crate::{
    broker::server::verbs::effects::Origin,
    channel::record::{Next, is_gone, peek},
};

/// The most unclosed descriptors per user. Beyond that, the user's connections are refused.
const MAX_BLOCKED: usize = 256;

/// The most closer threads. Further users wait.
const MAX_THREADS: usize = 64;

/// The most records to discard before a thread closes the connection instead.
const MAX_DISCARDED: usize = 16;

/// A user's unclosed descriptors.
#[derive(Debug, Default)]
struct CloseQueue {
    waiting: Vec<OwnedFd>,
    /// Waiting descriptors that count towards the user's connection limit.
    connections: usize,
    /// Including descriptors being closed.
    descriptors: usize,
    /// Descriptors that are not connections.
    files: usize,
    /// Whether the user has a thread or waits for one.
    busy: bool,
}

/// The closer threads and their queues.
#[derive(Debug)]
pub(super) struct Closers {
    queues: HashMap<Origin, CloseQueue>,
    /// Users waiting for a thread.
    turns: VecDeque<Origin>,
    threads: usize,
    descriptors: usize,
    done: Sender<Finished>,
    waker: Arc<Waker>,
}

impl Closers {
    pub(super) fn new(done: Sender<Finished>, waker: Arc<Waker>) -> Self {
        Self { queues: HashMap::new(), turns: VecDeque::new(), threads: 0, descriptors: 0, done, waker }
    }

    /// The number of unclosed descriptors.
    pub(super) fn descriptors(&self) -> usize {
        self.descriptors
    }

    /// A user's unclosed descriptors, without connections counted for the user.
    pub(super) fn files_of(&self, uid: u32) -> usize {
        self.queues.get(&Some(uid)).map_or(0, |queue| queue.files)
    }

    /// Refuses a user with too many unclosed descriptors.
    pub(super) fn check(&self, uid: u32) -> Result<(), String> {
        let blocked = self.queues.get(&Some(uid)).map_or(0, |queue| queue.descriptors);
        if blocked < MAX_BLOCKED {
            return Ok(());
        }
        Err(format!(
            "{blocked} descriptors sent by uid {uid} are still being closed, and the limit is {MAX_BLOCKED}: connect again \
            when they are closed"
        ))
    }

    /// Closes descriptors in a thread. `connections` of them count towards the user's connection limit until they are closed.
    pub(super) fn close(&mut self, of: Origin, fds: Vec<OwnedFd>, connections: usize) {
        if fds.is_empty() {
            return;
        }
        self.descriptors += fds.len();
        let queue = self.queues.entry(of).or_default();
        queue.descriptors += fds.len();
        queue.files += fds.len() - connections;
        queue.connections += connections;
        queue.waiting.extend(fds);
        if !queue.busy {
            queue.busy = true;
            self.turns.push_back(of);
        }
        self.start();
    }

    pub(super) fn start(&mut self) {
        while self.threads < MAX_THREADS
            && let Some(of) = self.turns.pop_front()
        {
            let Some(queue) = self.queues.get_mut(&of) else { continue };
            let fds = std::mem::take(&mut queue.waiting);
            let connections = std::mem::take(&mut queue.connections);
            let count = fds.len();
            let done = self.done.clone();
            let waker = Arc::clone(&self.waker);
            // Shared, so that a failed spawn does not close them here.
            let fds = Arc::new(Mutex::new(fds));
            let to_close = Arc::clone(&fds);
            let close = move || {
                drop(std::mem::take(&mut *to_close.lock().unwrap_or_else(PoisonError::into_inner)));
                // Fails if the event loop has ended.
                let closed = Finished::Closed(Closed { of, count, connections });
                if done.send(closed).is_ok()
                    && let Err(error) = waker.wake()
                {
                    tracing::error!(%error, "cannot wake the event loop");
                }
            };
            if let Err(error) = thread::Builder::new().name("closer".to_owned()).spawn(close) {
                tracing::error!(%error, "cannot start a thread to close descriptors: retrying");
                queue.waiting = std::mem::take(&mut *fds.lock().unwrap_or_else(PoisonError::into_inner));
                queue.connections = connections;
                self.turns.push_front(of);
                return;
            }
            self.threads += 1;
        }
    }

    /// Whether users still wait because a thread could not be started.
    pub(super) fn wants_thread(&self) -> bool {
        self.threads < MAX_THREADS && !self.turns.is_empty()
    }

    /// Handles the result of a thread.
    pub(super) fn closed(&mut self, Closed { of, count, connections }: Closed) {
        self.threads -= 1;
        self.descriptors -= count;
        if let Some(queue) = self.queues.get_mut(&of) {
            queue.descriptors -= count;
            queue.files -= count - connections;
            if queue.waiting.is_empty() {
                self.queues.remove(&of);
            } else {
                self.turns.push_back(of);
            }
        }
        self.start();
    }
}

/// Shuts a connection down and discards queued records without descriptors. Returns whether the queue is empty, so that close(2) can't
/// block. Does not block.
pub(super) fn is_drained(socket: &OwnedFd) -> bool {
    // From here on, the peer's sends fail and the queue can't grow.
    let ended = shutdown(socket, Shutdown::Both);
    // Lets `peek` distinguish an empty record from the end of the stream.
    if ended.and_then(|()| sockopt::set_socket_passcred(socket, true)).is_err() {
        return false;
    }
    for _ in 0..MAX_DISCARDED {
        match peek(socket) {
            Ok(Next::End) => return true,
            Ok(Next::Record { descriptors: true }) => return false,
            Ok(Next::Record { descriptors: false }) => {
                if recv(socket, &mut [0; 1][..], RecvFlags::DONTWAIT).is_err() {
                    return false;
                }
            }
            // A reset is reported once, before queued records.
            Err(error) if is_gone(&error) || error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return false,
        }
    }
    false
}
