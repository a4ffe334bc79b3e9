//! The memory of arrays as the parts of a put.

use std::sync::Arc;

use vmmfd::{
    broker::{ArrayEntry, PutPart},
    memory::Shared,
};

use crate::{
    array::Array,
    error::{Failure, Outcome},
};

/// An array to put.
pub(crate) struct Named<'a> {
    pub(crate) part: &'a str,
    pub(crate) name: &'a str,
    pub(crate) array: Arc<Array>,
}

/// The name of the part of arrays without one, as in the Python package.
pub(crate) const PART: &str = "all";

/// Describes the parts of arrays, in the order of their first arrays.
///
/// # Errors
/// For no array; see [`part`].
pub(crate) fn parts<'a>(named: &[Named<'a>]) -> Outcome<Vec<PutPart<'a>>> {
    let mut names: Vec<&'a str> = Vec::new();
    for array in named {
        if !names.contains(&array.part) {
            names.push(array.part);
        }
    }
    if names.is_empty() {
        return Err(Failure::invalid("there is no array to put: pass at least one"));
    }
    names.into_iter().map(|name| part(name, named.iter().filter(|array| array.part == name))).collect()
}

/// Describes the memory of arrays, each memory once. Waits until all work in the device's primary context is done.
///
/// # Errors
/// For memory that another process created, and for memory of several devices.
fn part<'a, 'b>(part: &'a str, arrays: impl Iterator<Item = &'b Named<'a>>) -> Outcome<PutPart<'a>>
where
    'a: 'b,
{
    let mut memories: Vec<(&Arc<Shared>, u64)> = Vec::new();
    let mut end = 0;
    let mut entries = Vec::new();
    for Named { name, array, .. } in arrays {
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
    Ok(PutPart::of_several(part, memories.iter().map(|(memory, _)| &***memory))?.arrays(entries))
}
