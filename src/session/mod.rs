//! The conversation of [`crate::wire`], held over a [`crate::channel::Channel`] about [`crate::memory`].
//!
//! | Dialect | Producer | Consumer |
//! |---|---|---|
//! | one buffer, handed to any number of consumers | [`handoff::serve`], [`handoff::serve_connection`] | [`handoff::Consumer`] |
//! | many buffers that one consumer gets again and again | [`stream::Publisher`] | [`stream::Subscriber`] |
//!
//! Each of them meets its peer at a path, or talks over a connected socket that the caller already has.

mod acceptor;
pub mod handoff;
mod link;
mod opening;
pub mod stream;

use std::{
    path::Path,
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

#[doc(inline)]
pub use crate::channel::Config;
pub use crate::wire::{Check, Verdict};
use crate::{
    channel::{Cancel, Peer},
    driver::{Access, Backend, Choice, Opened, open},
    error::{Error, Result},
    memory::{Description, Device},
};

/// A step that was taken, as it is taken.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// The backend is ready.
    Started {
        /// Which one.
        backend: Backend,
        /// Why it is not CUDA although that was preferred.
        fallback: Option<&'a Error>,
        /// How long it took.
        elapsed: Duration,
    },
    /// The device is chosen, and ready for copies.
    Device {
        /// Which one.
        device: &'a Device,
        /// What sizes are multiples of, in bytes.
        granularity: u64,
        /// How long it took.
        elapsed: Duration,
    },
    /// Memory is allocated.
    Created {
        /// What it is.
        description: &'a Description,
        /// How long it took.
        elapsed: Duration,
    },
    /// Memory is mapped.
    Mapped {
        /// Its address in this process.
        address: u64,
        /// What this process may do with it.
        access: Access,
        /// How long it took.
        elapsed: Duration,
    },
    /// Memory is exported.
    Exported {
        /// The descriptors' numbers in this process: none for a legacy handle.
        fds: &'a [i32],
        /// How long it took.
        elapsed: Duration,
    },
    /// The memory is sealed.
    Sealed {
        /// Whether the kernel enforces it. If not, any holder of the descriptor can still write.
        enforced: bool,
        /// How long it took.
        elapsed: Duration,
    },
    /// The producer listens.
    Listening {
        /// Where.
        path: &'a Path,
        /// For how many consumers, or 0 for any number.
        consumers: u64,
    },
    /// The consumer is connected and both have said hello.
    Connected {
        /// To whom.
        peer: Peer,
        /// How long it took, with the wait for the producer.
        elapsed: Duration,
    },
    /// A consumer asked for the buffer.
    Requested {
        /// Who.
        peer: Peer,
    },
    /// The producer sent the offer and the descriptor, and the consumer has them.
    Offered {
        /// To whom.
        peer: Peer,
        /// The access offered.
        access: Access,
        /// How long it took.
        elapsed: Duration,
    },
    /// The consumer has an offer and its descriptors.
    Received {
        /// What was offered.
        description: &'a Description,
        /// The descriptors' numbers in this process, which it had for a moment.
        fds: &'a [i32],
        /// How long it took.
        elapsed: Duration,
    },
    /// The other side sent its result.
    Reported {
        /// Who.
        peer: Peer,
        /// What it says.
        verdict: &'a Verdict,
        /// How long was waited for it.
        elapsed: Duration,
    },
    /// A consumer's conversation ended.
    Ended {
        /// Whose.
        served: &'a handoff::Served,
    },
}

/// Receives events, perhaps from several threads at once.
pub type Observer<'a> = &'a (dyn Fn(Event<'_>) + Sync);

/// Opens a backend, in a thread of its own: starting a driver takes long and can't be interrupted, waiting for it can.
///
/// # Errors
/// Those of [`open`]; [`Error::Interrupted`].
pub fn start(choice: Choice, cancel: &Cancel, observer: Observer<'_>) -> Result<Opened> {
    let begun = Instant::now();
    let opened = interruptibly(&mut || cancel.check(), move || open(choice))?;
    let backend = opened.driver.backend();
    observer(Event::Started { backend, fallback: opened.fallback.as_ref(), elapsed: begun.elapsed() });
    Ok(opened)
}

/// Makes a device ready for copies, and reports it: the second part of a driver's start. Calls `tick` meanwhile.
fn activate(device: &Device, tick: &mut dyn FnMut() -> Result<()>, observer: Observer<'_>) -> Result<()> {
    let begun = Instant::now();
    let granularity = device.granularity()?;
    let activated = device.clone();
    interruptibly(tick, move || activated.activate())?;
    observer(Event::Device { device, granularity, elapsed: begun.elapsed() });
    Ok(())
}

/// Runs what can't be interrupted in a thread, which is left behind if `tick`, which is called meanwhile, fails.
pub fn interruptibly<T: Send + 'static>(
    tick: &mut dyn FnMut() -> Result<()>,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let (sender, receiver) = mpsc::channel();
    let spawned = thread::Builder::new().name("driver".to_owned()).spawn(move || {
        // The caller may have given up.
        let _ = sender.send(work());
    });
    spawned.map_err(|error| Error::system("start a thread", error))?;
    loop {
        match receiver.recv_timeout(Duration::from_millis(5)) {
            Ok(result) => return result,
            Err(RecvTimeoutError::Timeout) => tick()?,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Error::system("start the driver", std::io::Error::other("its thread panicked")));
            }
        }
    }
}
