//! Puts: memory of this process with its arrays, and copies of other arrays into such memory.

use std::{collections::HashMap, sync::Arc};

use pyo3::{prelude::*, types::PyList};
use vmmfd::{
    array::ArrayDescriptor,
    broker::{ArrayEntry, Attached, PutPart},
    driver::Access,
    memory::{Rdma, Region, Selector, Spec},
};

use crate::{
    array::Array,
    device::Wanted,
    driver,
    error::{Failure, Outcome},
    json,
    memory::{Owned, RdmaOption},
    shared::PyMemory,
    signals::{self, GilPause},
    source::{self, Location, Source},
    text::Text,
};

/// The largest segment for copied arrays, which a reader maps as a whole.
const SEGMENT: u64 = 1 << 30;

/// The alignment of copied arrays, in bytes.
const ALIGNMENT: u64 = 256;

/// An array: its name, type, shape, strides, the index of its memory, its offset there, and its attributes as JSON.
pub(crate) type Entry = (String, String, Vec<u64>, Option<Vec<i64>>, usize, u64, Option<String>);

/// A part to put: its name, its adjacent memories, their arrays as a list of [`Entry`], and a digest.
pub(crate) type Plan<'py> = (String, Vec<Py<PyMemory>>, Bound<'py, PyList>, Option<String>);

/// A [`Plan`], checked, without Python objects.
pub(crate) struct PlannedPart {
    name: String,
    memories: Vec<Arc<Owned>>,
    arrays: Vec<ArrayEntry>,
    digest: Option<String>,
}

impl PlannedPart {
    /// # Errors
    /// `ValueError` for a part without memory, an array outside its memory, an unknown type, and attributes that are not a JSON object.
    pub(crate) fn of((name, memories, entries, digest): Plan<'_>) -> Outcome<Self> {
        let mut pause = GilPause::new();
        let memories: Vec<Arc<Owned>> = memories.iter().map(|memory| Arc::clone(&memory.get().owned)).collect();
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
        for entry in entries.iter() {
            pause.step(entry.py());
            entry.get_item(0)?.extract::<Text>()?;
            let (name, dtype, shape, strides, memory, offset, attributes): Entry = entry.extract()?;
            let (Some(start), Some(of)) = (starts.get(memory), memories.get(memory)) else {
                let problem = format!("array {name:?} is in memory {memory}, but its part has {}", memories.len());
                return Err(Failure::invalid(problem));
            };
            if name.contains('\0') {
                return Err(Failure::invalid(format!("array {name:?} has a null character in its name: remove it")));
            }
            let dtype = dtype.parse().map_err(|error| Failure::invalid(format!("array {name:?}: {error}")))?;
            let mut array = ArrayDescriptor { dtype, shape, strides, offset };
            array.check(of.mapped_size())?;
            array.offset += start;
            let attributes = attributes.map(|text| parse_attributes(&name, text)).transpose()?;
            let entry = ArrayEntry::new(name, array);
            arrays.push(match attributes {
                Some(attributes) => entry.attributes(attributes),
                None => entry,
            });
        }
        Ok(Self { name, memories, arrays, digest })
    }

    /// Describes the part. Waits until all work in the device's primary context is done.
    ///
    /// # Errors
    /// As [`PutPart::of_several`].
    pub(crate) fn finish(&self) -> Outcome<PutPart<'static>> {
        let memories = self.memories.iter().map(|memory| &**memory.shared());
        let part = PutPart::of_several(&self.name, memories)?.arrays(self.arrays.iter().cloned());
        Ok(self.digest.iter().fold(part, PutPart::digest))
    }
}

fn parse_attributes(array: &str, text: String) -> Outcome<Attached> {
    let bad = || Failure::invalid(format!("the attributes of array {array:?} are not a JSON object"));
    let attached = Attached::from_text(text).map_err(|_| bad())?;
    if attached.as_str().trim_start().starts_with('{') { Ok(attached) } else { Err(bad()) }
}

/// An array to put.
enum Value {
    /// In memory that this process created: shared without a copy.
    Shared(Arc<Owned>, ArrayDescriptor),
    /// Elsewhere: copied.
    Other(Source),
}

