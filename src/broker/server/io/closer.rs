//! Closes what other processes may keep from closing, away from the event loop.
//!
//! close(2) of a descriptor that a peer sent blocks for as long as the peer likes: of a TCP socket with `SO_LINGER`, or of a file
//! whose FUSE daemon does not answer. The same holds for a connection whose queue has records with such descriptors, since the
//! kernel drops them in the thread that closes the connection.
//!
//! Each user has a thread at a time and a bound, so that blocked closes delay and refuse the connections of their sender alone.

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

/// The most descriptors of a user that are not closed yet: its connections are refused beyond.
const MOST_BLOCKED: usize = 256;

/// The most threads that close: the users beyond wait for one.
const MOST_THREADS: usize = 64;

/// How many queued records without descriptors are discarded for a connection to be closed on the event loop.
const FEW: usize = 16;

/// What a user's thread closes next, and how much it has not closed.
#[derive(Debug, Default)]
struct Queue {
    waiting: Vec<OwnedFd>,
    /// How many of the waiting descriptors are connections that count as the user's.
    connections: usize,
    /// Those that are being closed included.
    descriptors: usize,
    /// The descriptors among them that are no connections.
    files: usize,
    /// Whether it has a thread, or waits for one.
    busy: bool,
}

/// The threads that close, and what waits for them.
#[derive(Debug)]
pub(super) struct Closers {
    queues: HashMap<Origin, Queue>,
    /// Users that wait for a thread.
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

    /// How many descriptors are not closed yet.
    pub(super) fn descriptors(&self) -> usize {
        self.descriptors
    }

    /// How many of a user's are not closed yet, besides connections that count as the user's.
    pub(super) fn files_of(&self, uid: u32) -> usize {
        self.queues.get(&Some(uid)).map_or(0, |queue| queue.files)
    }

    /// Why a user may send nothing more, if so many of its descriptors are not closed.
    pub(super) fn check(&self, uid: u32) -> Result<(), String> {
        let blocked = self.queues.get(&Some(uid)).map_or(0, |queue| queue.descriptors);
        if blocked < MOST_BLOCKED {
            return Ok(());
        }
        Err(format!(
            "the broker can't close {blocked} descriptors that uid {uid} sent, and the limit is {MOST_BLOCKED}: it serves that user \
             again when they are closed"
        ))
    }

    /// Closes descriptors in a thread. `connections` of them count as connections of the user until then.
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

    /// Starts as many threads as may run.
    pub(super) fn start(&mut self) {
        while self.threads < MOST_THREADS
            && let Some(of) = self.turns.pop_front()
        {
            let Some(queue) = self.queues.get_mut(&of) else { continue };
            let (fds, connections) = (std::mem::take(&mut queue.waiting), std::mem::take(&mut queue.connections));
            let (count, done, waker) = (fds.len(), self.done.clone(), Arc::clone(&self.waker));
            // Shared, so that a thread that does not start leaves them open.
            let fds = Arc::new(Mutex::new(fds));
            let to_close = Arc::clone(&fds);
            let close = move || {
                drop(std::mem::take(&mut *to_close.lock().unwrap_or_else(PoisonError::into_inner)));
                // Fails if the loop has ended.
                let closed = Finished::Closed(Closed { of, count, connections });
                if done.send(closed).is_ok()
                    && let Err(error) = waker.wake()
                {
                    tracing::error!(%error, "cannot wake the event loop");
                }
            };
            if let Err(error) = thread::Builder::new().name("closer".to_owned()).spawn(close) {
                tracing::error!(%error, "no thread can be started that closes descriptors: it is tried again");
                queue.waiting = std::mem::take(&mut *fds.lock().unwrap_or_else(PoisonError::into_inner));
                queue.connections = connections;
                self.turns.push_front(of);
                return;
            }
            self.threads += 1;
        }
    }

    /// Whether users wait for a thread that could not be started.
    pub(super) fn wants_thread(&self) -> bool {
        self.threads < MOST_THREADS && !self.turns.is_empty()
    }

    /// A thread has closed so many descriptors.
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

/// Ends both directions of a connection, and discards queued records without descriptors. Returns whether none is left, so that
/// close(2) drops nothing. Does not block.
pub(super) fn is_drained(socket: &OwnedFd) -> bool {
    // From here on the peer's sends fail, so the queue does not grow.
    let ended = shutdown(socket, Shutdown::Both);
    // Distinguishes an empty record from the end.
    if ended.and_then(|()| sockopt::set_socket_passcred(socket, true)).is_err() {
        return false;
    }
    for _ in 0..FEW {
        match peek(socket) {
            Ok(Next::End) => return true,
            Ok(Next::Record { descriptors: true }) => return false,
            Ok(Next::Record { descriptors: false }) => {
                if recv(socket, &mut [0; 1][..], RecvFlags::DONTWAIT).is_err() {
                    return false;
                }
            }
            // A reset is reported once, ahead of queued records.
            Err(error) if is_gone(&error) || error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return false,
        }
    }
    false
}
