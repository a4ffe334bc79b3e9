//! `_native.Lease`, `_native.Prepared` and `_native.Claim`, which the classes of `vmmfd/_lease.py` wrap.

use std::{
    sync::{Arc, atomic::Ordering},
    time::UNIX_EPOCH,
};

use pyo3::{IntoPyObjectExt, prelude::*, types::PyDict};
use vmmfd::{
    array::{ArrayDescriptor, ElementType},
    bindings::lock,
    broker::{self, ArrayEntry, Object, ObjectPart},
    driver::Backend,
    fork::ProcessIdentity,
    memory::Region,
};

use crate::{
    array::Array,
    buffer::contiguous,
    client_put::Entry,
    closing::UntilClosed,
    connections::Checkout,
    error::{Failure, Outcome},
    json,
    lazy::Lazy,
    leased_memory::{Leased, LeasedPiece, attributes_of, part_number},
    memory::{Memory, Origin, PickledAddress},
    signals,
    text::Text,
};

/// A leased and mapped object.
#[pyclass(name = "Lease", module = "vmmfd._native", frozen, weakref)]
pub(crate) struct Lease(UntilClosed<Arc<Leased>>);

impl Lease {
    /// A lease, which other objects may share.
    pub(crate) fn new(leased: Arc<Leased>) -> Self {
        let made_by = leased.made_by;
        Self(UntilClosed::new(leased, made_by))
    }

    /// # Errors
    /// `ValueError` if it is closed, and in a fork.
    pub(crate) fn leased(&self) -> Outcome<Arc<Leased>> {
        self.0.get("the lease is closed: get the object again")
    }

    fn with<T: Send>(&self, py: Python<'_>, look: impl FnOnce(&Object) -> T + Send) -> Outcome<T> {
        Ok(self.leased()?.read(py, look))
    }

    fn array_of(py: Python<'_>, made: Outcome<(Arc<LeasedPiece>, ArrayDescriptor)>) -> Outcome<Bound<'_, Array>> {
        let (piece, array) = made?;
        Ok(Bound::new(py, Array::new(piece, array)?)?)
    }
}

#[pymethods]
impl Lease {
    #[getter]
    fn name(&self, py: Python<'_>) -> Outcome<String> {
        self.with(py, |object| object.name().to_owned())
    }

    #[getter]
    fn version(&self, py: Python<'_>) -> Outcome<u64> {
        self.with(py, Object::version)
    }

    #[getter]
    fn id(&self, py: Python<'_>) -> Outcome<String> {
        self.with(py, |object| object.id().to_owned())
    }

    /// The publication time in seconds since 1970.
    #[getter]
    fn created(&self, py: Python<'_>) -> Outcome<f64> {
        self.with(py, |object| object.created().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64())
    }

    /// The user id and the group id.
    #[getter]
    fn owner(&self, py: Python<'_>) -> Outcome<(u32, u32)> {
        self.with(py, |object| (object.owner().uid, object.owner().gid))
    }

