//! A mapped object.

use std::{
    collections::HashMap,
    slice,
    sync::{Arc, OnceLock},
    time::SystemTime,
};

use super::holdings::{Header, Hold, PartHeader, part_accessors, version_accessors};
use crate::{
    error::{Error, MemoryError, ProtocolError, Result},
    memory::{Array, Description, Imported, Region, Remains},
    wire::{
        Check,
        broker::{ArrayEntry, Owner},
    },
};

/// Identifies the positions of an object's data and arrays. Versions with the same positions share a layout.
#[derive(Debug, Clone, Default)]
pub(super) struct Layout(Arc<()>);

impl Layout {
    pub(super) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// A mapped object and its lease.
///
/// Dropping it ends the lease. Memory and arrays taken from it remain mapped as long as they live, even after the lease has ended or the
/// broker has exited; the broker then no longer counts this process among the readers.
#[derive(Debug)]
pub struct Object {
    pub(super) parts: Vec<ObjectPart>,
    pub(super) header: Arc<Header>,
    /// `None` while parked without a lease.
    pub(super) hold: Option<Hold>,
    pub(super) layout: Layout,
}

impl Object {
    version_accessors!();

    /// Whether the broker counts this process among the readers: see [`Lease::is_held`](super::Lease::is_held).
    pub fn is_held(&self) -> bool {
        self.hold.as_ref().is_some_and(Hold::is_held)
    }

    /// As [`Lease::is_recalled`](super::Lease::is_recalled); false while [parked](Object::park) without a lease.
    ///
    /// # Errors
    /// As [`Lease::is_recalled`](super::Lease::is_recalled).
    pub fn is_recalled(&self) -> Result<bool> {
        self.hold.as_ref().map_or(Ok(false), Hold::is_recalled)
    }

    /// As [`Lease::on_recall`](super::Lease::on_recall), for the present version: a [`switch`](Object::switch) moves the handler with the
    /// lease. Does nothing while [parked](Object::park) without a lease.
    ///
    /// # Errors
    /// As [`Lease::is_recalled`](super::Lease::is_recalled).
    pub fn on_recall(&self, call: impl FnOnce() + Send + 'static) -> Result<()> {
        self.hold.as_ref().map_or(Ok(()), |hold| hold.on_recall(call))
    }

    /// The requested parts.
    pub fn parts(&self) -> &[ObjectPart] {
        &self.parts
    }

    /// Reports to the broker, in one sentence, that the memory differs from its creator's description, for example because its digest
    /// is wrong. The broker shows the report to every user who may read the object, and watchers get the event `reported`. Does nothing
    /// while the object is [parked](Object::park) without a lease. Blocks only if the socket is full.
    pub fn report(&self, message: impl Into<String>) {
        if let Some(hold) = &self.hold {
            hold.send_report(message.into());
        }
    }

    /// The part with this name.
    pub fn part(&self, name: &str) -> Option<&ObjectPart> {
        self.parts.iter().find(|part| part.header.name == name)
    }

    /// Returns an array by name, from the part that has it.
    ///
    /// # Errors
    /// The errors of [`Object::part_of`]; [`MemoryError::OutOfRange`] if its bytes were not requested; [`Error::Misuse`] while the object is
    /// [parked](Object::park).
    pub fn array(&self, name: &str) -> Result<Array> {
        self.part_of(name)?.array(name)
    }

    /// The part that has an array of this name.
    ///
    /// # Errors
    /// [`MemoryError::NoArray`] if no part has it, [`MemoryError::AmbiguousArray`] if several have: use [`ObjectPart::array`] then.
    pub fn part_of(&self, name: &str) -> Result<&ObjectPart> {
        let mut found = self.parts.iter().filter(|part| part.find(name).is_some());
        let part = found.next().ok_or_else(|| no_array(name, &self.parts))?;
        let others: Vec<_> = found.map(|part| part.name().to_owned()).collect();
        if others.is_empty() {
            return Ok(part);
        }
        let parts = [vec![part.name().to_owned()], others].concat();
        Err(MemoryError::AmbiguousArray { name: name.to_owned(), parts }.into())
    }
}

/// A mapped part of an [`Object`].
#[derive(Debug)]
pub struct ObjectPart {
    pub(super) header: PartHeader,
    pub(super) memory: Vec<Arc<Imported>>,
    /// Each piece's handles and descriptors, needed to map it again after a failed switch.
    pub(super) remains: Vec<Remains>,
    /// The index of each array in `arrays`, built by the first lookup.
    pub(super) index: OnceLock<HashMap<String, usize>>,
}

impl ObjectPart {
    part_accessors!();

