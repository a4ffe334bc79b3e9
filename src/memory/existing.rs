//! Sharing memory that another library of this process allocated, found by its address.

use std::{collections::BTreeMap, ops::Range, sync::Arc};

use super::{Allocation, Device, Shared, chunks::Chunks};
use crate::{
    driver::{Location, Retained, code},
    error::{Error, MemoryError, Result},
};

/// Whether sharing a range may expose the rest of its allocations: see [`Shared::from_addresses`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Neighbours {
    /// Refuse a range that does not fill its allocations.
    #[default]
    Refuse,
    /// Share the allocations whole: receivers can read and write everything in them.
    Expose,
}

impl Shared {
    /// Shares memory that another library of this process allocated with `cuMemCreate`, without a copy: PyTorch with expandable segments,
    /// JAX, or your own code. `ranges` are addresses and sizes in bytes. Returns the allocations that contain them, side by side as one
    /// memory, and the offset of each range in it.
    ///
    /// A descriptor always gives access to a whole allocation. An allocator puts other data there too, its neighbours, and a receiver can
    /// read and write it: [`Neighbours::Refuse`] refuses ranges that leave a part of their allocations uncovered.
    ///
    /// The result keeps the allocations alive, whatever their owner does, and maps them read-only at addresses of its own. It does not keep
    /// their contents: an owner that frees a range reuses its memory, and receivers then see the new data. Keep the ranges allocated for as
    /// long as a receiver uses them.
    ///
    /// Blocks for driver calls, about 0.1 ms for each allocation. The ranges must stay mapped until it returns.
    ///
    /// # Errors
    /// [`MemoryError::NotShareable`] if an allocation can't be exported, with the reason; [`MemoryError::Neighbours`];
    /// [`MemoryError::InvalidSize`] if all ranges are empty; [`MemoryError::OutOfRange`] if a range exceeds the address space;
    /// [`MemoryError::TooManyDescriptors`]; [`Error::Driver`].
    ///
    /// Driver calls: `cuPointerGetAttribute`, `cuMemRetainAllocationHandle` and `cuMemGetAllocationPropertiesFromHandle` for each allocation;
    /// those of [`super::Mapping::side_by_side`] and [`Allocation::export`].
    #[doc(alias("cuMemRetainAllocationHandle", "cuPointerGetAttribute"))]
    pub fn from_addresses(device: &Device, ranges: &[(u64, u64)], neighbours: Neighbours) -> Result<(Self, Vec<u64>)> {
        device.require_sharing()?;
        let mut found = Found { device, allocations: BTreeMap::new() };
        let mut wanted = Vec::with_capacity(ranges.len());
        for &(address, size) in ranges {
            let beyond = Error::Memory(MemoryError::OutOfRange { offset: address, length: size, size: u64::MAX });
            let range = address..address.checked_add(size).ok_or(beyond)?;
            found.retain(&range)?;
            wanted.push(range);
        }
        // The address and the offset of each allocation.
        let mut places = Vec::with_capacity(found.allocations.len());
        let mut total = 0;
        for (&start, allocation) in &found.allocations {
            places.push((start, total));
            total += allocation.size();
        }
        let exposed = total - union(&wanted);
        if exposed > 0 && neighbours == Neighbours::Refuse {
            return Err(Error::Memory(MemoryError::Neighbours { size: total - exposed, exposed }));
        }
        let offset = |range: &Range<u64>| {
            let after = places.partition_point(|&(start, _)| start <= range.start);
            let place = after.checked_sub(1).filter(|_| !range.is_empty());
            place.map_or(0, |at| places[at].1 + (range.start - places[at].0))
        };
        let offsets = wanted.iter().map(offset).collect();
        let allocations = found.allocations.into_values().collect();
        Ok((Self::read_only(device, Chunks::existing(device, allocations)?), offsets))
    }
}

/// The allocations of some ranges, by the address at which their owner has mapped them.
struct Found<'a> {
    device: &'a Device,
    allocations: BTreeMap<u64, Arc<Allocation>>,
}

impl Found<'_> {
    /// Retains each allocation of a range.
    fn retain(&mut self, range: &Range<u64>) -> Result<()> {
        let mut at = range.start;
        while at < range.end {
            let known = self.allocations.range(..=at).next_back().map(|(&start, allocation)| start + allocation.size());
            at = match known {
                Some(end) if end > at => end,
                _ => self.add(at)?,
            };
        }
        Ok(())
    }

    /// Retains the allocation at an address. Returns the address after it.
    fn add(&mut self, address: u64) -> Result<u64> {
        let refused = |reason: String| Error::Memory(MemoryError::NotShareable { address, reason });
        let retained = self.device.verbs().retain(address).map_err(|error| match error {
            Error::Driver { code: code::NOT_SUPPORTED, .. } if self.device.is_host() => {
                refused("ordinary memory has no descriptor".to_owned())
            }
            Error::Driver { code: code::INVALID_VALUE, .. } if self.device.driver().device_of(address).is_ok() => {
                refused("its allocator does not use cuMemCreate".to_owned())
            }
            Error::Driver { code: code::INVALID_VALUE, .. } => refused("it is not mapped GPU memory".to_owned()),
            error => error,
        })?;
        let Retained { handle, start, size } = retained;
        let allocation = Allocation::existing(self.device, handle, size)?;
        let properties = allocation.properties();
        if properties.location != Location::Device(self.device.ordinal()) {
            return Err(refused(match properties.location {
                Location::Device(ordinal) => format!("it is on device {ordinal}, not on {}", self.device),
                Location::HostNuma(_) => "it is host memory of the driver".to_owned(),
            }));
        }
        if !properties.exportable {
            return Err(refused(
                "it was allocated without CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, or another process allocated it"
                    .to_owned(),
            ));
        }
        self.allocations.insert(start, Arc::new(allocation));
        Ok(start.saturating_add(size).max(address + 1))
    }
}

/// The number of bytes that the ranges cover.
fn union(ranges: &[Range<u64>]) -> u64 {
    let mut sorted: Vec<&Range<u64>> = ranges.iter().collect();
    sorted.sort_unstable_by_key(|range| range.start);
    let (mut end, mut bytes) = (0, 0);
    for range in sorted {
        bytes += range.end.saturating_sub(range.start.max(end));
        end = end.max(range.end);
    }
    bytes
}
