//! What is put: memory of this process's own with the arrays in it, and how other arrays come into such memory.

use std::{collections::HashMap, sync::Arc};

use pyo3::prelude::*;
use vmmfd::{
    array::ArrayDescriptor,
    broker::{ArrayEntry, Attached, PutPart},
    driver::Access,
    memory::{Chunk, Description, Device, Region, Selector, Sharing, Spec},
};

use crate::{
    array::Array,
    driver,
    error::{Failure, Outcome},
    json,
    memory::Owned,
    shared::PyMemory,
    source::{self, Place, Source},
};

/// The largest segment of memory that arrays are copied to: what a reader maps as one.
const SEGMENT: u64 = 1 << 30;

/// What arrays that are copied begin at multiples of, in bytes.
const ALIGNMENT: u64 = 256;

/// An array: its name, type, shape, strides, in which of the memories, where there, and its attributes as JSON.
pub(crate) type Entry = (String, String, Vec<u64>, Option<Vec<i64>>, usize, u64, Option<String>);

/// A part that is to be put: its name, the memories that it is side by side, the arrays in them, and a digest.
pub(crate) type Plan = (String, Vec<Py<PyMemory>>, Vec<Entry>, Option<String>);

/// A [`Plan`], checked, without Python's objects.
pub(crate) struct Part {
    name: String,
    memories: Vec<Arc<Owned>>,
    arrays: Vec<ArrayEntry>,
    digest: Option<String>,
}

impl Part {
    /// # Errors
    /// `ValueError` for a part without memory, an array outside of its memory, a type that is none, and attributes that are no JSON object.
    pub(crate) fn of((name, memories, entries, digest): Plan) -> Outcome<Self> {
        let memories: Vec<Arc<Owned>> = memories.iter().map(|memory| Arc::clone(&memory.get().0)).collect();
        if memories.is_empty() {
            return Err(Failure::invalid(format!("part {name:?} has no memory")));
        }
        let mut starts = Vec::with_capacity(memories.len());
        let mut end = 0;
        for memory in &memories {
            starts.push(end);
            end += memory.mapped_size();
        }
        let mut arrays = Vec::with_capacity(entries.len());
        for (name, dtype, shape, strides, memory, offset, attributes) in entries {
            let (Some(start), Some(of)) = (starts.get(memory), memories.get(memory)) else {
                let problem = format!("array {name:?} is in memory {memory}, and its part has {}", memories.len());
                return Err(Failure::invalid(problem));
            };
            if name.contains('\0') {
                return Err(Failure::invalid(format!("array {name:?} has a null character in its name: leave it out")));
            }
            let dtype = dtype.parse().map_err(|error| Failure::invalid(format!("array {name:?}: {error}")))?;
            let mut array = ArrayDescriptor { dtype, shape, strides, offset };
            array.check(of.mapped_size())?;
            array.offset += start;
            let attributes = attributes.map(|text| attached(&name, text)).transpose()?;
            let entry = ArrayEntry::new(name, array);
            arrays.push(match attributes {
                Some(attributes) => entry.attributes(attributes),
                None => entry,
            });
        }
        Ok(Self { name, memories, arrays, digest })
    }
}

fn attached(array: &str, text: String) -> Outcome<Attached> {
    let bad = || Failure::invalid(format!("the attributes of array {array:?} are no JSON object"));
    let attached = Attached::from_text(text).map_err(|_| bad())?;
    if attached.as_str().trim_start().starts_with('{') { Ok(attached) } else { Err(bad()) }
}

/// Parts whose memory is finished and can be sent: the descriptors of all segments.
pub(crate) struct Handed<'a>(Vec<(&'a Part, Description, Vec<Arc<Chunk>>)>);

