//! Access to a buffer: many readers at a time or one writer, in order of arrival.

use std::{
    collections::VecDeque,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use crate::error::Result;

/// The kind of access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    Shared,
    Exclusive,
}

#[derive(Debug, Default)]
pub(super) struct Gate {
    state: Mutex<Turns>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Turns {
    tickets: u64,
    waiting: VecDeque<u64>,
    readers: usize,
    writing: bool,
}

impl Gate {
    /// Waits for a turn, which lasts until the guard is dropped. Calls `tick` at least every `interval`, without the lock. If `tick` fails,
    /// the wait fails with its error.
    pub(super) fn enter(
        &self,
        turn: Turn,
        interval: Duration,
        tick: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Entered<'_>> {
        let mut state = self.lock();
        state.tickets += 1;
        let ticket = state.tickets;
        state.waiting.push_back(ticket);
        loop {
            let first = state.waiting.front() == Some(&ticket);
            if first && !state.writing && (turn == Turn::Shared || state.readers == 0) {
                state.waiting.pop_front();
                match turn {
                    Turn::Shared => state.readers += 1,
                    Turn::Exclusive => state.writing = true,
                }
                // The next in line may share this turn.
                self.changed.notify_all();
                return Ok(Entered { gate: self, turn });
            }
            drop(self.changed.wait_timeout(state, interval).unwrap_or_else(PoisonError::into_inner));
            let ticked = tick();
            state = self.lock();
            if let Err(error) = ticked {
                state.waiting.retain(|waiting| *waiting != ticket);
                self.changed.notify_all();
                return Err(error);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Turns> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A turn, until it is dropped.
#[derive(Debug)]
pub(super) struct Entered<'a> {
    gate: &'a Gate,
    turn: Turn,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut state = self.gate.lock();
        match self.turn {
            Turn::Shared => state.readers -= 1,
            Turn::Exclusive => state.writing = false,
        }
        self.gate.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::error::{Error, LoadError};

    const INTERVAL: Duration = Duration::from_millis(100);

    fn give_up() -> Result<()> {
        Err(Error::Load(LoadError::NoDevice))
    }

    #[test]
    fn readers_share_writers_wait() {
        let gate = Gate::default();
        let first = gate.enter(Turn::Shared, INTERVAL, &mut give_up).unwrap();
        let second = gate.enter(Turn::Shared, INTERVAL, &mut give_up).unwrap();
        assert!(gate.enter(Turn::Exclusive, INTERVAL, &mut give_up).is_err());
        drop((first, second));
        let alone = gate.enter(Turn::Exclusive, INTERVAL, &mut give_up).unwrap();
        assert!(gate.enter(Turn::Shared, INTERVAL, &mut give_up).is_err());
        drop(alone);
        gate.enter(Turn::Shared, INTERVAL, &mut give_up).unwrap();
    }

    #[test]
    fn abandoned_wait_does_not_block_queue() {
        let gate = Gate::default();
        let reader = gate.enter(Turn::Shared, INTERVAL, &mut give_up).unwrap();
        assert!(gate.enter(Turn::Exclusive, INTERVAL, &mut give_up).is_err());
        drop(gate.enter(Turn::Shared, INTERVAL, &mut give_up).unwrap());
        drop(reader);
    }

    #[test]
    fn exclusive_turns_do_not_overlap() {
        let gate = Gate::default();
        let inside = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        let _turn = gate.enter(Turn::Exclusive, INTERVAL, &mut || Ok(())).unwrap();
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                        std::thread::yield_now();
                        assert_eq!(inside.fetch_sub(1, Ordering::SeqCst), 1);
                    }
                });
            }
        });
    }
}
