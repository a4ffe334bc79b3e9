//! A buffer that the subscriber has open, and its turn.

use std::{fmt, sync::Arc, time::Instant};

use super::BufferId;
use crate::{
    array::ArrayDescriptor,
    driver::Access,
    error::Result,
    memory::{Array, Device, Imported, Pool, Region},
    session::opening::Connection,
};

/// A buffer's memory.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) id: BufferId,
    pub(super) memory: Imported,
    pub(super) array: Option<ArrayDescriptor>,
    // Dropped after the memory.
    pub(super) pool: Option<(u64, Arc<Pool>)>,
    // And this at the very end, where the memory is the producer's to free.
    pub(super) _connection: Option<Arc<Connection>>,
}

/// A buffer in use, which is this side's until it is given back. [`Region::size`] is its bytes of data.
///
/// Dropped without [`Subscriber::give_back`](super::Subscriber::give_back) it is given back with the next call of the subscriber.
/// It can be used also when the producer is gone; of memory of a pool and legacy memory the connection lasts until it is dropped.
pub struct Received {
    pub(super) held: Arc<Held>,
    pub(super) generation: u64,
    pub(super) usable: Instant,
}

impl Received {
    /// Which buffer it is.
    pub fn id(&self) -> BufferId {
        self.held.id
    }

    /// How often the buffer was published, with this time.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Since when it can be used: of a new buffer, from before `received` was sent to the producer.
    pub fn usable_since(&self) -> Instant {
        self.usable
    }

    /// What the data is made of, if the producer says.
    pub fn array(&self) -> Option<&ArrayDescriptor> {
        self.held.array.as_ref()
    }

    /// How many bytes are mapped: at least [`Region::size`]. What lies behind the data is the producer's padding.
    pub fn mapped_size(&self) -> u64 {
        self.held.memory.mapped_size()
    }

    /// The typed array that it holds, if the producer says so. It is given back with the next call of the subscriber after the
    /// array and its views are dropped.
    ///
    /// # Errors
    /// [`MemoryError::Array`](crate::error::MemoryError::Array) if it is not inside the memory, which was checked before.
    pub fn into_array(self) -> Result<Option<Array>> {
        match self.held.array.clone() {
            Some(array) => Array::new(Arc::new(self), array).map(Some),
            None => Ok(None),
        }
    }
}

impl crate::memory::sealed::Sealed for Received {}

impl Region for Received {
    fn device(&self) -> &Device {
        self.held.memory.device()
    }

    fn address(&self) -> u64 {
        self.held.memory.address()
    }

    fn size(&self) -> u64 {
        self.held.memory.size()
    }

    fn access(&self) -> Access {
        self.held.memory.access()
    }

    fn is_protected(&self) -> bool {
        self.held.memory.is_protected()
    }
}

impl fmt::Debug for Received {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "generation {} of buffer {} at {:#x}", self.generation, self.held.id, self.address())
    }
}
