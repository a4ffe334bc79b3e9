//! Arrays over memory that another library of this process allocated.

use std::{collections::BTreeMap, sync::Arc};

use pyo3::{
    prelude::*,
    types::{PyDict, PyMapping},
};
use vmmfd::{
    Error,
    array::ArrayDescriptor,
    driver::{Backend, Choice, open},
    error::MemoryError,
    memory::{Device, Neighbours, Selector, Shared},
};

use crate::{
    array::Array,
    error::{Failure, Outcome},
    memory::Owned,
    signals,
    source::{self, Keep, Location, Source},
    text::Text,
    walk::span,
};

/// Shares arrays of other libraries on a GPU without a copy: returns an `Array` over the memory of `value`, or for a mapping of names to
/// arrays a dict of such arrays, which `Broker.put` and `serve` publish as they are.
///
/// For memory that was allocated with `cuMemCreate`: by PyTorch with `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`, and by JAX. Such an
/// allocation usually contains other arrays too, the neighbours, and **every process that receives the array can read and write them**:
/// without `neighbours=True` the call fails unless the arrays fill their allocations. Share all arrays of an object in one call: each
/// allocation is then shared once.
///
/// The result is read-only here; write through the original. It keeps the memory and `value` alive. **Keep it for as long as another process
/// uses the memory**, also after a put: once `value` is freed, its library puts other data there, and receivers see it. An `Array` in memory
/// that this process created is returned as it is. Blocks for the driver, about 0.1 ms for each allocation, with the GIL released.
///
/// Raises `Unsupported` for memory that can't be exported, with the reason and the remedy, also for arrays in the CPU's memory; `Invalid` for
/// neighbours without `neighbours=True`; `TypeError` for an object that is not an array; `Error` for a driver error.
#[pyfunction]
#[pyo3(signature = (value, *, neighbours=false))]
pub(crate) fn share(py: Python<'_>, value: &Bound<'_, PyAny>, neighbours: bool) -> Outcome<Py<PyAny>> {
    let neighbours = if neighbours { Neighbours::Expose } else { Neighbours::Refuse };
    let Ok(mapping) = value.cast::<PyMapping>() else {
        let found = [Given::of(value)?];
        let array = signals::run(py, &[], || share_all(found.into(), neighbours))?.remove(0);
        return Ok(array.into_pyobject(py)?.into_any().unbind());
    };
    let mut names = Vec::new();
    let mut found = Vec::new();
    for item in mapping.items()?.iter() {
        let (Text(name), array): (Text, Bound<'_, PyAny>) = item.extract()?;
        found.push(Given::of(&array).map_err(|failure| failure.with_subject(&format!("array {name:?}")))?);
        names.push(name);
    }
    let arrays = signals::run(py, &[], || share_all(found, neighbours))?;
    let shared = PyDict::new(py);
    for (name, array) in names.into_iter().zip(arrays) {
        shared.set_item(name, array)?;
    }
    Ok(shared.into_any().unbind())
}

/// An array to share.
enum Given {
    Ours(Arc<Owned>, ArrayDescriptor),
    Theirs(Source),
}

impl Given {
    fn of(value: &Bound<'_, PyAny>) -> Outcome<Self> {
        match value.cast::<Array>().ok().map(|array| (array.get().owner(), array.get().descriptor())) {
            Some((Some(owner), descriptor)) => Ok(Self::Ours(owner, descriptor.clone())),
            _ => Ok(Self::Theirs(source::of(value)?)),
        }
    }
}

/// Shares arrays, those of one device together.
fn share_all(given: Vec<Given>, neighbours: Neighbours) -> Outcome<Vec<Array>> {
    let mut arrays: Vec<Option<Array>> = Vec::with_capacity(given.len());
    let mut theirs: BTreeMap<u32, Vec<(usize, Source)>> = BTreeMap::new();
    for (index, value) in given.into_iter().enumerate() {
        arrays.push(match value {
            Given::Ours(owner, descriptor) => Some(Array::new(owner, descriptor)?),
            Given::Theirs(source) => {
                theirs.entry(ordinal(&source)?).or_default().push((index, source));
                None
            }
        });
    }
    for (ordinal, sources) in theirs {
        let driver = open(Choice::Only(Backend::Cuda))?.driver;
        let device = Device::find(&driver, Selector::Ordinal(ordinal))?;
        for (index, array) in on_device(&device, sources, neighbours)? {
            arrays[index] = Some(array);
        }
    }
    Ok(arrays.into_iter().flatten().collect())
}

/// The device of an array.
fn ordinal(source: &Source) -> Outcome<u32> {
    let found = match source.location {
        Location::Host => None,
        Location::Cuda(ordinal) if ordinal >= 0 => Some(ordinal),
        // For unknown memory, the library then reports the reason.
        Location::Cuda(_) => Some(open(Choice::Only(Backend::Cuda))?.driver.device_of(source.address).unwrap_or(0)),
    };
    found.and_then(|ordinal| u32::try_from(ordinal).ok()).ok_or_else(|| {
        let reason = "ordinary memory has no descriptor".to_owned();
        Failure::Library(Error::Memory(MemoryError::NotShareable { address: source.address, reason }))
    })
}

fn on_device(device: &Device, sources: Vec<(usize, Source)>, neighbours: Neighbours) -> Outcome<Vec<(usize, Array)>> {
    let mut ranges = Vec::with_capacity(sources.len());
    for (_, source) in &sources {
        let span = span(source.address, &source.shape, &source.steps()?, source.dtype.size());
        // Checked by `source::of`.
        let (start, size) =
            span.map_or((source.address, 0), |span| (span.start as u64, (span.end - span.start) as u64));
        let own = source.descriptor()?.bytes()?;
        if own < size && neighbours == Neighbours::Refuse {
            // The gaps of a strided array are other data.
            return Err(Error::Memory(MemoryError::Neighbours { size: own, exposed: size - own }).into());
        }
        ranges.push((start, size));
    }
    let (shared, offsets) = Shared::from_addresses(device, &ranges, neighbours)?;
    let placed: Vec<_> = sources
        .iter()
        .zip(ranges.iter().zip(offsets))
        .map(|((index, source), ((start, _), offset))| {
            let descriptor = ArrayDescriptor {
                dtype: source.dtype,
                shape: source.shape.clone(),
                strides: source.strides.clone(),
                offset: offset + (source.address - start),
            };
            (*index, descriptor)
        })
        .collect();
    let kept: Vec<Keep> = sources.into_iter().map(|(_, source)| source.keep).collect();
    let owned = Owned::lent(Arc::new(shared), kept);
    let arrays = placed.into_iter().map(|(index, descriptor)| Ok((index, Array::new(owned.clone(), descriptor)?)));
    arrays.collect()
}
