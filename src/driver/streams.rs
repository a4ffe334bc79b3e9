//! CUDA streams, and words in shared host memory on which they wait.

#![allow(unsafe_code)]

use std::{fmt, ptr::NonNull, sync::Arc};

use crate::{
    error::{Error, Result},
    sys::Words,
};

/// Streams and registered host memory. A stream is the number of a `CUstream`; `ordinal` is the device whose primary context is current
/// during the call.
///
/// No call invalidates a stream capture of another thread.
pub trait Streams: fmt::Debug + Send + Sync {
    /// Creates a stream that is not ordered with the default stream. `cuStreamCreate`.
    fn create(&self, ordinal: i32) -> Result<u64>;

    /// Destroys a stream; work that it contains is still done. Does not block. `cuStreamDestroy_v2`.
    ///
    /// # Safety
    /// [`Streams::create`] returned it, and nothing uses it any more.
    unsafe fn destroy(&self, ordinal: i32, stream: u64) -> Result<()>;

    /// The device of a stream. `cuStreamGetCtx`, `cuCtxGetDevice`.
    ///
    /// # Safety
    /// The stream exists. As for all functions below.
    unsafe fn device(&self, ordinal: i32, stream: u64) -> Result<i32>;

    /// Whether the stream is being captured into a graph. `cuStreamIsCapturing`.
    ///
    /// # Safety
    /// See [`Streams::device`].
    unsafe fn is_capturing(&self, ordinal: i32, stream: u64) -> Result<bool>;

    /// Whether all work of the stream is done. Does not block. `cuStreamQuery`.
    ///
    /// # Safety
    /// See [`Streams::device`].
    unsafe fn is_idle(&self, ordinal: i32, stream: u64) -> Result<bool>;

    /// Waits until all work of the stream is done. `cuStreamSynchronize`.
    ///
    /// # Safety
    /// See [`Streams::device`].
    unsafe fn synchronize(&self, ordinal: i32, stream: u64) -> Result<()>;

    /// Lets devices access host memory, and returns its address for them. `cuMemHostRegister_v2`, `cuMemHostGetDevicePointer_v2`.
    ///
    /// # Safety
    /// The memory stays mapped until [`Streams::unregister`], and all its bytes are valid whatever a device stores.
    unsafe fn register(&self, ordinal: i32, start: NonNull<u8>, size: usize) -> Result<u64>;

    /// Ends the registration. **Blocks while any stream of the context waits for a word**, of this memory or of other memory, and then
    /// other registrations block too. `cuMemHostUnregister`.
    ///
    /// # Safety
    /// [`Streams::register`] registered it.
    unsafe fn unregister(&self, ordinal: i32, start: NonNull<u8>) -> Result<()>;

    /// Enqueues operations, in this order. A store follows all earlier work of the stream, which is then visible to all processors.
    /// Blocks only if the stream's queue is full. Returns false, and enqueues nothing, if the stream is being captured.
    /// `cuStreamIsCapturing`, `cuStreamBatchMemOp_v2`.
    ///
    /// # Safety
    /// See [`Streams::device`]. The addresses are of registered memory, which stays registered until the operations are done.
    unsafe fn enqueue(&self, ordinal: i32, stream: u64, operations: &[Operation]) -> Result<bool>;
}

/// An operation of a stream on a word, by its address for devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Waits until the word has reached a value: until the difference is not negative as a signed number.
    /// `CU_STREAM_MEM_OP_WAIT_VALUE_64` with `CU_STREAM_WAIT_VALUE_GEQ`.
    Wait {
        /// The word.
        address: u64,
        /// The value.
        value: u64,
    },
    /// Stores a value. `CU_STREAM_MEM_OP_WRITE_VALUE_64`.
    Write {
        /// The word.
        address: u64,
        /// The value.
        value: u64,
    },
}

/// Whether a word has reached a value, as a stream compares them.
pub(crate) fn has_reached(word: u64, value: u64) -> bool {
    word.wrapping_sub(value) as i64 >= 0
}

/// A CUDA stream. Clones refer to the same stream.
///
/// [`Driver::create_stream`](super::Driver::create_stream) creates one, which is destroyed with its last clone.
/// [`Driver::stream`](super::Driver::stream) refers to a stream of another library.
#[derive(Clone)]
pub struct Stream(Arc<StreamParts>);

struct StreamParts {
    streams: Arc<dyn Streams>,
    ordinal: i32,
    number: u64,
    is_own: bool,
}

impl Stream {
    pub(super) fn create(streams: Arc<dyn Streams>, ordinal: i32) -> Result<Self> {
        let number = streams.create(ordinal)?;
        Ok(Self(Arc::new(StreamParts { streams, ordinal, number, is_own: true })))
    }

    /// # Safety
    /// The stream exists as long as the result and its clones.
    pub(super) unsafe fn of(streams: Arc<dyn Streams>, ordinal: i32, number: u64) -> Result<Self> {
        // SAFETY: upheld by the caller.
        let ordinal = unsafe { streams.device(ordinal, number) }?;
        Ok(Self(Arc::new(StreamParts { streams, ordinal, number, is_own: false })))
    }

