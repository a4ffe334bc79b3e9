//! What the driver counts, each with one owner, over a [`Device`].
//!
//! | Owner | What it is |
//! |---|---|
//! | [`Allocation`], [`Reservation`], [`Mapping`] | virtual memory management: physical memory, addresses, the one at the other |
//! | [`Pool`], [`PoolBuffer`] | a memory pool that can be shared, and memory of it |
//! | [`LegacyMemory`] | memory that is shared by a legacy handle |
//! | [`Shared`], [`Imported`] | memory that is shared with other processes, and memory that another process shares |
//! | [`Spec`], [`Description`] | what memory to make; what another process needs to open it |
//! | [`Mirror`] | a range of any of them in host memory |
//!
//! Dropping gives back; a dependent holds what it depends on, so that everything goes in the right order. A failure
//! at any step leaves nothing behind. A destructor that meets an error reports it through `tracing` and goes on.

mod chunks;
mod description;
mod device;
mod encoding;
mod handle;
mod imported;
mod legacy;
mod mirror;
mod pool;
#[cfg(test)]
mod races;
mod shared;
mod spec;
mod vmm;

pub use self::{
    chunks::{Chunk, Timings},
    description::{Description, DeviceIdentity, Mechanism, Part, Placement, Pointer, Sharing},
    device::{Device, Selector},
    handle::{Array, ArrayHandle},
    imported::Imported,
    legacy::LegacyMemory,
    mirror::Mirror,
    pool::{MOST as MOST_OF_A_POOL, Pool, PoolBuffer},
    shared::Shared,
    spec::{Spec, VmmSpec},
    vmm::{Allocation, Mapping, Reservation},
};

#[cfg(feature = "tools")]
pub(crate) use self::handle::first_elements;
pub(crate) use self::imported::{Importing, Remains};

use std::{
    fmt,
    ops::Range,
    time::{Duration, Instant},
};

use crate::{
    driver::Access,
    error::{Error, MemoryError, Result},
};

/// Who may be a [`Region`]: code elsewhere believes what it says of its address and size.
pub(crate) mod sealed {
    #[allow(unreachable_pub, reason = "the supertrait of a public trait")]
    pub trait Sealed {}
}

/// Memory at addresses that a device of this process can use. Only types of this crate are.
///
/// Other processes may see the same bytes, and write them at any time.
pub trait Region: sealed::Sealed + fmt::Debug + Send + Sync {
    /// The device that uses it.
    fn device(&self) -> &Device;

    /// Its address on the device, the `CUdeviceptr`; on the host backend an address of this process.
    fn address(&self) -> u64;

    /// Its size in bytes.
    fn size(&self) -> u64;

    /// What this process may do with it.
    fn access(&self) -> Access;

    /// Copies bytes into it, from `offset` on. They are there when it returns.
    ///
    /// # Errors
    /// [`MemoryError::ReadOnly`]; [`MemoryError::OutOfRange`] if there are not as many; [`Error::Driver`].
    ///
    /// Driver calls: `cuMemcpyHtoD`, `cuStreamSynchronize`.
    fn copy_in(&self, offset: u64, from: &[u8]) -> Result<()> {
        if self.access() == Access::ReadOnly {
            return Err(Error::Memory(MemoryError::ReadOnly));
        }
        check_range(offset, from.len() as u64, self.size())?;
        self.device().verbs().copy_in(self.device().ordinal(), self.address() + offset, from)
    }

    /// Whether the driver itself keeps this process to its access. Of a pool's memory and of legacy memory it does not.
    fn is_protected(&self) -> bool {
        true
    }

    /// Copies bytes out of it, from `offset` on.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`] if there are not as many; [`Error::Driver`].
    ///
    /// Driver call: `cuMemcpyDtoH`.
    fn copy_out(&self, offset: u64, to: &mut [u8]) -> Result<()> {
        check_range(offset, to.len() as u64, self.size())?;
        self.device().verbs().copy_out(self.device().ordinal(), self.address() + offset, to)
    }

    /// Waits until all work in the device's primary context is done: to be called before another process is told.
    ///
    /// # Errors
    /// [`Error::Driver`], also for an earlier asynchronous failure. Driver call: `cuCtxSynchronize`.
    fn synchronize(&self) -> Result<()> {
        self.device().verbs().synchronize(self.device().ordinal())
    }
}

/// Writes zeros over a range of memory, some at a time.
fn clear(region: &dyn Region, range: Range<u64>) -> Result<()> {
    const STEP: u64 = 2 << 20;
    let length = range.end.saturating_sub(range.start);
    let zeros = vec![0; length.min(STEP) as usize];
    let mut at = range.start;
    while at < range.end {
        let step = STEP.min(range.end - at);
        region.copy_in(at, &zeros[..step as usize])?;
        at += step;
    }
    Ok(())
}

fn check_range(offset: u64, length: u64, size: u64) -> Result<()> {
    match offset.checked_add(length) {
        Some(end) if end <= size => Ok(()),
        _ => Err(Error::Memory(MemoryError::OutOfRange { offset, length, size })),
    }
}

/// A size as a multiple of the granularity.
fn round_up(size: u64, granularity: u64) -> Result<u64> {
    match size.checked_next_multiple_of(granularity) {
        Some(rounded) if size > 0 => Ok(rounded),
        _ => Err(Error::Memory(MemoryError::InvalidSize { size, max: u64::MAX - u64::MAX % granularity })),
    }
}

/// A destructor has nobody to tell but the log.
fn report(result: Result<()>, what: &str) {
    if let Err(error) = result {
        tracing::error!(%error, "{what}");
    }
}

/// What a step returns; its time is added.
pub(crate) fn timed<T>(took: &mut Duration, step: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let result = step();
    *took += begun.elapsed();
    result
}
