//! Opening memory that another process shares, by any mechanism.

use std::{os::fd::OwnedFd, sync::Arc};

use super::{
    Description, Device, LegacyMemory, Pointer, Pool, PoolBuffer, Region, Run, Sharing, check_range,
    imported::{Imported, ImportedBacking},
    importing::Importing,
    offered::contradiction,
    pool::check_size,
};
use crate::{
    driver::Access,
    error::{Error, ErrorCode, PeerError, Result},
};

impl Imported {
    /// Opens memory from its description, the sizes of all segments, and its descriptors: with [`Sharing::Vmm`] one per segment, with
    /// [`Sharing::Pool`] the pool's, with [`Sharing::Legacy`] none.
    ///
    /// `device` may differ from the owner's device if it can reach the memory. The descriptors are closed on success and on failure.
    ///
    /// # Errors
    /// [`PeerError::Protocol`] if the description contradicts itself; [`PeerError::Mismatch`] if the memory differs from the description;
    /// [`DeviceError::NoPeerAccess`](crate::error::DeviceError::NoPeerAccess) if the device can't reach the memory;
    /// [`DeviceError::Unsupported`](crate::error::DeviceError::Unsupported) if this side does not support the mechanism;
    /// [`MemoryError::OwnHandle`](crate::error::MemoryError::OwnHandle); [`Error::Driver`].
    ///
    /// Driver calls: with [`Sharing::Vmm`] as for [`Allocation::import`](super::Allocation::import) and
    /// [`Mapping::side_by_side`](super::Mapping::side_by_side); with [`Sharing::Pool`] as for [`Pool::import`] and
    /// [`PoolBuffer::import`]; with [`Sharing::Legacy`] as for [`LegacyMemory::open`].
    pub fn open(
        device: &Device,
        description: &Description,
        segments: &[u64],
        mut fds: Vec<OwnedFd>,
        access: Access,
    ) -> Result<Self> {
        let want = if description.pool().is_some() { 1 } else { segments.len() };
        if fds.len() != want {
            return contradiction(format!("the memory needs {want} descriptors, but {} were received", fds.len()));
        }
        match description.sharing {
            Sharing::Vmm { .. } => {
                let count = segments.len() as u64;
                let part = Run { first: 0, segments: count, offset: 0, size: description.mapped_size };
                let mut importing = Importing::begin(device, description, &part, access)?;
                importing.take(segments, fds)?;
                importing.finish().map(|(imported, _)| imported)
            }
            Sharing::Pool { .. } => {
                let pool = Self::pool(device, description, fds.remove(0))?;
                Self::of_pool(&pool, description, access)
            }
            Sharing::Legacy { .. } => Self::of_legacy(device, description, access),
        }
    }

    /// Imports the pool of offered memory. Import it once to open several of its buffers.
    ///
    /// # Errors
    /// The errors of [`Imported::open`]. Driver calls: those of [`Pool::import`].
    pub fn pool(device: &Device, description: &Description, fd: OwnedFd) -> Result<Arc<Pool>> {
        Pool::import_offered(device, fd).map_err(|error| error.explain(device, description))
    }

    /// Opens a buffer of an imported pool.
    ///
    /// # Errors
    /// The errors of [`Imported::open`]. Driver calls: those of [`PoolBuffer::import`].
    pub fn of_pool(pool: &Arc<Pool>, description: &Description, access: Access) -> Result<Self> {
        let (pointer, offset) = pointer(description)?;
        check_size(pool.device(), description.mapped_size)?;
        let buffer =
            PoolBuffer::import_offered(pool, &pointer).map_err(|error| error.explain(pool.device(), description))?;
        Self::opened(buffer, offset, description, access)
    }

    /// Opens a legacy handle.
    ///
    /// # Errors
    /// The errors of [`Imported::open`]. Driver calls: those of [`LegacyMemory::open`].
    pub(crate) fn of_legacy(device: &Device, description: &Description, access: Access) -> Result<Self> {
        // A mechanism that this side does not support is reported before faults of the description.
        device.verbs().legacy()?;
        let (pointer, offset) = pointer(description)?;
        let memory =
            LegacyMemory::open_offered(device, &pointer).map_err(|error| error.explain(device, description))?;
        Self::opened(memory, offset, description, access)
    }

    fn opened(region: Arc<dyn Region>, offset: u64, description: &Description, access: Access) -> Result<Self> {
        let Description { size, mapped_size, .. } = *description;
        if size > mapped_size {
            return contradiction(format!("{size} bytes of data exceed {mapped_size} bytes of memory"));
        }
        // The driver does not know the claimed size.
        if check_range(offset, mapped_size, region.size()).is_err() {
            let message = format!(
                "the description claims {mapped_size} bytes at offset {offset}, but the memory has {} bytes",
                region.size()
            );
            return Err(Error::Peer(PeerError::Mismatch { code: ErrorCode::Failed, message }));
        }
        let memory = ImportedBacking::Opened { region, offset, mapped_size };
        Ok(Self { memory, start: 0, size, access, node: None, parked: false })
    }
}

/// The 64 bytes that open a pool buffer or legacy memory, and the offset of the data.
fn pointer(description: &Description) -> Result<(Pointer, u64)> {
    match description.sharing {
        Sharing::Pool { pointer, offset, .. } | Sharing::Legacy { pointer, offset } => Ok((pointer, offset)),
        Sharing::Vmm { .. } => contradiction("memory without the 64 bytes that open it".to_owned()),
    }
}
