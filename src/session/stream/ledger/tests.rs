//! An exhaustive search: all orders of all events, until no new state appears.

use std::collections::{BTreeSet, HashSet};

use super::*;

/// A ledger with its events, and the buffers that each subscriber was given by these events.
#[derive(Debug, Clone)]
struct Model {
    ledger: Ledger<()>,
    subscribers: &'static [(Policy, usize)],
    loans: Vec<usize>,
    given: Vec<BTreeSet<u64>>,
    /// Whether streams write and read the buffers.
    gpu: bool,
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Lend,
    Drop(usize),
    /// A stream has written the buffer.
    Written(u64),
    /// A stream of the subscriber has finished with a buffer that was given back.
    Finished(usize, u64),
    /// Publishes a loan. The bits name the subscribers whose sockets are full.
    Publish(usize, u32),
    Join(usize),
    Flush(usize),
    /// With whether a stream may still read it.
    GiveBack(usize, u64, bool),
    Leave(usize),
    Gone(usize),
}

impl Model {
    fn new(buffers: usize, limits: Limits, subscribers: &'static [(Policy, usize)]) -> Self {
        let given = vec![BTreeSet::new(); subscribers.len()];
        Self { ledger: Ledger::fixed(1, 1, buffers, limits), subscribers, loans: Vec::new(), given, gpu: false }
    }

    fn on_gpu(self) -> Self {
        Self { gpu: true, ..self }
    }

    fn finishing(&self, index: usize) -> Vec<u64> {
        let member = self.ledger.members.get(&(index as u64));
        member.map_or(Vec::new(), |member| member.given.iter().filter_map(|given| given.finishing).collect())
    }

    fn steps(&self) -> Vec<Step> {
        let mut steps = vec![Step::Lend];
        steps.extend(self.ledger.unwritten.iter().map(|(_, turn)| Step::Written(*turn)));
        for loan in 0..self.loans.len() {
            let full = 0..1 << self.subscribers.len();
            steps.extend(full.map(|full| Step::Publish(loan, full)).chain([Step::Drop(loan)]));
        }
        for (index, given) in self.given.iter().enumerate() {
            match self.ledger.members.get(&(index as u64)).map(|member| member.state) {
                None => steps.push(Step::Join(index)),
                Some(State::Active) => steps.extend([Step::Flush(index), Step::Leave(index), Step::Gone(index)]),
                Some(_) => steps.push(Step::Gone(index)),
            }
            let finishing = self.finishing(index);
            for &number in given {
                if finishing.contains(&number) {
                    steps.push(Step::Finished(index, number));
                } else {
                    steps.push(Step::GiveBack(index, number, false));
                    steps.extend(self.gpu.then_some(Step::GiveBack(index, number, true)));
                }
            }
        }
        steps
    }

    fn run(&mut self, step: Step) {
        match step {
            Step::Lend => self.lend(),
            Step::Drop(loan) => self.ledger.unlend(self.loans.swap_remove(loan)),
            Step::Publish(loan, full) => {
                let turn = self.gpu.then(|| self.ledger.published() + 1);
                self.ledger.publish(self.loans.swap_remove(loan), turn);
                for index in 0..self.subscribers.len() {
                    if full & 1 << index == 0 {
                        self.flush(index);
                    }
                    self.ledger.trim(index as u64);
                }
            }
            Step::Join(index) => {
                let (policy, room) = self.subscribers[index];
                if self.ledger.join(index as u64, policy, room).is_ok() {
                    self.ledger.activate(index as u64, 2);
                }
            }
            Step::Flush(index) => self.flush(index),
            Step::Written(turn) => assert!(self.ledger.written(|other| other == turn)),
            Step::Finished(index, number) => {
                assert!(self.ledger.finished(index as u64, |turn| turn == number));
                self.given[index].remove(&number);
            }
            Step::GiveBack(index, number, is_read) => {
                assert!(self.ledger.give_back(index as u64, number, is_read.then_some(number)));
                assert!(!self.ledger.give_back(index as u64, number, None), "it was given back twice");
                if !is_read {
                    self.given[index].remove(&number);
                }
            }
            Step::Leave(index) => drop(self.ledger.leave(index as u64, |_, _| true)),
            Step::Gone(index) => {
                assert!(!self.ledger.leave(index as u64, |_, _| false));
                self.given[index].clear();
            }
        }
    }

