//! A received buffer.

use std::{fmt, sync::Arc, time::Duration};

use super::{format::Format, misuse, subscriber::Connection, turns::Turns};
use crate::{
    driver::{Access, Stream},
    error::Result,
    memory::{Array, Device, Region, check_range, sealed},
    session::order::Completion,
};

/// A buffer that this subscriber was given, mapped read-only. [`Region::size`] is the size of the data in bytes.
///
/// Dropping it gives it back, from any thread, also after the subscriber was dropped: waits until the GPU's work on the device has
/// finished, then sends a small record. A sample of [`Subscriber::receive_on`](super::Subscriber::receive_on) is given back behind its
/// stream's work, without waiting. It remains readable after the publisher has ended. After an eviction the publisher does not
/// reuse it either, until it is given back.
pub struct Sample {
    pub(super) connection: Arc<Connection>,
    /// Its place in the connection's list.
    pub(super) entry: usize,
    pub(super) number: u64,
    pub(super) time: Duration,
    pub(super) skipped: u64,
    pub(super) offset: u64,
    pub(super) size: u64,
    pub(super) user: Vec<u8>,
    pub(super) format: Arc<Format>,
    /// The turn after which the publisher's streams have written it.
    pub(super) turn: Option<u64>,
    /// The stream that waits for it, and then uses it.
    pub(super) stream: Option<Stream>,
    /// Whether the buffer was given back, or can't be.
    pub(super) is_over: bool,
}

impl Sample {
    /// The number of the publication in the publisher's epoch, counted from 1.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The time of the publication: `CLOCK_MONOTONIC`, which all processes of the machine share.
    pub fn published_at(&self) -> Duration {
        self.time
    }

    /// The time since the publication.
    pub fn age(&self) -> Duration {
        crate::sys::monotonic().saturating_sub(self.time)
    }

    /// The number of publications between this sample and the one before, which this subscriber did not get. 0 for the first.
    pub fn skipped_before(&self) -> u64 {
        self.skipped
    }

    /// The publisher's own bytes.
    pub fn user(&self) -> &[u8] {
        &self.user
    }

    /// Whether the publisher's GPU has written the buffer. [`Completion::Pending`] is possible only with
    /// [`Subscriber::receive_on`](super::Subscriber::receive_on); after [`Completion::Lost`], discard what was read. Does not block.
    pub fn completion(&self) -> Completion {
        match (self.turn, &self.connection.turns) {
            (Some(turn), Some(turns)) => turns.completion(turn),
            _ => Completion::Done,
        }
    }

    /// The description of the buffer.
    pub fn format(&self) -> &Format {
        &self.format
    }

    /// An array of the format. The array and its views keep the sample.
    ///
    /// # Errors
    /// [`MemoryError::NoArray`](crate::error::MemoryError::NoArray) if the format has no array of this name;
    /// [`MemoryError::Array`](crate::error::MemoryError::Array) or [`MemoryError::OutOfRange`](crate::error::MemoryError::OutOfRange) if
    /// the array is not inside the buffer.
    pub fn array(self: &Arc<Self>, name: &str) -> Result<Array> {
        let array = self.format.array(name);
        let array = array.ok_or_else(|| misuse(format!("the stream's format has no array `{name}`")))?;
        Array::new(Arc::clone(self) as Arc<dyn Region>, array.clone())
    }

    /// Gives the buffer back, like a drop, and reports a failure of the GPU's work.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver): the buffer is then not given back before this process exits.
    ///
    /// Driver call: `cuCtxSynchronize`.
    #[doc(alias = "cuCtxSynchronize")]
    pub fn give_back(mut self) -> Result<()> {
        self.is_over = true;
        self.give_back_when_done()
    }

    fn give_back_when_done(&self) -> Result<()> {
        match &self.stream {
            Some(stream) => self.connection.give_back_on(stream, self.entry, self.number),
            None => {
                self.synchronize()?;
                self.connection.give_back(self.entry, self.number, None);
                Ok(())
            }
        }
    }

    /// Gives the buffer back without the synchronization: the caller has already synchronized all GPU work on the buffer.
    pub fn give_back_idle(mut self) {
        if !std::mem::replace(&mut self.is_over, true) {
            self.connection.give_back(self.entry, self.number, None);
        }
    }

    /// Gives the buffer back behind the work of its stream, if that needs no wait, and keeps the pool mapped. For the bindings: nothing may
    /// use the buffer afterwards. If it fails, the buffer is not given back yet.
    #[doc(hidden)]
    pub fn give_back_early(&mut self) -> Result<()> {
        let is_ordered = self.connection.turns.as_ref().is_some_and(Turns::is_used);
        let may = is_ordered && !self.is_over && self.connection.is_own();
        if let Some(stream) = self.stream.as_ref().filter(|_| may) {
            self.connection.give_back_on(stream, self.entry, self.number)?;
            self.is_over = true;
        }
        Ok(())
    }
}

impl Drop for Sample {
    fn drop(&mut self) {
        if self.is_over || !self.connection.is_own() {
            return;
        }
        if let Err(error) = self.give_back_when_done() {
            tracing::error!(%error, "a buffer is not given back: GPU work on it may not be finished");
        }
    }
}

impl sealed::Sealed for Sample {}

impl Region for Sample {
    fn device(&self) -> &Device {
        self.connection.memory.device()
    }

    fn address(&self) -> u64 {
        self.connection.memory.address() + self.offset
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn access(&self) -> Access {
        Access::ReadOnly
    }

    /// Waits for the sample's stream first, if it has one.
    fn copy_out(&self, offset: u64, to: &mut [u8]) -> Result<()> {
        if let Some(stream) = &self.stream {
            stream.synchronize()?;
        }
        check_range(offset, to.len() as u64, self.size)?;
        self.connection.memory.copy_out(self.offset + offset, to)
    }
}

impl fmt::Debug for Sample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "publication {} with {} bytes at {:#x}", self.number, self.size, self.address())
    }
}
