//! Timelines.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Mutex, atomic::Ordering},
    time::Duration,
};

use super::{Completion, PAGE, Stream, Tested, Waits, test};
use crate::{
    channel::Cancel,
    driver::Registered,
    error::{Error, Loss, PeerError, Result},
    memory::Device,
    sys::{Words, lock},
};

/// The index of the value.
const VALUE: usize = 8;

/// A number that streams of one process raise, and that streams of any process wait for.
///
/// The process that creates it records; any process that has the descriptor can wait and release. It is handed over as a descriptor, like
/// memory: over SCM_RIGHTS, or to a child.
///
/// Dropping a timeline of a device blocks while any stream of the device waits for a timeline. To release the waits first, call
/// [`Timeline::release`].
///
/// ```no_run
/// use std::time::Duration;
/// use vmmfd::{driver::{Choice, open}, memory::{Device, Selector}, session::order::{Completion, Timeline}};
///
/// # fn main() -> vmmfd::Result<()> {
/// let driver = open(Choice::Auto)?.driver;
/// let device = Device::find(&driver, Selector::default())?;
/// let stream = driver.create_stream(device.ordinal())?;
///
/// let timeline = Timeline::create(&device)?; // Send `timeline.as_fd()` to the other process.
/// // Enqueue work on `stream`, then:
/// let value = timeline.record(&stream)?;
///
/// // In the other process, with the descriptor, the value, and its own stream:
/// # let (fd, pidfd) = (timeline.as_fd().try_clone_to_owned().unwrap(), timeline.as_fd().try_clone_to_owned().unwrap());
/// # use std::os::fd::AsFd;
/// let other = Timeline::open(fd, Some(&device))?;
/// other.release_with(pidfd)?; // If the first process dies.
/// other.wait(&stream, value, Duration::from_secs(1))?; // At most one second.
/// // Enqueue work that reads, synchronize, then:
/// assert_ne!(other.completion(value), Completion::Lost);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Timeline {
    /// Before the words. Blocks.
    registered: Option<Tested>,
    words: Arc<Words>,
    waits: Arc<Waits>,
    file: OwnedFd,
    device: Option<Device>,
    /// `None` if another process records.
    recorded: Option<Mutex<Recorded>>,
}

#[derive(Debug, Default)]
struct Recorded {
    value: u64,
    last: Option<Stream>,
}

impl Timeline {
    /// Creates a timeline whose value is 0, for streams of a device.
    ///
    /// # Errors
    /// [`DeviceError::Unordered`](crate::error::DeviceError::Unordered) if the device's streams can't wait for host memory, as on the host
    /// backend; [`Error::Driver`]; [`Error::System`].
    ///
    /// Driver calls: `cuMemHostRegister`, `cuStreamCreate`, `cuStreamBatchMemOp`.
    #[doc(alias("cuMemHostRegister", "cuStreamBatchMemOp"))]
    pub fn create(device: &Device) -> Result<Self> {
        let made = Words::create(c"vmmfd-words", PAGE).map_err(|error| Error::system("create a timeline", error))?;
        let recorded = Some(Mutex::default());
        Self::new(made, Some(device), recorded)
    }

    /// Opens another process's timeline, for streams of a device, or, without a device, to query, wait on the CPU and release.
    ///
    /// # Errors
    /// The errors of [`Timeline::create`]; [`Error::System`] if the descriptor is of no timeline: it must be a memfd of 4096 bytes with
    /// final seals.
    pub fn open(file: OwnedFd, device: Option<&Device>) -> Result<Self> {
        let words = Words::open(file.as_fd(), PAGE).map_err(|error| Error::system("open a timeline", error))?;
        Self::new((words, file), device, None)
    }

    fn new(
        (words, file): (Words, OwnedFd),
        device: Option<&Device>,
        recorded: Option<Mutex<Recorded>>,
    ) -> Result<Self> {
        let words = Arc::new(words);
        let waits = Waits::new(Arc::clone(&words), VALUE..VALUE + 1)?;
        let registered = device.map(|device| test(device, &words)).transpose()?;
        Ok(Self { registered, words, waits, file, device: device.cloned(), recorded })
    }

    fn registered(&self, stream: &Stream) -> Result<&Registered> {
        let (Some([registered, _]), Some(device)) = (&self.registered, &self.device) else {
            return Err(misuse("this timeline was opened without a device: no stream can use it"));
        };
        if device.ordinal() != stream.ordinal() {
            return Err(misuse(format!("the timeline is for {device}, but {stream:?} is of another device")));
        }
        Ok(registered)
    }

