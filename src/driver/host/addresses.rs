//! Address ranges of this process: reserving, mapping and freeing them.
//!
//! A reservation is a range of `PROT_NONE` addresses, which `MAP_FIXED` replaces. The kernel may unmap the old mapping and fail after that
//! (6.18 does so for huge pages if none are available; any kernel may if it has no memory for its own tables). Then the range is a hole,
//! and another thread's mmap(2) may be given it at once. Creating the mapping elsewhere and moving it with mremap(2) does not help: that
//! also unmaps its destination first. So if a mapping fails, its range is reserved again where it is still free. Where this is not
//! certain, the range is lost: never mapped, unmapped or freed again, because it may have another owner. No peer can cause this: see
//! [`crate::sys::memfd::inspect`].

use std::{collections::BTreeMap, ffi::c_void, num::NonZeroUsize, ops::Range, os::fd::AsFd, ptr::NonNull};

use nix::{
    errno::Errno,
    sys::mman::{MapFlags, ProtFlags, mmap, mmap_anonymous, mprotect, munmap},
};

use crate::driver::{Access, cover};

/// A range of addresses with its mappings, by address.
#[derive(Debug)]
pub(super) struct Reserved {
    address: u64,
    pub(super) size: u64,
    pub(super) mapped: BTreeMap<u64, Mapped>,
    /// Ranges that may have become another thread's mappings.
    lost: Vec<Range<u64>>,
}

#[derive(Debug)]
pub(super) struct Mapped {
    pub(super) size: u64,
    pub(super) access: Option<Access>,
    pub(super) pages: Pages,
}

/// The kind of a mapping's pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pages {
    /// The memfd's pages: every write is visible to all.
    Shared,
    /// The pages of a sealed memfd: nothing can write to them.
    Sealed,
    /// The memfd's pages. A write in this process gives it a private copy of the page.
    CopyOnWrite,
}

impl Pages {
    /// Kernels before 6.7 refuse shared mappings of memory that is sealed against writes, even for reading. Nothing can change the bytes,
    /// so a private mapping is equivalent.
    fn flag(self) -> MapFlags {
        match self {
            Self::Shared => MapFlags::MAP_SHARED,
            Self::Sealed | Self::CopyOnWrite => MapFlags::MAP_PRIVATE,
        }
    }
}

const RESERVE: MapFlags = MapFlags::MAP_PRIVATE.union(MapFlags::MAP_NORESERVE);

impl Reserved {
    /// Reserves addresses at a multiple of `alignment`: maps more than needed, and unmaps both ends.
    pub(super) fn new(size: u64, alignment: u64) -> nix::Result<Self> {
        let padded = size.checked_add(alignment).ok_or(Errno::ENOMEM)?;
        let length_padded = usize::try_from(padded).ok().and_then(NonZeroUsize::new).ok_or(Errno::ENOMEM)?;
        // SAFETY: new anonymous addresses that replace nothing.
        let found = unsafe { mmap_anonymous(None, length_padded, ProtFlags::PROT_NONE, RESERVE) }?.as_ptr() as u64;
        let address = found.next_multiple_of(alignment);
        for (start, end) in [(found, address), (address + size, found + padded)] {
            if start < end {
                // SAFETY: both ends belong to the mapping just created, which no other thread knows.
                unsafe { munmap(pointer(start), length(end - start)) }?;
            }
        }
        Ok(Self { address, size, mapped: BTreeMap::new(), lost: Vec::new() })
    }

    pub(super) fn address(&self) -> u64 {
        self.address
    }

    /// The mappings inside a range. `None` if another mapping is partly inside.
    pub(super) fn whole(&self, address: u64, size: u64) -> Option<Vec<u64>> {
        let end = address.checked_add(size)?;
        let inside = |start: u64, mapped: &Mapped| address <= start && start + mapped.size <= end;
        self.overlapping(address, end).map(|(start, mapped)| inside(start, mapped).then_some(start)).collect()
    }

    /// The mappings that overlap a range, in the order of their addresses. Mappings do not overlap each other.
    fn overlapping(&self, address: u64, end: u64) -> impl Iterator<Item = (u64, &Mapped)> {
        let first = self.mapped.range(..=address).next_back().map_or(address, |(start, _)| *start);
        let found = self.mapped.range(first..end).map(|(start, mapped)| (*start, mapped));
        found.filter(move |(start, mapped)| address < start + mapped.size)
    }

