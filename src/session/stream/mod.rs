//! Streams: a producer publishes buffers to a consumer, which gives each back for the next publication.
//!
//! The descriptors of a buffer travel with its first publication, and the consumer maps it. Later publications name the buffer by number:
//! one small record in each direction, no descriptors, and no driver call except the synchronization.
//!
//! ```
//! use std::{collections::HashMap, sync::Arc, thread};
//! use vmmfd::{
//!     channel::Channel,
//!     driver::{Access, Backend, Choice, open},
//!     memory::{Device, Region, Selector, Shared, Spec},
//!     session::{Config, stream::{Publisher, Subscriber}},
//! };
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let driver = open(Choice::Only(Backend::Host))?.driver;
//! let config = Config::default();
//! // With a socket path instead: `Subscriber::connect`, `Publisher::accept`.
//! let (ours, theirs) = Channel::socket_pair()?;
//!
//! // The consumer, usually another process:
//! let consume = || -> vmmfd::Result<()> {
//!     let mut subscriber = Subscriber::over(theirs, &driver, None, 2, &config)?;
//!     for round in 0..10 {
//!         let received = subscriber.receive()?;
//!         let mut byte = [0];
//!         received.copy_out(0, &mut byte)?;
//!         assert_eq!(byte, [round]);
//!         subscriber.give_back(received)?;
//!     }
//!     Ok(())
//! };
//!
//! // The producer, with two buffers in rotation:
//! let produce = || -> vmmfd::Result<()> {
//!     let device = Device::find(&driver, Selector::default())?;
//!     let mut publisher = Publisher::over(ours, &driver, &config)?;
//!     let (mut free, mut memory) = (Vec::new(), HashMap::new());
//!     for _ in 0..2 {
//!         let shared = Arc::new(Shared::create(&device, Spec::vmm(1 << 20))?);
//!         let id = publisher.add(&shared, None, Access::ReadOnly)?;
//!         memory.insert(id, shared);
//!         free.push(id);
//!     }
//!     for round in 0..10 {
//!         let id = match free.pop() {
//!             Some(id) => id,
//!             None => publisher.take_back()?,
//!         };
//!         memory[&id].copy_in(0, &[round])?;
//!         publisher.publish(id)?;
//!     }
//!     while memory.keys().any(|id| publisher.is_out(*id)) {
//!         publisher.take_back()?;
//!     }
//!     Ok(())
//! };
//! # thread::scope(|scope| {
//! #     let consumer = scope.spawn(consume);
//! #     produce()?;
//! #     consumer.join().expect("no panic")
//! # })?;
//! # Ok(())
//! # }
//! ```

mod publisher;
mod received;
mod subscriber;

use std::{
    fmt,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

pub use self::{publisher::Publisher, received::Received, subscriber::Subscriber};
use crate::{channel::deadline_after, error::Error};

/// A buffer of a stream, in one session. Never equal to a buffer of another session, and not accepted there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BufferId {
    session: SessionNumber,
    number: u64,
}

impl BufferId {
    /// The buffer's number in the protocol, chosen by the producer. Unique on a connection, even after the buffer is withdrawn.
    pub fn number(self) -> u64 {
        self.number
    }
}

impl fmt::Display for BufferId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.number.fmt(f)
    }
}

/// A session number, unique in this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct SessionNumber(u64);

impl SessionNumber {
    fn next() -> Self {
        static NUMBERS: AtomicU64 = AtomicU64::new(0);
        Self(NUMBERS.fetch_add(1, Ordering::Relaxed))
    }
}

/// The largest number of buffers in a stream. All messages that either peer can send about this many buffers fit into a socket's
/// buffer, so neither peer waits for the other to read.
pub const MAX_BUFFERS: usize = 64;

/// Limits a wait. After its deadline, messages that have already arrived are still read, but a peer that never pauses can't keep the loop
/// busy.
#[derive(Debug)]
struct Limit {
    deadline: Instant,
    /// Messages read after the deadline.
    late: usize,
}

/// The most messages read after a deadline. A correct peer queues fewer.
const MAX_LATE_MESSAGES: usize = 4 * MAX_BUFFERS;

impl Limit {
    fn after(timeout: Duration) -> Self {
        Self { deadline: deadline_after(timeout), late: 0 }
    }

    /// The deadline for another message. `None` if the wait is over.
    fn next(&mut self) -> Option<Instant> {
        self.late += usize::from(Instant::now() >= self.deadline);
        (self.late <= MAX_LATE_MESSAGES).then_some(self.deadline)
    }
}

/// The call is not possible in this state.
fn misuse(problem: impl Into<String>) -> Error {
    Error::Misuse { problem: problem.into() }
}

/// The error of every call after the session has failed.
fn ended() -> Error {
    misuse("the session has ended: an earlier call returned the reason")
}
