//! The identity of a process, which its forks do not share.

use std::{
    io, process,
    ptr::{self, NonNull},
    sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering},
};

use nix::libc;

use crate::error::{Error, Result};

/// A page that is zero in each new fork. Null until it is mapped, and [`MISSING`] where the kernel has no such pages.
static PAGE: AtomicPtr<AtomicU64> = AtomicPtr::new(ptr::null_mut());

/// In the place of a page: the kernel has none. Its address alone matters.
static MISSING: AtomicU64 = AtomicU64::new(0);

/// The last generation of this process or of those that it descends from by forks. Unlike [`PAGE`] a fork keeps it.
static LAST: AtomicU32 = AtomicU32::new(0);

/// Identifies a process: no fork of it is equal, nor a fork of a fork.
///
/// Process numbers don't serve for that, because they repeat: process 1 of a PID namespace can fork into a new PID namespace, where
/// the child is process 1 too. An identity instead holds a generation from a page that the kernel wipes in each fork
/// (`MADV_WIPEONFORK`, Linux 4.14). On older kernels it is the process number alone.
///
/// ```
/// use vmmfd::fork::ProcessIdentity;
///
/// let made_by = ProcessIdentity::current();
/// // ... and before each use, which may be in a fork:
/// assert!(made_by.is_current());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ProcessIdentity {
    generation: u32,
    pid: u32,
}

impl ProcessIdentity {
    /// This process's. Does not block. It costs one read of memory, and two system calls once in each process.
    ///
    /// See madvise(2).
    pub fn current() -> Self {
        let Some(page) = page() else { return Self { generation: 0, pid: process::id() } };
        match Self::from_bits(page.load(Ordering::Acquire)) {
            Some(current) => current,
            None => {
                let new = Self { generation: LAST.fetch_add(1, Ordering::AcqRel) + 1, pid: process::id() };
                match page.compare_exchange(0, new.to_bits(), Ordering::AcqRel, Ordering::Acquire) {
                    Ok(_) => new,
                    // Another thread was first.
                    Err(bits) => Self::from_bits(bits).unwrap_or(new),
                }
            }
        }
    }

    /// Whether it is this process's. Does not block.
    pub fn is_current(self) -> bool {
        self == Self::current()
    }

    /// The process's number when it was asked for its identity first.
    pub fn pid(self) -> u32 {
        self.pid
    }

    /// Checks that it is this process's. Does not block.
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub fn check(self) -> Result<()> {
        if self.is_current() {
            return Ok(());
        }
        Err(Error::Forked { initialised_by: self.pid, pid: process::id() })
    }

    /// As a number that is not 0, for an atomic.
    pub(crate) fn to_bits(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.pid)
    }

    /// `None` for 0.
    pub(crate) fn from_bits(bits: u64) -> Option<Self> {
        (bits != 0).then_some(Self { generation: (bits >> 32) as u32, pid: bits as u32 })
    }
}

/// The page. It is mapped without a lock, which another thread might hold during a fork.
fn page() -> Option<&'static AtomicU64> {
    let mut found = PAGE.load(Ordering::Acquire);
    if found.is_null() {
        let made = map().map_or_else(
            |error| {
                tracing::debug!(%error, "forks are recognised by their process numbers alone");
                (&raw const MISSING).cast_mut()
            },
            NonNull::as_ptr,
        );
        found = match PAGE.compare_exchange(ptr::null_mut(), made, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => made,
            // Another thread was first. The page of this one, if it has one, is never needed.
            Err(other) => other,
        };
    }
    if ptr::eq(found, &raw const MISSING) {
        return None;
    }
    // SAFETY: it is a page that `map` returned, aligned and zero at first, which is never unmapped and is accessed by atomics alone.
    // The kernel wipes it in a new process only, before that runs.
    Some(unsafe { &*found })
}