    #[getter]
    fn metadata<'py>(&self, py: Python<'py>) -> Outcome<Bound<'py, PyDict>> {
        json::read(py, &self.with(py, |object| object.metadata_text().to_owned())?)
    }

    #[getter]
    fn is_held(&self, py: Python<'_>) -> bool {
        self.with(py, Object::is_held).unwrap_or(false)
    }

    /// Whether the owner has recalled the version. The first call opens a connection.
    #[getter]
    fn recalled(&self, py: Python<'_>) -> Outcome<bool> {
        let leased = self.leased()?;
        signals::run(py, &[], || Ok(leased.read_detached(Object::is_recalled)?))
    }

    /// Calls `call` once when the owner recalls the version, on a connection's own thread. Not during interpreter shutdown.
    fn on_recall(&self, py: Python<'_>, call: Py<PyAny>) -> Outcome<()> {
        let leased = self.leased()?;
        let called = move || {
            Python::try_attach(|py| {
                if let Err(error) = call.call0(py) {
                    error.write_unraisable(py, Some(call.bind(py)));
                }
            });
        };
        signals::run(py, &[], || Ok(leased.read_detached(|object| object.on_recall(called))?))
    }

    #[getter]
    fn is_parked(&self) -> bool {
        self.leased().is_ok_and(|leased| leased.is_parked())
    }

    /// How often it was unparked.
    #[getter]
    fn unparks(&self) -> u64 {
        self.leased().map_or(0, |leased| leased.unparks.load(Ordering::Acquire))
    }

    #[getter]
    fn is_closed(&self) -> bool {
        self.0.is_closed()
    }

    /// Whether this process may write to private copies of its pages.
    #[getter]
    fn copy_on_write(&self) -> Outcome<bool> {
        Ok(self.leased()?.copy_on_write)
    }

    /// The number of live exports to other libraries.
    #[getter]
    fn exports(&self) -> usize {
        self.leased().map_or(0, |leased| leased.exports())
    }

    /// The requested parts and arrays, to request them again.
    #[getter]
    #[allow(clippy::type_complexity)]
    fn selection(&self) -> Outcome<(Option<Vec<String>>, Option<Vec<String>>)> {
        let leased = self.leased()?;
        Ok((leased.selection.parts.clone(), leased.selection.arrays.clone()))
    }

    /// For each part: name, bytes of data, bytes of memory, digest, device, and the number of arrays.
    #[getter]
    #[allow(clippy::type_complexity)]
    fn parts(&self, py: Python<'_>) -> Outcome<Vec<(String, u64, u64, Option<String>, String, usize)>> {
        self.with(py, |object| {
            let part = |part: &ObjectPart| {
                let of = part.description();
                let backend = part.pieces().first().map(|piece| piece.device().backend());
                let prefix = if backend == Some(Backend::Host) { "HOST" } else { "GPU" };
                let device = format!("{prefix}-{}", of.device.uuid);
                let digest = part.digest().map(str::to_owned);
                (part.name().to_owned(), of.size, of.mapped_size, digest, device, part.arrays().len())
            };
            object.parts().iter().map(part).collect()
        })
    }

    /// For each part: name, whether it has padding, digest, the sizes of its segments, and its arrays for a put, each with its last offset.
    #[allow(clippy::type_complexity)]
    fn layout(&self, py: Python<'_>) -> Outcome<Vec<(String, bool, Option<String>, Vec<u64>, Vec<(Entry, u64)>)>> {
        self.with(py, |object| {
            let entry = |entry: &ArrayEntry| {
                let ArrayDescriptor { dtype, shape, strides, offset } = entry.array.clone();
                let attributes = entry.attributes.as_ref().map(|attributes| attributes.as_str().to_owned());
                let end = entry.array.span()?.end;
                Ok(((entry.name.clone(), dtype.to_string(), shape, strides, 0, offset, attributes), end))
            };
            let part = |part: &ObjectPart| {
                let of = part.description();
                let entries = part.arrays().iter().map(entry).collect::<Outcome<_>>()?;
                let digest = part.digest().map(str::to_owned);
                Ok((part.name().to_owned(), of.size < of.mapped_size, digest, part.segments().collect(), entries))
            };
            object.parts().iter().map(part).collect()
        })?
    }

    /// The unique names of the mapped arrays.
    fn keys(&self, py: Python<'_>) -> Outcome<Vec<String>> {
        let leased = self.leased()?;
        Ok(leased.read(py, |object| {
            let mut seen = std::collections::HashSet::new();
            leased
                .mapped(object)
                .filter(|(_, _, entry)| seen.insert(&entry.name))
                .map(|(_, _, entry)| entry.name.clone())
                .collect()
        }))
    }

    fn __contains__(&self, py: Python<'_>, name: &Bound<'_, PyAny>) -> Outcome<bool> {
        let leased = self.leased()?;
        let Ok(name) = name.extract::<String>() else { return Ok(false) };
        Ok(leased.read(py, |object| match leased.find(object, &name, None) {
            Ok(_) => true,
            Err(Failure::Caller("NoArray", _)) => false,
            // The name is in several parts.
            Err(_) => true,
        }))
    }

    #[pyo3(signature = (name, part=None))]
    fn array<'py>(&self, py: Python<'py>, name: Text, part: Option<Text>) -> Outcome<Bound<'py, Array>> {
        let part = part.as_deref();
        let leased = self.leased()?;
        let found = leased.read(py, |object| {
            leased.check_mapped(object)?;
            let (part, entry) = leased.find(object, &name, part)?;
            leased.piece(object, part, &entry.array)
        });
        Self::array_of(py, found)
    }

    /// Returns all mapped arrays, each with its part, name, attributes, and whether its elements are contiguous in C order.
    #[pyo3(signature = (part=None))]
    fn arrays(&self, py: Python<'_>, part: Option<Text>) -> Outcome<Lazy> {
        let part = part.as_deref();
        let leased = self.leased()?;
        let found = leased.read(py, |object| {
            leased.check_mapped(object)?;
            let part = part.map(|part| part_number(object, part)).transpose()?;
            let mut found = Vec::new();
            for (number, _, entry) in leased.mapped(object).filter(|(at, ..)| part.is_none_or(|part| part == *at)) {
                let (piece, array) = leased.piece(object, number, &entry.array)?;
                let part = object.parts()[number].name().to_owned();
                found.push((part, entry.name.clone(), piece, array, attributes_of(entry)?));
            }
            Ok::<_, Failure>(found)
        })?;
        Ok(Lazy::of(found, |py, (part, name, piece, array, attributes)| {
            let dense = !array.shape.contains(&0) && contiguous(&array)?.0;
            let array = Bound::new(py, Array::new(piece, array)?)?;
            let attributes = attributes.map(|attributes| json::to_dict(py, &attributes)).transpose()?;
            Ok((part, name, array, attributes, dense).into_py_any(py)?)
        }))
    }

    /// Returns the attributes of an array, or None.
    #[pyo3(signature = (name, part=None))]
    fn attributes<'py>(&self, py: Python<'py>, name: Text, part: Option<Text>) -> Outcome<Option<Bound<'py, PyDict>>> {
        let part = part.as_deref();
        let leased = self.leased()?;
        let attributes = leased.read(py, |object| {
            let (_, entry) = leased.find(object, &name, part)?;
            attributes_of(entry)
        })?;
        Ok(attributes.map(|attributes| json::to_dict(py, &attributes)).transpose()?)
    }

    /// Returns the pieces of a part's memory: the offset of each in the part, and an array of its bytes.
    #[pyo3(signature = (part=None))]
    fn memory<'py>(&self, py: Python<'py>, part: Option<Text>) -> Outcome<Vec<(u64, Bound<'py, Array>)>> {
        let part = part.as_deref();
        let leased = self.leased()?;
        let pieces = leased.read(py, |object| {
            leased.check_mapped(object)?;
            let number = match (part, object.parts()) {
                (None, [_]) => 0,
                (None, parts) => {
                    let names: Vec<&str> = parts.iter().map(ObjectPart::name).collect();
                    return Err(Failure::invalid(format!("the object has the parts {}: give part=", names.join(", "))));
                }
                (Some(part), _) => part_number(object, part)?,
            };
            let pieces = object.parts()[number].pieces().iter().enumerate();
            Ok(pieces.map(|(at, piece)| (piece.start(), leased.whole_piece(object, number, at))).collect::<Vec<_>>())
        })?;
        let bytes = |(start, piece): (u64, Arc<LeasedPiece>)| {
            let dtype: ElementType = "uint8".parse().expect("a type");
            let array = ArrayDescriptor { dtype, shape: vec![piece.size()], strides: None, offset: 0 };
            Ok((start, Bound::new(py, Array::new(piece, array)?)?))
        };
        pieces.into_iter().map(bytes).collect()
    }

    /// Returns an array at any byte offset of a part.
    fn view<'py>(
        &self,
        py: Python<'py>,
        part: &str,
        dtype: &str,
        shape: Vec<u64>,
        strides: Option<Vec<i64>>,
        offset: u64,
    ) -> Outcome<Bound<'py, Array>> {
        let dtype = dtype.parse().map_err(|error| Failure::invalid(format!("{error}")))?;
        let array = ArrayDescriptor { dtype, shape, strides, offset };
        let leased = self.leased()?;
        let found = leased.read(py, |object| {
            leased.check_mapped(object)?;
            leased.piece(object, part_number(object, part)?, &array)
        });
        Self::array_of(py, found)
    }

    /// Maps a prepared version at this lease's addresses. Returns the previous version.
    fn switch(&self, py: Python<'_>, prepared: &Prepared, promised: bool) -> Outcome<Prepared> {
        let leased = self.leased()?;
        py.detach(|| leased.switch(|| prepared.take(), promised).map(Prepared::new))
    }

    /// Unmaps the memory, and keeps the addresses.
    fn park(&self, py: Python<'_>, keep_lease: bool, promised: bool) -> Outcome<()> {
        let leased = self.leased()?;
        py.detach(|| leased.park(keep_lease, promised))
    }

    /// Closes the lease, now or when its last array is gone.
    fn close(&self, py: Python<'_>) {
        let leased = lock(&self.0.value).take();
        py.detach(|| {
            if let Some(leased) = leased.and_then(Arc::into_inner) {
                leased.release_now();
            }
        });
    }
}

