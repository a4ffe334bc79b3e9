//! The server's descriptor limit, and each user's share of it.

use super::{caller::Caller, objects::Objects, refuse};
use crate::{
    error::{BrokerError, RefusalCode},
    wire::MAX_FDS,
};

/// Descriptors reserved for the server and for a record being received.
pub(crate) const SPARE: usize = MAX_FDS + 64;

/// The least open-file limit with which a server and its keeper can hold an object: some descriptors of their own, connections, a segment.
#[cfg(feature = "internals")]
pub const MIN_FILE_LIMIT: usize = SPARE + 32;

/// The process's descriptors when a request arrives.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DescriptorRoom {
    /// Approximate number of open descriptors, plus the announced descriptors of pending puts.
    pub(crate) used: usize,
    /// The open-file limit.
    pub(crate) limit: usize,
    /// The user's descriptors that are not closed yet.
    pub(crate) closing: usize,
}

impl DescriptorRoom {
    /// Refuses a request if the process would exceed its limit, or the user its share, half of the descriptors that other users leave.
    /// The server's own user and root have no such share.
    pub(crate) fn require(&self, objects: &Objects, caller: &Caller, more: usize) -> Result<(), BrokerError> {
        let (&Self { used, limit, closing }, uid) = (self, caller.uid);
        if used + more + SPARE > limit {
            return refuse(
                RefusalCode::Full,
                format!(
                    "the request needs {more} more descriptors, but the broker has {used}, reserves {SPARE}, and its limit is {limit}: \
                     raise it (ulimit -n, LimitNOFILE)"
                ),
            );
        }
        let own = objects.descriptors_of(uid) + closing;
        let share = limit.saturating_sub(SPARE + used.saturating_sub(own)) / 2;
        if caller.is_superuser() || own + more <= share {
            return Ok(());
        }
        refuse(
            RefusalCode::Full,
            format!(
                "uid {uid} has {own} descriptors in the broker and asks for {more} more: its share is {share}, half of the \
                 descriptors that other users leave; delete objects, or raise the broker's limit (ulimit -n, LimitNOFILE)"
            ),
        )
    }
}
