//! Sessions between a producer and a consumer: the messages of [`crate::wire`], exchanged over a [`crate::channel::Channel`], share
//! objects of [`crate::memory`].
//!
//! | Session | Producer | Consumer |
//! |---|---|---|
//! | one buffer, handed to any number of consumers | [`handoff::serve`], [`handoff::serve_connection`] | [`handoff::Consumer`] |
//! | several buffers that one consumer receives repeatedly | [`stream::Publisher`] | [`stream::Subscriber`] |
//!
//! Each function takes a socket path or a connected socket.

mod acceptor;
pub mod handoff;
pub(crate) mod interrupt;
mod link;
mod opening;
pub mod order;
pub mod stream;
mod watcher;

use std::{
    path::Path,
    time::{Duration, Instant},
};

use self::interrupt::interruptibly;
#[doc(inline)]
pub use crate::channel::Config;
pub use crate::wire::{Check, Verdict};
use crate::{
    channel::{Cancel, Peer},
    driver::{Access, Backend, Choice, Opened, open},
    error::{Error, Result},
    memory::{Description, Device},
};

/// Progress of a session, reported as each step completes.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// The backend is ready.
    Started {
        /// The backend.
        backend: Backend,
        /// The reason for the fallback, if CUDA was preferred but is unavailable.
        fallback: Option<&'a Error>,
        /// Time that opening the backend took.
        elapsed: Duration,
    },
    /// The device is chosen, and its context is ready for copies.
    Device {
        /// The device.
        device: &'a Device,
        /// The allocation granularity, in bytes: sizes are multiples of it.
        granularity: u64,
        /// Time that the activation took.
        elapsed: Duration,
    },
    /// Memory is allocated.
    Created {
        /// The allocation.
        description: &'a Description,
        /// Time that the allocation took.
        elapsed: Duration,
    },
    /// Memory is mapped.
    Mapped {
        /// Its address in this process.
        address: u64,
        /// The access of this process.
        access: Access,
        /// Time that the mapping took.
        elapsed: Duration,
    },
    /// Memory is exported.
    Exported {
        /// The descriptors' numbers in this process. Empty for a legacy handle.
        fds: &'a [i32],
        /// Time that the export took.
        elapsed: Duration,
    },
    /// The memory is sealed.
    Sealed {
        /// Whether the kernel enforces the seal. If not, any holder of the descriptor can still write.
        enforced: bool,
        /// Time that sealing took.
        elapsed: Duration,
    },
    /// The producer listens for consumers.
    Listening {
        /// The socket's path.
        path: &'a Path,
        /// The number of consumers to serve. 0 means no limit.
        consumers: u64,
    },
    /// The consumer is connected, and both sides have sent their hello.
    Connected {
        /// The producer.
        peer: Peer,
        /// Time since the first connection attempt, including the wait for the producer.
        elapsed: Duration,
    },
    /// A consumer requested the buffer.
    Requested {
        /// The consumer.
        peer: Peer,
    },
    /// The consumer acknowledged the offer and its descriptors.
    Offered {
        /// The consumer.
        peer: Peer,
        /// The access offered.
        access: Access,
        /// The number of bytes offered.
        bytes: u64,
        /// Time since the request was processed.
        elapsed: Duration,
    },
    /// The consumer has received an offer and its descriptors.
    Received {
        /// The offered memory.
        description: &'a Description,
        /// The number of bytes requested.
        bytes: u64,
        /// The descriptors' numbers in this process. They are closed by now.
        fds: &'a [i32],
        /// Time from the request to the last descriptor, without the time for opening.
        elapsed: Duration,
    },
    /// The peer sent its result.
    Reported {
        /// The peer.
        peer: Peer,
        /// The peer's verdict.
        verdict: &'a Verdict,
        /// Time spent waiting for it.
        elapsed: Duration,
    },
    /// A consumer's session is over.
    Ended {
        /// The consumer and its result.
        served: &'a handoff::Served,
    },
}

/// Receives events. Several threads may call it at once.
pub type Observer<'a> = &'a (dyn Fn(Event<'_>) + Sync);

/// Opens a backend. Blocks until the driver has started; a cancellation interrupts the wait, and the driver finishes in a thread.
///
/// # Errors
/// The errors of [`open`]; [`Error::Interrupted`].
pub fn start(choice: Choice, cancel: &Cancel, observer: Observer<'_>) -> Result<Opened> {
    let begun = Instant::now();
    let opened = interruptibly(&mut || cancel.check(), move || open(choice))?;
    let backend = opened.driver.backend();
    observer(Event::Started { backend, fallback: opened.fallback.as_ref(), elapsed: begun.elapsed() });
    Ok(opened)
}

/// Creates the device's context, and reports it. Calls `tick` while it waits.
fn activate(device: &Device, tick: &mut dyn FnMut() -> Result<()>, observer: Observer<'_>) -> Result<()> {
    let begun = Instant::now();
    let granularity = device.granularity()?;
    let activated = device.clone();
    interruptibly(tick, move || activated.activate())?;
    observer(Event::Device { device, granularity, elapsed: begun.elapsed() });
    Ok(())
}
