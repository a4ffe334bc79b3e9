//! Who has which buffer: the pool, the subscribers' rooms and queues, and the history. Pure state, without sockets and clocks.
//!
//! A buffer is free, on loan to the publisher, or published. A published buffer returns to the pool when nothing refers to it: no
//! subscriber has it, it waits for no subscriber, it is not in the history, and no GPU works on it: not the publisher's, and not that of a
//! subscriber that gave it back. So no stream waits for a free buffer. The buffers that wait are always the last publications, so
//! all queues together need only as many buffers as the longest.

use std::collections::{BTreeMap, VecDeque};

use super::{options::Policy, space::Space};

/// The buffers and their users. `T` is the data of a publication, whose allocations are reused.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(super) struct Ledger<T> {
    slots: Vec<Slot<T>>,
    /// Slots without a buffer (varying sizes), or with a free buffer (fixed size).
    free: Vec<usize>,
    /// `None` if all buffers have one size.
    space: Option<Space>,
    members: BTreeMap<u64, Member>,
    /// The last publications, oldest first.
    history: VecDeque<usize>,
    /// The publications that the publisher's streams may not have written yet, each with its turn.
    unwritten: Vec<(usize, u64)>,
    limits: Limits,
    /// The number of buffers on loan.
    loaned: usize,
    published: u64,
}

/// The publisher's own limits.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub(super) history: usize,
    pub(super) loans: usize,
}

/// A buffer.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
struct Slot<T> {
    offset: u64,
    size: u64,
    /// The number of its publication.
    number: u64,
    /// How many subscribers have it or will receive it, plus 1 while it is in the history, while it is on loan, and while it may not be
    /// written yet.
    uses: u32,
    data: T,
}

/// A subscriber.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
struct Member {
    policy: Policy,
    /// The most buffers that it has at a time.
    room: usize,
    /// The buffers that it was given and has not given back, oldest first.
    given: Vec<Given>,
    /// The buffers that wait for it, oldest first.
    waiting: VecDeque<usize>,
    /// How many may wait although its queue is shorter: what remains of the history that it asked for.
    backlog: usize,
    state: State,
    tally: Tally,
}

/// A buffer that a subscriber has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Given {
    slot: usize,
    /// The turn after which its streams do not use the buffer, once it is given back.
    finishing: Option<u64>,
}

/// The counts of a subscriber.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Tally {
    pub(super) delivered: u64,
    pub(super) skipped: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// It maps the pool, and receives nothing yet.
    Joining,
    Active,
    /// It receives nothing more, and may still have buffers.
    Former,
}

/// Why no buffer can be lent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shortage {
    /// The publisher has all its loans.
    Loans,
    /// This subscriber with the policy `every` has no room.
    Every(u64),
    /// No buffer, or no range of this size, is free.
    Space,
}

/// Why a subscriber is refused: the pool would need more buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TooFew {
    pub(super) needed: usize,
    pub(super) buffers: usize,
}

impl<T: Default> Ledger<T> {
    /// A pool of `count` buffers of one size, `stride` bytes apart.
    pub(super) fn fixed(size: u64, stride: u64, count: usize, limits: Limits) -> Self {
        let mut ledger = Self::empty(None, limits);
        ledger.slots = (0..count as u64).map(|index| Slot::at(index * stride, size)).collect();
        // The first is taken first.
        ledger.free = (0..count).rev().collect();
        ledger
    }

    /// A pool of `bytes` for buffers of any size.
    pub(super) fn varying(bytes: u64, limits: Limits) -> Self {
        Self::empty(Some(Space::new(bytes)), limits)
    }

    fn empty(space: Option<Space>, limits: Limits) -> Self {
        let (slots, free, members, history) = (Vec::new(), Vec::new(), BTreeMap::new(), VecDeque::new());
        Self { slots, free, space, members, history, unwritten: Vec::new(), limits, loaned: 0, published: 0 }
    }

