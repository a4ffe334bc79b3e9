//! Arrays of other libraries, as sources and destinations of copies.

use pyo3::prelude::*;
use vmmfd::array::ElementType;

use crate::{
    error::{Failure, Outcome},
    memory::Memory,
};

/// Where another library's array is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// In memory that the CPU reads.
    Host,
    /// On a device of CUDA, by its number in this process.
    Cuda(i32),
}

/// Another library's array: it speaks DLPack, one of the array interfaces, or the buffer protocol. Its memory stays as long as this
/// lives. Dropping it needs the GIL.
pub(crate) struct Source {
    pub(crate) dtype: ElementType,
    /// The length of each dimension, in elements.
    pub(crate) shape: Vec<u64>,
    /// The step along each dimension, in bytes; `None` for C order.
    pub(crate) strides: Option<Vec<i64>>,
    /// Of the element with all indices 0.
    pub(crate) address: u64,
    pub(crate) place: Place,
    /// Whether its owner forbids to write to it.
    pub(crate) read_only: bool,
    #[allow(dead_code, reason = "held")]
    keep: Py<PyAny>,
}

impl Source {
    /// Its elements together, in bytes: what a copy of it takes.
    pub(crate) fn bytes(&self) -> u64 {
        self.shape.iter().product::<u64>() * self.dtype.size()
    }

    /// Copies its elements, in C order, to `offset` of memory. They are there when it returns. Blocks: call it with the GIL released.
    ///
    /// # Errors
    /// Those of [`Memory::copy_in`].
    pub(crate) fn copy_to(&self, memory: &dyn Memory, offset: u64) -> Outcome<()> {
        let _ = (memory, offset);
        Err(Failure::invalid("not yet"))
    }
}

/// A view of another library's array, or of one of ours, with all work on it ordered before what this process does with the
/// default stream.
///
/// # Errors
/// `ValueError` for what speaks none of the protocols, `BufferError` for what its library refuses to give.
pub(crate) fn source(object: &Bound<'_, PyAny>) -> Outcome<Source> {
    Err(Failure::invalid(format!("{object:?}: not yet")))
}
