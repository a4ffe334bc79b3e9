//! The memory of arrays as one part of a put.

use std::sync::Arc;

use vmmfd::{
    broker::{ArrayEntry, PutPart},
    memory::Shared,
};

use crate::{
    array::Array,
    error::{Failure, Outcome},
};

/// The name of the part, as in the Python package.
const PART: &str = "all";

/// Describes the memory of arrays, each memory once. Waits until all work in the device's primary context is done.
///
/// # Errors
/// For no array, for memory that another process created, and for memory of several devices.
pub(crate) fn part(named: &[(&str, Arc<Array>)]) -> Outcome<PutPart<'static>> {
    let mut memories: Vec<(&Arc<Shared>, u64)> = Vec::new();
    let mut end = 0;
    let mut entries = Vec::with_capacity(named.len());
    for (name, array) in named {
        let shared = array.memory.shared("put it")?;
        let known = memories.iter().find(|(memory, _)| Arc::ptr_eq(memory, shared)).map(|(_, start)| *start);
        let start = known.unwrap_or_else(|| {
            memories.push((shared, end));
            // Further memory follows the padding.
            end += shared.mapped_size();
            end - shared.mapped_size()
        });
        let mut descriptor = array.descriptor.clone();
        descriptor.offset += start;
        entries.push(ArrayEntry::new(*name, descriptor));
    }
    if entries.is_empty() {
        return Err(Failure::invalid("there is no array to put: pass at least one"));
    }
    Ok(PutPart::of_several(PART, memories.iter().map(|(memory, _)| &***memory))?.arrays(entries))
}
