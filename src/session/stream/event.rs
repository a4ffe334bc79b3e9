//! Events and figures about subscribers.

use super::options::Policy;
use crate::channel::Peer;

/// A subscriber, as its publisher knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct SubscriberInfo {
    /// A number that the publisher uses once.
    pub id: u64,
    /// Its process.
    pub peer: Peer,
    /// Its policy.
    pub policy: Policy,
}

/// A change among the subscribers: see [`Publisher::event`](super::Publisher::event).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A subscriber has mapped the pool, and receives the next publication.
    Joined(SubscriberInfo),
    /// A subscriber has left.
    Left {
        /// The subscriber.
        subscriber: SubscriberInfo,
        /// Whether it sent `leave`. If not, its process exited, closed the connection or broke the protocol; the buffers that it had return to
        /// the pool when its process exits.
        orderly: bool,
        /// The number of buffers that it was given, in all.
        delivered: u64,
        /// The number of buffers that it did not get, because of its policy.
        skipped: u64,
    },
    /// A subscriber did not give a buffer back within its deadline, and is no longer subscribed. Its buffers return to the pool when it
    /// gives them back or its process exits.
    Evicted(SubscriberInfo),
    /// A loan got no buffer in time.
    Starved {
        /// The subscribers that have buffers.
        by: Vec<Usage>,
    },
}

/// A subscriber and its use of the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// The subscriber.
    pub subscriber: SubscriberInfo,
    /// Whether it is still subscribed.
    pub is_subscribed: bool,
    /// The number of buffers that it was given, in all.
    pub delivered: u64,
    /// The number of buffers that it did not get, because of its policy.
    pub skipped: u64,
    /// The number of buffers that it has now: received, or on their way to it.
    pub buffers: usize,
    /// The bytes of these buffers.
    pub bytes: u64,
}
