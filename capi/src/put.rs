//! The memory of arrays as one part of a put.

use std::{os::fd::AsFd, sync::Arc};

use vmmfd::{
    broker::{ArrayEntry, PutPart},
    driver::Backend,
    memory::{Chunk, Description, Region, Shared, Sharing},
};

use crate::{
    array::Array,
    error::{Failure, Outcome},
};

/// The name of the part, as in the Python package.
const PART: &str = "all";

/// Arrays whose memory has no pending work, with the segments of all memory side by side.
pub(crate) struct Finished {
    backend: Backend,
    description: Description,
    chunks: Vec<Arc<Chunk>>,
    entries: Vec<ArrayEntry>,
}

impl Finished {
    /// Waits until all work in the device's primary context is done.
    ///
    /// # Errors
    /// For no array, for memory that another process created, and for memory of several devices.
    pub(crate) fn of(named: &[(&str, Arc<Array>)]) -> Outcome<Self> {
        let mut memories: Vec<(&Arc<Shared>, u64)> = Vec::new();
        let mut whole: Option<Description> = None;
        let (mut chunks, mut entries) = (Vec::new(), Vec::with_capacity(named.len()));
        for (name, array) in named {
            let shared = array.memory.shared("put it")?;
            let known = memories.iter().find(|(memory, _)| Arc::ptr_eq(memory, shared)).map(|(_, start)| *start);
            let start = match known {
                Some(start) => start,
                None => {
                    let start = whole.as_ref().map_or(0, |whole| whole.mapped_size);
                    let mut one = shared.describe()?;
                    // Further memory follows the padding.
                    one.size = one.mapped_size;
                    chunks.extend(shared.chunks(0..shared.size())?.map(|(_, chunks)| chunks).unwrap_or_default());
                    whole = Some(match whole {
                        None => one,
                        Some(whole) => join(whole, &one)?,
                    });
                    memories.push((shared, start));
                    start
                }
            };
            let mut descriptor = array.descriptor.clone();
            descriptor.offset += start;
            entries.push(ArrayEntry::new(*name, descriptor));
        }
        let (Some(description), Some((first, _))) = (whole, memories.first()) else {
            return Err(Failure::invalid("there is no array to put: pass at least one"));
        };
        // All memory is on one device.
        first.synchronize()?;
        Ok(Self { backend: first.device().backend(), description, chunks, entries })
    }

    pub(crate) fn part(&self) -> Outcome<PutPart<'_>> {
        let segments = self.chunks.iter().map(|chunk| (chunk.size(), chunk.as_fd()));
        let part = PutPart::of_segments(PART, self.backend, self.description.clone(), segments)?;
        Ok(part.arrays(self.entries.iter().cloned()))
    }
}

/// Describes two memories side by side.
fn join(mut one: Description, other: &Description) -> Outcome<Description> {
    if one.device != other.device {
        let (one, other) = (one.device, &other.device);
        return Err(Failure::invalid(format!("the arrays are on {one} and on {other}: put an object for each device")));
    }
    match (&mut one.sharing, &other.sharing) {
        (Sharing::Vmm { placement, segments }, Sharing::Vmm { placement: of_other, segments: more })
            if placement == of_other =>
        {
            *segments += more;
        }
        _ => {
            let problem = "some arrays are in device memory and some in host memory: put an object for each";
            return Err(Failure::invalid(problem));
        }
    }
    one.size += other.size;
    one.mapped_size += other.mapped_size;
    Ok(one)
}
