//! Indexes by permission to read: a request visits only names and leases that its caller may see.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, BinaryHeap},
    iter,
    ops::Bound,
    sync::Arc,
};

use crate::{
    broker::{
        manifest::Version,
        server::state::caller::{Caller, Right},
    },
    wire::broker::{Owner, Token},
};

/// Names and leases, grouped by the owner, group and mode that decide who may read them.
///
/// A request compares its caller with each group once. The number of groups depends on users and modes, not on names.
#[derive(Debug, Default)]
pub(crate) struct Readers {
    names: BTreeMap<Rights, BTreeSet<Arc<str>>>,
    /// Also grouped by the lease's user, who may always see it. Each lease by number.
    leases: BTreeMap<(Rights, u32), BTreeMap<u64, Token>>,
}

/// Owner, group and mode of a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Rights {
    uid: u32,
    gid: u32,
    mode: u16,
}

impl Rights {
    fn of(owner: Owner, mode: u16) -> Self {
        Self { uid: owner.uid, gid: owner.gid, mode }
    }

    fn allow(self, caller: &Caller) -> bool {
        let Self { uid, gid, mode } = self;
        caller.may(Right::Read, Owner { uid, gid }, mode)
    }
}

impl Readers {
    pub(crate) fn add_name(&mut self, name: Arc<str>, owner: Owner, mode: u16) {
        self.names.entry(Rights::of(owner, mode)).or_default().insert(name);
    }

    pub(crate) fn remove_name(&mut self, name: &str, owner: Owner, mode: u16) {
        let rights = Rights::of(owner, mode);
        if let Some(names) = self.names.get_mut(&rights) {
            names.remove(name);
            if names.is_empty() {
                self.names.remove(&rights);
            }
        }
    }

    pub(crate) fn add_lease(&mut self, version: &Version, uid: u32, number: u64, token: Token) {
        let group = (Rights::of(version.owner, version.mode), uid);
        self.leases.entry(group).or_default().insert(number, token);
    }

    pub(crate) fn remove_lease(&mut self, version: &Version, uid: u32, number: u64) {
        let group = (Rights::of(version.owner, version.mode), uid);
        if let Some(leases) = self.leases.get_mut(&group) {
            leases.remove(&number);
            if leases.is_empty() {
                self.leases.remove(&group);
            }
        }
    }

    /// Names from `from` that the caller may read, ascending.
    pub(crate) fn names<'a>(&'a self, caller: &'a Caller, from: Bound<&'a str>) -> impl Iterator<Item = &'a str> {
        let readable = self.names.iter().filter(|(rights, _)| rights.allow(caller));
        merge(readable.map(move |(_, names)| names.range::<str, _>((from, Bound::Unbounded)).map(|name| &**name)))
    }

    /// Leases from `from` that the caller may see, by number.
    pub(crate) fn leases<'a>(&'a self, caller: &'a Caller, from: u64) -> impl Iterator<Item = (u64, Token)> {
        let sees = move |rights: Rights, uid: u32| uid == caller.uid || rights.allow(caller);
        let visible = self.leases.iter().filter(move |((rights, uid), _)| sees(*rights, *uid));
        merge(visible.map(move |(_, leases)| leases.range(from..).map(|(number, token)| (*number, *token))))
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
