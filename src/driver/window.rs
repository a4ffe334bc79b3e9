//! Memory for the CPU: private page-locked memory, and windows on mappings.

#![allow(unsafe_code)]

use std::{
    fmt,
    ops::{Deref, DerefMut},
    ptr::{self, NonNull},
    slice,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::{code, copy, failure};
use crate::{
    error::{Error, MemoryError, Result},
    sys::fork::ProcessIdentity,
};

/// Frees page-locked memory.
pub(super) trait PageLocker: fmt::Debug + Send + Sync {
    /// Frees the memory.
    ///
    /// # Safety
    /// Start and size are the arguments of [`PageLocked::new`], and the memory is no longer used.
    unsafe fn unlock(&self, start: NonNull<u8>, size: usize) -> Result<()>;
}

/// Private memory of this process with the fastest copies to and from a device. Initially zero.
///
/// Keeps the required part of its driver alive. Dropping it frees the memory. Must not be used in a fork of the process.
///
/// Driver calls: `cuMemHostAlloc`, `cuMemFreeHost`. On the host backend it is ordinary memory.
pub struct PageLocked {
    start: NonNull<u8>,
    size: usize,
    locker: Arc<dyn PageLocker>,
}

// SAFETY: the object owns its memory, which is not bound to a thread.
unsafe impl Send for PageLocked {}
// SAFETY: a shared reference only allows reads.
unsafe impl Sync for PageLocked {}

impl PageLocked {
    /// # Safety
    /// The memory is readable and writable, no other thread or process has it, and `locker` can free it.
    pub(super) unsafe fn new(start: NonNull<u8>, size: usize, locker: Arc<dyn PageLocker>) -> Self {
        // The driver may return memory with the contents of an earlier owner.
        // SAFETY: the caller promises the size, and that the memory is private, so that a plain write races with nothing. A device
        // accesses it only in copies from and to a slice of it, which the caller of such a copy has borrowed until it is done.
        unsafe { start.write_bytes(0, size) };
        Self { start, size, locker }
    }

    /// Size in bytes.
    pub fn size(&self) -> u64 {
        self.size as u64
    }
}

impl Deref for PageLocked {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `new` initialized all of it. Until the drop it belongs to this object alone: no other process has it, and threads of this
        // process reach it through this object, which the slice borrows.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.size) }
    }
}

impl DerefMut for PageLocked {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.size) }
    }
}

impl fmt::Debug for PageLocked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PageLocked").field("start", &self.start).field("size", &self.size).finish_non_exhaustive()
    }
}

impl Drop for PageLocked {
    fn drop(&mut self) {
        // SAFETY: these are the arguments of `new`, and no reference into the memory outlives this object.
        if let Err(error) = unsafe { self.locker.unlock(self.start, self.size) } {
            tracing::error!(%error, "can't free page-locked memory");
        }
    }
}

/// The ranges of open windows.
#[derive(Debug, Default)]
pub(super) struct Windows(Mutex<Vec<(u64, u64)>>);

impl Windows {
    fn ranges(&self) -> MutexGuard<'_, Vec<(u64, u64)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a window is open on any part of a range.
    pub(super) fn overlap(&self, address: u64, size: u64) -> bool {
        self.ranges().iter().any(|&(start, length)| start < address.saturating_add(size) && address < start + length)
    }
}

/// The properties of the memory under a window.
#[derive(Debug, Clone, Copy)]
pub(super) struct View {
    pub address: u64,
    pub size: u64,
    pub writable: bool,
    pub immutable: bool,
}

/// A view of mapped memory for this process's CPU, without driver calls.
///
/// While a window is open, unmapping any part of it and changing its access fail with `CUDA_ERROR_INVALID_VALUE`. The memory stays
/// mapped even if the driver object is dropped first. Other processes, and other mappings, may write at any time: a read may return part of
/// a concurrent write.
pub struct Window {
    view: View,
    origin: ProcessIdentity,
    open: Arc<Windows>,
    /// The owner of the mapping: dropping it would unmap the memory.
    _mapped: Arc<dyn Send + Sync>,
}

impl Window {
    /// Opens a window. During the call, the driver must prevent the range from being unmapped.
    ///
    /// # Safety
    /// The CPU can read the range, and write to it if it is `writable`, for as long as `mapped` lives and the range is in `open`. The range
    /// is outside of all Rust allocations. If it is `immutable`, it is not `writable`, and neither another process nor another mapping in
    /// this one can change its bytes. Otherwise all accesses in this process use [`copy`].
    pub(super) unsafe fn new(
        view: View,
        origin: ProcessIdentity,
        open: &Arc<Windows>,
        mapped: Arc<dyn Send + Sync>,
    ) -> Self {
        open.ranges().push((view.address, view.size));
        Self { view, origin, open: Arc::clone(open), _mapped: mapped }
    }

    /// Size in bytes.
    pub fn size(&self) -> u64 {
        self.view.size
    }

    /// Copies bytes from the window, starting at `offset`.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`] if the window is too short; [`Error::Forked`].
    pub fn read(&self, offset: u64, to: &mut [u8]) -> Result<()> {
        let from = self.pointer(offset, to.len())?;
        // SAFETY: the whole source is readable while this object lives, which is borrowed here. It is outside of Rust's allocations.
        // Threads of this process write to it only with `copy::write`, and slices of it exist only where nothing writes to it.
        unsafe { copy::read(from, to) };
        Ok(())
    }

    /// Copies bytes into the window, starting at `offset`.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`] if the window is too short; [`Error::Driver`] with `CUDA_ERROR_INVALID_VALUE` if it is read-only;
    /// [`Error::Forked`].
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        let to = self.pointer(offset, from.len())?;
        if !self.view.writable {
            return Err(failure("window write", code::INVALID_VALUE));
        }
        // SAFETY: the whole destination is writable while this object lives, which is borrowed here. It is outside of Rust's allocations:
        // slices exist only of immutable memory, which is never writable. Threads of this process access it only with `copy`.
        unsafe { copy::write(from, to) };
        Ok(())
    }

    /// The window's bytes, without a copy, if nothing can write to them: sealed memory of the host backend.
    pub fn slice(&self) -> Option<&[u8]> {
        let start = self.pointer(0, 0).ok()?;
        // SAFETY: the whole window is readable while this object lives, which the slice borrows. Nothing changes its bytes, as `new`
        // requires: the kernel prevents all other processes from it, and no mapping in this process is or becomes writable while a window
        // is open.
        self.view.immutable.then(|| unsafe { slice::from_raw_parts(start.cast_const(), self.view.size as usize) })
    }

    /// The address of `length` bytes at `offset`. Fails in a fork, where the memory may not exist.
    fn pointer(&self, offset: u64, length: usize) -> Result<*mut u8> {
        self.origin.check()?;
        let length = length as u64;
        let size = self.view.size;
        match offset.checked_add(length) {
            Some(end) if end <= size => Ok(ptr::with_exposed_provenance_mut((self.view.address + offset) as usize)),
            _ => Err(Error::Memory(MemoryError::OutOfRange { offset, length, size })),
        }
    }
}

impl fmt::Debug for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Window").field(&self.view).finish()
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // In a fork, the lock may be held forever by a thread of the parent, and the table is not used.
        if self.origin.check().is_err() {
            return;
        }
        let range = (self.view.address, self.view.size);
        let mut open = self.open.ranges();
        if let Some(at) = open.iter().position(|&other| other == range) {
            open.swap_remove(at);
        }
    }
}
