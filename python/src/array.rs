//! `vmmfd.Array`: a typed, strided view of memory that is shared.

use std::sync::Arc;

use pyo3::prelude::*;
use vmmfd::array::ArrayDescriptor;

use crate::{error::Outcome, memory::Memory, shared::Owned};

/// A typed array in shared memory.
#[pyclass(name = "Array", module = "vmmfd", frozen, weakref)]
pub(crate) struct Array {
    memory: Arc<dyn Memory>,
    descriptor: ArrayDescriptor,
}

impl Array {
    /// An array in memory, which it keeps.
    ///
    /// # Errors
    /// [`vmmfd::error::MemoryError::Array`] and [`vmmfd::error::MemoryError::OutOfRange`] if it is not inside the memory.
    pub(crate) fn new(memory: Arc<dyn Memory>, descriptor: ArrayDescriptor) -> Outcome<Self> {
        descriptor.check(memory.size())?;
        Ok(Self { memory, descriptor })
    }

    /// The memory of this process's own that it is in, which can be published without a copy. The descriptor's offset counts from
    /// that memory's beginning. `None` for memory that another process made.
    pub(crate) fn owner(&self) -> Option<Arc<Owned>> {
        Arc::clone(&self.memory).owner()
    }

    /// The memory that it is in.
    pub(crate) fn memory(&self) -> &Arc<dyn Memory> {
        &self.memory
    }

    /// Which bytes of the memory it is.
    pub(crate) fn descriptor(&self) -> &ArrayDescriptor {
        &self.descriptor
    }
}
