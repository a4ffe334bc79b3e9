//! A buffer that a producer shares, open in this process.

use std::{ops::Range, sync::Arc};

use crate::{
    array::ArrayDescriptor,
    driver::Access,
    error::Result,
    memory::{Array, Description, Device, Imported, Region},
    session::{
        Check,
        opening::{Connection, Offer},
    },
};

/// A buffer that a producer shares, or a part of it, open in this process.
///
/// [`Region::size`] is the bytes of data that it has; [`ImportedObject::mapped_size`] is what is mapped. Shared by
/// [`crate::memory::Mechanism::Vmm`] it stays valid for as long as it lives, also when the producer is gone. Memory of a pool and
/// legacy memory are the producer's to free once the connection has ended: so the connection lasts until they are dropped, even if
/// the [`Consumer`](super::Consumer) is dropped before.
#[derive(Debug)]
pub struct ImportedObject {
    pub(super) offer: Offer,
    pub(super) memory: Imported,
    pub(super) range: Range<u64>,
    // Dropped after the memory, which can't be taken out of here.
    pub(super) _connection: Option<Arc<Connection>>,
}

impl ImportedObject {
    /// What the producer says of all of the object.
    pub fn description(&self) -> &Description {
        &self.offer.memory
    }

    /// What the data of all of the object is made of, if the producer says.
    pub fn array(&self) -> Option<&ArrayDescriptor> {
        self.offer.array.as_ref()
    }

    /// What the bytes that were asked for can be checked against, if the producer says.
    pub fn check(&self) -> Option<&Check> {
        self.offer.check.as_ref()
    }

    /// The bytes of the object that were asked for.
    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    /// Which byte of the object the memory begins with: 0 unless only a part was asked for.
    pub fn start(&self) -> u64 {
        self.memory.start()
    }

    /// How many bytes are mapped: at least [`Region::size`]. What lies behind the data is the producer's padding.
    pub fn mapped_size(&self) -> u64 {
        self.memory.mapped_size()
    }

    /// Whether all of the object is there.
    pub fn is_whole(&self) -> bool {
        self.memory.start() == 0 && self.range == (0..self.offer.memory.size)
    }

    /// The typed array that it holds, if the producer says so and all of it was asked for.
    ///
    /// # Errors
    /// [`MemoryError::Array`](crate::error::MemoryError::Array) if it is not inside the memory, which was checked before.
    pub fn into_array(self) -> Result<Option<Array>> {
        match self.offer.array.clone().filter(|_| self.is_whole()) {
            Some(array) => Array::new(Arc::new(self), array).map(Some),
            None => Ok(None),
        }
    }
}

impl crate::memory::sealed::Sealed for ImportedObject {}

impl Region for ImportedObject {
    fn device(&self) -> &Device {
        self.memory.device()
    }

    fn address(&self) -> u64 {
        self.memory.address()
    }

    fn size(&self) -> u64 {
        self.memory.size()
    }

    fn access(&self) -> Access {
        self.memory.access()
    }

    fn is_protected(&self) -> bool {
        self.memory.is_protected()
    }
}