    /// The ordinal of the stream's device.
    pub fn ordinal(&self) -> i32 {
        self.0.ordinal
    }

    /// The `CUstream`, as a number.
    pub fn number(&self) -> u64 {
        self.0.number
    }

    /// Waits until all work of the stream is done.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver), also for an earlier failure of the work. Driver call: `cuStreamSynchronize`.
    #[doc(alias = "cuStreamSynchronize")]
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: the stream exists, as `create` or the caller of `of` ensured.
        unsafe { self.0.streams.synchronize(self.0.ordinal, self.0.number) }
    }

    /// Whether all work of the stream is done. Does not block.
    ///
    /// # Errors
    /// As for [`Stream::synchronize`]. Driver call: `cuStreamQuery`.
    #[doc(alias = "cuStreamQuery")]
    pub fn is_idle(&self) -> Result<bool> {
        // SAFETY: as above.
        unsafe { self.0.streams.is_idle(self.0.ordinal, self.0.number) }
    }

    /// # Errors
    /// [`Error::Misuse`] if the stream is being captured; [`Error::Driver`].
    pub(crate) fn check(&self) -> Result<()> {
        // SAFETY: as above.
        let is_capturing = unsafe { self.0.streams.is_capturing(self.0.ordinal, self.0.number) }?;
        if is_capturing { Err(self.captured()) } else { Ok(()) }
    }

    /// Refuses the default stream of the calling thread where other threads use the stream later: there it is another stream.
    ///
    /// # Errors
    /// [`Error::Misuse`].
    pub(crate) fn check_shared(&self) -> Result<()> {
        const PER_THREAD: u64 = 2;
        if self.number() == PER_THREAD {
            let problem = "the per-thread default stream is another stream on each thread: use a created stream".into();
            return Err(Error::Misuse { problem });
        }
        Ok(())
    }

    /// Enqueues operations on words: see [`Streams::enqueue`].
    ///
    /// # Errors
    /// As for [`Stream::check`].
    pub(crate) fn enqueue(&self, operations: &[Operation]) -> Result<()> {
        // SAFETY: as above. Only `Registered` returns operations, and it is unregistered when no stream uses it any more.
        let is_enqueued = unsafe { self.0.streams.enqueue(self.0.ordinal, self.0.number, operations) }?;
        if is_enqueued { Ok(()) } else { Err(self.captured()) }
    }

    fn captured(&self) -> Error {
        let problem = format!(
            "{self:?} is being captured into a graph: a replay would not wait for another process. Order the work before \
             or after the capture"
        );
        Error::Misuse { problem }
    }
}

/// Compares streams: clones are equal.
impl PartialEq for Stream {
    fn eq(&self, other: &Self) -> bool {
        (self.0.ordinal, self.0.number) == (other.0.ordinal, other.0.number)
    }
}

impl Eq for Stream {}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the stream {:#x} of device {}", self.0.number, self.0.ordinal)
    }
}

impl Drop for StreamParts {
    fn drop(&mut self) {
        if self.is_own {
            // SAFETY: `create` returned it, and this was the last reference.
            if let Err(error) = unsafe { self.streams.destroy(self.ordinal, self.number) } {
                tracing::warn!(%error, "can't destroy a stream");
            }
        }
    }
}

/// Words that the streams of this process can use.
///
/// Dropping it blocks while any stream of the context waits for a word: see [`Streams::unregister`].
#[derive(Debug)]
pub(crate) struct Registered {
    words: Arc<Words>,
    address: u64,
    ordinal: i32,
    streams: Arc<dyn Streams>,
}

impl Registered {
    pub(super) fn new(streams: Arc<dyn Streams>, ordinal: i32, words: Arc<Words>) -> Result<Self> {
        // SAFETY: this object keeps the words mapped until its drop, and they are atomic.
        let address = unsafe { streams.register(ordinal, words.start().cast(), words.size()) }?;
        Ok(Self { words, address, ordinal, streams })
    }

    /// Waits for the word at an index.
    pub(crate) fn wait(&self, index: usize, value: u64) -> Operation {
        Operation::Wait { address: self.address_of(index), value }
    }

    /// Stores into the word at an index.
    pub(crate) fn write(&self, index: usize, value: u64) -> Operation {
        Operation::Write { address: self.address_of(index), value }
    }

    fn address_of(&self, index: usize) -> u64 {
        assert!(index < self.words.get().len(), "word {index} is outside of the memory");
        self.address + 8 * index as u64
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // SAFETY: `new` registered it. The call waits for the streams that wait for a word.
        if let Err(error) = unsafe { self.streams.unregister(self.ordinal, self.words.start().cast()) } {
            tracing::warn!(%error, "can't unregister host memory");
            // The driver may still use it.
            std::mem::forget(Arc::clone(&self.words));
        }
    }
}
