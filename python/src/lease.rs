//! `_native.Lease`: an object of the broker that is mapped. `vmmfd.Lease` is made of it.

use std::{
    collections::HashMap,
    path::PathBuf,
    process,
    sync::{
        Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError,
        atomic::{AtomicBool, Ordering},
    },
    time::UNIX_EPOCH,
};

use pyo3::{
    prelude::*,
    types::{PyDict, PyTuple},
};
use serde_json::{Map, Value};
use vmmfd::{
    Error, Result,
    array::{ArrayDescriptor, ElementType},
    broker::{self, ArrayEntry, Object, ObjectPart},
    driver::Backend,
    memory::{Device, Region},
};

use crate::{
    array::Array,
    buffer::contiguous,
    client::{Taken, check_process},
    error::{Class, Failure, Outcome},
    json,
    memory::{Export, Memory, Origin, Place},
    reaper::Kept,
};

/// How many arrays are searched one by one.
const FEW: usize = 8;

/// What of an object was asked for: of another version the same.
#[derive(Debug, Default)]
pub(crate) struct Selection {
    pub(crate) parts: Option<Vec<String>>,
    pub(crate) arrays: Option<Vec<String>>,
}

/// An object that is mapped, and its lease, until the last array in it is gone.
///
/// Arrays have its addresses and read through its lock, so that another version can take its place while they live.
pub(crate) struct Leased {
    object: Kept<RwLock<Mapped>>,
    /// Counts what was exported to other libraries: they have an address, and know of no lock.
    exports: Arc<()>,
    /// Whether nothing is mapped. Changed with the lock held.
    parked: AtomicBool,
    index: Mutex<Option<Arc<Index>>>,
    pub(crate) selection: Selection,
    place: Arc<Place>,
    pid: u32,
}

/// An object, and all devices that use it.
struct Mapped(Object);

impl Drop for Mapped {
    /// What keeps it has waited for the first device alone.
    fn drop(&mut self) {
        let mut pieces = self.0.parts().iter().flat_map(ObjectPart::pieces);
        let Some(first) = pieces.next() else { return };
        let mut done: Vec<&Device> = vec![first.device()];
        for piece in pieces.filter(|piece| !piece.is_parked()) {
            if done.iter().all(|device| device.uuid() != piece.device().uuid()) {
                // Not as `synchronize` does: another thread may be capturing a stream. It fails with the error of earlier work, which is
                // not this one's.
                let _ = piece.device().wait_for_work();
                done.push(piece.device());
            }
        }
    }
}

/// In which parts the mapped arrays of a name are, and where in their tables.
type Index = HashMap<String, Vec<(usize, usize)>>;

impl Leased {
    pub(crate) fn new(object: Object, selection: Selection, place: Arc<Place>) -> Self {
        let mapped = object.parts().iter().flat_map(ObjectPart::pieces).next().map(|piece| piece.device().clone());
        let device = mapped.expect("a lease has memory");
        Self {
            object: Kept::new(&device, RwLock::new(Mapped(object))),
            exports: Arc::default(),
            parked: AtomicBool::new(false),
            index: Mutex::default(),
            selection,
            place,
            pid: process::id(),
        }
    }

    fn object(&self) -> RwLockReadGuard<'_, Mapped> {
        self.object.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn object_mut(&self) -> RwLockWriteGuard<'_, Mapped> {
        self.object.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at the object, with the GIL released.
    pub(crate) fn read<T: Send>(&self, py: Python<'_>, look: impl FnOnce(&Object) -> T + Send) -> T {
        py.detach(|| look(&self.object().0))
    }

    fn is_parked(&self) -> bool {
        self.parked.load(Ordering::Acquire)
    }

    /// Fails unless it is parked.
    pub(crate) fn check_parked(&self) -> Outcome<()> {
        match self.is_parked() {
            true => Ok(()),
            false => Err(Failure::unusable("the lease is not parked: prepare a version, and switch to it")),
        }
    }

    /// Fails if other libraries have its addresses, unless the caller promises that they are not used meanwhile.
    fn check_exports(&self, promised: bool, verb: &str) -> Outcome<()> {
        match Arc::strong_count(&self.exports) - 1 {
            0 => Ok(()),
            _ if promised => Ok(()),
            count => Err(Failure::export(format!(
                "{count} exports of its arrays to other libraries are alive, which may use the memory while it is exchanged: drop them, or \
                 promise that nothing uses them until {verb} returns, with exported=\"valid\""
            ))),
        }
    }

