//! A received buffer.

use std::{fmt, sync::Arc, time::Instant};

use super::BufferId;
use crate::{
    array::ArrayDescriptor,
    error::Result,
    memory::{Array, Imported, Pool, Region, region},
    session::opening::Connection,
};

/// The memory of an open buffer.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) id: BufferId,
    pub(super) memory: Imported,
    pub(super) array: Option<ArrayDescriptor>,
    // Declared after the memory, and therefore dropped after it.
    pub(super) pool: Option<(u64, Arc<Pool>)>,
    // Dropped last: closing the connection frees the producer's memory.
    pub(super) _connection: Option<Arc<Connection>>,
}

/// A buffer that the consumer has until it gives it back. [`Region::size`] is the size of the data in bytes.
///
/// If it is dropped without [`Subscriber::give_back`](super::Subscriber::give_back), the subscriber's next call gives it back. It remains
/// usable after the producer exits. If it is memory of a pool or legacy memory, the connection remains open until it is dropped.
pub struct Received {
    pub(super) held: Arc<Held>,
    pub(super) generation: u64,
    pub(super) usable_since: Instant,
}

impl Received {
    /// The buffer's identifier.
    pub fn id(&self) -> BufferId {
        self.held.id
    }

    /// The number of publications of this buffer, including this one.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// When the buffer became usable. For a new buffer, the time before its opening was acknowledged to the producer.
    pub fn usable_since(&self) -> Instant {
        self.usable_since
    }

    /// The array layout of the data, if the producer sent one.
    pub fn array(&self) -> Option<&ArrayDescriptor> {
        self.held.array.as_ref()
    }

    /// Size of the mapping in bytes, at least [`Region::size`]. The bytes after the data are padding.
    pub fn mapped_size(&self) -> u64 {
        self.held.memory.mapped_size()
    }

    /// Converts the buffer into its typed array. `None` if the producer sent no array layout. When the array and its views are dropped, the
    /// subscriber's next call gives the buffer back.
    ///
    /// # Errors
    /// [`MemoryError::Array`](crate::error::MemoryError::Array) if the array is not inside the memory. Opening has already checked this.
    pub fn into_array(self) -> Result<Option<Array>> {
        match self.held.array.clone() {
            Some(array) => Array::new(Arc::new(self), array).map(Some),
            None => Ok(None),
        }
    }
}

region!(
    Received,
    |this| this.held.memory.device(),
    this.held.memory.address(),
    this.held.memory.size(),
    this.held.memory.access(),
    this.held.memory.is_protected()
);

impl fmt::Debug for Received {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "generation {} of buffer {} at {:#x}", self.generation, self.held.id, self.address())
    }
}