    /// The part's memory. It is one piece, unless the get requested arrays that are not contiguous.
    ///
    /// # Errors
    /// [`Error::Misuse`] if the memory is several pieces (see [`ObjectPart::pieces`]), or while the object is [parked](Object::park).
    pub fn memory(&self) -> Result<&Arc<Imported>> {
        self.check_mapped()?;
        match self.memory.as_slice() {
            [memory] => Ok(memory),
            several => {
                let problem =
                    format!("part `{}` is mapped in {} pieces: use `pieces`", self.header.name, several.len());
                Err(Error::Misuse { problem })
            }
        }
    }

    /// The pieces of the part's memory, in order; [`Imported::start`] is the offset of each. While the object is
    /// [parked](Object::park), each has 0 bytes.
    pub fn pieces(&self) -> &[Arc<Imported>] {
        &self.memory
    }

    /// The sizes of the segments that are mapped, in order. Each is an allocation of its own, for libraries that register each allocation.
    pub fn segments(&self) -> impl Iterator<Item = u64> {
        self.remains.iter().flat_map(Remains::sizes)
    }

    /// Returns an array by name.
    ///
    /// # Errors
    /// [`MemoryError::NoArray`] if the part has no such array, [`MemoryError::OutOfRange`] if its bytes were not requested;
    /// [`Error::Misuse`] while the object is [parked](Object::park).
    pub fn array(&self, name: &str) -> Result<Array> {
        self.check_mapped()?;
        let mut descriptor = self.entry(name)?.array.clone();
        let span = descriptor.span()?;
        let inside = |piece: &&Arc<Imported>| {
            let start = piece.start();
            start <= span.start && span.end <= start + piece.size()
        };
        let Some(piece) = self.memory.iter().find(inside) else {
            let offset = span.start;
            let length = span.end - span.start;
            let size = self.memory.iter().map(|piece| piece.size()).sum();
            return Err(Error::Memory(MemoryError::OutOfRange { offset, length, size }));
        };
        descriptor.offset -= piece.start();
        Array::new(Arc::clone(piece) as Arc<dyn Region>, descriptor)
    }

    fn check_mapped(&self) -> Result<()> {
        match self.memory.iter().any(|piece| piece.is_parked()) {
            false => Ok(()),
            true => Err(Error::Misuse { problem: format!("part `{}` is parked: nothing is mapped", self.header.name) }),
        }
    }

    /// Describes an array by name.
    ///
    /// # Errors
    /// [`MemoryError::NoArray`] if the part has no such array.
    pub fn entry(&self, name: &str) -> Result<&ArrayEntry> {
        self.find(name).ok_or_else(|| no_array(name, slice::from_ref(self)))
    }

    fn find(&self, name: &str) -> Option<&ArrayEntry> {
        let index = self
            .index
            .get_or_init(|| (0..).zip(self.header.arrays.iter()).map(|(at, of)| (of.name.clone(), at)).collect());
        index.get(name).map(|at| &self.header.arrays[*at])
    }
}

/// Names the first arrays of the parts.
fn no_array(name: &str, parts: &[ObjectPart]) -> Error {
    const SHOWN: usize = 8;
    let mut names = parts.iter().flat_map(|part| part.arrays().iter().map(|entry| format!("`{}`", entry.name)));
    let shown: Vec<String> = names.by_ref().take(SHOWN).collect();
    let known = match (shown.join(", "), names.count()) {
        (shown, _) if shown.is_empty() => "no part has arrays".to_owned(),
        (shown, 0) => format!("the arrays are {shown}"),
        (shown, more) => format!("the arrays are {shown} and {more} more"),
    };
    MemoryError::NoArray { name: name.to_owned(), known }.into()
}
