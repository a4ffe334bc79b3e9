//! Buffers that come again and again over one connection: a producer publishes, a consumer receives and gives back.
//!
//! The first time a buffer is published its descriptors travel and the consumer maps it. From then on the two ends name it by a
//! number, and a turn is one small record each way: no descriptor, no driver call but the synchronisation.
//!
//! ```
//! use std::{collections::HashMap, sync::Arc, thread, time::Duration};
//! use vmmfd::{
//!     channel::{Cancel, Listener, Trust},
//!     driver::{Access, Backend, Choice, open},
//!     memory::{Device, Region, Selector, Shared, Spec},
//!     session::{Terms, stream::{Publisher, Subscriber}},
//! };
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let driver = open(Choice::Only(Backend::Host))?.driver;
//! let terms = Terms { timeout: Duration::from_secs(30), trust: Trust::default(), cancel: Cancel::new()? };
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("s");
//! let listener = Listener::bind(&path, false, terms.timeout, &terms.cancel)?;
//!
//! // The consumer, which is another process most often:
//! let consume = || -> vmmfd::Result<()> {
//!     let mut subscriber = Subscriber::connect(&driver, None, &path, 2, &terms)?;
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
//!     let mut publisher = Publisher::accept(&listener, &driver, &terms)?;
//!     let (mut free, mut memory) = (Vec::new(), HashMap::new());
//!     for _ in 0..2 {
//!         let shared = Arc::new(Shared::create(&device, &Spec { size: 1 << 20, ..Spec::default() })?);
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

mod lobby;
mod publisher;
mod subscriber;

use std::fmt;

pub use self::{
    publisher::Publisher,
    subscriber::{Received, Subscriber},
};
use crate::error::{Error, ProtocolError};

/// A buffer of a stream: a number that the producer gives, and never again on the same connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BufferId(u64);

impl BufferId {
    /// The number, as it travels.
    pub fn number(self) -> u64 {
        self.0
    }
}

impl fmt::Display for BufferId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// How many buffers a stream has at most at a time: so many that all that either end could have to say of them fits into a socket,
/// and neither ever waits for the other one to read.
pub const MAX_BUFFERS: usize = 64;

/// The caller asks for what can't be.
fn misused(problem: impl Into<String>) -> Error {
    Error::Misuse { problem: problem.into() }
}

/// The peer says what can't be.
fn wrong(message: String) -> Error {
    ProtocolError::Content(message).into()
}

/// What a call is told when an earlier one had failed for good.
fn over() -> Error {
    misused("the session has ended: an earlier call says why")
}
