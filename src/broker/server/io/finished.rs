//! What other threads report to the event loop.

use crate::broker::server::{
    state::caller::ConnectionId,
    verbs::effects::{Origin, Outcome},
};

/// What a thread has finished.
pub(super) enum Finished {
    /// Work for a request of a client.
    Work(ConnectionId, Outcome),
    /// Enough memory was closed that users may send again.
    CaughtUp,
    /// Descriptors that a peer may have blocked.
    Closed(Closed),
}

/// What a thread has closed.
#[derive(Debug)]
pub(super) struct Closed {
    pub(super) of: Origin,
    pub(super) count: usize,
    /// How many of the descriptors were connections that counted as the user's.
    pub(super) connections: usize,
}
