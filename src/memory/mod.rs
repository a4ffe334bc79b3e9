//! GPU memory: one owning type for each resource of the driver, on a [`Device`].
//!
//! | Type | Owns or describes |
//! |---|---|
//! | [`Allocation`], [`Reservation`], [`Mapping`] | virtual memory management: physical memory, addresses, and memory mapped at addresses |
//! | [`Pool`], [`PoolBuffer`] | a shareable memory pool, and a buffer in it |
//! | [`LegacyMemory`] | memory that is shared by a legacy IPC handle |
//! | [`Shared`], [`Imported`] | memory that this process shares; memory that another process shares |
//! | [`Arenas`] | blocks of shared memory, for another library's allocator |
//! | [`Spec`], [`Description`] | the memory to allocate; the data that another process needs to open memory |
//! | [`Mirror`] | a view or copy of a memory range for the CPU |
//!
//! Dropping a value releases its resource. A dependent value keeps its dependencies alive, so resources are released in the right order.
//! A failure at any step leaves nothing allocated. A destructor reports errors through `tracing` and continues.

mod arena;
mod chunks;
mod description;
mod device;
mod exchange;
mod existing;
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
    description::{Description, Sharing},
    device::Device,
    existing::Neighbours,
    handle::{Array, ArrayHandle},
    imported::Imported,
    legacy::LegacyMemory,
    mirror::Mirror,
    pool::{MOST as MOST_OF_A_POOL, Pool, PoolBuffer},
    selector::{Selector, UuidPrefix},
    shared::Shared,
    spec::{Rdma, Spec, VmmSpec},
    vmm::{Allocation, Mapping, Reservation},
};

pub(crate) use self::exchange::{Place, Spare, exchange};
pub use self::handle::first_elements;
pub(crate) use self::importing::{Importing, Remains};

pub use crate::base::{DeviceIdentity, Mechanism, Placement, Pointer, Run};

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

/// Restricts [`Region`] to types of this crate: other code trusts their address and size.
pub(crate) mod sealed {
    #[allow(unreachable_pub, reason = "the supertrait of a public trait")]
    pub trait Sealed {}
}

/// Implements [`Region`] for a type of this crate, from the fields that have its properties: `|this| device, address, size, access, protected`.
macro_rules! region {
    ($type:ty, |$this:ident| $device:expr, $address:expr, $size:expr, $access:expr, $is_protected:expr) => {
        impl $crate::memory::sealed::Sealed for $type {}

        #[allow(unused_variables, reason = "properties that are the same for all values")]
        impl $crate::memory::Region for $type {
            fn device(&self) -> &$crate::memory::Device {
                let $this = self;
                $device
            }

            fn address(&self) -> u64 {
                let $this = self;
                $address
            }

            fn size(&self) -> u64 {
                let $this = self;
                $size
            }

            fn access(&self) -> $crate::driver::Access {
                let $this = self;
                $access
            }

            fn is_protected(&self) -> bool {
                let $this = self;
                $is_protected
            }
        }
    };
}

pub(crate) use region;

/// Memory at addresses that a device of this process can use. The trait is sealed.
///
/// Other processes may share the memory and write to it at any time.
///
/// ```
/// # use vmmfd::{driver::{Backend, Choice, open}, memory::{Device, Region, Selector, Shared, Spec}};
/// # let driver = open(Choice::Only(Backend::Host))?.driver;
/// # let device = Device::find(&driver, Selector::default())?;
/// # let memory = Shared::create(&device, Spec::vmm(1000))?;
/// memory.copy_in(990, b"0123456789")?;
/// let mut bytes = [0; 4];
/// memory.copy_out(996, &mut bytes)?;
/// assert_eq!(&bytes, b"6789");
/// println!("kernels use the address {:#x}", memory.address());
/// # Ok::<(), vmmfd::Error>(())
/// ```
pub trait Region: sealed::Sealed + fmt::Debug + Send + Sync {
    /// The device that the memory is mapped for.
    fn device(&self) -> &Device;

    /// The address on the device, the `CUdeviceptr`; on the host backend an address of this process.
    fn address(&self) -> u64;

    /// The size in bytes.
    fn size(&self) -> u64;

    /// The access of this process.
    fn access(&self) -> Access;

