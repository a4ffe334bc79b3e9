//! The turns of threads on a connection, which carries one request at a time.

use std::{
    ops::{Deref, DerefMut},
    sync::{Condvar, Mutex, PoisonError},
    time::Instant,
};

use crate::{
    channel::{Cancel, cancel::CHECK_INTERVAL},
    error::Result,
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
}

/// A turn. It ends when dropped.
#[derive(Debug)]
pub(super) struct Turn<'a> {
    turns: &'a Turns,
    buffer: Vec<u8>,
}

impl Turns {
    pub(super) fn new(buffer: Vec<u8>) -> Self {
        Self { state: Mutex::new(State { buffer: Some(buffer), wanted: 0 }), freed: Condvar::new() }
    }

    /// Waits for a turn. Returns `None` after the deadline.
    ///
    /// # Errors
    /// [`Error::Interrupted`](crate::Error::Interrupted).
    pub(super) fn begin(&self, deadline: Instant, cancel: &Cancel) -> Result<Option<Turn<'_>>> {
        let mut state = lock(&self.state);
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
        Some(Turn { turns: self, buffer: state.buffer.take()? })
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