    /// Imports another version. Blocks for the driver's calls.
    pub(crate) fn prepare(&self, lease: broker::Lease) -> Outcome<broker::Prepared> {
        Ok(self.object().0.prepare(lease)?)
    }

    /// `next` is not taken where other libraries have its addresses.
    fn switch(&self, next: &Prepared, promised: bool) -> Outcome<broker::Prepared> {
        let mut object = self.object_mut();
        self.check_exports(promised, "switch")?;
        self.check_mapped(&object.0)?;
        let switched = object.0.switch(next.take()?);
        self.changed(&object.0);
        Ok(switched?)
    }

    fn park(&self, keep_lease: bool, promised: bool) -> Outcome<()> {
        let mut object = self.object_mut();
        if !self.is_parked() {
            self.check_exports(promised, "unpark")?;
        }
        let parked = object.0.park(keep_lease);
        self.changed(&object.0);
        Ok(parked?)
    }

    /// Fills the addresses again. Blocks for the driver's calls.
    pub(crate) fn unpark(&self, lease: broker::Lease) -> Outcome<()> {
        let mut object = self.object_mut();
        let filled = object.0.unpark(lease);
        self.changed(&object.0);
        Ok(filled?)
    }

    /// Takes note of what is there now. With the lock held.
    fn changed(&self, object: &Object) {
        self.parked.store(object.is_parked(), Ordering::Release);
        *self.index.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Where the mapped arrays of each name are. With the lock held.
    fn index(&self, object: &Object) -> Arc<Index> {
        let mut index = self.index.lock().unwrap_or_else(PoisonError::into_inner);
        let made = || {
            let mut made = Index::new();
            for (part, at, entry) in mapped(object) {
                made.entry(entry.name.clone()).or_default().push((part, at));
            }
            Arc::new(made)
        };
        Arc::clone(index.get_or_insert_with(made))
    }

    /// The array of a name: in the part that is named, or in the only one that has it.
    fn find<'a>(&self, object: &'a Object, name: &str, part: Option<&str>) -> Outcome<(usize, &'a ArrayEntry)> {
        let count: usize = object.parts().iter().map(|part| part.arrays().len()).sum();
        let mut found: Vec<(usize, &ArrayEntry)> = if count <= FEW {
            mapped(object).filter(|(_, _, entry)| entry.name == name).map(|(part, _, entry)| (part, entry)).collect()
        } else {
            let index = self.index(object);
            let places = index.get(name).map(Vec::as_slice).unwrap_or_default();
            places.iter().map(|&(part, at)| (part, &object.parts()[part].arrays()[at])).collect()
        };
        let here = || format!("version {} of {:?}", object.version(), object.name());
        if let Some(part) = part {
            if object.part(part).is_none() {
                return Err(Failure::Caller(
                    Class::NoArray,
                    format!("{} has no part {part:?}, or it was not asked for", here()),
                ));
            }
            found.retain(|(at, _)| object.parts()[*at].name() == part);
        }
        match found[..] {
            [found] => Ok(found),
            [] => {
                let exists = object.parts().iter().any(|part| part.arrays().iter().any(|entry| entry.name == name));
                let problem = match exists {
                    true => format!("array {name:?} of {} was not asked for: get it too", here()),
                    false => format!("{} has no array {name:?}{}", here(), similar(object)),
                };
                Err(Failure::Caller(Class::NoArray, problem))
            }
            ref several => {
                let parts: Vec<&str> = several.iter().map(|(part, _)| object.parts()[*part].name()).collect();
                let parts = parts.join(", ");
                Err(Failure::invalid(format!(
                    "array {name:?} is in the parts {parts}: name one, with array({name:?}, part=...)"
                )))
            }
        }
    }

    fn check_mapped(&self, object: &Object) -> Outcome<()> {
        match self.is_parked() {
            true => Err(Failure::unusable(format!("{:?} is parked, and nothing is mapped: unpark it", object.name()))),
            false => Ok(()),
        }
    }