    /// Copies bytes into the memory, starting at `offset`. Blocks until the copy is complete.
    ///
    /// # Errors
    /// [`MemoryError::ReadOnly`]; [`MemoryError::OutOfRange`] if the range exceeds the memory; [`Error::Driver`].
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

    /// Whether the driver enforces this process's access. It does not for pool buffers and legacy memory.
    fn is_protected(&self) -> bool {
        true
    }

    /// Copies bytes out of the memory, starting at `offset`.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`] if the range exceeds the memory; [`Error::Driver`].
    ///
    /// Driver call: `cuMemcpyDtoH`.
    #[doc(alias = "cuMemcpyDtoH")]
    fn copy_out(&self, offset: u64, to: &mut [u8]) -> Result<()> {
        let address = locate(self, offset, to.len() as u64)?;
        self.device().verbs().copy_out(self.device().ordinal(), address, to)
    }

    /// Copies typed elements into the memory, starting at `offset` bytes. Blocks until the copy is complete.
    ///
    /// The element type must have no uninitialised bytes ([`NoUninit`]: no padding), because other processes read them.
    ///
    /// # Errors
    /// The errors of [`Region::copy_in`]. Driver calls: those of [`Region::copy_in`].
    fn copy_in_slice<T: NoUninit>(&self, offset: u64, from: &[T]) -> Result<()>
    where
        Self: Sized,
    {
        self.copy_in(offset, bytemuck::cast_slice(from))
    }

    /// Copies typed elements out of the memory, starting at `offset` bytes.
    ///
    /// Any bytes must be a valid value of the element type ([`AnyBitPattern`]: integers and floats, but not `bool`), because another
    /// process may have written anything.
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
    /// The errors of [`Region::copy_out`]. Driver calls: those of [`Region::copy_out`].
    fn copy_out_slice<T: AnyBitPattern + NoUninit>(&self, offset: u64, to: &mut [T]) -> Result<()>
    where
        Self: Sized,
    {
        self.copy_out(offset, bytemuck::cast_slice_mut(to))
    }

    /// Waits until all work in the device's primary context has finished. Call it before you notify another process.
    ///
    /// # Errors
    /// [`Error::Driver`], also for an earlier asynchronous failure. Driver call: `cuCtxSynchronize`.
    #[doc(alias = "cuCtxSynchronize")]
    fn synchronize(&self) -> Result<()> {
        self.device().verbs().synchronize(self.device().ordinal())
    }
}

/// Writes zeros to a range of memory, at most 2 MiB at a time.
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

/// The address of a memory range. Checks for overflow: the driver takes the size of pool buffers and legacy memory from their owner
/// without verifying it.
fn locate<R: Region + ?Sized>(region: &R, offset: u64, length: u64) -> Result<u64> {
    let size = region.size();
    check_range(offset, length, size)?;
    let end = region.address().checked_add(offset + length);
    end.map(|end| end - length).ok_or(Error::Memory(MemoryError::OutOfRange { offset, length, size }))
}

pub(crate) fn check_range(offset: u64, length: u64, size: u64) -> Result<()> {
    match offset.checked_add(length) {
        Some(end) if end <= size => Ok(()),
        _ => Err(Error::Memory(MemoryError::OutOfRange { offset, length, size })),
    }
}

/// Rounds a size up to a multiple of the granularity.
fn round_up(size: u64, granularity: u64) -> Result<u64> {
    match size.checked_next_multiple_of(granularity) {
        Some(rounded) if size > 0 => Ok(rounded),
        _ => Err(Error::Memory(MemoryError::InvalidSize { size, max: u64::MAX - u64::MAX % granularity })),
    }
}

/// Logs an error in a destructor.
fn report(result: Result<()>, message: &str) {
    if let Err(error) = result {
        tracing::error!(%error, "{message}");
    }
}

/// Runs a step and adds its duration to `total`.
pub(crate) fn timed<T>(total: &mut Duration, step: impl FnOnce() -> T) -> T {
    let started = Instant::now();
    let result = step();
    *total += started.elapsed();
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::{Backend, Choice, open};

    /// Memory whose reported size exceeds the address space.
    #[derive(Debug)]
    struct Oversized(Device);

    impl sealed::Sealed for Oversized {}

    impl Region for Oversized {
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
    fn ranges_beyond_the_address_space_are_refused() {
        let driver = open(Choice::Only(Backend::Host)).unwrap().driver;
        let endless = Oversized(Device::find(&driver, Selector::default()).unwrap());
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
