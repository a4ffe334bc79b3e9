//! Ranges of a pool for buffers of varying sizes.

use std::collections::BTreeMap;

/// The alignment of buffers: suitable for all element types, and for vector loads and textures on GPUs.
pub(super) const ALIGNMENT: u64 = 512;

/// The free ranges of a pool. A range is taken from the first free range that is large enough: the rest of the pool stays in one piece.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(super) struct Space {
    /// The lengths of free ranges, by offset. No two are adjacent.
    free: BTreeMap<u64, u64>,
}

impl Space {
    pub(super) fn new(bytes: u64) -> Self {
        Self { free: BTreeMap::from([(0, bytes - bytes % ALIGNMENT)]) }
    }

    /// Takes a range, and returns its offset. `None` if no free range is large enough.
    pub(super) fn take(&mut self, size: u64) -> Option<u64> {
        let size = padded(size)?;
        let (&offset, &length) = self.free.iter().find(|(_, length)| **length >= size)?;
        self.free.remove(&offset);
        if length > size {
            self.free.insert(offset + size, length - size);
        }
        Some(offset)
    }

    /// Returns a range that was taken.
    pub(super) fn put(&mut self, offset: u64, size: u64) {
        let (mut offset, mut length) = (offset, padded(size).unwrap_or(0));
        if let Some((&before, &other)) = self.free.range(..offset).next_back()
            && before + other == offset
        {
            self.free.remove(&before);
            (offset, length) = (before, other + length);
        }
        if let Some(behind) = self.free.remove(&(offset + length)) {
            length += behind;
        }
        self.free.insert(offset, length);
    }

    /// The number of free bytes, in any number of ranges.
    pub(super) fn free(&self) -> u64 {
        self.free.values().sum()
    }
}

/// The bytes that a buffer of this size occupies.
pub(super) fn padded(size: u64) -> Option<u64> {
    size.max(1).checked_next_multiple_of(ALIGNMENT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_never_overlap() {
        const UNITS: u64 = 64;
        let mut space = Space::new(UNITS * ALIGNMENT + 100);
        let mut taken: Vec<(u64, u64)> = Vec::new();
        let mut used = [false; UNITS as usize];
        let mut random = 1_u64;
        let units = |offset: u64, size: u64| offset / ALIGNMENT..(offset + padded(size).unwrap()) / ALIGNMENT;
        for _ in 0..20_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let pick = random >> 33;
            if pick.is_multiple_of(2) && !taken.is_empty() {
                let (offset, size) = taken.swap_remove(pick as usize % taken.len());
                space.put(offset, size);
                units(offset, size).for_each(|unit| used[unit as usize] = false);
            } else {
                let size = pick % (9 * ALIGNMENT);
                let fits = used
                    .chunk_by(|one, other| one == other)
                    .any(|run| !run[0] && run.len() as u64 * ALIGNMENT >= padded(size).unwrap());
                let found = space.take(size);
                assert_eq!(found.is_some(), fits, "{size} bytes in {space:?}");
                let Some(offset) = found else { continue };
                for unit in units(offset, size) {
                    assert!(!std::mem::replace(&mut used[unit as usize], true), "{size} bytes at {offset}");
                }
                taken.push((offset, size));
            }
            let free = used.iter().filter(|used| !**used).count() as u64;
            assert_eq!(space.free(), free * ALIGNMENT);
        }
        assert_eq!(space.take(u64::MAX), None);
    }
}
