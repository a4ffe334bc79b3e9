//! The search visits every reachable state, breadth first, so it finds the shortest path to an invalid state.

use std::{
    collections::{HashSet, VecDeque},
    hash::{BuildHasher, BuildHasherDefault, Hasher},
};

use super::{
    steps::{Action, Model},
    world::World,
};

/// The result of a search.
#[derive(Debug)]
pub(super) struct Searched {
    pub(super) states: usize,
    /// The number of actions to the deepest state.
    pub(super) depth: usize,
}

/// An invalid state, and the actions that lead to it.
#[derive(Debug)]
pub(super) struct Wrong {
    pub(super) what: String,
    pub(super) actions: Vec<Action>,
}

/// The predecessor of a state, and the action between them.
struct Reached {
    from: usize,
    action: Action,
}

/// A hash that is fast without compiler optimisation: one multiplication per field.
#[derive(Debug, Default)]
struct Mixer(u64);

impl Hasher for Mixer {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(byte.into()));
    }

    fn write_u8(&mut self, value: u8) {
        self.write_u64(value.into());
    }

    fn write_usize(&mut self, value: usize) {
        self.write_u64(value as u64);
    }

    fn write_isize(&mut self, value: isize) {
        self.write_u64(value as u64);
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = (self.0.rotate_left(26) ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 ^= self.0 >> 32;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// Visits every state. Two states with the same 64-bit hash count as one.
///
/// # Errors
/// The first invalid state.
pub(super) fn search(model: Model, first: World, mut seen_by: impl FnMut(&World, &Action)) -> Result<Searched, Wrong> {
    let hasher = BuildHasherDefault::<Mixer>::default();
    let mut seen = HashSet::from([hasher.hash_one(&first)]);
    let mut reached: Vec<Reached> = Vec::new();
    let mut frontier = VecDeque::from([(first, 0, 0)]);
    let mut deepest = 0;
    while let Some((world, number, depth)) = frontier.pop_front() {
        deepest = depth;
        for action in model.actions(&world) {
            seen_by(&world, &action);
            match model.next(&world, action) {
                Ok(next) => {
                    if seen.insert(hasher.hash_one(&next)) {
                        reached.push(Reached { from: number, action });
                        frontier.push_back((next, reached.len(), depth + 1));
                    }
                }
                Err(what) => {
                    let mut actions = way(&reached, number);
                    actions.push(action);
                    return Err(Wrong { what, actions });
                }
            }
        }
    }
    Ok(Searched { states: seen.len(), depth: deepest })
}

fn way(reached: &[Reached], mut number: usize) -> Vec<Action> {
    let mut actions = Vec::new();
    while let Some(Reached { from, action }) = number.checked_sub(1).map(|at| &reached[at]) {
        actions.push(*action);
        number = *from;
    }
    actions.reverse();
    actions
}
