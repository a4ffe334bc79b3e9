//! The turns of threads on a connection, which carries one request at a time.

use std::{
    ops::{Deref, DerefMut},
    sync::{Condvar, Mutex, PoisonError},
    time::{Duration, Instant},
};

use crate::{
    channel::{Cancel, cancel::CHECK_INTERVAL},
    error::Result,
    sys::lock,
};

/// How long a request that waits in the broker lasts before another thread that waits too pauses it again.
const SLICE: Duration = Duration::from_millis(100);

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
    wanted: u64,
    /// How many threads wait until others have had their turn.
    passing: u64,
    /// How many turns have begun.
    begun: u64,
    /// Whether the request of the current turn waits in the broker, and may be stopped and repeated.
    can_pause: bool,
}

/// A turn. It ends when dropped.
#[derive(Debug)]
pub(super) struct Turn<'a> {
    turns: &'a Turns,
    buffer: Vec<u8>,
}

impl Turns {
    pub(super) fn new(buffer: Vec<u8>) -> Self {
        let state = State { buffer: Some(buffer), wanted: 0, passing: 0, begun: 0, can_pause: false };
        Self { state: Mutex::new(state), freed: Condvar::new() }
    }

    /// Waits for a turn. Calls `pause` if the current turn's request may be paused. Returns `None` after the deadline.
    ///
    /// # Errors
    /// [`Error::Interrupted`](crate::Error::Interrupted).
    pub(super) fn begin(&self, deadline: Instant, cancel: &Cancel, pause: impl Fn()) -> Result<Option<Turn<'_>>> {
        let mut state = lock(&self.state);
        state.wanted += 1;
        let mut pause_at = Instant::now();
        let mut checked = Ok(());
        while state.buffer.is_none() && checked.is_ok() {
            let now = Instant::now();
            if state.can_pause && now >= pause_at {
                pause();
                pause_at = now + SLICE;
            }
            if now >= deadline {
                break;
            }
            let left = CHECK_INTERVAL.min(deadline - now);
            state = self.freed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
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
        state.begun += 1;
        state.can_pause = false;
        Some(Turn { turns: self, buffer })
    }

    /// Runs a short function while no turn begins or ends. Passes the number of the current turn, if there is one.
    pub(super) fn exclusively<T>(&self, work: impl FnOnce(Option<u64>) -> T) -> T {
        let state = lock(&self.state);
        work(state.buffer.is_none().then_some(state.begun))
    }

    /// Sets whether other threads may pause the request of the current turn.
    pub(super) fn allow_pause(&self, allowed: bool) {
        lock(&self.state).can_pause = allowed;
    }

    /// Whether the request of the current turn should be paused.
    pub(super) fn is_wanted(&self) -> bool {
        let state = lock(&self.state);
        state.can_pause && state.wanted > 0
    }
}

impl<'a> Turn<'a> {
    /// Lets the threads that wait have their turns first, for at least a slice of time, and then begins another turn.
    ///
    /// # Errors
    /// As [`Turns::begin`].
    pub(super) fn pass(self, deadline: Instant, cancel: &Cancel, pause: impl Fn()) -> Result<Option<Turn<'a>>> {
        let turns = self.turns;
        let others = {
            let state = lock(&turns.state);
            state.begun + state.wanted
        };
        drop(self);
        let until = deadline.min(Instant::now() + SLICE);
        let mut state = lock(&turns.state);
        while state.buffer.is_none() || (state.wanted > 0 && state.begun < others) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state.passing += 1;
            state = turns.freed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            state.passing -= 1;
        }
        drop(state);
        turns.begin(deadline, cancel, pause)
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
        state.can_pause = false;
        // A notification is a system call.
        if state.wanted + state.passing > 0 {
            self.turns.freed.notify_all();
        }
    }
}
