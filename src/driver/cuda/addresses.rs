//! What the driver gave out, by address: so that nothing else is ever copied, unmapped or freed.

use std::collections::BTreeMap;

use super::super::{Access, PoolHandle, cover, window::View};

/// What is reserved, what is mapped, and memory that is neither.
#[derive(Debug, Default)]
pub(super) struct Addresses {
    /// Sizes by address.
    pub reserved: BTreeMap<u64, u64>,
    pub mapped: BTreeMap<u64, Mapped>,
    pub blocks: BTreeMap<u64, Block>,
}

/// A mapping.
#[derive(Debug)]
pub(super) struct Mapped {
    pub size: u64,
    /// What this machine's CPUs may do with it.
    pub host: Option<Access>,
    /// What each device may do with it, by ordinal.
    pub devices: BTreeMap<i32, Access>,
}

/// Memory of a legacy handle or of a pool.
#[derive(Debug)]
pub(super) struct Block {
    pub size: u64,
    /// The device that it was taken on.
    pub ordinal: i32,
    pub source: Source,
    /// How often it was taken.
    pub count: usize,
}

/// A block on its way back to the driver.
#[derive(Debug)]
pub(super) struct Leaving {
    address: u64,
    size: u64,
    ordinal: i32,
    source: Source,
    /// Whether this was the last time that it was taken.
    pub last: bool,
}

/// Where a block came from.
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
    pub(super) fn pool(self) -> Option<PoolHandle> {
        match self {
            Self::Pooled(pool) | Self::Imported(pool) => Some(pool),
            Self::Allocated | Self::Opened => None,
        }
    }
}

impl Addresses {
    /// Whether a range lies in one reservation.
    pub(super) fn hold(&self, address: u64, size: u64) -> bool {
        let reservation = self.reserved.range(..=address).next_back();
        reservation.is_some_and(|(&start, &length)| address.checked_add(size).is_some_and(|end| end <= start + length))
    }

    /// Whether a copy may touch a range: mappings cover it without a gap, or it lies in one block.
    pub(super) fn cover(&self, address: u64, size: u64) -> bool {
        self.covered(address, size) || self.block(address, size).is_some()
    }

    /// Whether a device may access all of a range so: what a kernel must know before, where a copy is only refused.
    pub(super) fn let_device(&self, ordinal: i32, address: u64, size: u64, access: Access) -> bool {
        let enough = |mapped: &Mapped| match mapped.devices.get(&ordinal) {
            Some(Access::ReadWrite) => true,
            Some(Access::ReadOnly) => access == Access::ReadOnly,
            None => false,
        };
        let accessible = self.near(address, size).filter(|(_, mapped)| enough(mapped));
        cover(accessible.map(|(start, mapped)| (start, mapped.size)), address, size)
            || self.block(address, size).is_some_and(|(_, block)| block.ordinal == ordinal)
    }

    /// Whether there is a range, and all of it is mapped.
    pub(super) fn map_all(&self, address: u64, size: u64) -> bool {
        size > 0 && self.covered(address, size)
    }

    /// Whether mappings cover a range without a gap, if it is not empty.
    fn covered(&self, address: u64, size: u64) -> bool {
        cover(self.near(address, size).map(|(start, mapped)| (start, mapped.size)), address, size)
    }

    /// How the CPU sees a range, if all of it is mapped and accessible to it.
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

    /// The mapping that an address is in.
    pub(super) fn mapping(&self, address: u64) -> Option<(u64, u64)> {
        let (&start, mapped) = self.mapped.range(..=address).next_back()?;
        (address - start < mapped.size).then_some((start, mapped.size))
    }

    /// The block that a range lies in.
    pub(super) fn block(&self, address: u64, size: u64) -> Option<(u64, &Block)> {
        let (&start, block) = self.blocks.range(..=address).next_back()?;
        let offset = address - start;
        (offset < block.size && size <= block.size - offset).then_some((start, block))
    }

    /// Enters a block, or counts once more what is entered already.
    pub(super) fn take(&mut self, address: u64, size: u64, ordinal: i32, source: Source) {
        self.blocks.entry(address).or_insert(Block { size, ordinal, source, count: 0 }).count += 1;
    }

    /// The block at exactly this address, if it was taken on that device from such a source.
    pub(super) fn taken(&self, address: u64, ordinal: i32, from: impl Fn(Source) -> bool) -> Option<&Block> {
        self.blocks.get(&address).filter(|block| block.ordinal == ordinal && from(block.source))
    }

    /// Counts a block once less, and forgets it with the last: so that no copy begins any more. Returns what it was, to enter it
    /// again if the driver does not take it back.
    pub(super) fn leave(&mut self, address: u64, ordinal: i32, from: impl Fn(Source) -> bool) -> Option<Leaving> {
        let block = self.taken(address, ordinal, from)?;
        let leaving = Leaving { address, size: block.size, ordinal, source: block.source, last: block.count == 1 };
        self.give(address);
        Some(leaving)
    }

    /// Enters again what was not taken back.
    pub(super) fn stay(&mut self, leaving: &Leaving) {
        self.take(leaving.address, leaving.size, leaving.ordinal, leaving.source);
    }

    /// Counts a block once less, and forgets it with the last.
    fn give(&mut self, address: u64) {
        if let Some(block) = self.blocks.get_mut(&address) {
            block.count -= 1;
            if block.count == 0 {
                self.blocks.remove(&address);
            }
        }
    }

    /// The mappings from the one that may hold an address on, as far as a range goes.
    fn near(&self, address: u64, size: u64) -> impl Iterator<Item = (u64, &Mapped)> {
        let first = self.mapped.range(..=address).next_back().map_or(address, |(&start, _)| start);
        let mapped = self.mapped.range(first..).map(|(&start, mapped)| (start, mapped));
        mapped.take_while(move |&(start, _)| start <= address || start - address < size)
    }
}