    /// The piece of memory in which an array is, and the array in it.
    fn piece(
        self: &Arc<Self>,
        object: &Object,
        part: usize,
        entry: &ArrayEntry,
    ) -> Outcome<(Arc<LeasedPiece>, ArrayDescriptor)> {
        let mut array = entry.array.clone();
        let pieces = object.parts()[part].pieces();
        let at = place(pieces, &array)?.ok_or_else(|| {
            Failure::Caller(Class::NoArray, format!("array {:?} was not asked for: get it too", entry.name))
        })?;
        array.offset -= pieces[at].start();
        Ok((self.whole_piece(object, part, at), array))
    }

    fn whole_piece(self: &Arc<Self>, object: &Object, part: usize, at: usize) -> Arc<LeasedPiece> {
        let piece = &object.parts()[part].pieces()[at];
        Arc::new(LeasedPiece {
            device: piece.device().clone(),
            address: piece.address(),
            size: piece.size(),
            leased: Arc::clone(self),
            part,
            piece: at,
        })
    }
}

/// The arrays whose bytes are mapped: the part, where in its table, and what.
fn mapped(object: &Object) -> impl Iterator<Item = (usize, usize, &ArrayEntry)> {
    object.parts().iter().enumerate().flat_map(|(number, part)| {
        let whole = matches!(part.pieces(), [piece] if piece.start() == 0 && piece.size() >= part.description().size);
        let is_mapped = move |entry: &ArrayEntry| whole || matches!(place(part.pieces(), &entry.array), Ok(Some(_)));
        let arrays = part.arrays().iter().enumerate();
        arrays.filter(move |(_, entry)| is_mapped(entry)).map(move |(at, entry)| (number, at, entry))
    })
}

/// In which piece an array is.
fn place(pieces: &[Arc<vmmfd::memory::Imported>], array: &ArrayDescriptor) -> Result<Option<usize>> {
    let span = array.span()?;
    Ok(pieces.iter().position(|piece| piece.start() <= span.start && span.end <= piece.start() + piece.size()))
}

/// What arrays there are, for a person who asked for another.
fn similar(object: &Object) -> String {
    const SHOWN: usize = 5;
    let mut names: Vec<&str> = mapped(object).map(|(_, _, entry)| entry.name.as_str()).take(SHOWN + 1).collect();
    let more = if names.len() > SHOWN { ", ..." } else { "" };
    names.truncate(SHOWN);
    if names.is_empty() { ", and no other".to_owned() } else { format!("; it has {}{more}", names.join(", ")) }
}

/// A piece of leased memory: what arrays keep.
struct LeasedPiece {
    leased: Arc<Leased>,
    part: usize,
    piece: usize,
    device: Device,
    address: u64,
    size: u64,
}

impl Memory for LeasedPiece {
    fn device(&self) -> &Device {
        &self.device
    }

