//! All addresses that the driver returned, so that no other address is ever copied, unmapped or freed.

use std::{collections::BTreeMap, sync::Arc};

use super::super::{
    Access, PoolHandle, cover,
    ties::{Tie, Ties},
    window::View,
};

/// Reservations, mappings and other memory.
#[derive(Debug)]
pub(super) struct Addresses {
    /// Sizes by address.
    pub reserved: BTreeMap<u64, u64>,
    pub mapped: BTreeMap<u64, Mapped>,
    pub blocks: BTreeMap<u64, Block>,
    /// Counts the mappings and the blocks.
    ties: Arc<Ties>,
}

#[derive(Debug)]
pub(super) struct Mapped {
    pub size: u64,
    /// Counts it.
    pub _tie: Arc<Tie>,
    /// The access of this machine's CPUs.
    pub host: Option<Access>,
    /// The access of each device, by ordinal.
    pub devices: BTreeMap<i32, Access>,
}

/// Memory of a legacy handle or of a pool.
#[derive(Debug)]
pub(super) struct Block {
    pub size: u64,
    /// The device that it was allocated or opened on.
    pub ordinal: i32,
    pub source: Source,
    /// The number of times it was returned.
    pub count: usize,
    /// Counts it.
    _tie: Tie,
}

/// A block that is being returned to the driver.
#[derive(Debug)]
pub(super) struct Released {
    address: u64,
    size: u64,
    ordinal: i32,
    source: Source,
    /// Whether the count has dropped to 0.
    pub last: bool,
}

/// The origin of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    /// `cuMemAlloc`.
    Allocated,
    /// `cuIpcOpenMemHandle`.
    Opened,
    /// `cuMemAllocFromPoolAsync`.
    Pooled(PoolHandle),
    /// `cuMemPoolImportPointer`.
    Imported(PoolHandle),
}

impl Source {
    fn is_imported(self) -> bool {
        matches!(self, Self::Opened | Self::Imported(_))
    }

    pub(super) fn pool(self) -> Option<PoolHandle> {
        match self {
            Self::Pooled(pool) | Self::Imported(pool) => Some(pool),
            Self::Allocated | Self::Opened => None,
        }
    }
}

impl Addresses {
    pub(super) fn new(ties: &Arc<Ties>) -> Self {
        let (reserved, mapped, blocks) = Default::default();
        Self { reserved, mapped, blocks, ties: Arc::clone(ties) }
    }

    /// Whether a range is inside one reservation.
    pub(super) fn in_reservation(&self, address: u64, size: u64) -> bool {
        let reservation = self.reserved.range(..=address).next_back();
        reservation.is_some_and(|(&start, &length)| address.checked_add(size).is_some_and(|end| end <= start + length))
    }

    /// Whether a copy may access a range: mappings cover it without a gap, or it is inside one block.
    pub(super) fn cover(&self, address: u64, size: u64) -> bool {
        self.covered(address, size) || self.block(address, size).is_some()
    }

    /// Whether a device has this access to all of a range. Required before a kernel starts: a kernel faults where a copy is only refused.
    pub(super) fn device_may_access(&self, ordinal: i32, address: u64, size: u64, access: Access) -> bool {
        let enough = |mapped: &Mapped| match mapped.devices.get(&ordinal) {
            Some(Access::ReadWrite) => true,
            Some(Access::ReadOnly) => access == Access::ReadOnly,
            None => false,
        };
        let accessible = self.near(address, size).filter(|(_, mapped)| enough(mapped));
        cover(accessible.map(|(start, mapped)| (start, mapped.size)), address, size)
            || self.block(address, size).is_some_and(|(_, block)| block.ordinal == ordinal)
    }

    /// Whether a range is not empty, and all of it is mapped.
    pub(super) fn all_mapped(&self, address: u64, size: u64) -> bool {
        size > 0 && self.covered(address, size)
    }

    /// Whether mappings cover a range without a gap. An empty range is covered.
    fn covered(&self, address: u64, size: u64) -> bool {
        cover(self.near(address, size).map(|(start, mapped)| (start, mapped.size)), address, size)
    }

    /// The CPU's view of a range, if all of it is mapped and accessible to the CPU.
    pub(super) fn view(&self, address: u64, size: u64) -> Option<View> {
        let accessible = self.near(address, size).filter(|(_, mapped)| mapped.host.is_some());
        let mut writable = true;
        let accessible = accessible.inspect(|(start, mapped)| {
            let inside = *start < address.saturating_add(size) && address < start + mapped.size;
            writable &= !inside || mapped.host == Some(Access::ReadWrite);
        });
        let covered = cover(accessible.map(|(start, mapped)| (start, mapped.size)), address, size);
        (size > 0 && covered).then_some(View { address, size, writable, immutable: false })
    }

    /// The mapping that contains an address.
    pub(super) fn mapping(&self, address: u64) -> Option<(u64, u64)> {
        let (&start, mapped) = self.mapped.range(..=address).next_back()?;
        (address - start < mapped.size).then_some((start, mapped.size))
    }

    /// The block that contains a range.
    pub(super) fn block(&self, address: u64, size: u64) -> Option<(u64, &Block)> {
        let (&start, block) = self.blocks.range(..=address).next_back()?;
        let offset = address - start;
        (offset < block.size && size <= block.size - offset).then_some((start, block))
    }

    /// Adds a block, or increments its count.
    pub(super) fn add_block(&mut self, address: u64, size: u64, ordinal: i32, source: Source) {
        let tie = || Tie::new(&self.ties, source.is_imported());
        let block = || Block { size, ordinal, source, count: 0, _tie: tie() };
        self.blocks.entry(address).or_insert_with(block).count += 1;
    }

    /// The block at exactly this address, if it was returned for this device with such a source.
    pub(super) fn block_at(&self, address: u64, ordinal: i32, from: impl Fn(Source) -> bool) -> Option<&Block> {
        self.blocks.get(&address).filter(|block| block.ordinal == ordinal && from(block.source))
    }

    /// Decrements a block's count, and removes the block at 0, so that no new copy starts. Returns its properties, to add it again if the
    /// driver fails to free it.
    pub(super) fn release_block(
        &mut self,
        address: u64,
        ordinal: i32,
        from: impl Fn(Source) -> bool,
    ) -> Option<Released> {
        let block = self.block_at(address, ordinal, from)?;
        let released = Released { address, size: block.size, ordinal, source: block.source, last: block.count == 1 };
        self.decrement(address);
        Some(released)
    }

    /// Adds a block again that the driver failed to free.
    pub(super) fn restore_block(&mut self, released: &Released) {
        self.add_block(released.address, released.size, released.ordinal, released.source);
    }

    /// Decrements a block's count, and removes the block at 0.
    fn decrement(&mut self, address: u64) {
        if let Some(block) = self.blocks.get_mut(&address) {
            block.count -= 1;
            if block.count == 0 {
                self.blocks.remove(&address);
            }
        }
    }

    /// The mappings that may overlap a range, starting with the last one at or before its address.
    fn near(&self, address: u64, size: u64) -> impl Iterator<Item = (u64, &Mapped)> {
        let first = self.mapped.range(..=address).next_back().map_or(address, |(&start, _)| start);
        let mapped = self.mapped.range(first..).map(|(&start, mapped)| (start, mapped));
        mapped.take_while(move |&(start, _)| start <= address || start - address < size)
    }
}
