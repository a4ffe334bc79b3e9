//! A producer's buffer, open in this process.

use std::{ops::Range, sync::Arc};

use crate::{
    array::ArrayDescriptor,
    error::Result,
    memory::{Array, Description, Imported, region},
    session::{
        Check,
        opening::{Connection, Offer},
    },
};

/// A producer's buffer, or a part of it, open in this process.
///
/// [`Region::size`](crate::memory::Region::size) is the size of the data in bytes, [`ImportedObject::mapped_size`] the size of the mapping.
/// An object shared with [`crate::memory::Mechanism::Vmm`] stays valid until it is dropped, even after the producer exits. Memory of a pool and legacy memory
/// belong to the producer, which frees them when the connection closes. The connection therefore remains open until all such objects are
/// dropped, even if the [`Consumer`](super::Consumer) is dropped first.
#[derive(Debug)]
pub struct ImportedObject {
    pub(super) offer: Offer,
    pub(super) memory: Imported,
    pub(super) range: Range<u64>,
    // Declared, and so dropped, after the memory.
    pub(super) _connection: Option<Arc<Connection>>,
}

impl ImportedObject {
    /// The producer's description of the whole object.
    pub fn description(&self) -> &Description {
        &self.offer.memory
    }

    /// The array layout of the whole object, if the producer sent one.
    pub fn array(&self) -> Option<&ArrayDescriptor> {
        self.offer.array.as_ref()
    }

    /// The producer's check of the requested bytes, if it sent one.
    pub fn check(&self) -> Option<&Check> {
        self.offer.check.as_ref()
    }

    /// The requested bytes of the object.
    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    /// Offset of the memory's first byte in the object: 0 unless a part was requested.
    pub fn start(&self) -> u64 {
        self.memory.start()
    }

    /// Size of the mapping in bytes, at least [`Region::size`](crate::memory::Region::size). The bytes after the data are padding.
    pub fn mapped_size(&self) -> u64 {
        self.memory.mapped_size()
    }

    /// Whether the whole object is open.
    pub fn is_whole(&self) -> bool {
        self.memory.start() == 0 && self.range == (0..self.offer.memory.size)
    }

    /// Converts the object into its typed array. `None` if the producer sent no array layout, or only a part was requested.
    ///
    /// # Errors
    /// [`MemoryError::Array`](crate::error::MemoryError::Array) if the array is not inside the memory. Opening has already checked this.
    pub fn into_array(self) -> Result<Option<Array>> {
        match self.offer.array.clone().filter(|_| self.is_whole()) {
            Some(array) => Array::new(Arc::new(self), array).map(Some),
            None => Ok(None),
        }
    }
}

region!(
    ImportedObject,
    |this| this.memory.device(),
    this.memory.address(),
    this.memory.size(),
    this.memory.access(),
    this.memory.is_protected()
);
