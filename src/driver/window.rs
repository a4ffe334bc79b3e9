//! Memory that the CPU reaches by itself: private page-locked memory, and windows on mappings.

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

/// What takes page-locked memory back.
pub(super) trait PageLocker: fmt::Debug + Send + Sync {
    /// Takes back what was locked.
    ///
    /// # Safety
    /// It is what [`PageLocked::new`] was given, and it is not used any more.
    unsafe fn take_back(&self, start: NonNull<u8>, size: usize) -> Result<()>;
}

/// Private memory of this process that a device copies from and to at full speed. It is zero at first.
///
/// It keeps what it needs of its driver, which may be dropped before. Dropping it frees it. In a fork of the process it must
/// not be touched.
///
/// Driver calls: `cuMemHostAlloc`, `cuMemFreeHost`. On the host backend it is ordinary memory.
pub struct PageLocked {
    start: NonNull<u8>,
    size: usize,
    locker: Arc<dyn PageLocker>,
}

// SAFETY: it owns its memory, which has no thread of its own.
unsafe impl Send for PageLocked {}
// SAFETY: through a shared reference it is only read.
unsafe impl Sync for PageLocked {}

impl PageLocked {
    /// # Safety
    /// The memory is readable and writable, no other thread or process has it, and it is `locker`'s to take back.
    pub(super) unsafe fn new(start: NonNull<u8>, size: usize, locker: Arc<dyn PageLocker>) -> Self {
        // What the driver gives may hold what another owner left in it.
        // SAFETY: the caller's promise: it is as large, and private, so that a plain write races with nothing. A device accesses it
        // only in copies from and to a slice of it, which the caller of such a copy has borrowed until it is done.
        unsafe { start.write_bytes(0, size) };
        Self { start, size, locker }
    }

    /// Its size in bytes.
    pub fn size(&self) -> u64 {
        self.size as u64
    }
}

impl Deref for PageLocked {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: it was initialised as a whole, and is this object's alone until it is dropped: no other process has it, and threads
        // of this one reach it through this object, which is borrowed as long as the slice.
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
        // SAFETY: it is what `new` was given, and references into it ended before this.
        if let Err(error) = unsafe { self.locker.take_back(self.start, self.size) } {
            tracing::error!(%error, "page-locked memory can't be freed");
        }
    }
}

/// The ranges that windows are open on.
#[derive(Debug, Default)]
pub(super) struct Windows(Mutex<Vec<(u64, u64)>>);

impl Windows {
    fn ranges(&self) -> MutexGuard<'_, Vec<(u64, u64)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a window is open on any part of a range.
    pub(super) fn touch(&self, address: u64, size: u64) -> bool {
        self.ranges().iter().any(|&(start, length)| start < address.saturating_add(size) && address < start + length)
    }
}

/// What a driver knows of the memory that a window is opened on.
#[derive(Debug, Clone, Copy)]
pub(super) struct View {
    pub address: u64,
    pub size: u64,
    pub writable: bool,
    pub immutable: bool,
}

/// Mapped memory as this process's CPU sees it, with no driver call between.
///
/// While it lives, unmapping any of it and changing its access are refused with `CUDA_ERROR_INVALID_VALUE`; the memory stays
/// mapped also when the driver object is dropped before. Other processes, and other mappings, may write to it at any time:
/// what is read may be half of what they write.
pub struct Window {
    view: View,
    origin: ProcessIdentity,
    open: Arc<Windows>,
    /// Whatever would unmap the memory when it goes.
    _mapped: Arc<dyn Send + Sync>,
}

impl Window {
    /// Opens a window. The driver must hold what keeps the range from being unmapped meanwhile.
    ///
    /// # Safety
    /// The CPU can read the range, and write to it if it is `writable`, for as long as `mapped` lives and the range is in
    /// `open`, and the range is outside of all that Rust allocates. If it is `immutable`, it is not `writable`, and neither another
    /// process nor another mapping in this one can change its bytes. Else all that accesses it in this process uses [`copy`].
    pub(super) unsafe fn new(
        view: View,
        origin: ProcessIdentity,
        open: &Arc<Windows>,
        mapped: Arc<dyn Send + Sync>,
    ) -> Self {
        open.ranges().push((view.address, view.size));
        Self { view, origin, open: Arc::clone(open), _mapped: mapped }
    }

    /// Its size in bytes.
    pub fn size(&self) -> u64 {
        self.view.size
    }

    /// Copies bytes out of it, from `offset` on.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`] if there are not as many; [`Error::Forked`].
    pub fn read(&self, offset: u64, to: &mut [u8]) -> Result<()> {
        let from = self.pointer(offset, to.len())?;
        // SAFETY: the source is readable, whole, while this object lives, which is borrowed here. It is no memory of Rust's. Threads
        // of this process write to it by `copy::write` alone, and slices of it are only had where nothing writes to it.
        unsafe { copy::read(from, to) };
        Ok(())
    }

    /// Copies bytes into it, from `offset` on.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`] if they do not fit; [`Error::Driver`] with `CUDA_ERROR_INVALID_VALUE` if this process may only
    /// read it; [`Error::Forked`].
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        let to = self.pointer(offset, from.len())?;
        if !self.view.writable {
            return Err(failure("window write", code::INVALID_VALUE));
        }
        // SAFETY: the destination is writable, whole, while this object lives, which is borrowed here. It is no memory of Rust's:
        // slices are had of immutable memory alone, which is never writable. Threads of this process access it by `copy` alone.
        unsafe { copy::write(from, to) };
        Ok(())
    }

    /// Its bytes, with no copy, where nothing can write to them: sealed memory of the host backend.
    pub fn slice(&self) -> Option<&[u8]> {
        let start = self.pointer(0, 0).ok()?;
        // SAFETY: it is readable, whole, while this object lives, which the slice borrows. Nothing changes its bytes, which `new`
        // was
        // promised: no other process, as the kernel refuses it to all of them, and no thread of this one, as no mapping of it here
        // is writable and none becomes so while a window is open.
        self.view.immutable.then(|| unsafe { slice::from_raw_parts(start.cast_const(), self.view.size as usize) })
    }

    /// Where `length` bytes from `offset` on are. In a fork the memory need not be there.
    fn pointer(&self, offset: u64, length: usize) -> Result<*mut u8> {
        self.origin.check()?;
        let (length, size) = (length as u64, self.view.size);
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
        // In a fork another thread may have held the lock, which then stays locked. The table is of no use there.
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
