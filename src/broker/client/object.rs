//! An object that is mapped.

use std::{
    collections::HashMap,
    sync::{Arc, OnceLock},
    time::SystemTime,
};

use super::hold::{Hold, about_its_version};
use crate::{
    error::{BrokerError, Error, MemoryError, ProtocolError, RefusalCode, Result},
    memory::{Array, Description, Imported, Region, Remains},
    wire::{
        Check,
        broker::{ArrayEntry, Attached, Owner},
    },
};

/// Stands for where the data and arrays of an object are: versions that have the same share one.
#[derive(Debug, Clone, Default)]
pub(super) struct Layout(Arc<()>);

impl Layout {
    pub(super) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// An object that is mapped, and the lease of it, which ends when it is dropped.
///
/// Memory and arrays that were taken from it stay mapped for as long as they live, also after the lease ended and when the broker
/// is gone. The broker then no longer counts this process among the readers.
#[derive(Debug)]
pub struct Object {
    pub(super) parts: Vec<ObjectPart>,
    pub(super) name: String,
    pub(super) version: u64,
    pub(super) id: String,
    pub(super) created: SystemTime,
    pub(super) owner: Owner,
    pub(super) metadata: Option<Attached>,
    /// None once it was parked without it.
    pub(super) hold: Option<Hold>,
    pub(super) layout: Layout,
}

impl Object {
    about_its_version!();

    /// Whether the broker counts this process among the readers: see [`Lease::is_held`](super::Lease::is_held).
    pub fn is_held(&self) -> bool {
        self.hold.as_ref().is_some_and(Hold::is_held)
    }

    /// The parts that were asked for.
    pub fn parts(&self) -> &[ObjectPart] {
        &self.parts
    }

    /// Reports to the broker, in one sentence, that the memory is not what its maker described: that its digest is wrong, say. The broker
    /// shows the report to everyone who may read the object, and watchers get the event `reported`. Does nothing while the object is
    /// [parked](Object::park) without its lease. Blocks only while the broker reads nothing.
    pub fn report(&self, message: impl Into<String>) {
        if let Some(hold) = &self.hold {
            hold.send_report(message.into());
        }
    }

    /// The part of a name.
    pub fn part(&self, name: &str) -> Option<&ObjectPart> {
        self.parts.iter().find(|part| part.name == name)
    }

    /// The array of a name, in whichever part it is.
    ///
    /// # Errors
    /// [`Error::Broker`] with the code `absent` if there is none; [`Error::Memory`] if its bytes were not asked for; [`Error::Misuse`]
    /// while it is [parked](Object::park).
    pub fn array(&self, name: &str) -> Result<Array> {
        let part = self.parts.iter().find(|part| part.entry(name).is_some());
        part.ok_or_else(|| no_array(name))?.array(name)
    }
}

/// A part of an [`Object`], mapped.
#[derive(Debug)]
pub struct ObjectPart {
    pub(super) name: String,
    pub(super) description: Description,
    pub(super) digest: Option<String>,
    pub(super) arrays: Arc<Vec<ArrayEntry>>,
    pub(super) memory: Vec<Arc<Imported>>,
    /// The handles and descriptors of the segments of each piece: with them it is mapped again if another version can't take its place.
    pub(super) remains: Vec<Remains>,
    /// Where each array is in the table, from the first look for one on.
    pub(super) index: OnceLock<HashMap<String, usize>>,
}

impl ObjectPart {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it is.
    pub fn description(&self) -> &Description {
        &self.description
    }

    /// The digest of its bytes, in its maker's words.
    pub fn digest(&self) -> Option<&str> {
        self.digest.as_deref()
    }

    /// Its memory: one piece, unless arrays were asked for that lie apart.
    ///
    /// # Errors
    /// [`Error::Misuse`] if it is several pieces: see [`ObjectPart::pieces`]; and while the object is [parked](Object::park).
    pub fn memory(&self) -> Result<&Arc<Imported>> {
        self.check_mapped()?;
        match self.memory.as_slice() {
            [memory] => Ok(memory),
            several => {
                let problem =
                    format!("part `{}` is mapped in {} pieces: take them one by one", self.name, several.len());
                Err(Error::Misuse { problem })
            }
        }
    }

    /// The pieces of its memory, in their order: [`Imported::start`] is where each begins. While the object is [parked](Object::park)
    /// they are of 0 bytes.
    pub fn pieces(&self) -> &[Arc<Imported>] {
        &self.memory
    }

    /// The arrays in it, in its maker's order: all of them, also if only some of the memory was asked for.
    pub fn arrays(&self) -> &[ArrayEntry] {
        &self.arrays
    }

    /// The array of a name.
    ///
    /// # Errors
    /// [`Error::Broker`] with the code `absent` if there is none; [`Error::Memory`] if its bytes were not asked for; [`Error::Misuse`]
    /// while the object is [parked](Object::park).
    pub fn array(&self, name: &str) -> Result<Array> {
        self.check_mapped()?;
        let mut descriptor = self.entry(name).ok_or_else(|| no_array(name))?.array.clone();
        let span = descriptor.span()?;
        let inside = |piece: &&Arc<Imported>| {
            let start = piece.start();
            start <= span.start && span.end <= start + piece.size()
        };
        let Some(piece) = self.memory.iter().find(inside) else {
            let (offset, length) = (span.start, span.end - span.start);
            let size = self.memory.iter().map(|piece| piece.size()).sum();
            return Err(Error::Memory(MemoryError::OutOfRange { offset, length, size }));
        };
        descriptor.offset -= piece.start();
        Array::new(Arc::clone(piece) as Arc<dyn Region>, descriptor)
    }

    fn check_mapped(&self) -> Result<()> {
        match self.memory.iter().any(|piece| piece.is_parked()) {
            false => Ok(()),
            true => Err(Error::Misuse { problem: format!("part `{}` is parked: nothing is mapped", self.name) }),
        }
    }

    fn entry(&self, name: &str) -> Option<&ArrayEntry> {
        let index =
            self.index.get_or_init(|| (0..).zip(self.arrays.iter()).map(|(at, of)| (of.name.clone(), at)).collect());
        index.get(name).map(|at| &self.arrays[*at])
    }
}

fn no_array(name: &str) -> Error {
    BrokerError::new(RefusalCode::Absent, format!("there is no array `{name}`")).into()
}
