//! The turns of threads on a connection, which carries one request at a time, and requests that wait in the broker. Each of those has a
//! connection of its own, so that no other request waits for it, and its end costs nothing else.

use std::{
    net::Shutdown,
    ops::{Deref, DerefMut},
    os::unix::net::UnixStream,
    ptr,
    sync::{
        Arc, Condvar, Mutex, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use crate::{
    channel::{Cancel, cancel::CHECK_INTERVAL},
    error::{BrokerError, Error, RefusalCode, Result},
    sys::lock,
};

/// Gives the receive buffer to one thread at a time. Only that thread makes requests.
#[derive(Debug)]
pub(super) struct Turns {
    state: Mutex<State>,
    freed: Condvar,
}

#[derive(Debug)]
struct State {
    /// `None` while a thread has it.
    buffer: Option<Vec<u8>>,
    /// How many threads wait for a turn.
    wanted: usize,
    /// The thread of the last turn.
    thread: usize,
}

/// A nonzero number of the calling thread.
fn this_thread() -> usize {
    thread_local!(static MARK: u8 = const { 0 });
    MARK.with(|mark| ptr::from_ref(mark).addr())
}

/// A turn. It ends when dropped.
#[derive(Debug)]
pub(super) struct Turn<'a> {
    turns: &'a Turns,
    buffer: Vec<u8>,
}

impl Turns {
    pub(super) fn new(buffer: Vec<u8>) -> Self {
        Self { state: Mutex::new(State { buffer: Some(buffer), wanted: 0, thread: 0 }), freed: Condvar::new() }
    }

    /// Waits for a turn. Returns `None` after the deadline.
    ///
    /// # Errors
    /// [`Error::Misuse`] if this thread has the turn: its program's check must not wait for another. [`Error::Interrupted`].
    pub(super) fn begin(&self, deadline: Instant, cancel: &Cancel) -> Result<Option<Turn<'_>>> {
        let mut state = lock(&self.state);
        if state.buffer.is_none() && state.thread == this_thread() {
            let problem = "a check of `Cancel::with_check` used the connection to the broker whose request it checks";
            return Err(Error::Misuse { problem: problem.to_owned() });
        }
        state.wanted += 1;
        let mut checked = Ok(());
        while state.buffer.is_none() && checked.is_ok() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = self.freed.wait_timeout(state, left.min(CHECK_INTERVAL)).unwrap_or_else(PoisonError::into_inner).0;
            // The check may take long, and make requests on other connections.
            drop(state);
            checked = cancel.check_now();
            state = lock(&self.state);
        }
        state.wanted -= 1;
        checked.map(|()| self.take(&mut state))
    }

    /// Returns a turn if no thread has one.
    pub(super) fn try_begin(&self) -> Option<Turn<'_>> {
        self.take(&mut lock(&self.state))
    }

    fn take(&self, state: &mut State) -> Option<Turn<'_>> {
        let buffer = state.buffer.take()?;
        state.thread = this_thread();
        Some(Turn { turns: self, buffer })
    }
}

impl Deref for Turn<'_> {
    type Target = Vec<u8>;

    fn deref(&self) -> &Vec<u8> {
        &self.buffer
    }
}

impl DerefMut for Turn<'_> {
    fn deref_mut(&mut self) -> &mut Vec<u8> {
        &mut self.buffer
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.turns.state);
        state.buffer = Some(std::mem::take(&mut self.buffer));
        // A notification is a system call.
        if state.wanted > 0 {
            self.turns.freed.notify_one();
        }
    }
}

/// The waits of a client, which [`Client::stop`](super::Client::stop) ends.
#[derive(Debug, Default)]
pub(super) struct Waits {
    stops: AtomicU64,
    sockets: Mutex<Vec<Weak<UnixStream>>>,
}

/// A wait of a socket. It ends when dropped.
pub(super) struct Waiting<'a> {
    waits: &'a Waits,
    socket: Arc<UnixStream>,
}

impl Waits {
    /// The number of stops.
    pub(super) fn stops(&self) -> u64 {
        self.stops.load(Ordering::Acquire)
    }

    /// Adds a wait that started at the stop `since`.
    ///
    /// # Errors
    /// [`Waits::check`].
    pub(super) fn add(&self, socket: Arc<UnixStream>, since: u64) -> Result<Waiting<'_>> {
        lock(&self.sockets).push(Arc::downgrade(&socket));
        let waiting = Waiting { waits: self, socket };
        self.check(since)?;
        Ok(waiting)
    }

    /// # Errors
    /// [`Error::Broker`] with the code `stopped` if the waits were stopped after the stop `since`.
    pub(super) fn check(&self, since: u64) -> Result<()> {
        match self.stops() == since {
            true => Ok(()),
            false => Err(Error::Broker(BrokerError::new(RefusalCode::Stopped, "the wait was stopped"))),
        }
    }

    /// Ends all waits: their sockets are closed in both directions.
    pub(super) fn stop(&self) {
        self.stops.fetch_add(1, Ordering::AcqRel);
        for socket in lock(&self.sockets).iter().filter_map(Weak::upgrade) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        lock(&self.waits.sockets).retain(|socket| !ptr::eq(socket.as_ptr(), &raw const *self.socket));
    }
}
