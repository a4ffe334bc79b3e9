//! Memory that the CPU reaches by itself: private page-locked memory, and windows on mappings.

#![cfg_attr(not(feature = "internals"), allow(unreachable_pub, reason = "some are for the project's own tests alone"))]
#![allow(unsafe_code)]

use std::{
    fmt,
    ops::{Deref, DerefMut},
    ptr::{self, NonNull},
    slice,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::{Origin, code, failure};
use crate::error::{Error, MemoryError, Result};

/// What takes page-locked memory back.
pub(super) trait PageLocker: fmt::Debug + Send + Sync {
    /// Takes back what was locked.
    ///
    /// # Safety
    /// It is what [`PageLocked::new`] was given, and nobody uses it any more.
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
    /// The memory is readable and writable, nobody else's, and `locker`'s to take back.
    pub(super) unsafe fn new(start: NonNull<u8>, size: usize, locker: Arc<dyn PageLocker>) -> Self {
        // SAFETY: the caller's promise. What the driver gives may hold what another owner left in it.
        unsafe { start.write_bytes(0, size) };
        Self { start, size, locker }
    }

    /// Its size in bytes.
    #[cfg(feature = "internals")]
    pub fn size(&self) -> u64 {
        self.size as u64
    }
}

impl Deref for PageLocked {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: it was initialised as a whole, and is this object's alone until it is dropped.
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
    origin: Origin,
    open: Arc<Windows>,
    /// Whatever would unmap the memory when it goes.
    _mapped: Arc<dyn Send + Sync>,
}

impl Window {
    /// Opens a window. The driver must hold what keeps the range from being unmapped meanwhile.
    ///
    /// # Safety
    /// The CPU can read the range, and write to it if it is `writable`, for as long as `mapped` lives and the range is in
    /// `open`; if it is `immutable`, nobody can change its bytes.
    pub(super) unsafe fn new(view: View, origin: Origin, open: &Arc<Windows>, mapped: Arc<dyn Send + Sync>) -> Self {
        open.ranges().push((view.address, view.size));
        Self { view, origin, open: Arc::clone(open), _mapped: mapped }
    }

    /// Its size in bytes.
    #[cfg(feature = "internals")]
    pub fn size(&self) -> u64 {
        self.view.size
    }

    /// Copies bytes out of it, from `offset` on.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`] if there are not as many; [`Error::Forked`].
    pub fn read(&self, offset: u64, to: &mut [u8]) -> Result<()> {
        let from = self.pointer(offset, to.len())?;
        // SAFETY: the source is readable, whole, while this object lives; it is no memory of Rust's that anybody holds a
        // mutable reference to, so it can't overlap `to`. Others may write to it at the same time: any bytes will do.
        unsafe { ptr::copy_nonoverlapping(from.cast_const(), to.as_mut_ptr(), to.len()) };
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
        // SAFETY: the destination is writable, whole, while this object lives; it is no memory of Rust's, since slices are
        // of immutable memory alone, so it can't overlap `from`. Nothing here relies on what it holds.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
        Ok(())
    }

    /// Its bytes, with no copy, where nobody can write to them: sealed memory of the host backend.
    pub fn slice(&self) -> Option<&[u8]> {
        let start = self.pointer(0, 0).ok()?;
        // SAFETY: it is readable, whole, while this object lives, and nobody can change the bytes.
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
        let range = (self.view.address, self.view.size);
        let mut open = self.open.ranges();
        if let Some(at) = open.iter().position(|&other| other == range) {
            open.swap_remove(at);
        }
    }
}
