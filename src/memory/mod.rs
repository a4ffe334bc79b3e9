//! What the driver counts, each with one owner, over a [`Device`].
//!
//! | Owner | What it is |
//! |---|---|
//! | [`Allocation`], [`Reservation`], [`Mapping`] | virtual memory management: physical memory, addresses, the one at the other |
//! | [`Pool`], [`PoolBuffer`] | a memory pool that can be shared, and memory of it |
//! | [`LegacyMemory`] | memory that is shared by a legacy handle |
//! | [`Shared`], [`Imported`] | memory that is shared with other processes, and memory that another process shares |
//! | [`Arenas`] | blocks cut from shared memory, for another library's allocator |
//! | [`Spec`], [`Description`] | what memory to make; what another process needs to open it |
//! | [`Mirror`] | a range of any of them in host memory |
//!
//! Dropping gives back; a dependent holds what it depends on, so that everything goes in the right order. A failure
//! at any step leaves nothing behind. A destructor that meets an error reports it through `tracing` and goes on.

mod arena;
mod chunks;
mod description;
mod device;
mod exchange;
mod handle;
mod imported;
mod importing;
mod legacy;
mod mirror;
mod offered;
mod opening;
mod pool;
#[cfg(test)]
mod races;
mod selector;
mod shared;
mod spec;
mod vmm;

pub use self::{
    arena::{ArenaFigures, Arenas},
    chunks::{Chunk, Timings},
    description::{Description, DeviceIdentity, Mechanism, Part, Placement, Pointer, Sharing},
    device::Device,
    handle::{Array, ArrayHandle},
    imported::Imported,
    legacy::LegacyMemory,
    mirror::Mirror,
    pool::{MOST as MOST_OF_A_POOL, Pool, PoolBuffer},
    selector::{Selector, UuidPrefix},
    shared::Shared,
    spec::{Spec, VmmSpec},
    vmm::{Allocation, Mapping, Reservation},
};

pub(crate) use self::exchange::{Place, Spare, exchange};
pub use self::handle::first_elements;
pub(crate) use self::importing::{Importing, Remains};

use std::{
    fmt,
    ops::Range,
    time::{Duration, Instant},
};

use bytemuck::{AnyBitPattern, NoUninit};

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
    #[doc(alias("cuMemcpyHtoD", "cuStreamSynchronize"))]
    fn copy_in(&self, offset: u64, from: &[u8]) -> Result<()> {
        if self.access() == Access::ReadOnly {
            return Err(Error::Memory(MemoryError::ReadOnly));
        }
        let address = locate(self, offset, from.len() as u64)?;
        self.device().verbs().copy_in(self.device().ordinal(), address, from)
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
    #[doc(alias = "cuMemcpyDtoH")]
    fn copy_out(&self, offset: u64, to: &mut [u8]) -> Result<()> {
        let address = locate(self, offset, to.len() as u64)?;
        self.device().verbs().copy_out(self.device().ordinal(), address, to)
    }

    /// Copies typed elements into it, from `offset` bytes on. They are there when it returns.
    ///
    /// The type has no bytes that a value leaves uninitialised ([`NoUninit`]: no padding), since other processes read them.
    ///
    /// # Errors
    /// Those of [`Region::copy_in`]. Driver calls: those of [`Region::copy_in`].
    fn copy_in_slice<T: NoUninit>(&self, offset: u64, from: &[T]) -> Result<()>
    where
        Self: Sized,
    {
        self.copy_in(offset, bytemuck::cast_slice(from))
    }

    /// Copies typed elements out of it, from `offset` bytes on.
    ///
    /// The type is one of which any bytes are a value ([`AnyBitPattern`]: integers and floats, but not `bool`), since another process may
    /// have written anything.
    ///
    /// ```
    /// use vmmfd::{
    ///     driver::{Backend, Choice, open},
    ///     memory::{Device, Region, Selector, Shared, Spec},
    /// };
    ///
    /// # fn main() -> vmmfd::Result<()> {
    /// let driver = open(Choice::Only(Backend::Host))?.driver;
    /// let memory = Shared::create(&Device::find(&driver, Selector::default())?, Spec::vmm(4096))?;
    /// memory.copy_in_slice(0, &[1.5f32, 2.5])?;
    /// let mut values = [0f32; 2];
    /// memory.copy_out_slice(0, &mut values)?;
    /// assert_eq!(values, [1.5, 2.5]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Those of [`Region::copy_out`]. Driver call: that of [`Region::copy_out`].
    fn copy_out_slice<T: AnyBitPattern + NoUninit>(&self, offset: u64, to: &mut [T]) -> Result<()>
    where
        Self: Sized,
    {
        self.copy_out(offset, bytemuck::cast_slice_mut(to))
    }

    /// Waits until all work in the device's primary context is done: call it before you notify another process.
    ///
    /// # Errors
    /// [`Error::Driver`], also for an earlier asynchronous failure. Driver call: `cuCtxSynchronize`.
    #[doc(alias = "cuCtxSynchronize")]
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

/// Where a range of memory is. Of memory of pools and legacy memory the driver believes its owner's size, so that the end need not
/// be an address.
fn locate<R: Region + ?Sized>(region: &R, offset: u64, length: u64) -> Result<u64> {
    let size = region.size();
    check_range(offset, length, size)?;
    let end = region.address().checked_add(offset + length);
    end.map(|end| end - length).ok_or(Error::Memory(MemoryError::OutOfRange { offset, length, size }))
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

/// Logs what a destructor can not return.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::{Backend, Choice, open};

    /// Memory of which the driver says that it passes the end of all addresses.
    #[derive(Debug)]
    struct Endless(Device);

    impl sealed::Sealed for Endless {}

    impl Region for Endless {
        fn device(&self) -> &Device {
            &self.0
        }

        fn address(&self) -> u64 {
            u64::MAX - 4096
        }

        fn size(&self) -> u64 {
            u64::MAX
        }

        fn access(&self) -> Access {
            Access::ReadWrite
        }
    }

    #[test]
    fn memory_ends_where_addresses_do() {
        let driver = open(Choice::Only(Backend::Host)).unwrap().driver;
        let endless = Endless(Device::find(&driver, Selector::default()).unwrap());
        for (offset, length) in [(4096, 1), (4097, 0), (u64::MAX - 1, 1), (4000, 200)] {
            let mut bytes = vec![0; length];
            for answer in [
                endless.copy_in(offset, &bytes),
                endless.copy_out(offset, &mut bytes),
                Mirror::of(&endless, offset, length as u64).map(drop),
            ] {
                assert!(matches!(answer, Err(Error::Memory(MemoryError::OutOfRange { .. }))), "{offset}: {answer:?}");
            }
        }
    }
}
