//! Hands one buffer to each consumer that requests it.
//!
//! A producer serves a [`Buffer`]. A [`Consumer`] requests it, opens it, uses it and reports a [`Verdict`](super::Verdict) on the data. The
//! caller defines the data and its check: [`Content`] for the producer, [`Verifier`] for the consumer, [`Unchecked`] for either if the data
//! is not checked.
//!
//! Over a socket pair, as between a process and its child:
//!
//! ```
//! use std::thread;
//! use vmmfd::{
//!     channel::Channel,
//!     driver::{Access, Backend, Choice, open},
//!     memory::{Device, Region, Selector, Shared, Spec},
//!     session::{
//!         Config, Verdict,
//!         handoff::{Buffer, Consumer, Request, ServeOptions, Unchecked, serve_connection},
//!     },
//! };
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let driver = open(Choice::Only(Backend::Host))?.driver;
//! let device = Device::find(&driver, Selector::default())?;
//! let shared = Shared::create(&device, Spec::vmm(1000))?;
//! shared.copy_in(0, b"there")?;
//! let buffer = Buffer::new(shared, Unchecked, None)?;
//!
//! let (ours, theirs) = Channel::socket_pair()?;
//! let config = Config::default();
//! thread::scope(|scope| {
//!     let producer = scope.spawn(|| serve_connection(ours, &buffer, &ServeOptions::default(), &config, &|_| {}));
//!
//!     // In the other process:
//!     let mut consumer = Consumer::over(theirs, &driver, None, &config, &|_| {})?;
//!     let object = consumer.request(&Request::default())?;
//!     let mut bytes = [0; 5];
//!     object.copy_out(0, &mut bytes)?;
//!     assert_eq!(&bytes, b"there");
//!     consumer.report(&object, &Verdict::unchecked(true))?;
//!     consumer.close();
//!
//!     let served = producer.join().expect("no panic")?;
//!     assert!(served.error.is_none());
//!     Ok(())
//! })
//! # }
//! ```

mod buffer;
mod connection;
mod consumer;
mod content;
mod gate;
mod object;
mod options;
mod server;

pub use self::{
    buffer::Buffer,
    consumer::{Consumer, Findings, Request, fetch},
    content::{Content, Offered, Tick, Unchecked, Verifier},
    object::ImportedObject,
    options::ServeOptions,
    server::{ServeReport, Served, serve, serve_connection},
};
