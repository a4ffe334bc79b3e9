//! The order of GPU work across processes: a stream of one process waits for work of another process's stream, and no CPU waits.
//!
//! A [`Timeline`] is a number in a page of host memory that both processes map. One process's streams store a value when earlier work
//! is done, and other streams wait until the number has reached the value. If the peer dies, is stopped or is late, the library's thread
//! stores a value instead: the waiting streams continue, and [`Timeline::completion`] reports [`Completion::Lost`]. No context is lost.
//!
//! [Streams](super::stream) use the same order by themselves: see [`Loan::publish_on`](super::stream::Loan::publish_on) and
//! [`Subscriber::receive_on`](super::stream::Subscriber::receive_on).
//!
//! Rules of the driver, which no library can change:
//! - A process's streams share a few hardware queues (8 by default, at most 32 with `CUDA_DEVICE_MAX_CONNECTIONS`). A stream that waits
//!   occupies its queue: with eight waiting streams, all other streams of the process stand still until one of them continues.
//! - Behind a wait, an asynchronous copy to pageable memory blocks the calling thread. So do `cuMemUnmap`, `cuMemFree`,
//!   `cuCtxSynchronize` and `cuMemHostUnregister`, on any thread. Release the timeline first, or wait for the work.
//! - A captured wait would be replayed with an old value and read torn data. A stream that is being captured is therefore refused.

mod timeline;
mod waits;

use std::{
    num::NonZeroUsize,
    sync::{Arc, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};

pub use self::timeline::Timeline;
pub(crate) use self::waits::Waits;
#[doc(inline)]
pub use crate::driver::Stream;
use crate::{
    driver::{Attribute, Registered},
    error::{DeviceError, Error, Result},
    memory::Device,
    sys::Words,
};

/// Not 0 once the waits for the words are released.
pub(crate) const LOST: usize = 0;

/// The words of the self-test: a stream waits for the first, then stores into the second.
const TEST: usize = 0;
const TESTED: usize = 1;

/// The length of the self-test, at most.
const TEST_LIMIT: Duration = Duration::from_secs(2);

/// How two processes order their GPU work.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Order {
    /// Streams wait for streams.
    Gpu,
    /// A CPU waits for each buffer.
    Cpu {
        /// The reason.
        reason: String,
    },
}

/// Whether GPU work of a peer is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Completion {
    /// It is done, and all that it wrote is visible.
    Done,
    /// It is not done yet.
    Pending,
    /// The wait was released before it was known to be done: the data that was read behind the wait is undefined.
    Lost,
}

/// Words that streams use, and the words of the self-test: unregistering may block, so both are unregistered together.
pub(crate) type Tested = [Registered; 2];

/// Lets the streams of a device use words, after a test that a store of this CPU releases a wait. The test has words of its own: a peer may
/// test the others at the same time, or store into them.
///
/// # Errors
/// [`DeviceError::Unordered`]; [`Error::Driver`]; [`Error::System`].
pub(crate) fn test(device: &Device, words: &Arc<Words>) -> Result<Tested> {
    let unordered = |reason| Err(Error::Device(DeviceError::Unordered { reason }));
    if device.attribute(Attribute::StreamMemoryOperations)? == 0 {
        return unordered(format!("{device} has no stream memory operations (attribute 122)"));
    }
    let (own, _) =
        Words::create(c"vmmfd-words", PAGE).map_err(|error| Error::system("create the words of a test", error))?;
    let own = Arc::new(own);
    let registered = device.driver().register(device.ordinal(), Arc::clone(&own))?;
    let stream = device.driver().create_stream(device.ordinal())?;
    let [test, tested] = [TEST, TESTED].map(|index| &own.get()[index]);
    stream.enqueue(&[registered.wait(TEST, 1), registered.write(TESTED, 1)])?;
    // A stream that watches a copy of the page may continue at once, or never.
    thread::sleep(Duration::from_micros(100));
    let is_early = tested.load(Ordering::Acquire) != 0;
    test.store(1, Ordering::Release);
    let deadline = Instant::now() + TEST_LIMIT;
    while tested.load(Ordering::Acquire) == 0 && Instant::now() < deadline {
        thread::yield_now();
    }
    if tested.load(Ordering::Acquire) == 0 {
        // It may wait for ever, and the driver with it.
        std::mem::forget((registered, stream));
        return unordered(format!("a stream of {device} did not see a store of the CPU within {TEST_LIMIT:?}"));
    }
    // Destroying and unregistering would wait for it.
    stream.synchronize()?;
    if is_early {
        return unordered(format!("a stream of {device} did not wait"));
    }
    Ok([device.driver().register(device.ordinal(), Arc::clone(words))?, registered])
}

/// The memory of a timeline.
const PAGE: NonZeroUsize = NonZeroUsize::new(4096).unwrap();