    /// A loan waits for nothing but the publisher's own loans and subscribers that skip nothing.
    fn lend(&mut self) {
        match self.ledger.lend(1) {
            Ok(slot) => self.loans.push(slot),
            Err(Shortage::Loans) => assert_eq!(self.loans.len(), self.ledger.limits.loans),
            // A buffer waits for it, so its time for an eviction runs.
            Err(Shortage::Every(id)) => {
                assert!(self.subscribers[id as usize].0 == Policy::Every && self.ledger.has_waiting(id));
            }
            // The publisher's own streams are late.
            Err(Shortage::Space) => assert!(!self.ledger.is_written(), "no buffer is free: {self:?}"),
        }
    }

    fn flush(&mut self, index: usize) {
        while let Some(slot) = self.ledger.next(index as u64) {
            self.ledger.sent(index as u64);
            assert!(self.given[index].insert(self.ledger.slots[slot].number));
        }
    }

    fn check(&self) {
        let ledger = &self.ledger;
        let mut uses = vec![0; ledger.slots.len()];
        self.loans.iter().for_each(|slot| uses[*slot] += 1);
        ledger.history.iter().for_each(|slot| uses[*slot] += 1);
        ledger.unwritten.iter().for_each(|(slot, _)| uses[*slot] += 1);
        for (index, given) in self.given.iter().enumerate() {
            let member = ledger.members.get(&(index as u64));
            let slots: Vec<_> = member.into_iter().flat_map(|member| &member.given).map(|given| given.slot).collect();
            assert_eq!(slots.iter().map(|slot| ledger.slots[*slot].number).collect::<BTreeSet<_>>(), *given);
            assert!(given.len() <= self.subscribers[index].1);
            let waiting = member.into_iter().flat_map(|member| member.waiting.iter());
            slots.iter().chain(waiting).for_each(|slot| uses[*slot] += 1);
        }
        for (slot, counted) in uses.iter().enumerate() {
            assert_eq!(ledger.slots[slot].uses, *counted, "slot {slot} of {ledger:?}");
            let free = ledger.free.iter().filter(|free| **free == slot).count();
            assert_eq!(free, usize::from(*counted == 0), "slot {slot} is in two states: {ledger:?}");
            let is_loan = self.loans.contains(&slot);
            assert!(!is_loan || *counted == 1, "slot {slot} is on loan and elsewhere: {ledger:?}");
        }
    }

    /// Equal for states that differ only in the numbers of slots and publications.
    fn key(&self) -> Vec<u8> {
        let ledger = &self.ledger;
        let mut published: Vec<usize> = (0..ledger.slots.len()).collect();
        published.retain(|slot| ledger.slots[*slot].uses > 0 && !self.loans.contains(slot));
        published.sort_by_key(|slot| ledger.slots[*slot].number);
        let mut key = vec![self.loans.len() as u8];
        for slot in published {
            let is_unwritten = ledger.unwritten.iter().any(|(other, _)| *other == slot);
            key.push(u8::from(ledger.history.contains(&slot)) + 2 * u8::from(is_unwritten));
            for id in 0..self.subscribers.len() as u64 {
                let member = ledger.members.get(&id);
                key.push(member.map_or(0, |member| {
                    let given = member.given.iter().find(|given| given.slot == slot);
                    let has = given.map_or(0, |given| 1 + 2 * u8::from(given.finishing.is_some()));
                    has + 4 * u8::from(member.waiting.contains(&slot))
                }));
            }
        }
        let states = (0..self.subscribers.len() as u64).map(|id| ledger.members.get(&id).map(|member| member.state));
        key.extend(states.map(|state| state.map_or(9, |state| state as u8)));
        key.extend(ledger.members.values().map(|member| member.backlog as u8));
        key
    }
}

