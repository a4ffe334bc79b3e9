//! Memory that another process shares, by any mechanism.

use std::sync::Arc;

use super::{Device, Mapping, Region};
use crate::{
    driver::Access,
    error::{Error, Result},
};

/// Memory that another process owns and this process has open. Dropping it closes the memory.
///
/// [`Region::size`] is the size of the data; [`Imported::mapped_size`] bytes are mapped. Memory that is shared by
/// [`super::Mechanism::Vmm`] stays valid until it is dropped, even if its owner exits. Pool buffers and legacy memory must be dropped
/// before the owner frees them.
#[derive(Debug)]
pub struct Imported {
    pub(super) memory: ImportedBacking,
    /// Offset of this part in the owner's memory, in bytes.
    pub(super) start: u64,
    /// Bytes of data.
    pub(super) size: u64,
    pub(super) access: Access,
    /// The NUMA node of host memory, whose CPUs also get access. Needed again when other memory replaces this memory.
    pub(super) node: Option<i32>,
    /// Whether nothing is mapped and the addresses are only reserved.
    pub(super) parked: bool,
}

/// Keeps the memory open.
#[derive(Debug)]
pub(super) enum ImportedBacking {
    Vmm(Mapping),
    /// A pool buffer or legacy memory. The offered memory starts `offset` bytes after the pointer.
    Opened {
        region: Arc<dyn Region>,
        offset: u64,
        mapped_size: u64,
    },
}

impl Imported {
    /// The offset of this memory in the owner's memory, in bytes: 0 unless a part was requested.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// The number of mapped bytes: at least [`Region::size`]. The bytes after the data are the owner's padding.
    pub fn mapped_size(&self) -> u64 {
        match &self.memory {
            ImportedBacking::Vmm(mapping) => mapping.size(),
            ImportedBacking::Opened { mapped_size, .. } => *mapped_size,
        }
    }

    /// Whether nothing is mapped and the addresses are only reserved: see `Object::park` of the broker's client. [`Region::size`] is then
    /// 0, so that every access is refused.
    pub fn is_parked(&self) -> bool {
        self.parked
    }

    /// Bytes of data, also while parked.
    pub(crate) fn data_size(&self) -> u64 {
        self.size
    }

    /// The mapping of memory with segments.
    ///
    /// # Errors
    /// [`Error::Misuse`] for pool buffers and legacy memory.
    pub(super) fn mapping(&mut self) -> Result<&mut Mapping> {
        match &mut self.memory {
            ImportedBacking::Vmm(mapping) => Ok(mapping),
            ImportedBacking::Opened { .. } => {
                let problem = "pool buffers and legacy memory can't be replaced at their addresses";
                Err(Error::Misuse { problem: problem.to_owned() })
            }
        }
    }

    /// The number of reserved bytes of addresses.
    pub(crate) fn room(&self) -> u64 {
        match &self.memory {
            ImportedBacking::Vmm(mapping) => mapping.room(),
            ImportedBacking::Opened { .. } => self.mapped_size(),
        }
    }

    /// Whether the memory must be dropped before its owner frees it.
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
