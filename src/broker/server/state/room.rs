//! How many descriptors the process has, and which share of them a user may have.

use super::{caller::Caller, objects::Objects};
use crate::{
    error::{BrokerError, RefusalCode},
    wire::MAX_FDS,
};

/// Descriptors that are neither a connection's nor memory: those of a record that is being received, and the server's own.
pub(crate) const SPARE: usize = MAX_FDS + 64;

/// The descriptors of the process, as they are when a request of a user comes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Room {
    /// How many it has, about, and how many puts under way will bring.
    pub(crate) used: usize,
    /// How many it may have.
    pub(crate) limit: usize,
    /// How many of the user's are not closed yet.
    pub(crate) closing: usize,
}

impl Room {
    /// Refuses a request for more descriptors than this process may have, or than a user's share: half of what other users leave. The
    /// server's own user and root, who may do everything, have no share.
    pub(crate) fn require(&self, objects: &Objects, caller: &Caller, more: usize) -> Result<(), BrokerError> {
        let (&Self { used, limit, closing }, uid) = (self, caller.uid);
        if used + more + SPARE > limit {
            return Err(BrokerError::new(
                RefusalCode::Full,
                format!(
                    "the broker has {used} descriptors, needs {SPARE} to spare, and {more} more are asked for: its limit is {limit}; \
                     raise it (ulimit -n, LimitNOFILE)"
                ),
            ));
        }
        let own = objects.descriptors_of(uid) + closing;
        let share = limit.saturating_sub(SPARE + used.saturating_sub(own)) / 2;
        if caller.is_superuser() || own + more <= share {
            return Ok(());
        }
        Err(BrokerError::new(
            RefusalCode::Full,
            format!(
                "uid {uid} has {own} descriptors in the broker and asks for {more} more: its share is {share}, half of what other \
                 users leave; delete objects, or raise the broker's limit (ulimit -n, LimitNOFILE)"
            ),
        ))
    }
}
