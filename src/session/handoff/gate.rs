//! Turns on a buffer: many readers at a time, or one alone, in the order in which they came.

use std::{
    collections::VecDeque,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use crate::error::Result;

/// Whether a turn can be shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    Shared,
    Alone,
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
    sharing: usize,
    alone: bool,
}

impl Gate {
    /// Waits for a turn, which lasts until the guard is dropped. Calls `tick` as often as `every` says; its error ends the
    /// waiting.
    pub(super) fn enter(
        &self,
        turn: Turn,
        every: Duration,
        tick: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Entered<'_>> {
        let mut state = self.lock();
        state.tickets += 1;
        let ticket = state.tickets;
        state.waiting.push_back(ticket);
        loop {
            let first = state.waiting.front() == Some(&ticket);
            if first && !state.alone && (turn == Turn::Shared || state.sharing == 0) {
                state.waiting.pop_front();
                match turn {
                    Turn::Shared => state.sharing += 1,
                    Turn::Alone => state.alone = true,
                }
                // The next one may be able to share.
                self.changed.notify_all();
                return Ok(Entered { gate: self, turn });
            }
            let (woken, _) = self.changed.wait_timeout(state, every).unwrap_or_else(PoisonError::into_inner);
            drop(woken);
            // Without the lock: it may send.
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

/// A turn.
#[derive(Debug)]
pub(super) struct Entered<'a> {
    gate: &'a Gate,
    turn: Turn,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut state = self.gate.lock();
        match self.turn {
            Turn::Shared => state.sharing -= 1,
            Turn::Alone => state.alone = false,
        }
        self.gate.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::error::{Error, LoadError};

    const EVERY: Duration = Duration::from_millis(100);

    fn give_up() -> Result<()> {
        Err(Error::Load(LoadError::NoDevice))
    }

    #[test]
    fn readers_share_and_a_writer_waits_for_them() {
        let gate = Gate::default();
        let first = gate.enter(Turn::Shared, EVERY, &mut give_up).unwrap();
        let second = gate.enter(Turn::Shared, EVERY, &mut give_up).unwrap();
        assert!(gate.enter(Turn::Alone, EVERY, &mut give_up).is_err());
        drop((first, second));
        let alone = gate.enter(Turn::Alone, EVERY, &mut give_up).unwrap();
        assert!(gate.enter(Turn::Shared, EVERY, &mut give_up).is_err());
        drop(alone);
        gate.enter(Turn::Shared, EVERY, &mut give_up).unwrap();
    }

    #[test]
    fn a_waiter_that_gives_up_does_not_block_those_behind() {
        let gate = Gate::default();
        let reader = gate.enter(Turn::Shared, EVERY, &mut give_up).unwrap();
        assert!(gate.enter(Turn::Alone, EVERY, &mut give_up).is_err());
        drop(gate.enter(Turn::Shared, EVERY, &mut give_up).unwrap());
        drop(reader);
    }

    #[test]
    fn a_turn_alone_is_never_shared() {
        let (gate, inside) = (Gate::default(), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        let _turn = gate.enter(Turn::Alone, EVERY, &mut || Ok(())).unwrap();
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                        std::thread::yield_now();
                        assert_eq!(inside.fetch_sub(1, Ordering::SeqCst), 1);
                    }
                });
            }
        });
    }
}
