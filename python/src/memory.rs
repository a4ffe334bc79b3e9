//! What keeps an array's bytes: owned by Rust alone, and let go of without Python.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{Ordering, fence},
    },
    time::Duration,
};

use vmmfd::{
    Result,
    driver::Access,
    memory::{Device, Region},
};

use crate::{reaper::Kept, shared::Owned};

/// Memory that arrays are in. Arrays, the managed tensors of DLPack and views of the buffer protocol hold it by `Arc<dyn Memory>`, and it
/// goes with the last of them.
///
/// An owner of a GPU's memory itself keeps it in a [`Kept`], as [`Whole`] does: a view may be dropped on any
/// thread, and while kernels still use it.
pub(crate) trait Memory: Send + Sync {
    /// The device that uses it.
    fn device(&self) -> &Device;

    /// Its first address, the same for all its life.
    fn address(&self) -> u64;

    /// Its size in bytes.
    fn size(&self) -> u64;

    /// Whether this process may only read it. On CUDA a kernel's write then ends the context; on host memory it is a fault.
    fn is_read_only(&self) -> bool;

    /// Fails while there is nothing at its addresses.
    fn check_mapped(&self) -> Result<()> {
        Ok(())
    }

    /// Stands for one export to another library, until it is dropped: what is mapped must not change under it unasked. Whether the memory
    /// is read-only is to be asked afterwards: another thread may have made it so until now. May block for a switch, without the GIL.
    ///
    /// # Errors
    /// As [`Memory::check_mapped`], of the very moment at which it begins to count.
    fn export(&self) -> Result<Export> {
        self.check_mapped()?;
        Ok(Export::default())
    }

    /// As [`Memory::export`], to a reader of an array interface, which holds the array and says nothing when it is done.
    fn export_by_interface(&self) -> Result<Export> {
        self.export()
    }

    /// Copies bytes out of it.
    fn copy_out(&self, offset: u64, to: &mut [u8]) -> Result<()>;

    /// Copies bytes into it.
    fn copy_in(&self, offset: u64, from: &[u8]) -> Result<()>;

    /// It, if this process made it and can publish it.
    fn owner(self: Arc<Self>) -> Option<Arc<Owned>> {
        None
    }

    /// Where another process gets it, if it is of a broker. May block for a switch: release the GIL.
    fn origin(&self) -> Option<Origin> {
        None
    }
}

/// Where memory of a broker is: for other processes.
#[derive(Debug)]
pub(crate) struct Origin {
    pub(crate) broker: Arc<Place>,
    pub(crate) name: String,
    pub(crate) version: u64,
    pub(crate) id: String,
    pub(crate) part: String,
    /// Where it begins in the part, and how many bytes it has.
    pub(crate) start: u64,
    pub(crate) length: u64,
}

/// A broker, as [`crate::client::Client`] connects to it.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) path: PathBuf,
    pub(crate) backend: String,
    pub(crate) timeout: Duration,
    /// The users that it may be of, besides this process's and root.
    pub(crate) trust: Vec<u32>,
}

/// An export to another library, counted where that matters.
#[derive(Debug, Clone, Default)]
pub(crate) struct Export(#[allow(dead_code, reason = "counted by its owner")] Option<Arc<()>>);

impl Export {
    /// One more that `of` counts.
    pub(crate) fn counted(of: &Arc<()>) -> Self {
        Self(Some(Arc::clone(of)))
    }

    /// How many are alive of those that `of` counts. Under a lock with which they are made it stays 0.
    pub(crate) fn count(of: &Arc<()>) -> usize {
        let count = Arc::strong_count(of) - 1;
        // What was written through those that were dropped is there.
        fence(Ordering::Acquire);
        count
    }
}

/// Memory of a region of the library: memory of this process's own, or imported once and for all.
#[derive(Debug)]
pub(crate) struct Whole(Kept<Arc<dyn Region>>);

impl Whole {
    pub(crate) fn new(region: Arc<dyn Region>) -> Arc<Self> {
        let device = region.device().clone();
        Arc::new(Self(Kept::new(&device, region)))
    }
}

impl Memory for Whole {
    fn device(&self) -> &Device {
        self.0.device()
    }

    fn address(&self) -> u64 {
        self.0.address()
    }

    fn size(&self) -> u64 {
        self.0.size()
    }

    fn is_read_only(&self) -> bool {
        self.0.access() == Access::ReadOnly
    }

    fn copy_out(&self, offset: u64, to: &mut [u8]) -> Result<()> {
        self.0.copy_out(offset, to)
    }

    fn copy_in(&self, offset: u64, from: &[u8]) -> Result<()> {
        self.0.copy_in(offset, from)
    }
}