    /// Whether mappings that `usable` accepts cover a range without a gap.
    pub(super) fn covers(&self, address: u64, size: u64, usable: impl Fn(&Mapped) -> bool) -> bool {
        let overlapping = self.overlapping(address, address.saturating_add(size));
        cover(
            overlapping.filter(|(_, mapped)| usable(mapped)).map(|(start, mapped)| (start, mapped.size)),
            address,
            size,
        )
    }

    /// Whether a range can be mapped: it is inside the reservation, and no part of it is mapped or lost.
    pub(super) fn is_vacant(&self, address: u64, size: u64) -> bool {
        let Some(end) = address.checked_add(size) else { return false };
        self.address <= address
            && end <= self.address + self.size
            && self.whole(address, size).is_some_and(|inside| inside.is_empty())
            && self.lost.iter().all(|lost| end <= lost.start || lost.end <= address)
    }

    /// Maps `size` bytes of a memfd, inaccessible, into a vacant range. After a failure the range may be lost.
    pub(super) fn map(&mut self, address: u64, size: u64, memfd: impl AsFd, pages: Pages) -> nix::Result<()> {
        if !self.is_vacant(address, size) {
            return Err(Errno::EINVAL);
        }
        let over = |start, length| {
            // SAFETY: this object has reserved the range and nothing is mapped there, so only addresses that no thread accesses are
            // replaced.
            unsafe { mmap(Some(start), length, ProtFlags::PROT_NONE, pages.flag() | MapFlags::MAP_FIXED, &memfd, 0) }
        };
        match replace(address, size, over) {
            Replaced::Done => {
                self.mapped.insert(address, Mapped { size, access: None, pages });
                Ok(())
            }
            Replaced::Reserved(errno) => Err(errno),
            Replaced::Lost(errno) => {
                self.lose(address..address + size);
                Err(errno)
            }
        }
    }

    /// Replaces a mapping with a memfd of the same size, with the same access. After a failure the addresses are reserved and
    /// unmapped, or lost.
    ///
    /// # Safety
    /// No thread relies on the mapping's bytes not to change.
    pub(super) unsafe fn replace(&mut self, start: u64, memfd: impl AsFd, pages: Pages) -> nix::Result<()> {
        let Some(Mapped { size, access, .. }) = self.mapped.remove(&start) else { return Err(Errno::EINVAL) };
        let over = |start, length| {
            // SAFETY: it is a whole mapping of this object, and the caller upholds the rest.
            unsafe { mmap(Some(start), length, protection(access), pages.flag() | MapFlags::MAP_FIXED, &memfd, 0) }
        };
        match replace(start, size, over) {
            Replaced::Done => {
                self.mapped.insert(start, Mapped { size, access, pages });
                Ok(())
            }
            Replaced::Reserved(errno) => Err(errno),
            Replaced::Lost(errno) => {
                self.lose(start..start + size);
                Err(errno)
            }
        }
    }

    /// Replaces a mapping with reserved addresses. After a failure they are lost, and the memory may still be mapped.
    ///
    /// # Safety
    /// No thread accesses the mapping, now or later with an address that it already has.
    pub(super) unsafe fn unmap(&mut self, start: u64) -> nix::Result<()> {
        let Some(Mapped { size, .. }) = self.mapped.remove(&start) else { return Err(Errno::EINVAL) };
        let over = |start, length| {
            // SAFETY: it is a whole mapping of this object, and the caller upholds the rest.
            unsafe { mmap_anonymous(Some(start), length, ProtFlags::PROT_NONE, RESERVE | MapFlags::MAP_FIXED) }
        };
        match replace(start, size, over) {
            // The mapping is removed in both cases.
            Replaced::Done | Replaced::Reserved(_) => Ok(()),
            Replaced::Lost(errno) => {
                self.lose(start..start + size);
                Err(errno)
            }
        }
    }

    /// Sets the access of whole mappings. After a failure it is the earlier access or none.
    ///
    /// # Safety
    /// No thread accesses them during the call, or later in a way that is no longer allowed.
    pub(super) unsafe fn protect(&mut self, inside: &[u64], access: Option<Access>) -> nix::Result<()> {
        let mut result = Ok(());
        for start in inside {
            let Some(mapped) = self.mapped.get_mut(start).filter(|_| result.is_ok()) else { continue };
            // SAFETY: it is a whole mapping of this object, and the caller upholds the rest.
            result = unsafe { mprotect(pointer(*start), length(mapped.size), protection(access)) };
        }
        for start in inside {
            let Some(mapped) = self.mapped.get_mut(start) else { continue };
            // SAFETY: as above.
            let back = || unsafe { mprotect(pointer(*start), length(mapped.size), protection(mapped.access)) };
            mapped.access = match result {
                Ok(()) => access,
                Err(_) => mapped.access.filter(|_| back().is_ok()),
            };
        }
        result
    }