/// Builds the part for some arrays. Arrays outside this process's own memory, or all with `copy`, are copied to `device`, else to the
/// device of the part's other arrays, else to the backend's first device. Copied arrays are aligned to 256 bytes, in segments of at most 1
/// GiB.
///
/// # Errors
/// `BufferError` for an array that needs a copy if `copy` is false; `ValueError` for arrays of several devices, and for an object that is
/// not an array; driver errors.
pub(crate) fn plan<'py>(
    py: Python<'py>,
    backend: &str,
    values: &Bound<'py, PyList>,
    part: String,
    device: Option<Wanted>,
    copy: Option<bool>,
    RdmaOption(rdma): RdmaOption,
) -> Outcome<Plan<'py>> {
    if values.is_empty() {
        return Err(Failure::invalid("there is no array to put: give a mapping of names to arrays"));
    }
    let mut pause = GilPause::new();
    let mut named = Vec::with_capacity(values.len());
    for value in values.iter() {
        pause.step(py);
        let (Text(name), value): (Text, Bound<'_, PyAny>) = value.extract()?;
        named.push(match value.cast::<Array>().ok().map(|array| (array, array.get().owner())) {
            Some((array, Some(owner))) if copy != Some(true) => {
                (name, Value::Shared(owner, array.get().descriptor().clone()))
            }
            _ if copy == Some(false) => {
                return Err(Failure::export(format!(
                    "array {name:?}, of type {}, is not in memory that can be shared, and copy=False forbids a copy: create it with \
                     vmmfd.empty, or share it with vmmfd.share",
                    json::type_of(&value)
                )));
            }
            _ => {
                let source = source::of(&value).map_err(|failure| failure.with_subject(&format!("array {name:?}")))?;
                (name, Value::Other(source))
            }
        });
    }
    let laid_out = signals::run(py, &[], || lay_out(backend, &named, device, rdma));
    for value in named {
        drop(value);
        pause.step(py);
    }
    let LaidOut { memories, copies, entries } = laid_out?;
    let shared = memories.into_iter().map(PyMemory::shared);
    let copies = copies.into_iter().map(|owned| PyMemory { owned, copied: true });
    let memories = shared.chain(copies).map(|memory| Py::new(py, memory)).collect::<PyResult<_>>()?;
    let listed = PyList::empty(py);
    for entry in entries {
        pause.step(py);
        listed.append(entry)?;
    }
    Ok((part, memories, listed, None))
}

/// The memory of a part.
struct LaidOut {
    /// Shared as it is.
    memories: Vec<Arc<Owned>>,
    /// Of all copied arrays, behind the others.
    copies: Option<Arc<Owned>>,
    entries: Vec<Entry>,
}

fn lay_out(backend: &str, named: &[(String, Value)], wanted: Option<Wanted>, rdma: Rdma) -> Outcome<LaidOut> {
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
                let dtype = source.dtype;
                let shape = source.shape.clone();
                let array = ArrayDescriptor { dtype, shape, strides: None, offset: room };
                let bytes = array.bytes()?;
                let end = room.checked_add(bytes).and_then(|end| end.checked_next_multiple_of(ALIGNMENT));
                room = end.ok_or_else(|| Failure::invalid(format!("array {name:?} is too large: {bytes} bytes")))?;
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
    let mut copies = None;
    if others.clone().next().is_some() {
        let device = match (wanted, memories.first()) {
            (None, Some(memory)) => memory.shared().device().clone(),
            (wanted @ Some(_), _) => driver::open_device(backend, wanted)?,
            (None, None) => {
                let on = others.clone().find_map(|source| match source.location {
                    Location::Cuda(ordinal) => u32::try_from(ordinal).ok(),
                    Location::Host => None,
                });
                driver::open_device(backend, on.map(|ordinal| Wanted(Selector::Ordinal(ordinal))))?
            }
        };
        let spec = Spec::vmm(room.max(1)).rdma(rdma);
        let spec = if room > SEGMENT { spec.chunk(SEGMENT) } else { spec };
        // The kernel then stops every process with a descriptor from writing. A GPU driver has no such seal.
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
        copies = Some(memory);
    }
    let entries = entries.into_iter().map(|(name, array, memory)| {
        let ArrayDescriptor { dtype, shape, strides, offset } = array;
        (name.clone(), dtype.to_string(), shape, strides, memory.unwrap_or(copied), offset, None)
    });
    Ok(LaidOut { memories, copies, entries: entries.collect() })
}