    /// Lends a buffer of this size to the publisher. In a pool of varying sizes, the history and then buffers that wait make room, oldest
    /// first, except for subscribers with the policy `every`.
    pub(super) fn lend(&mut self, size: u64) -> Result<usize, Shortage> {
        if self.loaned >= self.limits.loans {
            return Err(Shortage::Loans);
        }
        let full = self.members.iter().find(|(_, member)| member.stops_publisher());
        if let Some((&id, _)) = full {
            return Err(Shortage::Every(id));
        }
        let slot = loop {
            match self.take(size) {
                Some(slot) => break slot,
                None if self.drop_oldest() => {}
                None => return Err(Shortage::Space),
            }
        };
        self.slots[slot].uses = 1;
        self.loaned += 1;
        Ok(slot)
    }

    fn take(&mut self, size: u64) -> Option<usize> {
        let Some(space) = &mut self.space else {
            let slot = self.free.pop()?;
            self.slots[slot].size = size;
            return Some(slot);
        };
        let offset = space.take(size)?;
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::at(0, 0));
            self.slots.len() - 1
        });
        (self.slots[slot].offset, self.slots[slot].size) = (offset, size);
        Some(slot)
    }

    /// Drops the oldest publication of the history, or the oldest that waits for a subscriber, except for the policy `every`. Only with
    /// varying sizes.
    fn drop_oldest(&mut self) -> bool {
        if self.space.is_none() {
            return false;
        }
        if let Some(slot) = self.history.pop_front() {
            self.release(slot);
            return true;
        }
        let droppable = self.members.values().filter(|member| member.policy != Policy::Every);
        let oldest = droppable.filter_map(|member| member.waiting.front().copied());
        let Some(oldest) = oldest.min_by_key(|slot| self.slots[*slot].number) else { return false };
        let mut uses = 0;
        for member in self.members.values_mut().filter(|member| member.policy != Policy::Every) {
            if member.waiting.front() == Some(&oldest) {
                member.waiting.pop_front();
                member.tally.skipped += 1;
                uses += 1;
            }
        }
        (0..uses).for_each(|_| self.release(oldest));
        true
    }

    /// Takes an unpublished buffer back.
    pub(super) fn unlend(&mut self, slot: usize) {
        self.loaned -= 1;
        self.release(slot);
    }

    /// Publishes a buffer on loan. It then waits for every subscriber, beyond the limits of their queues until [`Ledger::trim`]. With a
    /// turn, it is in use until [`Ledger::written`].
    pub(super) fn publish(&mut self, slot: usize, turn: Option<u64>) -> u64 {
        self.loaned -= 1;
        self.published += 1;
        self.slots[slot].number = self.published;
        if let Some(turn) = turn {
            self.unwritten.push((slot, turn));
            self.slots[slot].uses += 1;
        }
        for member in self.members.values_mut().filter(|member| member.state == State::Active) {
            member.waiting.push_back(slot);
            self.slots[slot].uses += 1;
        }
        if self.limits.history > 0 {
            self.history.push_back(slot);
            self.slots[slot].uses += 1;
            if self.history.len() > self.limits.history
                && let Some(oldest) = self.history.pop_front()
            {
                self.release(oldest);
            }
        }
        self.release(slot);
        self.published
    }

    /// The next buffer to give to a subscriber that has room.
    pub(super) fn next(&self, id: u64) -> Option<usize> {
        let member = self.members.get(&id)?;
        (member.given.len() < member.room).then(|| member.waiting.front().copied()).flatten()
    }

    /// Notes that the buffer of [`Ledger::next`] was sent.
    pub(super) fn sent(&mut self, id: u64) {
        let Some(member) = self.members.get_mut(&id) else { return };
        if let Some(slot) = member.waiting.pop_front() {
            member.given.push(Given { slot, finishing: None });
            member.tally.delivered += 1;
        }
    }

    /// Drops the oldest waiting buffers beyond the limit of the subscriber's queue. Returns whether any still waits.
    pub(super) fn trim(&mut self, id: u64) -> bool {
        let Some(member) = self.members.get_mut(&id) else { return false };
        let most = match member.policy {
            Policy::Latest => 1,
            Policy::Queue(length) => length.into(),
            Policy::Every => usize::MAX,
        };
        let excess = member.waiting.len().saturating_sub(most.max(member.backlog));
        let dropped: Vec<usize> = member.waiting.drain(..excess).collect();
        member.tally.skipped += excess as u64;
        member.backlog = member.backlog.min(member.waiting.len());
        let waits = !member.waiting.is_empty();
        dropped.into_iter().for_each(|slot| self.release(slot));
        waits
    }

    /// A subscriber gives a buffer back, at once or with a turn until [`Ledger::finished`]. Returns false if it does not have it.
    pub(super) fn give_back(&mut self, id: u64, number: u64, turn: Option<u64>) -> bool {
        let slots = &self.slots;
        let Some(member) = self.members.get_mut(&id) else { return false };
        let has = |given: &Given| slots[given.slot].number == number && given.finishing.is_none();
        let Some(at) = member.given.iter().position(has) else { return false };
        if turn.is_some() {
            member.given[at].finishing = turn;
        } else {
            let slot = member.given.remove(at).slot;
            self.release(slot);
        }
        true
    }

    /// Takes the buffers back that a subscriber gave back with a turn, if the turn has come. Returns whether there was any.
    pub(super) fn finished(&mut self, id: u64, has_come: impl Fn(u64) -> bool) -> bool {
        let Some(member) = self.members.get_mut(&id) else { return false };
        let mut slots = Vec::new();
        member.given.retain(|given| {
            let is_over = given.finishing.is_some_and(&has_come);
            slots.extend(is_over.then_some(given.slot));
            !is_over
        });
        slots.iter().for_each(|slot| self.release(*slot));
        !slots.is_empty()
    }

    /// Whether a subscriber gave back buffers whose turns may not have come.
    pub(super) fn is_finishing(&self, id: u64) -> bool {
        self.members.get(&id).is_some_and(|member| member.given.iter().any(|given| given.finishing.is_some()))
    }

    /// Notes publications that the publisher's streams have written. Returns whether there was any.
    pub(super) fn written(&mut self, has_come: impl Fn(u64) -> bool) -> bool {
        let before = self.unwritten.len();
        for at in (0..self.unwritten.len()).rev() {
            let (slot, turn) = self.unwritten[at];
            if has_come(turn) {
                self.unwritten.swap_remove(at);
                self.release(slot);
            }
        }
        self.unwritten.len() < before
    }

    /// Whether all publications are written.
    pub(super) fn is_written(&self) -> bool {
        self.unwritten.is_empty()
    }

    /// Admits a subscriber if the pool then suffices for all: an accepted publisher can always take a buffer. Varying sizes have no such
    /// promise.
    pub(super) fn join(&mut self, id: u64, policy: Policy, room: usize) -> Result<(), TooFew> {
        let queue = |policy| if let Policy::Queue(length) = policy { usize::from(length) - 1 } else { 0 };
        let others = self.members.values();
        let rooms: usize = others.clone().map(|member| member.reserved()).sum();
        let kept = others.map(|member| queue(member.policy)).max().unwrap_or(0).max(queue(policy));
        let needed = rooms + room + kept.max(self.limits.history) + self.limits.loans + 1;
        let buffers = self.slots.len();
        if self.space.is_none() && needed > buffers {
            return Err(TooFew { needed, buffers });
        }
        let (given, waiting, tally) = (Vec::with_capacity(room), VecDeque::new(), Tally::default());
        self.members.insert(id, Member { policy, room, given, waiting, backlog: 0, state: State::Joining, tally });
        Ok(())
    }

    /// Starts a subscriber, with at most `history` earlier buffers.
    pub(super) fn activate(&mut self, id: u64, history: usize) {
        let Some(member) = self.members.get_mut(&id).filter(|member| member.state == State::Joining) else { return };
        member.state = State::Active;
        let skipped = self.history.len().saturating_sub(history);
        for &slot in self.history.iter().skip(skipped) {
            member.waiting.push_back(slot);
            self.slots[slot].uses += 1;
        }
        member.backlog = member.waiting.len();
    }

    /// Ends a subscription. Of the given buffers the subscriber keeps only `kept`, by their numbers and whether they were given back with a
    /// turn. Returns whether it has any.
    pub(super) fn leave(&mut self, id: u64, kept: impl Fn(u64, bool) -> bool) -> bool {
        let Some(member) = self.members.get_mut(&id) else { return false };
        member.state = State::Former;
        let mut dropped: Vec<usize> = member.waiting.drain(..).collect();
        let slots = &self.slots;
        member.given.retain(|given| {
            let is_kept = kept(slots[given.slot].number, given.finishing.is_some());
            dropped.extend((!is_kept).then_some(given.slot));
            is_kept
        });
        let is_empty = member.given.is_empty();
        if is_empty {
            self.members.remove(&id);
        }
        dropped.into_iter().for_each(|slot| self.release(slot));
        !is_empty
    }

    /// Frees a buffer if this was its last use.
    fn release(&mut self, slot: usize) {
        let Slot { offset, size, uses, .. } = &mut self.slots[slot];
        *uses -= 1;
        if *uses == 0 {
            if let Some(space) = &mut self.space {
                space.put(*offset, *size);
            }
            self.free.push(slot);
        }
    }

    pub(super) fn data(&mut self, slot: usize) -> &mut T {
        &mut self.slots[slot].data
    }

    /// The offset and the size of a buffer, in bytes.
    pub(super) fn range(&self, slot: usize) -> (u64, u64) {
        (self.slots[slot].offset, self.slots[slot].size)
    }

    pub(super) fn published(&self) -> u64 {
        self.published
    }

    /// Whether a subscriber could receive another buffer at once.
    pub(super) fn has_room(&self, id: u64) -> bool {
        self.members.get(&id).is_some_and(|member| member.given.len() < member.room)
    }

    /// Whether buffers wait for a subscriber.
    pub(super) fn has_waiting(&self, id: u64) -> bool {
        self.members.get(&id).is_some_and(|member| !member.waiting.is_empty())
    }

    pub(super) fn tally(&self, id: u64) -> Tally {
        self.members.get(&id).map(|member| member.tally).unwrap_or_default()
    }

    /// The number and the bytes of the buffers that a subscriber has.
    pub(super) fn holds(&self, id: u64) -> (usize, u64) {
        let Some(member) = self.members.get(&id) else { return (0, 0) };
        (member.given.len(), member.given.iter().map(|given| self.slots[given.slot].size).sum())
    }

    /// The number of subscribers, with the former ones that have buffers.
    pub(super) fn members(&self) -> usize {
        self.members.len()
    }

    /// The number of free buffers, or of free bytes in a pool of varying sizes.
    pub(super) fn free(&self) -> u64 {
        self.space.as_ref().map_or(self.free.len() as u64, Space::free)
    }
}

impl<T: Default> Slot<T> {
    fn at(offset: u64, size: u64) -> Self {
        Self { offset, size, number: 0, uses: 0, data: T::default() }
    }
}

impl Member {
    /// Whether a buffer waits for a subscriber that skips none, and that has no room for it.
    fn stops_publisher(&self) -> bool {
        let is_asked = self.policy == Policy::Every && self.state == State::Active;
        is_asked && self.given.len() + self.waiting.len() > self.room
    }

    /// The most buffers that it can have from now on.
    fn reserved(&self) -> usize {
        if self.state == State::Former { self.given.len() } else { self.room }
    }
}

#[cfg(test)]
mod tests;