impl<'a> Handed<'a> {
    /// Waits until all work of the devices' primary contexts is done.
    ///
    /// # Errors
    /// `ValueError` for memory of several devices in a part, and for memory of a pool or a legacy handle; [`vmmfd::Error::Driver`].
    pub(crate) fn of(parts: &'a [Part]) -> Outcome<Self> {
        let mut done: Vec<Device> = Vec::new();
        let mut handed = Vec::with_capacity(parts.len());
        for part in parts {
            let mut whole: Option<Description> = None;
            let mut chunks = Vec::new();
            for memory in &part.memories {
                let device = memory.shared().device();
                if !done.iter().any(|done| done.uuid() == device.uuid() && done.backend() == device.backend()) {
                    Region::synchronize(&**memory.shared())?;
                    done.push(device.clone());
                }
                let mut one = memory.describe()?;
                let Some((_, of)) = memory.chunks(0..Region::size(&**memory.shared()))? else {
                    return Err(Failure::invalid(format!(
                        "part {:?} is shared by {}: pools and legacy handles die with their maker, so a broker can't keep them; \
                         make it with vmmfd.empty",
                        part.name,
                        one.mechanism()
                    )));
                };
                chunks.extend(of);
                one.size = one.mapped_size;
                whole = Some(match whole {
                    None => one,
                    Some(whole) => side_by_side(&part.name, whole, one)?,
                });
            }
            let Some(whole) = whole else { continue };
            handed.push((part, whole, chunks));
        }
        Ok(Self(handed))
    }

