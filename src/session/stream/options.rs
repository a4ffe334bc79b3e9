//! The options of publishers and subscribers.

use std::time::Duration;

use super::misuse;
use crate::{
    error::Result,
    memory::Placement,
    wire::{self, MAX_HELD, MAX_QUEUE},
};

/// What happens to buffers that a subscriber has no room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Policy {
    /// The newest buffer waits at the publisher, and replaces an older one: a slow subscriber skips to the newest.
    #[default]
    Latest,
    /// The newest buffers wait at the publisher, at most this many: 1 to [`MAX_QUEUE`].
    Queue(u16),
    /// The publisher waits, so the subscriber skips nothing. Only if [`PublishOptions::every`] allows it.
    Every,
}

/// The pool of a publisher, and the subscribers that it accepts.
///
/// ```
/// use std::time::Duration;
/// use vmmfd::session::stream::PublishOptions;
///
/// // Eight frames of 6 MB, for example for five subscribers, a history of one, and a loan.
/// let frames = PublishOptions::fixed(1920 * 1080 * 3, 8).history(1);
/// // 256 MiB for batches of any size. A subscriber may ask for every batch, and then has two seconds for each.
/// let batches = PublishOptions::varying(256 << 20).every(Duration::from_secs(2));
/// # drop((frames, batches));
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct PublishOptions {
    /// The size of each buffer in bytes. `None` if the sizes vary.
    pub size: Option<u64>,
    /// The number of buffers, or the size of the pool in bytes if the sizes vary.
    pub room: u64,
    /// The number of publications that a late subscriber can receive at once. By default 0.
    pub history: usize,
    /// The most buffers that the publisher has on loan at a time. By default 1.
    pub loans: usize,
    /// How long the publisher waits for a subscriber with [`Policy::Every`] before it evicts the subscriber. By default `None`: such
    /// subscribers are refused.
    pub every: Option<Duration>,
    /// Device memory or host memory. By default device memory.
    pub placement: Placement,
}

impl PublishOptions {
    /// A pool of `count` buffers of `size` bytes.
    ///
    /// A subscriber is refused if the pool has fewer buffers than the sum of: the buffers that each subscriber may hold, the history (or
    /// the longest queue less 1), the loans, and 1. So an accepted publisher never waits for a buffer.
    pub fn fixed(size: u64, count: usize) -> Self {
        Self::new(Some(size), count as u64)
    }

    /// A pool of `bytes` for buffers of any size.
    pub fn varying(bytes: u64) -> Self {
        Self::new(None, bytes)
    }

    fn new(size: Option<u64>, room: u64) -> Self {
        Self { size, room, history: 0, loans: 1, every: None, placement: Placement::Device }
    }

    /// Sets the number of publications that a late subscriber can receive at once.
    pub fn history(self, history: usize) -> Self {
        Self { history, ..self }
    }

    /// Sets the most buffers that the publisher has on loan at a time.
    pub fn loans(self, loans: usize) -> Self {
        Self { loans, ..self }
    }

    /// Allows [`Policy::Every`]. The publisher waits for such a subscriber at most this long, then evicts it.
    pub fn every(self, deadline: Duration) -> Self {
        Self { every: Some(deadline), ..self }
    }

    /// Selects device memory or host memory.
    pub fn placement(self, placement: Placement) -> Self {
        Self { placement, ..self }
    }
}

/// The options of a subscriber.
///
/// ```
/// use vmmfd::session::stream::{Policy, SubscribeOptions};
///
/// let viewer = SubscribeOptions::default(); // The newest frame, one at a time.
/// let recorder = SubscribeOptions::default().policy(Policy::Queue(8)).held(2).history(8);
/// # drop((viewer, recorder));
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct SubscribeOptions {
    /// What happens to buffers that this subscriber has no room for. By default [`Policy::Latest`].
    pub policy: Policy,
    /// The most buffers that this subscriber has at a time, 1 to [`MAX_HELD`]: received and not dropped, or on their way to it. By
    /// default 1.
    pub held: u16,
    /// The most earlier buffers to receive at once. By default 0.
    pub history: u16,
}

impl Default for SubscribeOptions {
    fn default() -> Self {
        Self { policy: Policy::Latest, held: 1, history: 0 }
    }
}

impl SubscribeOptions {
    /// Sets the policy.
    pub fn policy(self, policy: Policy) -> Self {
        Self { policy, ..self }
    }

    /// Sets the most buffers that this subscriber has at a time.
    pub fn held(self, held: u16) -> Self {
        Self { held, ..self }
    }

    /// Sets the most earlier buffers to receive at once.
    pub fn history(self, history: u16) -> Self {
        Self { history, ..self }
    }

    /// # Errors
    /// [`Error::Misuse`](crate::Error::Misuse) for values outside their limits.
    pub(crate) fn check(&self) -> Result<()> {
        self.to_wire().map(drop)
    }

    pub(super) fn to_wire(&self) -> Result<wire::Subscribe> {
        let Self { policy, held, history } = *self;
        if !(1..=MAX_HELD).contains(&held.into()) {
            return Err(misuse(format!("a subscriber holds 1 to {MAX_HELD} buffers, not {held}")));
        }
        let (policy, queue) = match policy {
            Policy::Latest => (wire::Policy::Latest, None),
            Policy::Every => (wire::Policy::Every, None),
            Policy::Queue(length) if (1..=MAX_QUEUE).contains(&length.into()) => {
                (wire::Policy::Queue, Some(length.into()))
            }
            Policy::Queue(length) => return Err(misuse(format!("a queue has 1 to {MAX_QUEUE} buffers, not {length}"))),
        };
        Ok(wire::Subscribe { policy, queue, held: held.into(), history: history.into() })
    }
}

impl Policy {
    /// The policy of a checked message.
    pub(super) fn of(subscribe: &wire::Subscribe) -> Self {
        match (subscribe.policy, subscribe.queue) {
            (wire::Policy::Every, _) => Self::Every,
            (wire::Policy::Queue, Some(length)) => Self::Queue(u16::try_from(length).unwrap_or(u16::MAX)),
            _ => Self::Latest,
        }
    }
}
