//! What a connection holds, and what became of it when the connection was made again.

use std::{
    collections::HashMap,
    fmt,
    os::fd::OwnedFd,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use super::Client;
use crate::{
    memory::Description,
    wire::broker::{ArrayEntry, Attached, Lifetime, Owner, Token},
};

/// What is to be taken up when the connection is made again.
#[derive(Debug, Default)]
pub(super) struct Holdings {
    /// The UUID of what the broker holds, as it said last.
    pub(super) instance: String,
    pub(super) leases: HashMap<Token, Arc<Held>>,
    /// The puts of names that go with their maker, or may: the last one of each name.
    pub(super) puts: HashMap<String, Token>,
    /// What was released while the broker did not read, which is still to be told.
    pub(super) unsent: Vec<Token>,
}

impl Holdings {
    pub(super) fn is_empty(&self) -> bool {
        self.leases.is_empty() && self.puts.is_empty()
    }
}

/// A lease that this process holds.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) token: Token,
    pub(super) name: String,
    pub(super) version: u64,
    pub(super) id: String,
    /// What it takes to offer the version back, if all of it was handed out.
    pub(super) whole: Option<Whole>,
    /// Whether the broker counts it, as far as is known.
    counted: AtomicBool,
    /// Whether an offer of it has failed in a way that would repeat itself.
    vain: AtomicBool,
}

impl Held {
    pub(super) fn new(token: Token, name: String, version: u64, id: String, whole: Option<Whole>) -> Self {
        Self { token, name, version, id, whole, counted: AtomicBool::new(true), vain: AtomicBool::new(false) }
    }

    pub(super) fn is_counted(&self) -> bool {
        self.counted.load(Ordering::Acquire)
    }

    /// Says whether it is counted. Returns whether it was.
    pub(super) fn count(&self, counted: bool) -> bool {
        self.counted.swap(counted, Ordering::AcqRel)
    }

    /// What can be offered back: all of it, with its descriptors.
    pub(super) fn offer(&self) -> Option<(&Whole, Vec<Vec<Arc<OwnedFd>>>)> {
        let whole = self.whole.as_ref().filter(|_| !self.vain.load(Ordering::Acquire))?;
        let part = |part: &WholePart| part.segments.iter().map(|(_, fd)| fd.upgrade()).collect();
        Some((whole, whole.parts.iter().map(part).collect::<Option<_>>()?))
    }

    /// Does not offer it again.
    pub(super) fn offered_in_vain(&self) {
        self.vain.store(true, Ordering::Release);
    }
}

/// All that the broker was told of a version.
#[derive(Debug)]
pub(super) struct Whole {
    pub(super) backend: String,
    pub(super) created_ms: u64,
    pub(super) owner: Owner,
    pub(super) metadata: Option<Attached>,
    pub(super) mode: Option<u16>,
    pub(super) lifetime: Option<Lifetime>,
    pub(super) keep: Option<u32>,
    pub(super) parts: Vec<WholePart>,
}

/// A part of a version.
#[derive(Debug)]
pub(super) struct WholePart {
    pub(super) name: String,
    pub(super) description: Description,
    pub(super) digest: Option<String>,
    pub(super) arrays: Arc<Vec<ArrayEntry>>,
    /// The lease or the object that was opened with it keeps the descriptors. Memory that is parked has none.
    pub(super) segments: Vec<(u64, Weak<OwnedFd>)>,
}

/// A lease that the broker does not count any more, although this process has not ended it: see
/// [`Client::on_lost`](super::Client::on_lost). What is mapped stays mapped.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Lost {
    /// The object's name.
    pub name: String,
    /// Its version.
    pub version: u64,
    /// The version's UUID.
    pub id: String,
    /// Why.
    pub reason: LossReason,
}

/// Why a lease is lost.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum LossReason {
    /// The connection broke, and could not be made again within the config's timeout. If that succeeds later the lease is taken up
    /// then, and [`Restored`] follows.
    Unreachable,
    /// The broker has ended it: it was not taken up in time, or the broker ended the connection itself.
    Ended,
    /// The broker has lost the version, and did not get it back from this process: one sentence why.
    NotRestored(String),
}

impl fmt::Display for LossReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreachable => f.write_str("the broker can't be reached"),
            Self::Ended => f.write_str("the broker has ended it"),
            Self::NotRestored(why) => write!(f, "the broker has lost the version: {why}"),
        }
    }
}

/// A lease that the broker counts again: see [`Client::on_restored`](super::Client::on_restored).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Restored {
    /// The object's name.
    pub name: String,
    /// Its version.
    pub version: u64,
    /// The version's UUID.
    pub id: String,
    /// Whether the broker had lost the version and has it from its readers again.
    pub rebuilt: bool,
}

/// What is to be said to the handlers.
#[derive(Debug)]
pub(super) enum Notice {
    Lost(Lost),
    Restored(Restored),
}

impl Notice {
    pub(super) fn lost(held: &Held, reason: LossReason) -> Self {
        let Held { name, version, id, .. } = held;
        Self::Lost(Lost { name: name.clone(), version: *version, id: id.clone(), reason })
    }

    pub(super) fn restored(held: &Held, rebuilt: bool) -> Self {
        let Held { name, version, id, .. } = held;
        Self::Restored(Restored { name: name.clone(), version: *version, id: id.clone(), rebuilt })
    }
}

type Handler<T> = Arc<dyn Fn(&Client, &T) + Send + Sync>;

/// What the caller wants to be called with.
#[derive(Default)]
pub(super) struct Handlers {
    pub(super) lost: Vec<Handler<Lost>>,
    pub(super) restored: Vec<Handler<Restored>>,
    /// What they are still to be called with.
    pub(super) due: Vec<Notice>,
}

impl Handlers {
    /// Takes what is said to the handlers that there are.
    pub(super) fn add(&mut self, notices: impl IntoIterator<Item = Notice>) {
        if !self.lost.is_empty() || !self.restored.is_empty() {
            self.due.extend(notices);
        }
    }
}

impl fmt::Debug for Handlers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handlers").field("due", &self.due).finish_non_exhaustive()
    }
}