/// Maps a page that is zero in each fork.
fn map() -> io::Result<NonNull<AtomicU64>> {
    const SIZE: usize = size_of::<AtomicU64>();
    // SAFETY: a new mapping, at an address of the kernel's choice.
    let start = unsafe {
        libc::mmap(
            ptr::null_mut(),
            SIZE,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it is the mapping that was just made, which nothing else knows.
    if unsafe { libc::madvise(start, SIZE, libc::MADV_WIPEONFORK) } != 0 {
        let error = io::Error::last_os_error();
        // SAFETY: as above; it is not used any more.
        unsafe { libc::munmap(start, SIZE) };
        return Err(error);
    }
    NonNull::new(start.cast()).ok_or_else(|| io::ErrorKind::Other.into())
}

/// A value that each process has for itself. A fork begins with a new one, in whatever state another thread had its parent's.
#[derive(Debug)]
pub struct PerProcess<T: 'static> {
    at: AtomicPtr<(ProcessIdentity, T)>,
    make: fn() -> T,
}

impl<T: Sync> PerProcess<T> {
    /// Each process's is made by `make` when it is asked for first.
    pub const fn new(make: fn() -> T) -> Self {
        Self { at: AtomicPtr::new(ptr::null_mut()), make }
    }

    /// This process's. It is never dropped. Does not block, unless `make` does.
    pub fn get(&self) -> &'static T {
        let identity = ProcessIdentity::current();
        let mut found = self.at.load(Ordering::Acquire);
        loop {
            // SAFETY: it is null, or was leaked below and is never freed; it is only read.
            if let Some((by, value)) = unsafe { found.as_ref::<'static>() }
                && *by == identity
            {
                return value;
            }
            let made = Box::into_raw(Box::new((identity, (self.make)())));
            match self.at.compare_exchange(found, made, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => found = made,
                Err(other) => {
                    // SAFETY: it was just made, and nothing else has seen it.
                    drop(unsafe { Box::from_raw(made) });
                    found = other;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use nix::{
        sys::wait::{WaitStatus, waitpid},
        unistd::{ForkResult, fork},
    };

    use super::*;

    /// Runs `check` in a fork of this process and returns whether it held there.
    fn holds_in_fork(check: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child reads and writes atomics, allocates, and ends by `_exit`.
        match unsafe { fork() }.unwrap() {
            ForkResult::Child => {
                let held = check();
                // SAFETY: it does not return.
                unsafe { libc::_exit(i32::from(!held)) }
            }
            ForkResult::Parent { child } => waitpid(child, None).unwrap() == WaitStatus::Exited(child, 0),
        }
    }

    #[test]
    fn threads_share_an_identity() {
        let current = ProcessIdentity::current();
        assert!(thread::spawn(move || current.is_current()).join().unwrap());
        assert_eq!(current.pid(), process::id());
    }

    #[test]
    fn forks_have_new_generations() {
        let parent = ProcessIdentity::current();
        assert!(parent.generation > 0, "this kernel has no MADV_WIPEONFORK");
        assert!(holds_in_fork(|| {
            let child = ProcessIdentity::current();
            let differ = |one: ProcessIdentity, other: ProcessIdentity| one.generation != other.generation;
            let grandchild_differs = holds_in_fork(|| {
                let grandchild = ProcessIdentity::current();
                differ(grandchild, parent) && differ(grandchild, child) && grandchild.check().is_ok()
            });
            differ(parent, child) && !parent.is_current() && grandchild_differs
        }));
        assert!(parent.is_current());
    }

    #[test]
    fn forks_make_values_of_their_own() {
        static VALUE: PerProcess<AtomicU32> = PerProcess::new(AtomicU32::default);
        VALUE.get().store(7, Ordering::Relaxed);
        assert!(holds_in_fork(
            || VALUE.get().swap(8, Ordering::Relaxed) == 0 && VALUE.get().load(Ordering::Relaxed) == 8
        ));
        assert_eq!(VALUE.get().load(Ordering::Relaxed), 7);
    }
}
