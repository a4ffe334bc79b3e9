//! 64-bit words in a sealed memfd that several processes map.

use std::{
    ffi::CStr,
    io,
    num::NonZeroUsize,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    ptr::NonNull,
    slice,
    sync::atomic::AtomicU64,
};

use nix::{
    errno::Errno,
    fcntl::SealFlag,
    sys::mman::{MapFlags, ProtFlags, mmap, munmap},
};

use super::memfd;

/// Mapped words. Other processes may change them at any time, and nobody can take them away.
#[derive(Debug)]
pub(crate) struct Words {
    start: NonNull<AtomicU64>,
    size: NonZeroUsize,
}

// SAFETY: the pages stay mapped as long as the value, and all access is atomic.
unsafe impl Send for Words {}
// SAFETY: as above.
unsafe impl Sync for Words {}

impl Words {
    /// Creates and maps `size` bytes of zeros. The descriptor, with its name in `/proc/PID/fd`, is for other processes.
    ///
    /// # Errors
    /// See memfd_create(2), mmap(2).
    pub(crate) fn create(name: &CStr, size: NonZeroUsize) -> io::Result<(Self, OwnedFd)> {
        let (words, file) = Self::create_for_one(name, size)?;
        memfd::add_seals(&file, SealFlag::F_SEAL_SEAL)?;
        Ok((words, file))
    }

    /// Like [`Words::create`], for one other process, which seals them: see [`Words::open_alone`].
    pub(crate) fn create_for_one(name: &CStr, size: NonZeroUsize) -> io::Result<(Self, OwnedFd)> {
        let file = memfd::create(name, size.get() as u64)?;
        let words = Self::map(&file, size)?;
        Ok((words, file))
    }

    /// Maps words that another process created for this process alone, and seals them: no further process can map them, and nobody can
    /// punch holes. A device that has registered a page does not see what its CPU then stores into the hole.
    ///
    /// # Errors
    /// As for [`Words::open`], also if the seals were final before.
    pub(crate) fn open_alone(file: &OwnedFd, size: NonZeroUsize) -> io::Result<Self> {
        let unfit = |reason| io::Error::new(io::ErrorKind::InvalidData, reason);
        memfd::seals(file.as_fd()).map_err(|(_, reason)| unfit(reason))?;
        let words = Self::map(file, size)?;
        memfd::seal_mapping(file).map_err(|errno| unfit(errno.into()))?;
        match memfd::inspect(file.as_fd(), size.get() as u64) {
            Ok(_) => Ok(words),
            Err((_, reason)) => Err(unfit(reason)),
        }
    }

    /// Maps another process's words.
    ///
    /// # Errors
    /// `InvalidData` with the reason if it is no memfd of this size whose seals are final and allow writing; see mmap(2).
    pub(crate) fn open(file: BorrowedFd<'_>, size: NonZeroUsize) -> io::Result<Self> {
        match memfd::inspect(file, size.get() as u64) {
            Ok(false) => Self::map(file, size),
            Ok(true) => Err(io::Error::new(io::ErrorKind::InvalidData, "the memory is sealed against writing")),
            Err((_, reason)) => Err(io::Error::new(io::ErrorKind::InvalidData, reason)),
        }
    }

    fn map(file: impl AsFd, size: NonZeroUsize) -> io::Result<Self> {
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: the kernel chooses the address, so the mapping replaces no other.
        let start = unsafe { mmap(None, size, protection, MapFlags::MAP_SHARED, file, 0) };
        start.map(|start| Self { start: start.cast(), size }).map_err(Errno::into)
    }

    /// Zero is valid for all words, and other processes and devices only store whole words.
    pub(crate) fn get(&self) -> &[AtomicU64] {
        // SAFETY: the pages are mapped, aligned and as long as that.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.size.get() / size_of::<AtomicU64>()) }
    }

    pub(crate) fn start(&self) -> NonNull<AtomicU64> {
        self.start
    }

    /// In bytes.
    pub(crate) fn size(&self) -> usize {
        self.size.get()
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: `map` mapped it, and nothing refers to it any more.
        let _ = unsafe { munmap(self.start.cast(), self.size.get()) };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use nix::fcntl::{FallocateFlags, fallocate};

    use super::*;

    const SIZE: NonZeroUsize = NonZeroUsize::new(8192).unwrap();

    #[test]
    fn nobody_punches_holes() {
        let (own, file) = Words::create_for_one(c"vmmfd-words", SIZE).unwrap();
        let other = Words::open_alone(&file, SIZE).unwrap();
        other.get()[1].store(7, Ordering::Release);
        let punch = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        assert_eq!(fallocate(&file, punch, 0, 8192), Err(Errno::EPERM));
        assert_eq!(own.get()[1].load(Ordering::Acquire), 7);
        assert_eq!(Words::open_alone(&file, SIZE).unwrap_err().raw_os_error(), Some(nix::libc::EPERM));
    }
}
