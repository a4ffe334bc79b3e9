//! Unpublished puts.

use std::os::fd::OwnedFd;

use super::objects::Terms;
use crate::wire::broker::PutHeader;

/// Uploads with more segments are examined by the worker, not on the event loop.
const MAX_SMALL: usize = 128;

/// A put whose segments are being received or examined.
#[derive(Debug)]
pub(crate) struct ReceivedPut {
    pub(crate) uid: u32,
    pub(crate) put: PutHeader,
    pub(crate) terms: Terms,
    /// Segments of the complete put.
    pub(crate) total: usize,
    pub(crate) tables: Vec<OwnedFd>,
    pub(crate) segments: Vec<(u64, OwnedFd)>,
}

impl ReceivedPut {
    pub(crate) fn into_fds(self) -> Vec<OwnedFd> {
        self.tables.into_iter().chain(self.segments.into_iter().map(|(_, fd)| fd)).collect()
    }

    /// Descriptors of the complete put.
    pub(crate) fn descriptors(&self) -> usize {
        self.total + self.tables.len()
    }

    /// Whether the put can be examined on the event loop.
    pub(crate) fn is_small(&self) -> bool {
        self.tables.is_empty() && self.segments.len() <= MAX_SMALL
    }
}
