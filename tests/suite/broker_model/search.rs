//! The search: every state that can come about, breadth first, and so the shortest way to one that is wrong.

use std::{
    collections::{HashSet, VecDeque},
    hash::{BuildHasher, BuildHasherDefault, Hasher},
};

use super::{
    steps::{Action, Model},
    world::World,
};

/// What a search came to.
#[derive(Debug)]
pub(super) struct Searched {
    pub(super) states: usize,
    /// How many actions it takes to come to the last of them.
    pub(super) depth: usize,
}

/// A state that is wrong, and how it came about.
#[derive(Debug)]
pub(super) struct Wrong {
    pub(super) what: String,
    pub(super) actions: Vec<Action>,
}

/// How a state was reached: from which, and by what.
struct Reached {
    from: usize,
    action: Action,
}

/// A hash that is fast without optimisation: a multiplication for each field.
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

/// Looks at every state. Two of one hash of 64 bits pass for one.
///
/// # Errors
/// The first that is wrong.
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

/// The actions that lead to a state.
fn way(reached: &[Reached], mut number: usize) -> Vec<Action> {
    let mut actions = Vec::new();
    while let Some(Reached { from, action }) = number.checked_sub(1).map(|at| &reached[at]) {
        actions.push(*action);
        number = *from;
    }
    actions.reverse();
    actions
}
