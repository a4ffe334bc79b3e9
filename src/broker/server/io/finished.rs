//! Results that other threads report to the event loop.

use crate::broker::server::verbs::effects::Origin;

/// A result of another thread.
pub(super) enum Finished {
    /// The worker has closed enough memory for users to send again.
    CaughtUp,
    /// Descriptors whose close a peer could block.
    Closed(Closed),
}

/// Closed descriptors.
#[derive(Debug)]
pub(super) struct Closed {
    pub(super) of: Origin,
    pub(super) count: usize,
    /// How many of them counted towards the user's connection limit.
    pub(super) connections: usize,
}
