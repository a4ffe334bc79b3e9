//! Indexes by permission to read: a request visits only names and leases that its caller may see.

use std::{
    borrow::Borrow,
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, BinaryHeap},
    iter,
    ops::Bound,
};

use crate::{
    broker::server::state::caller::{Caller, Right},
    wire::broker::Owner,
};

/// Names or leases, grouped by the properties that decide who may see them.
///
/// A request compares its caller with each group once. The number of groups depends on users and modes, not on names.
#[derive(Debug)]
pub(crate) struct Readers<K>(BTreeMap<Rights, BTreeSet<K>>);

/// Owner, group and mode of a name; and the user of a lease, who may always see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rights(u32, u32, u16, Option<u32>);

impl Rights {
    pub(super) fn of(owner: Owner, mode: u16, user: Option<u32>) -> Self {
        Self(owner.uid, owner.gid, mode, user)
    }

    fn allow(self, caller: &Caller) -> bool {
        let Self(uid, gid, mode, user) = self;
        user == Some(caller.uid) || caller.may(Right::Read, Owner { uid, gid }, mode)
    }
}

impl<K> Default for Readers<K> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<K: Ord> Readers<K> {
    pub(super) fn add(&mut self, rights: Rights, item: K) {
        self.0.entry(rights).or_default().insert(item);
    }

    pub(super) fn remove<Q: Ord + ?Sized>(&mut self, rights: Rights, item: &Q)
    where
        K: Borrow<Q>,
    {
        if let Some(items) = self.0.get_mut(&rights) {
            items.remove(item);
            if items.is_empty() {
                self.0.remove(&rights);
            }
        }
    }

    /// The items from `from` that the caller may see, ascending.
    pub(super) fn from<'a, Q: Ord + ?Sized>(
        &'a self,
        caller: &'a Caller,
        from: Bound<&'a Q>,
    ) -> impl Iterator<Item = &'a K>
    where
        K: Borrow<Q>,
    {
        let visible = self.0.iter().filter(|(rights, _)| rights.allow(caller));
        merge(visible.map(move |(_, items)| items.range::<Q, _>((from, Bound::Unbounded))))
    }
}

/// Merges ascending sequences.
fn merge<T: Ord>(sequences: impl Iterator<Item = impl Iterator<Item = T>>) -> impl Iterator<Item = T> {
    let mut sequences: Vec<_> = sequences.collect();
    let mut heads: BinaryHeap<Reverse<(T, usize)>> = BinaryHeap::with_capacity(sequences.len());
    for (at, sequence) in sequences.iter_mut().enumerate() {
        heads.extend(sequence.next().map(|item| Reverse((item, at))));
    }
    iter::from_fn(move || {
        let Reverse((item, at)) = heads.pop()?;
        heads.extend(sequences[at].next().map(|next| Reverse((next, at))));
        Some(item)
    })
}
