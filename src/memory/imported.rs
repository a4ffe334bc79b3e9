//! Memory that another process shares, by any mechanism.

use std::sync::Arc;

use super::{Device, Mapping, Region};
use crate::{
    driver::Access,
    error::{Error, Result},
};

/// Memory that another process owns and that this one can use. Dropping it closes it.
///
/// [`Region::size`] is the bytes of data; [`Imported::mapped_size`] is what is mapped. Memory that is shared by
/// [`super::Mechanism::Vmm`] stays valid for as long as it lives, also when its owner is gone. Memory of a pool and legacy memory
/// must be dropped before its owner frees it.
#[derive(Debug)]
pub struct Imported {
    pub(super) memory: ImportedBacking,
    /// Where it begins, in bytes of the owner's.
    pub(super) start: u64,
    /// How many bytes of data it has.
    pub(super) size: u64,
    pub(super) access: Access,
    pub(super) immutable: bool,
    /// Which NUMA node's CPUs may use it too, if it is host memory: for other memory that comes in its place.
    pub(super) node: Option<i32>,
    /// Whether nothing is mapped: the addresses are kept for memory that comes back.
    pub(super) parked: bool,
}

/// What keeps the memory open.
#[derive(Debug)]
pub(super) enum ImportedBacking {
    Vmm(Mapping),
    /// Of a pool, or legacy: what was offered begins some bytes behind the pointer.
    Opened {
        region: Arc<dyn Region>,
        offset: u64,
        mapped_size: u64,
    },
}

impl Imported {
    /// Where it begins, in bytes of the owner's: 0 unless only a part was asked for.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// How many bytes are mapped: at least [`Region::size`]. What lies behind the data is the owner's padding.
    pub fn mapped_size(&self) -> u64 {
        match &self.memory {
            ImportedBacking::Vmm(mapping) => mapping.size(),
            ImportedBacking::Opened { mapped_size, .. } => *mapped_size,
        }
    }

    /// Whether nothing is mapped at its addresses, which stay reserved: see `Object::park` of the broker's client. Its
    /// [`Region::size`] is 0 then, so that every access to it is refused.
    pub fn is_parked(&self) -> bool {
        self.parked
    }

    /// How many bytes of data it has, or had when it was parked.
    pub(crate) fn data_size(&self) -> u64 {
        self.size
    }

    /// What is mapped at addresses of its own.
    ///
    /// # Errors
    /// [`Error::Misuse`] for memory of a pool, and for legacy memory.
    pub(super) fn mapping(&mut self) -> Result<&mut Mapping> {
        match &mut self.memory {
            ImportedBacking::Vmm(mapping) => Ok(mapping),
            ImportedBacking::Opened { .. } => {
                let problem = "memory of a pool and legacy memory have no addresses that can be filled again";
                Err(Error::Misuse { problem: problem.to_owned() })
            }
        }
    }

    /// How many bytes of addresses are reserved for it.
    pub(crate) fn room(&self) -> u64 {
        match &self.memory {
            ImportedBacking::Vmm(mapping) => mapping.room(),
            ImportedBacking::Opened { .. } => self.mapped_size(),
        }
    }

    /// Whether its owner says that it is never written any more.
    pub fn is_immutable(&self) -> bool {
        self.immutable
    }

    /// Whether it must be dropped before its owner frees it.
    pub fn is_borrowed(&self) -> bool {
        matches!(self.memory, ImportedBacking::Opened { .. })
    }
}

impl super::sealed::Sealed for Imported {}

impl Region for Imported {
    fn device(&self) -> &Device {
        match &self.memory {
            ImportedBacking::Vmm(mapping) => mapping.device(),
            ImportedBacking::Opened { region, .. } => region.device(),
        }
    }

    fn address(&self) -> u64 {
        match &self.memory {
            ImportedBacking::Vmm(mapping) => mapping.address(),
            ImportedBacking::Opened { region, offset, .. } => region.address() + offset,
        }
    }

    fn size(&self) -> u64 {
        if self.parked { 0 } else { self.size }
    }

    fn access(&self) -> Access {
        self.access
    }

    fn is_protected(&self) -> bool {
        !self.is_borrowed()
    }
}
