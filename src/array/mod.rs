//! Descriptors of typed arrays in shared memory.
//!
//! A descriptor maps the elements of an n-dimensional array to bytes of memory, with the types of NumPy and ml_dtypes and the strides of
//! `__cuda_array_interface__`. It is plain data, without access to the memory itself. Before you use a descriptor from a peer, call
//! [`ArrayDescriptor::check`] with the size of the memory.
//!
//! ```
//! use vmmfd::array::{ArrayDescriptor, ElementType, Order};
//!
//! # fn main() -> vmmfd::Result<()> {
//! let image = ArrayDescriptor::new(ElementType::F32, [768, 1024], Order::C)?;
//! image.check(4 << 20)?;
//! let upside_down = image.slice(0, 0..768, -1)?;
//! assert_eq!(upside_down.offset_of(&[0, 5])?, image.offset_of(&[767, 5])?);
//! # Ok(())
//! # }
//! ```

mod descriptor;
mod element;
mod format;
mod interface;
mod json;
mod offsets;
mod shape;
#[cfg(test)]
mod tests;
pub(crate) mod walk;

pub use descriptor::ArrayDescriptor;
pub use element::ElementType;
pub use interface::Interface;
pub use shape::{MAX_DIMENSIONS, Order, parse_shape};