    /// Frees all addresses that are not lost, with their mappings. If it fails, the rest can be freed again.
    ///
    /// # Safety
    /// No thread accesses any of it, now or later.
    pub(super) unsafe fn free(&mut self) -> nix::Result<()> {
        let mut start = self.address;
        let mut lost = self.lost.clone();
        lost.sort_by_key(|lost| lost.start);
        lost.push(self.address + self.size..self.address + self.size);
        for Range { start: end, end: next } in lost {
            if start < end {
                // SAFETY: this object reserved the range, and has neither lost nor freed it since; and the caller upholds the rest.
                unsafe { munmap(pointer(start), length(end - start)) }?;
                self.mapped.retain(|&at, _| at < start || end <= at);
                self.lose(start..end);
            }
            start = next;
        }
        Ok(())
    }

    fn lose(&mut self, range: Range<u64>) {
        self.lost.push(range);
    }
}

/// The result of mapping over addresses of this process.
#[derive(Debug, PartialEq, Eq)]
enum Replaced {
    /// The new mapping is there.
    Done,
    /// The mapping failed. The addresses are reserved and unmapped.
    Reserved(Errno),
    /// The mapping failed. The old mapping or another thread's may be there.
    Lost(Errno),
}

/// Maps over a range of this process with `over`, which must use `MAP_FIXED`.
fn replace(
    address: u64,
    size: u64,
    over: impl FnOnce(NonZeroUsize, NonZeroUsize) -> nix::Result<NonNull<c_void>>,
) -> Replaced {
    let start = nonzero(address);
    let length = nonzero(size);
    let Err(errno) = over(start, length) else { return Replaced::Done };
    // Without `MAP_FIXED` nothing is replaced: it fails where anything is mapped, even the old mapping.
    // SAFETY: new anonymous addresses that replace nothing.
    let again =
        unsafe { mmap_anonymous(Some(start), length, ProtFlags::PROT_NONE, RESERVE | MapFlags::MAP_FIXED_NOREPLACE) };
    match again {
        Ok(found) if found.as_ptr() as u64 == address => Replaced::Reserved(errno),
        Ok(elsewhere) => {
            // Kernels before 4.17 ignore the flag, and choose another address if the range is not free.
            // SAFETY: it was just mapped, and no other thread knows it.
            let _ = unsafe { munmap(elsewhere, length.get()) };
            Replaced::Lost(errno)
        }
        Err(_) => Replaced::Lost(errno),
    }
}

fn protection(access: Option<Access>) -> ProtFlags {
    match access {
        None => ProtFlags::PROT_NONE,
        Some(Access::ReadOnly) => ProtFlags::PROT_READ,
        Some(Access::ReadWrite) => ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
    }
}

/// Converts an address of the table. Address 0 is never in the table; if it were, the kernel would reject the dangling pointer.
pub(super) fn pointer(address: u64) -> NonNull<c_void> {
    NonNull::new(address as *mut c_void).unwrap_or(NonNull::dangling())
}

pub(super) fn length(size: u64) -> usize {
    size as usize
}

