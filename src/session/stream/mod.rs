//! Buffers that are used again and again over one connection: a producer publishes, a consumer receives and gives back.
//!
//! The first time a buffer is published its descriptors travel and the consumer maps it. From then on the two ends name it by a
//! number, and a turn is one small record each way: no descriptor, no driver call but the synchronisation.
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
//! // Or a path: `Subscriber::connect`, `Publisher::accept`.
//! let (ours, theirs) = Channel::socket_pair()?;
//!
//! // The consumer, which is another process most often:
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
};

pub use self::{publisher::Publisher, received::Received, subscriber::Subscriber};
use crate::error::{Error, ProtocolError};

/// A buffer of a stream, as one end of one session knows it. Another session's is never equal to it, nor accepted in its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BufferId {
    session: SessionNumber,
    number: u64,
}

impl BufferId {
    /// The number that the producer gave it, as it travels: both ends know it by that, and it is never used again on the
    /// connection.
    pub fn number(self) -> u64 {
        self.number
    }
}

impl fmt::Display for BufferId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.number.fmt(f)
    }
}

/// One end of a session: a number that this process never uses again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct SessionNumber(u64);

impl SessionNumber {
    fn next() -> Self {
        static NUMBERS: AtomicU64 = AtomicU64::new(0);
        Self(NUMBERS.fetch_add(1, Ordering::Relaxed))
    }
}

/// How many buffers a stream has at most at a time: so many that all that either end could have to say of them fits into a socket,
/// and neither ever waits for the other one to read.
pub const MAX_BUFFERS: usize = 64;

/// The caller asks for something that is not possible in this state.
fn misused(problem: impl Into<String>) -> Error {
    Error::Misuse { problem: problem.into() }
}

/// The peer contradicts the protocol.
fn wrong(message: String) -> Error {
    ProtocolError::Content(message).into()
}

/// The error of a call after an earlier one has failed for good.
fn over() -> Error {
    misused("the session has ended: an earlier call says why")
}