    fn address(&self) -> u64 {
        self.address
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn is_read_only(&self) -> bool {
        true
    }

    fn check_mapped(&self) -> Result<()> {
        match self.leased.is_parked() {
            true => Err(Error::Misuse { problem: "its lease is parked, and nothing is mapped: unpark it".to_owned() }),
            false => Ok(()),
        }
    }

    fn export(&self) -> Result<Export> {
        // Not while another version takes its place. The thread that does that needs no GIL; others do meanwhile. What is mapped is looked at
        // with the lock held: a park counts the exports with it held, too.
        let counted = || self.check_mapped().map(|()| Export::counted(&self.leased.exports));
        let free = match self.leased.object.try_read() {
            Ok(object) => Some(object),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        if let Some(_object) = free {
            return counted();
        }
        let wait = || {
            let _object = self.leased.object();
            counted()
        };
        Python::try_attach(|py| py.detach(wait)).unwrap_or_else(wait)
    }

    fn copy_out(&self, offset: u64, to: &mut [u8]) -> Result<()> {
        let object = self.leased.object();
        self.check_mapped()?;
        object.0.parts()[self.part].pieces()[self.piece].copy_out(offset, to)
    }

    fn copy_in(&self, _offset: u64, _from: &[u8]) -> Result<()> {
        Err(Error::Memory(vmmfd::error::MemoryError::ReadOnly))
    }

    fn origin(&self) -> Option<Origin> {
        let object = self.leased.object();
        let part = &object.0.parts()[self.part];
        Some(Origin {
            broker: Arc::clone(&self.leased.place),
            name: object.0.name().to_owned(),
            version: object.0.version(),
            id: object.0.id().to_owned(),
            part: part.name().to_owned(),
            start: part.pieces()[self.piece].start(),
            length: self.size,
        })
    }
}

/// A lease of an object, and the object mapped.
#[pyclass(name = "Lease", module = "vmmfd._native", frozen, weakref)]
pub(crate) struct Lease(Mutex<Option<Arc<Leased>>>, u32);

impl Lease {
    pub(crate) fn new(leased: Leased) -> Self {
        Self::of(Arc::new(leased))
    }

    /// A lease that others have too.
    pub(crate) fn of(leased: Arc<Leased>) -> Self {
        let pid = leased.pid;
        Self(Mutex::new(Some(leased)), pid)
    }

    /// # Errors
    /// `ValueError` once it is closed, and in a fork.
    pub(crate) fn leased(&self) -> Outcome<Arc<Leased>> {
        check_process(self.1, "got this lease", "connect and get it again")?;
        let leased = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        leased.ok_or_else(|| Failure::unusable("the lease was closed: get the object again"))
    }

    fn with<T: Send>(&self, py: Python<'_>, look: impl FnOnce(&Object) -> T + Send) -> Outcome<T> {
        Ok(self.leased()?.read(py, look))
    }

    /// Makes arrays, and lets go of what could not be made.
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

    /// In seconds since 1970.
    #[getter]
    fn created(&self, py: Python<'_>) -> Outcome<f64> {
        self.with(py, |object| object.created().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64())
    }

    /// The user and the group.
    #[getter]
    fn owner(&self, py: Python<'_>) -> Outcome<(u32, u32)> {
        self.with(py, |object| (object.owner().uid, object.owner().gid))
    }

    #[getter]
    fn metadata<'py>(&self, py: Python<'py>) -> Outcome<Bound<'py, PyDict>> {
        Ok(json::to_dict(py, &self.with(py, Object::metadata)??)?)
    }

    #[getter]
    fn is_held(&self, py: Python<'_>) -> bool {
        self.with(py, Object::is_held).unwrap_or(false)
    }

    #[getter]
    fn is_parked(&self) -> bool {
        self.leased().is_ok_and(|leased| leased.is_parked())
    }

