//! Streams: a publisher passes buffers of one pool to any number of subscribers, and none of them delays it.
//!
//! A subscriber maps the pool once, when it joins. After that, a publication is one small record to each subscriber, and dropping a
//! sample is one small record back: no descriptors, and no driver call except the synchronization.
//!
//! ```
//! use std::{thread, time::Duration};
//! use vmmfd::{
//!     driver::{Backend, Choice, open},
//!     memory::{Device, Region, Selector},
//!     session::{Config, stream::{Policy, PublishOptions, Publisher, Received, SubscribeOptions, Subscriber}},
//! };
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = vmmfd::internals::ExampleFolder::new()?;
//! # let path = folder.path().join("s.sock");
//! const LIMIT: Duration = Duration::from_secs(10);
//! let driver = open(Choice::Only(Backend::Host))?.driver;
//! let config = Config::default();
//!
//! // The publisher: four buffers of 1 MiB, the last of which a late subscriber receives too.
//! let device = Device::find(&driver, Selector::default())?;
//! let publisher = Publisher::create(&device, &PublishOptions::fixed(1 << 20, 4).history(1), &config)?;
//! publisher.listen(&path)?;
//! let loan = publisher.loan(LIMIT)?;
//! loan.copy_in(0, b"frame")?; // Or kernels on `loan.address()`.
//! loan.publish(b"left eye")?;
//!
//! // A subscriber, usually another process:
//! let subscriber = Subscriber::connect(&driver, None, &path, &SubscribeOptions::default().history(1), &config)?;
//! let Received::Sample(sample) = subscriber.receive(LIMIT)? else { return Err("no frame".into()) };
//! let mut bytes = [0; 5];
//! sample.copy_out(0, &mut bytes)?;
//! assert_eq!((&bytes, sample.number(), sample.user()), (b"frame", 1, &b"left eye"[..]));
//! drop(sample); // Gives the buffer back, from any thread.
//!
//! let stats = publisher.finish(LIMIT)?;
//! assert_eq!((stats.published, stats.subscribers[0].delivered), (1, 1));
//! assert!(matches!(subscriber.receive(LIMIT)?, Received::Ended));
//! # Ok(())
//! # }
//! ```

mod connection;
mod event;
mod format;
mod hub;
mod joining;
mod ledger;
mod loan;
mod member;
mod options;
mod publisher;
mod sample;
mod space;
mod subscriber;
mod turns;

pub(crate) use self::connection::Identity;
pub use self::{
    event::{Event, SubscriberInfo, Usage},
    format::Format,
    loan::{Loan, Published},
    options::{Policy, PublishOptions, SubscribeOptions},
    publisher::{Publisher, PublisherStats},
    sample::Sample,
    subscriber::{Received, Subscriber},
};
use crate::error::Error;
pub use crate::wire::{MAX_HELD, MAX_QUEUE, MAX_USER_BYTES};

/// The call is not possible in this state.
fn misuse(problem: impl Into<String>) -> Error {
    Error::Misuse { problem: problem.into() }
}