    /// Raises the value by 1 when all earlier work of the stream is done, and returns the new value. Does not wait for the work. If the
    /// last value was recorded on another stream, this stream waits for that value first: the value only grows.
    ///
    /// # Errors
    /// [`Error::Misuse`] if another process records, for a stream of another device, for the per-thread default stream, and for a stream
    /// that is being captured; [`PeerError::WorkLost`](crate::error::PeerError::WorkLost) after a release; [`Error::Driver`].
    ///
    /// Driver calls: `cuStreamIsCapturing`, `cuStreamBatchMemOp`.
    #[doc(alias("cuStreamBatchMemOp", "cuStreamWriteValue64"))]
    pub fn record(&self, stream: &Stream) -> Result<u64> {
        let recorded = self.recorded.as_ref();
        let recorded = recorded.ok_or_else(|| misuse("another process records on this timeline: create an own one"))?;
        let registered = self.registered(stream)?;
        stream.check_shared()?;
        let mut recorded = lock(recorded);
        if self.waits.is_lost() {
            return Err(self.waits.loss());
        }
        let value = recorded.value + 1;
        let behind = recorded.last.as_ref().is_some_and(|last| last != stream);
        let wait = behind.then(|| registered.wait(VALUE, recorded.value));
        let operations: Vec<_> = wait.into_iter().chain([registered.write(VALUE, value)]).collect();
        stream.enqueue(&operations)?;
        *recorded = Recorded { value, last: Some(stream.clone()) };
        Ok(value)
    }

    /// Lets a stream wait until the value is reached, at most this long. Does not block. After the limit, all waits for the timeline are
    /// released, in all processes, and it can't be used any more.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a value of 2^63 or more, for a stream of another device, and for a stream that is being captured;
    /// [`PeerError::WorkLost`](crate::error::PeerError::WorkLost) after a release; [`Error::Driver`].
    ///
    /// Driver calls: `cuStreamIsCapturing`, `cuStreamBatchMemOp`.
    #[doc(alias("cuStreamBatchMemOp", "cuStreamWaitValue64"))]
    pub fn wait(&self, stream: &Stream, value: u64, limit: Duration) -> Result<()> {
        let registered = self.registered(stream)?;
        stream.check()?;
        if self.waits.expect(VALUE, value, limit)? {
            stream.enqueue(&[registered.wait(VALUE, value)])?;
        }
        Ok(())
    }

    /// Waits on the CPU until the value is reached, at most this long.
    ///
    /// # Errors
    /// [`PeerError::Timeout`]; [`PeerError::WorkLost`] after a release; [`Error::Interrupted`].
    pub fn wait_cpu(&self, value: u64, limit: Duration, cancel: &Cancel) -> Result<()> {
        match self.waits.wait(VALUE, value, limit, cancel)? {
            Completion::Done => Ok(()),
            Completion::Lost => Err(self.waits.loss()),
            Completion::Pending => {
                Err(Error::Peer(PeerError::Timeout { purpose: "for a value of a timeline", waited: limit }))
            }
        }
    }

    /// Whether the value was reached. Does not block.
    pub fn completion(&self, value: u64) -> Completion {
        self.waits.completion(VALUE, value)
    }

    /// The value now; after a release usually 2^63 - 1.
    pub fn value(&self) -> u64 {
        self.words.get()[VALUE].load(Ordering::Acquire)
    }

    /// Ends all waits for the timeline, in all processes, by a store of this CPU. Values that were not reached are lost. Does not block,
    /// and makes no driver call.
    pub fn release(&self) {
        self.waits.release(Loss::Released);
    }

    /// Releases the waits when a peer's process exits (its pidfd), or closes its end of a connection (a socket).
    ///
    /// # Errors
    /// [`Error::Forked`] in a fork; [`Error::System`]: see epoll_ctl(2), pidfd_open(2).
    pub fn release_with(&self, peer: OwnedFd) -> Result<()> {
        self.waits.release_with(peer)
    }
}

impl AsFd for Timeline {
    /// The memory of the timeline, for another process's [`Timeline::open`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

fn misuse(problem: impl Into<String>) -> Error {
    Error::Misuse { problem: problem.into() }
}