    #[getter]
    fn is_closed(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// How many exports to other libraries are alive.
    #[getter]
    fn exports(&self) -> usize {
        self.leased().map_or(0, |leased| Arc::strong_count(&leased.exports) - 1)
    }

    /// What was asked for, to ask for it again: parts and arrays.
    #[getter]
    #[allow(clippy::type_complexity)]
    fn selection(&self) -> Outcome<(Option<Vec<String>>, Option<Vec<String>>)> {
        let leased = self.leased()?;
        Ok((leased.selection.parts.clone(), leased.selection.arrays.clone()))
    }

    /// Of each part its name, bytes of data and of memory, digest, device, and how many arrays are in it.
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

    /// The names of the arrays that are mapped, each once.
    fn keys(&self, py: Python<'_>) -> Outcome<Vec<String>> {
        self.with(py, |object| {
            let mut seen = std::collections::HashSet::new();
            mapped(object)
                .filter(|(_, _, entry)| seen.insert(&entry.name))
                .map(|(_, _, entry)| entry.name.clone())
                .collect()
        })
    }

    fn __contains__(&self, py: Python<'_>, name: &str) -> Outcome<bool> {
        let leased = self.leased()?;
        Ok(leased.read(py, |object| match leased.find(object, name, None) {
            Ok(_) => true,
            Err(Failure::Caller(Class::NoArray, _)) => false,
            // In several parts.
            Err(_) => true,
        }))
    }

    /// An array.
    #[pyo3(signature = (name, part=None))]
    fn array<'py>(&self, py: Python<'py>, name: &str, part: Option<&str>) -> Outcome<Bound<'py, Array>> {
        let leased = self.leased()?;
        let found = leased.read(py, |object| {
            leased.check_mapped(object)?;
            let (part, entry) = leased.find(object, name, part)?;
            leased.piece(object, part, entry)
        });
        Self::array_of(py, found)
    }

    /// All arrays that are mapped: of each its part, name, the array, its attributes, and whether its elements lie in C order without
    /// gaps.
    #[pyo3(signature = (part=None))]
    fn arrays<'py>(&self, py: Python<'py>, part: Option<&str>) -> Outcome<Vec<Bound<'py, PyTuple>>> {
        let leased = self.leased()?;
        let found = leased.read(py, |object| {
            leased.check_mapped(object)?;
            let all = mapped(object).filter(|(at, ..)| part.is_none_or(|part| object.parts()[*at].name() == part));
            let mut whole: HashMap<(usize, usize), Arc<LeasedPiece>> = HashMap::new();
            let mut found = Vec::new();
            for (part, _, entry) in all {
                let of = &object.parts()[part];
                let Some(at) = place(of.pieces(), &entry.array)? else { continue };
                let piece = whole.entry((part, at)).or_insert_with(|| leased.whole_piece(object, part, at));
                let mut array = entry.array.clone();
                array.offset -= of.pieces()[at].start();
                let attributes = attributes_of(entry)?;
                found.push((of.name().to_owned(), entry.name.clone(), Arc::clone(piece), array, attributes));
            }
            Ok::<_, Failure>(found)
        })?;
        let mut arrays = Vec::with_capacity(found.len());
        for (part, name, piece, array, attributes) in found {
            let dense = !array.shape.contains(&0) && contiguous(&array)?.0;
            let array = Bound::new(py, Array::new(piece, array)?)?;
            let attributes = attributes.map(|attributes| json::to_dict(py, &attributes)).transpose()?;
            arrays.push((part, name, array, attributes, dense).into_pyobject(py)?);
        }
        Ok(arrays)
    }

    /// The attributes of an array, or None.
    #[pyo3(signature = (name, part=None))]
    fn attributes<'py>(&self, py: Python<'py>, name: &str, part: Option<&str>) -> Outcome<Option<Bound<'py, PyDict>>> {
        let leased = self.leased()?;
        let attributes = leased.read(py, |object| {
            let (_, entry) = leased.find(object, name, part)?;
            attributes_of(entry)
        })?;
        Ok(attributes.map(|attributes| json::to_dict(py, &attributes)).transpose()?)
    }

    /// The pieces of a part's memory, as arrays of bytes: of each where it begins in the part, and the array.
    #[pyo3(signature = (part=None))]
    fn memory<'py>(&self, py: Python<'py>, part: Option<&str>) -> Outcome<Vec<(u64, Bound<'py, Array>)>> {
        let leased = self.leased()?;
        let pieces = leased.read(py, |object| {
            leased.check_mapped(object)?;
            let number = match (part, object.parts()) {
                (None, [_]) => 0,
                (None, parts) => {
                    let names: Vec<&str> = parts.iter().map(ObjectPart::name).collect();
                    return Err(Failure::invalid(format!("the object has the parts {}: name one", names.join(", "))));
                }
                (Some(part), parts) => parts.iter().position(|of| of.name() == part).ok_or_else(|| {
                    Failure::Caller(
                        Class::NoArray,
                        format!("{:?} has no part {part:?}, or it was not asked for", object.name()),
                    )
                })?,
            };
            let pieces = object.parts()[number].pieces().iter().enumerate();
            Ok(pieces.map(|(at, piece)| (piece.start(), leased.whole_piece(object, number, at))).collect::<Vec<_>>())
        })?;
        let bytes = |(start, piece): (u64, Arc<LeasedPiece>)| {
            let dtype: ElementType = "uint8".parse().expect("a type");
            let array = ArrayDescriptor { dtype, shape: vec![piece.size], strides: None, offset: 0 };
            Ok((start, Bound::new(py, Array::new(piece, array)?)?))
        };
        pieces.into_iter().map(bytes).collect()
    }

    /// An array of a part, wherever it begins there, in bytes.
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
            let number = object.parts().iter().position(|of| of.name() == part);
            let number = number.ok_or_else(|| Failure::Caller(Class::NoArray, format!("there is no part {part:?}")))?;
            let pieces = object.parts()[number].pieces();
            let at = place(pieces, &array)?;
            let at = at.ok_or_else(|| Failure::Caller(Class::NoArray, format!("{array} is not mapped")))?;
            let array = ArrayDescriptor { offset: array.offset - pieces[at].start(), ..array.clone() };
            Ok((leased.whole_piece(object, number, at), array))
        });
        Self::array_of(py, found)
    }

    /// Puts a version that was prepared at the addresses of this one. Returns the old one.
    fn switch(&self, py: Python<'_>, prepared: &Prepared, promised: bool) -> Outcome<Prepared> {
        let leased = self.leased()?;
        py.detach(|| leased.switch(prepared, promised).map(Prepared::new))
    }

    /// Gives the memory back, and keeps the addresses.
    fn park(&self, py: Python<'_>, keep_lease: bool, promised: bool) -> Outcome<()> {
        let leased = self.leased()?;
        py.detach(|| leased.park(keep_lease, promised))
    }

    /// Ends the lease, now or when the last array in it is gone.
    fn close(&self, py: Python<'_>) {
        let leased = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| {
            if let Some(leased) = leased.and_then(Arc::into_inner) {
                leased.object.let_go_now();
            }
        });
    }
}

