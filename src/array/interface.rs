//! The dictionary of `__cuda_array_interface__`.

use serde::Serialize;

use super::{ArrayDescriptor, descriptor::problem};
use crate::{base::Access, error::Result};

/// The dictionary of `__cuda_array_interface__`, version 3, in serialisable form.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Interface {
    /// The length of each dimension, in elements.
    pub shape: Vec<u64>,
    /// The type of each element: see [`ElementType::typestr`](super::ElementType::typestr).
    pub typestr: String,
    /// The address of the first element (0 for an empty array), and whether the memory is read-only.
    pub data: (u64, bool),
    /// Always 3.
    pub version: u32,
    /// The strides in bytes; null for C order.
    pub strides: Option<Vec<i64>>,
    /// Always null: all work has finished before memory is handed over, so a reader need not wait for a stream.
    pub stream: Option<u64>,
}

impl ArrayDescriptor {
    /// The dictionary of `__cuda_array_interface__` for the array in memory that is mapped at `address`.
    ///
    /// # Errors
    /// [`MemoryError::Array`](crate::error::MemoryError::Array) if the elements have no typestr (pass `bfloat16` and 8-bit floats by
    /// DLPack, or as integers of the same size), or if the array exceeds the address space; the errors of [`ArrayDescriptor::span`].
    pub fn interface(&self, address: u64, access: Access) -> Result<Interface> {
        let span = self.span()?;
        // The interface requires a null pointer for an empty array.
        let pointer = match address.checked_add(span.end) {
            _ if self.is_empty() => 0,
            Some(_) => address + self.offset,
            None => {
                return Err(problem(format!("an array of bytes {span:?} at {address:#x} exceeds the address space")));
            }
        };
        let typestr = self.dtype.typestr().ok_or_else(|| {
            problem(format!(
                "__cuda_array_interface__ can't describe elements of type {}: it has no typestr",
                self.dtype
            ))
        })?;
        Ok(Interface {
            shape: self.shape.clone(),
            typestr,
            data: (pointer, access == Access::ReadOnly),
            version: 3,
            strides: self.strides.clone(),
            stream: None,
        })
    }
}
