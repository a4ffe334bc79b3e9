//! Puts that are not published: what has come of them.

use std::os::fd::OwnedFd;

use super::objects::Terms;
use crate::wire::broker::Put;

/// How many segments are examined on the event loop: the worker examines more.
const FEW: usize = 128;

/// A put whose segments are still to come, or have all come.
#[derive(Debug)]
pub(crate) struct Upload {
    pub(crate) uid: u32,
    pub(crate) put: Put,
    pub(crate) terms: Terms,
    /// How many segments it has when all have come.
    pub(crate) total: usize,
    pub(crate) tables: Vec<OwnedFd>,
    pub(crate) segments: Vec<(u64, OwnedFd)>,
}

impl Upload {
    /// Its descriptors, to be closed.
    pub(crate) fn into_fds(self) -> Vec<OwnedFd> {
        self.tables.into_iter().chain(self.segments.into_iter().map(|(_, fd)| fd)).collect()
    }

    /// How many descriptors it has when all have come.
    pub(crate) fn descriptors(&self) -> usize {
        self.total + self.tables.len()
    }

    /// Whether examining it takes no time.
    pub(crate) fn is_small(&self) -> bool {
        self.tables.is_empty() && self.segments.len() <= FEW
    }
}
