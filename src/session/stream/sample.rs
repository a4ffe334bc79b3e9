//! A received buffer.

use std::{fmt, sync::Arc, time::Duration};

use super::{format::Format, misuse, subscriber::Connection};
use crate::{
    driver::Access,
    error::Result,
    memory::{Array, Region, region},
};

/// A buffer that this subscriber was given, mapped read-only. [`Region::size`] is the size of the data in bytes.
///
/// Dropping it gives it back, from any thread, also after the subscriber was dropped: waits until the GPU's work on the device has
/// finished, then sends a small record. It remains readable after the publisher has ended. After an eviction the publisher does not
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
        self.synchronize()?;
        self.connection.give_back(self.entry, self.number);
        Ok(())
    }

    /// Gives the buffer back without the synchronization: the caller has already synchronized all GPU work on the buffer.
    pub fn give_back_idle(mut self) {
        self.is_over = true;
        self.connection.give_back(self.entry, self.number);
    }
}

impl Drop for Sample {
    fn drop(&mut self) {
        if self.is_over || !self.connection.is_own() {
            return;
        }
        match self.synchronize() {
            Ok(()) => self.connection.give_back(self.entry, self.number),
            Err(error) => tracing::error!(%error, "a buffer is not given back: GPU work on it may not be finished"),
        }
    }
}

region!(
    Sample,
    |this| this.connection.memory.device(),
    this.connection.memory.address() + this.offset,
    this.size,
    Access::ReadOnly,
    true
);

impl fmt::Debug for Sample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "publication {} with {} bytes at {:#x}", self.number, self.size, self.address())
    }
}
