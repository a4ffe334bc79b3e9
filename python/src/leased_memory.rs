//! A mapped object of the broker, and the memory of its arrays: no Python objects, so any thread may release it.

use std::{
    collections::{HashMap, HashSet},
    ops::Range,
    sync::{
        Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use pyo3::Python;
use serde_json::{Map, Value};
use vmmfd::{
    Error, Result,
    array::ArrayDescriptor,
    bindings::lock,
    broker::{self, ArrayEntry, Get, Object, ObjectPart},
    driver::Access,
    fork::{PerProcess, ProcessIdentity},
    memory::{Device, Region, Selector},
};

use crate::{
    error::{Failure, Outcome},
    memory::{BrokerAddress, Export, Memory, Origin},
    reaper::Reaped,
};

/// The requested parts and arrays, requested again for another version.
#[derive(Debug, Default)]
pub(crate) struct Selection {
    pub(crate) parts: Option<Vec<String>>,
    pub(crate) arrays: Option<Vec<String>>,
    /// Bytes of the only part.
    pub(crate) range: Option<Range<u64>>,
}

impl Selection {
    /// Builds the request for a version.
    pub(crate) fn get(&self, name: &str) -> Get {
        let mut get = Get::new(name);
        get = self.parts.iter().fold(get, Get::parts);
        get = self.arrays.iter().fold(get, Get::arrays);
        self.range.iter().cloned().fold(get, Get::range)
    }
}

/// How a lease is mapped.
#[derive(Debug, Default)]
pub(crate) struct Opening {
    pub(crate) device: Option<Selector>,
    pub(crate) selection: Selection,
    pub(crate) copy_on_write: bool,
}

/// A mapped object and its lease, kept until its last array is dropped.
///
/// Arrays have its addresses and read under its lock, so that another version can be mapped while they live.
pub(crate) struct Leased {
    object: Reaped<RwLock<Mapped>>,
    /// Counts the exports to other libraries, which use the addresses without the lock.
    exports: Arc<()>,
    /// Whether no memory is mapped. Changed with the lock held.
    parked: AtomicBool,
    /// Whether [`suspend`](crate::suspend) parked it.
    pub(crate) suspended: AtomicBool,
    /// How often it was unparked.
    pub(crate) unparks: AtomicU64,
    index: Mutex<Option<Arc<Index>>>,
    pub(crate) selection: Selection,
    /// Whether this process may write to private copies of its pages.
    pub(crate) copy_on_write: bool,
    pub(crate) place: Arc<BrokerAddress>,
    pub(crate) made_by: ProcessIdentity,
}

/// The leases of this process. Arrays keep a lease whose Python object is gone.
static ALL: PerProcess<Mutex<Vec<Weak<Leased>>>> = PerProcess::new(Mutex::default);

/// A mapped object whose drop waits for its devices, except the first.
struct Mapped(Object);

impl Drop for Mapped {
    /// Waits for all devices but the first, for which the reaper has waited.
    fn drop(&mut self) {
        let mut pieces = self.0.parts().iter().flat_map(ObjectPart::pieces);
        let Some(first) = pieces.next() else { return };
        let mut done: Vec<&Device> = vec![first.device()];
        for piece in pieces.filter(|piece| !piece.is_parked()) {
            if done.iter().all(|device| device.uuid() != piece.device().uuid()) {
                // Not `synchronize`: another thread may be capturing a stream. An error belongs to earlier work.
                let _ = piece.device().wait_for_work();
                done.push(piece.device());
            }
        }
    }
}

/// For each name, the parts with a mapped array of that name, and its index in their tables.
type Index = HashMap<String, Vec<(usize, usize)>>;

impl Leased {
    pub(crate) fn new(object: Object, selection: Selection, place: Arc<BrokerAddress>) -> Arc<Self> {
        let mapped = object.parts().iter().flat_map(ObjectPart::pieces).next();
        let mapped = mapped.map(|piece| (piece.device().clone(), piece.access() == Access::ReadWrite));
        let (device, copy_on_write) = mapped.expect("a lease has memory");
        let leased = Arc::new(Self {
            object: Reaped::new(&device, RwLock::new(Mapped(object))),
            exports: Arc::default(),
            parked: AtomicBool::new(false),
            suspended: AtomicBool::new(false),
            unparks: AtomicU64::new(0),
            index: Mutex::default(),
            selection,
            copy_on_write,
            place,
            made_by: ProcessIdentity::current(),
        });
        let mut all = lock(ALL.get());
        all.retain(|leased| leased.strong_count() > 0);
        all.push(Arc::downgrade(&leased));
        drop(all);
        leased
    }

    /// All leases of this process whose addresses are in use.
    pub(crate) fn all() -> Vec<Arc<Self>> {
        lock(ALL.get()).iter().filter_map(Weak::upgrade).collect()
    }

    fn object(&self) -> RwLockReadGuard<'_, Mapped> {
        self.object.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn object_mut(&self) -> RwLockWriteGuard<'_, Mapped> {
        self.object.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn exports(&self) -> usize {
        Export::count(&self.exports)
    }

    /// Waits for the device, then releases the memory and the lease.
    pub(crate) fn release_now(self) {
        self.object.release_now();
    }

    /// Reads the object, with the GIL released.
    pub(crate) fn read<T: Send>(&self, py: Python<'_>, look: impl FnOnce(&Object) -> T + Send) -> T {
        py.detach(|| self.read_detached(look))
    }

    /// As [`Leased::read`], where the GIL is released already.
    pub(crate) fn read_detached<T>(&self, look: impl FnOnce(&Object) -> T) -> T {
        look(&self.object().0)
    }

    pub(crate) fn name(&self, py: Python<'_>) -> String {
        self.read(py, |object| object.name().to_owned())
    }

    pub(crate) fn is_parked(&self) -> bool {
        self.parked.load(Ordering::Acquire)
    }

    /// Fails unless it is parked.
    pub(crate) fn check_parked(&self) -> Outcome<()> {
        match self.is_parked() {
            true => Ok(()),
            false => Err(Failure::invalid("the lease is not parked: prepare a version, and switch to it")),
        }
    }

    /// Fails if other libraries have exports, unless the caller promises that they are not used.
    fn check_exports(&self, promised: bool, verb: &str) -> Outcome<()> {
        match self.exports() {
            0 => Ok(()),
            _ if promised => Ok(()),
            count => Err(Failure::export(format!(
                "other libraries hold {count} exports of its arrays and may use the memory during the call: drop them, or promise with \
                 exports_unused=True that nothing uses them until {verb} returns"
            ))),
        }
    }

    /// Imports another version. Blocks for the driver calls.
    pub(crate) fn prepare(&self, lease: broker::Lease) -> Outcome<broker::Prepared> {
        Ok(self.object().0.prepare(lease)?)
    }

    /// Calls `next` only if the switch is allowed.
    pub(crate) fn switch(
        &self,
        next: impl FnOnce() -> Outcome<broker::Prepared>,
        promised: bool,
    ) -> Outcome<broker::Prepared> {
        let mut object = self.object_mut();
        self.check_exports(promised, "switch")?;
        self.check_mapped(&object.0)?;
        let switched = object.0.switch(next()?);
        self.state_changed(&object.0);
        Ok(switched?)
    }

    pub(crate) fn park(&self, keep_lease: bool, promised: bool) -> Outcome<()> {
        let mut object = self.object_mut();
        if !self.is_parked() {
            self.check_exports(promised, "unpark")?;
        }
        let parked = if keep_lease { object.0.park_with_lease() } else { object.0.park() };
        self.state_changed(&object.0);
        Ok(parked?)
    }

    /// Maps a version at the parked addresses. Blocks for the driver calls.
    pub(crate) fn unpark(&self, lease: broker::Lease) -> Outcome<()> {
        let mut object = self.object_mut();
        let filled = object.0.unpark(lease);
        self.state_changed(&object.0);
        filled?;
        self.suspended.store(false, Ordering::Release);
        self.unparks.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    /// Updates the state after a change. Call with the lock held.
    fn state_changed(&self, object: &Object) {
        self.parked.store(object.is_parked(), Ordering::Release);
        *lock(&self.index) = None;
    }

    /// Returns the index of the mapped arrays. Call with the lock held.
    fn index(&self, object: &Object) -> Arc<Index> {
        let mut index = lock(&self.index);
        let made = || {
            let mut made = Index::new();
            for (part, at, entry) in self.mapped(object) {
                made.entry(entry.name.clone()).or_default().push((part, at));
            }
            Arc::new(made)
        };
        Arc::clone(index.get_or_insert_with(made))
    }

    /// Finds an array: in the named part, or in the only part that has it.
    pub(crate) fn find<'a>(
        &self,
        object: &'a Object,
        name: &str,
        part: Option<&str>,
    ) -> Outcome<(usize, &'a ArrayEntry)> {
        let wanted = part.map(|part| part_number(object, part)).transpose()?;
        let index = self.index(object);
        let places = index.get(name).map(Vec::as_slice).unwrap_or_default().iter();
        let places = places.filter(|(part, _)| wanted.is_none_or(|wanted| wanted == *part));
        let found: Vec<(usize, &ArrayEntry)> =
            places.map(|&(part, at)| (part, &object.parts()[part].arrays()[at])).collect();
        let here = || format!("version {} of {:?}", object.version(), object.name());
        match found[..] {
            [found] => Ok(found),
            [] => {
                let exists = object.parts().iter().any(|part| part.arrays().iter().any(|entry| entry.name == name));
                let problem = match exists {
                    true => format!("array {name:?} of {} was not requested: get it too", here()),
                    false => format!("{} has no array {name:?}{}", here(), self.available_arrays(object)),
                };
                Err(Failure::no_array(problem))
            }
            ref several => {
                let parts: Vec<&str> = several.iter().map(|(part, _)| object.parts()[*part].name()).collect();
                let parts = parts.join(", ");
                Err(Failure::invalid(format!(
                    "array {name:?} is in the parts {parts}: choose one with array({name:?}, part=...)"
                )))
            }
        }
    }

    /// The mapped arrays that were requested: part, index in its table, and entry. The segments may contain others.
    pub(crate) fn mapped<'a>(&self, object: &'a Object) -> impl Iterator<Item = (usize, usize, &'a ArrayEntry)> {
        let wanted: Option<HashSet<String>> =
            self.selection.arrays.as_ref().map(|names| names.iter().cloned().collect());
        let all = object.parts().iter().enumerate().flat_map(|(number, part)| {
            let whole =
                matches!(part.pieces(), [piece] if piece.start() == 0 && piece.size() >= part.description().size);
            let is_mapped =
                move |entry: &ArrayEntry| whole || matches!(place(part.pieces(), &entry.array), Ok(Some(_)));
            let arrays = part.arrays().iter().enumerate();
            arrays.filter(move |(_, entry)| is_mapped(entry)).map(move |(at, entry)| (number, at, entry))
        });
        all.filter(move |(_, _, entry)| wanted.as_ref().is_none_or(|wanted| wanted.contains(&entry.name)))
    }

    /// Lists available arrays for an error message.
    fn available_arrays(&self, object: &Object) -> String {
        const SHOWN: usize = 5;
        let mut names: Vec<&str> =
            self.mapped(object).map(|(_, _, entry)| entry.name.as_str()).take(SHOWN + 1).collect();
        let more = if names.len() > SHOWN { ", ..." } else { "" };
        names.truncate(SHOWN);
        if names.is_empty() { ", and no other".to_owned() } else { format!("; it has {}{more}", names.join(", ")) }
    }

    pub(crate) fn check_mapped(&self, object: &Object) -> Outcome<()> {
        match self.is_parked() {
            true => {
                Err(Failure::invalid(format!("{:?} is parked, and has no memory mapped: unpark it", object.name())))
            }
            false => Ok(()),
        }
    }

    /// Returns the piece of memory that contains an array of a part, and the array's position in it.
    pub(crate) fn piece(
        self: &Arc<Self>,
        object: &Object,
        part: usize,
        array: &ArrayDescriptor,
    ) -> Outcome<(Arc<LeasedPiece>, ArrayDescriptor)> {
        let pieces = object.parts()[part].pieces();
        let at = place(pieces, array)?.ok_or_else(|| Failure::no_array(format!("{array} is not mapped")))?;
        let array = ArrayDescriptor { offset: array.offset - pieces[at].start(), ..array.clone() };
        Ok((self.whole_piece(object, part, at), array))
    }

    pub(crate) fn whole_piece(self: &Arc<Self>, object: &Object, part: usize, at: usize) -> Arc<LeasedPiece> {
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

/// Returns the index of a part.
///
/// # Errors
/// `KeyError`.
pub(crate) fn part_number(object: &Object, part: &str) -> Outcome<usize> {
    object.parts().iter().position(|of| of.name() == part).ok_or_else(|| {
        let (version, name) = (object.version(), object.name());
        Failure::no_array(format!("version {version} of {name:?} has no part {part:?}, or it was not requested"))
    })
}

/// Returns the index of the piece that contains an array.
fn place(pieces: &[Arc<vmmfd::memory::Imported>], array: &ArrayDescriptor) -> Result<Option<usize>> {
    let span = array.span()?;
    Ok(pieces.iter().position(|piece| piece.start() <= span.start && span.end <= piece.start() + piece.size()))
}

/// A piece of leased memory, which arrays keep.
pub(crate) struct LeasedPiece {
    leased: Arc<Leased>,
    part: usize,
    piece: usize,
    device: Device,
    address: u64,
    size: u64,
}

impl Memory for LeasedPiece {
    fn extent(&self) -> (&Device, u64, u64) {
        (&self.device, self.address, self.size)
    }

    fn is_read_only(&self) -> bool {
        !self.leased.copy_on_write
    }

    fn check_mapped(&self) -> Result<()> {
        match self.leased.is_parked() {
            true => {
                Err(Error::Misuse { problem: "its lease is parked, and has no memory mapped: unpark it".to_owned() })
            }
            false => Ok(()),
        }
    }

    fn export(&self) -> Result<Export> {
        // Wait for a switch in progress, without the GIL, which other threads need. Check and count under the lock: a park reads the
        // count under it.
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

    fn with(&self, work: &mut dyn FnMut(&dyn Region) -> Result<()>) -> Result<()> {
        let object = self.leased.object();
        self.check_mapped()?;
        work(&*object.0.parts()[self.part].pieces()[self.piece])
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

pub(crate) fn attributes_of(entry: &ArrayEntry) -> Outcome<Option<Map<String, Value>>> {
    let read = entry.attributes.as_ref().map(|attributes| attributes.read::<Map<String, Value>>()).transpose();
    read.map_err(|error| Failure::invalid(format!("the attributes of array {:?} are wrong: {error}", entry.name)))
}