/// What of a broker an array is: the broker's path, backend, timeout and trust; name, version and id; part, and where its memory begins there and
/// how long it is; and of the array type, shape, strides and offset in the part.
type Sent = (
    (PathBuf, String, f64, Vec<u32>),
    (String, u64, String),
    (String, u64, u64),
    (String, Vec<u64>, Option<Vec<i64>>, u64),
);

/// What another process needs to get an array, if it is of a lease.
#[pyfunction]
pub(crate) fn origin(py: Python<'_>, array: &Bound<'_, Array>) -> Option<Sent> {
    let array = array.get();
    let memory = array.memory();
    let Origin { broker, name, version, id, part, start, length } = py.detach(|| memory.origin())?;
    let ArrayDescriptor { dtype, shape, strides, offset } = array.descriptor().clone();
    let Place { path, backend, timeout, trust } = &*broker;
    let place = (path.clone(), backend.clone(), timeout.as_secs_f64(), trust.clone());
    let (dtype, offset) = (dtype.to_string(), offset + start);
    Some((place, (name, version, id), (part, start, length), (dtype, shape, strides, offset)))
}

fn attributes_of(entry: &ArrayEntry) -> Outcome<Option<Map<String, Value>>> {
    let read = entry.attributes.as_ref().map(|attributes| attributes.read::<Map<String, Value>>()).transpose();
    read.map_err(|error| Failure::unusable(format!("the attributes of array {:?} are wrong: {error}", entry.name)))
}

/// A version that is imported and mapped nowhere.
#[pyclass(name = "Prepared", module = "vmmfd._native", frozen, weakref)]
pub(crate) struct Prepared(Mutex<Option<broker::Prepared>>, u32);

impl Prepared {
    pub(crate) fn new(prepared: broker::Prepared) -> Self {
        Self(Mutex::new(Some(prepared)), process::id())
    }

    fn take(&self) -> Outcome<broker::Prepared> {
        check_process(self.1, "prepared this version", "connect and get it again")?;
        let prepared = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        prepared.ok_or_else(used)
    }

    fn with<T>(&self, look: impl FnOnce(&broker::Prepared) -> T) -> Outcome<T> {
        check_process(self.1, "prepared this version", "connect and get it again")?;
        let prepared = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        prepared.as_ref().map(look).ok_or_else(used)
    }
}

fn used() -> Failure {
    Failure::unusable("the version was switched to, or closed: prepare it again")
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
        Ok(json::to_dict(py, &self.with(broker::Prepared::metadata)??)?)
    }

    #[getter]
    fn is_closed(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// Ends its lease, and releases its memory.
    fn close(&self, py: Python<'_>) {
        if process::id() != self.1 {
            return;
        }
        let prepared = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(prepared));
    }
}

/// The right to be the one that makes an object.
#[pyclass(name = "Claim", module = "vmmfd._native", frozen, weakref)]
pub(crate) struct Claim(Mutex<Option<(broker::Claim, Taken)>>, u32);

impl Claim {
    pub(crate) fn new(claim: broker::Claim, client: Taken) -> Self {
        Self(Mutex::new(Some((claim, client))), process::id())
    }
}

#[pymethods]
impl Claim {
    #[getter]
    fn is_closed(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// Passes it on to the next that waits.
    fn close(&self, py: Python<'_>) {
        if process::id() != self.1 {
            return;
        }
        let claim = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(claim));
    }
}