    /// What the library sends.
    pub(crate) fn parts(&'a self) -> Outcome<Vec<PutPart<'a>>> {
        use std::os::fd::AsFd;
        let mut parts = Vec::with_capacity(self.0.len());
        for (part, description, chunks) in &self.0 {
            let backend = part.memories[0].shared().device().backend();
            let segments = chunks.iter().map(|chunk| (chunk.size(), chunk.as_fd()));
            let mut sent = PutPart::of_segments(&part.name, backend, description.clone(), segments)?;
            sent = sent.arrays(part.arrays.iter().cloned());
            parts.push(part.digest.iter().fold(sent, |sent, digest| sent.digest(digest)));
        }
        Ok(parts)
    }
}

/// Two memories as one.
fn side_by_side(part: &str, mut one: Description, other: Description) -> Outcome<Description> {
    if one.device != other.device {
        let (one, other) = (one.device, other.device);
        return Err(Failure::invalid(format!(
            "part {part:?} has memory of {one} and of {other}: put one part for each device, with part=, parts= and group="
        )));
    }
    match (&mut one.sharing, other.sharing) {
        (Sharing::Vmm { placement, segments }, Sharing::Vmm { placement: of_other, segments: more })
            if *placement == of_other =>
        {
            *segments += more
        }
        _ => {
            return Err(Failure::invalid(format!(
                "part {part:?} has memory of a device and of its host: put two parts"
            )));
        }
    }
    one.size += other.size;
    one.mapped_size += other.mapped_size;
    one.immutable &= other.immutable;
    Ok(one)
}

/// An array that is to be in a part.
enum Value {
    /// In memory of this process's own: handed over as it is.
    Shared(Arc<Owned>, ArrayDescriptor),
    /// Elsewhere: copied.
    Other(Source),
}

/// Makes the part that some arrays are. What is no memory of this process's own, or all with `copy`, is copied: to memory of
/// `device`, or else of the device on which other arrays of the part are, or else of the backend's first device. Arrays begin at
/// multiples of 256 bytes; segments have at most 1 GiB.
///
/// # Errors
/// `BufferError` for an array that would be copied, if `copy` is false; `ValueError` for arrays of several devices, and for what is no
/// array; those of the driver.
pub(crate) fn plan(
    py: Python<'_>,
    backend: &str,
    values: Vec<(String, Bound<'_, PyAny>)>,
    part: String,
    device: Option<Selector>,
    copy: Option<bool>,
) -> Outcome<Plan> {
    if values.is_empty() {
        return Err(Failure::invalid("there is no array to put: give a mapping of names to arrays"));
    }
    let mut named = Vec::with_capacity(values.len());
    for (name, value) in values {
        named.push(match value.cast::<Array>().ok().map(|array| (array, array.get().owner())) {
            Some((array, Some(owner))) if copy != Some(true) => {
                (name, Value::Shared(owner, array.get().descriptor().clone()))
            }
            _ if copy == Some(false) => {
                return Err(Failure::export(format!(
                    "array {name:?}, of type {}, is in no memory that can be handed over, and copy=False forbids to copy it: make it with \
                     vmmfd.empty",
                    json::type_of(&value)
                )));
            }
            _ => {
                let source = source::of(&value).map_err(|failure| failure.about(&format!("array {name:?}")))?;
                (name, Value::Other(source))
            }
        });
    }
    let named = &named;
    let (memories, entries) = py.detach(|| laid_out(backend, named, device))?;
    let memories = memories.into_iter().map(|memory| Py::new(py, PyMemory(memory))).collect::<PyResult<_>>()?;
    Ok((part, memories, entries, None))
}

fn laid_out(
    backend: &str,
    named: &[(String, Value)],
    wanted: Option<Selector>,
) -> Outcome<(Vec<Arc<Owned>>, Vec<Entry>)> {
    let mut memories: Vec<Arc<Owned>> = Vec::new();
    let mut index = HashMap::new();
    let mut room = 0u64;
    let mut entries = Vec::with_capacity(named.len());
    for (name, value) in named {
        let (array, memory) = match value {
            Value::Shared(owner, descriptor) => {
                let at = *index.entry(Arc::as_ptr(owner.shared())).or_insert_with(|| {
                    memories.push(Arc::clone(owner));
                    memories.len() - 1
                });
                (descriptor.clone(), Some(at))
            }
            Value::Other(source) => {
                let (dtype, shape) = (source.dtype, source.shape.clone());
                let array = ArrayDescriptor { dtype, shape, strides: None, offset: room };
                let bytes = array.bytes()?;
                let end = room.checked_add(bytes).and_then(|end| end.checked_next_multiple_of(ALIGNMENT));
                room = end
                    .ok_or_else(|| Failure::invalid(format!("array {name:?} has {bytes} bytes, which is too many")))?;
                (array, None)
            }
        };
        entries.push((name, array, memory));
    }
    let others = named.iter().filter_map(|(_, value)| match value {
        Value::Other(source) => Some(source),
        Value::Shared(..) => None,
    });
    let copied = memories.len();
    if others.clone().next().is_some() {
        let device = match (wanted, memories.first()) {
            (None, Some(memory)) => memory.shared().device().clone(),
            (wanted @ Some(_), _) => driver::device(&driver::driver(backend)?, wanted)?,
            (None, None) => {
                let on = others.clone().find_map(|source| match source.place {
                    Place::Cuda(ordinal) => u32::try_from(ordinal).ok(),
                    Place::Host => None,
                });
                driver::device(&driver::driver(backend)?, on.map(Selector::Ordinal))?
            }
        };
        let spec = Spec::vmm(room.max(1));
        let spec = if room > SEGMENT { spec.chunk(SEGMENT) } else { spec };
        // The kernel then keeps each process that has a descriptor from writing. A GPU's driver knows no such thing.
        let sealed = device.is_host();
        let spec: Spec = if sealed { spec.sealed().into() } else { spec.into() };
        let memory = Owned::make(&device, spec)?;
        let arrays = entries.iter().filter(|(_, _, memory)| memory.is_none());
        for (source, (_, array, _)) in others.zip(arrays) {
            source.copy_to(&*memory, array.offset)?;
        }
        if sealed {
            memory.shared().seal()?;
            debug_assert_eq!(Region::access(&**memory.shared()), Access::ReadOnly);
        }
        memories.push(memory);
    }
    let entries = entries.into_iter().map(|(name, array, memory)| {
        let ArrayDescriptor { dtype, shape, strides, offset } = array;
        (name.clone(), dtype.to_string(), shape, strides, memory.unwrap_or(copied), offset, None)
    });
    Ok((memories, entries.collect()))
}