/// The origin of an array: the broker's path, backend, timeout and trust; name, version and id; part, and offset and size of its memory
/// there; and the array's type, shape, strides and offset in the part.
type Sent = (PickledAddress, (String, u64, String), (String, u64, u64), (String, Vec<u64>, Option<Vec<i64>>, u64));

/// Returns the data another process needs to get an array, if it is leased.
#[pyfunction]
pub(crate) fn origin(py: Python<'_>, array: &Bound<'_, Array>) -> Option<Sent> {
    let array = array.get();
    let memory = array.memory();
    let Origin { broker, name, version, id, part, start, length } = py.detach(|| memory.origin())?;
    let ArrayDescriptor { dtype, shape, strides, offset } = array.descriptor().clone();
    let dtype = dtype.to_string();
    let offset = offset + start;
    Some((broker.sent(), (name, version, id), (part, start, length), (dtype, shape, strides, offset)))
}

/// An imported version without a mapping.
#[pyclass(name = "Prepared", module = "vmmfd._native", frozen, weakref)]
pub(crate) struct Prepared(UntilClosed<broker::Prepared>);

impl Prepared {
    pub(crate) fn new(prepared: broker::Prepared) -> Self {
        Self(UntilClosed::new(prepared, ProcessIdentity::current()))
    }