pub(super) fn nonzero(value: u64) -> NonZeroUsize {
    NonZeroUsize::new(value as usize).unwrap_or(NonZeroUsize::MAX)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use nix::{
        sys::memfd::{MFdFlags, memfd_create},
        unistd::ftruncate,
    };

    use super::*;

    const UNIT: u64 = 2 << 20;

    /// The permissions at an address, as in /proc/self/maps. `None` for a hole.
    fn seen(address: u64) -> Option<String> {
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let at = |line: &str| {
            let (range, rest) = line.split_once(' ')?;
            let (start, end) = range.split_once('-')?;
            let number = |text| u64::from_str_radix(text, 16).unwrap();
            (number(start)..number(end)).contains(&address).then(|| rest[..4].to_owned())
        };
        maps.lines().find_map(at)
    }

    /// Fails like a kernel that has already unmapped the old mapping.
    fn half_way(start: NonZeroUsize, length: NonZeroUsize) -> nix::Result<NonNull<c_void>> {
        // SAFETY: the addresses belong to the test, and nothing accesses them.
        unsafe { munmap(pointer(start.get() as u64), length.get()) }.unwrap();
        Err(Errno::ENOMEM)
    }

    /// Retries a test whose hole was taken by a thread of another test, which is rare.
    fn eventually(attempt: impl Fn() -> bool) {
        assert!((0..100).any(|_| attempt()), "lost each time");
    }

    #[test]
    fn failed_mapping_leaves_reservation() {
        eventually(|| {
            let mut reserved = Reserved::new(3 * UNIT, UNIT).unwrap();
            let middle = reserved.address() + UNIT;
            let replaced = replace(middle, UNIT, half_way);
            if replaced == Replaced::Lost(Errno::ENOMEM) {
                return false;
            }
            assert_eq!(replaced, Replaced::Reserved(Errno::ENOMEM));
            assert_eq!(seen(middle).as_deref(), Some("---p"));
            // SAFETY: nothing accesses it.
            unsafe { reserved.free() }.unwrap();
            true
        });
    }

    #[test]
    fn missing_huge_pages_leave_no_hole() {
        // More than any machine has.
        let size = 1 << 40;
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_HUGETLB | MFdFlags::MFD_HUGE_2MB;
        let memfd = memfd_create(c"huge", flags).unwrap();
        ftruncate(&memfd, size).unwrap();
        eventually(|| {
            let mut reserved = Reserved::new(size as u64, UNIT).unwrap();
            let address = reserved.address();
            assert_eq!(reserved.map(address, size as u64, &memfd, Pages::Shared), Err(Errno::ENOMEM));
            assert!(reserved.mapped.is_empty());
            let vacant = reserved.is_vacant(address, size as u64);
            if vacant {
                assert_eq!(seen(address + UNIT).as_deref(), Some("---p"));
            }
            // SAFETY: nothing accesses it.
            unsafe { reserved.free() }.unwrap();
            vacant
        });
    }

    #[test]
    fn lost_range_is_left_alone() {
        let mut reserved = Reserved::new(3 * UNIT, UNIT).unwrap();
        let start = reserved.address();
        let middle = reserved.address() + UNIT;
        let taken = |at, length| {
            let writable = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
            // SAFETY: the addresses belong to the test, and nothing accesses them.
            unsafe { mmap_anonymous(Some(at), length, writable, MapFlags::MAP_PRIVATE | MapFlags::MAP_FIXED) }.unwrap();
            Err(Errno::ENOMEM)
        };
        assert_eq!(replace(middle, UNIT, taken), Replaced::Lost(Errno::ENOMEM));
        reserved.lose(middle..middle + UNIT);
        for (address, units) in [(middle, 1), (start, 2), (middle, 2), (start, 3)] {
            assert!(!reserved.is_vacant(address, units * UNIT));
        }
        assert!(reserved.is_vacant(start, UNIT) && reserved.is_vacant(middle + UNIT, UNIT));
        // SAFETY: nothing accesses it.
        unsafe { reserved.free() }.unwrap();
        assert_eq!(seen(middle).as_deref(), Some("rw-p"), "unmapped under the other thread");
        // SAFETY: the mapping in the hole, which nothing accesses.
        unsafe { munmap(pointer(middle), length(UNIT)) }.unwrap();
    }

    #[test]
    fn failed_protection_is_rolled_back() {
        let mut reserved = Reserved::new(2 * UNIT, UNIT).unwrap();
        let start = reserved.address();
        let memfd = memfd_create(c"test", MFdFlags::MFD_CLOEXEC).unwrap();
        ftruncate(&memfd, UNIT as i64).unwrap();
        let read_only = fs::File::open(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&memfd))).unwrap();
        reserved.map(start, UNIT, &memfd, Pages::Shared).unwrap();
        // The kernel never allows writes to a mapping of a read-only descriptor.
        reserved.map(start + UNIT, UNIT, &read_only, Pages::Shared).unwrap();
        let both = [start, start + UNIT];
        // SAFETY: nothing accesses it.
        unsafe {
            reserved.protect(&both, Some(Access::ReadOnly)).unwrap();
            assert_eq!(reserved.protect(&both, Some(Access::ReadWrite)), Err(Errno::EACCES));
        }
        for address in both {
            assert_eq!(reserved.mapped[&address].access, Some(Access::ReadOnly));
            assert_eq!(seen(address).as_deref(), Some("r--s"));
        }
        // SAFETY: nothing accesses it.
        unsafe { reserved.free() }.unwrap();
    }
}