/// Visits all states, and returns their number.
fn search(start: Model) -> usize {
    let mut seen = HashSet::from([start.key()]);
    let mut next = vec![start];
    while let Some(model) = next.pop() {
        for step in model.steps() {
            let mut after = model.clone();
            after.run(step);
            after.check();
            if seen.insert(after.key()) {
                next.push(after);
            }
        }
    }
    seen.len()
}

#[test]
fn loans_wait_only_for_every() {
    const LATEST: (Policy, usize) = (Policy::Latest, 1);
    const QUEUE: (Policy, usize) = (Policy::Queue(2), 1);
    const EVERY: (Policy, usize) = (Policy::Every, 1);
    let one = Limits { history: 1, loans: 1 };
    let two = Limits { history: 0, loans: 2 };
    let states = [
        search(Model::new(5, one, &[LATEST, QUEUE])),
        search(Model::new(5, one, &[EVERY, LATEST])),
        search(Model::new(6, two, &[LATEST, (Policy::Latest, 2)])),
        search(Model::new(6, two, &[QUEUE, EVERY])),
        search(Model::new(6, Limits { history: 2, loans: 1 }, &[LATEST, LATEST])),
        search(Model::new(8, one, &[LATEST, QUEUE, EVERY])),
        // Too few for both: the second is refused until the first is gone.
        search(Model::new(4, one, &[LATEST, LATEST])),
        search(Model::new(4, one, &[QUEUE]).on_gpu()),
        search(Model::new(5, Limits { history: 0, loans: 1 }, &[EVERY, LATEST]).on_gpu()),
    ];
    assert_eq!(states, [690, 498, 351, 274, 2076, 11814, 136, 606, 6657]);
}

#[test]
fn refusals_have_both_numbers() {
    let mut ledger = Ledger::<()>::fixed(1, 1, 8, Limits { history: 2, loans: 1 });
    ledger.join(0, Policy::Latest, 2).unwrap();
    ledger.join(1, Policy::Queue(2), 2).unwrap();
    assert_eq!(ledger.join(2, Policy::Latest, 1), Err(TooFew { needed: 9, buffers: 8 }));
    assert_eq!(ledger.join(2, Policy::Queue(5), 0), Err(TooFew { needed: 10, buffers: 8 }));
    ledger.leave(1, |_, _| false);
    ledger.join(2, Policy::Latest, 2).unwrap();
}

#[test]
fn varying_sizes_drop_what_nobody_has() {
    let mut ledger = Ledger::<()>::varying(4096, Limits { history: 2, loans: 2 });
    ledger.join(0, Policy::Latest, 1).unwrap();
    ledger.activate(0, 0);
    for size in [1024, 1024, 1024] {
        let slot = ledger.lend(size).unwrap();
        ledger.publish(slot, None);
        if ledger.next(0).is_some() {
            ledger.sent(0);
        }
        ledger.trim(0);
    }
    // The subscriber has the first; the others are in the history, and the third waits for it.
    assert_eq!((ledger.free(), ledger.holds(0)), (1024, (1, 1024)));
    assert_eq!(ledger.lend(4096), Err(Shortage::Space));
    assert_eq!((ledger.free(), ledger.tally(0)), (3072, Tally { delivered: 1, skipped: 2 }));
    let slot = ledger.lend(3072).unwrap();
    assert_eq!(ledger.range(slot), (1024, 3072));
    ledger.unlend(slot);
    assert!(ledger.give_back(0, 1, None) && !ledger.leave(0, |_, _| true));
    assert_eq!(ledger.free(), 4096);
}