    fn check(&self) -> Outcome<()> {
        Ok(self.0.made_by.check()?)
    }

    fn take(&self) -> Outcome<broker::Prepared> {
        self.check()?;
        lock(&self.0.value).take().ok_or_else(used)
    }

    fn with<T>(&self, look: impl FnOnce(&broker::Prepared) -> T) -> Outcome<T> {
        self.check()?;
        lock(&self.0.value).as_ref().map(look).ok_or_else(used)
    }
}

fn used() -> Failure {
    Failure::invalid("the version is closed, or was switched to: prepare it again")
}

#[pymethods]
impl Prepared {
    #[getter]
    fn name(&self) -> Outcome<String> {
        self.with(|prepared| prepared.name().to_owned())
    }

    #[getter]
    fn version(&self) -> Outcome<u64> {
        self.with(broker::Prepared::version)
    }

    #[getter]
    fn id(&self) -> Outcome<String> {
        self.with(|prepared| prepared.id().to_owned())
    }

    #[getter]
    fn metadata<'py>(&self, py: Python<'py>) -> Outcome<Bound<'py, PyDict>> {
        json::read(py, &self.with(|prepared| prepared.metadata_text().to_owned())?)
    }

    #[getter]
    fn is_closed(&self) -> bool {
        self.0.is_closed()
    }

    /// Ends its lease, and releases its memory.
    fn close(&self, py: Python<'_>) {
        self.0.close(py);
    }
}

/// The right to create an object.
#[pyclass(name = "Claim", module = "vmmfd._native", frozen, weakref)]
pub(crate) struct Claim(UntilClosed<(broker::Claim, Checkout)>);

impl Claim {
    pub(crate) fn new(claim: broker::Claim, client: Checkout) -> Self {
        Self(UntilClosed::new((claim, client), ProcessIdentity::current()))
    }
}

#[pymethods]
impl Claim {
    #[getter]
    fn is_closed(&self) -> bool {
        self.0.is_closed()
    }

    /// Passes the claim to the next waiting process.
    fn close(&self, py: Python<'_>) {
        self.0.close(py);
    }
}
