//! Detection of forks: a process identity that differs in each fork.

use std::{
    io, process,
    ptr::{self, NonNull},
    sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering},
};

use nix::libc;

use super::inherited::close_inherited;
use crate::error::{Error, Result};

/// A page that the kernel zeroes in each fork. Null until it is mapped; [`MISSING`] if the kernel does not support such pages.
static PAGE: AtomicPtr<AtomicU64> = AtomicPtr::new(ptr::null_mut());

/// Marks a missing page in [`PAGE`]. Only its address is used.
static MISSING: AtomicU64 = AtomicU64::new(0);

/// The last generation of this process and its ancestors. Unlike [`PAGE`], a fork inherits the value.
static LAST: AtomicU32 = AtomicU32::new(0);

/// Identifies a process. Every fork has a different identity, and so has every fork of a fork.
///
/// Process IDs are not sufficient because they repeat: process 1 of a PID namespace can fork into a new PID namespace, where the child
/// is process 1 too. Therefore an identity also holds a generation, stored in a page that the kernel wipes in each fork
/// (`MADV_WIPEONFORK`, Linux 4.14). On older kernels it is the process ID alone.
///
/// ```
/// use vmmfd::fork::ProcessIdentity;
///
/// let creator = ProcessIdentity::current();
/// // Before each use, which may be in a fork:
/// assert!(creator.is_current());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ProcessIdentity {
    generation: u32,
    pid: u32,
}

impl ProcessIdentity {
    /// The identity of this process. Does not block. Costs one memory read, and two system calls once per process. A fork's first call
    /// closes its copies of the parent's connections to brokers.
    ///
    /// See madvise(2).
    pub fn current() -> Self {
        let Some(page) = page() else { return Self { generation: 0, pid: process::id() } };
        match Self::from_bits(page.load(Ordering::Acquire)) {
            Some(current) => current,
            None => {
                let before = LAST.fetch_add(1, Ordering::AcqRel);
                let new = Self { generation: before + 1, pid: process::id() };
                match page.compare_exchange(0, new.to_bits(), Ordering::AcqRel, Ordering::Acquire) {
                    Ok(_) => {
                        if before > 0 {
                            close_inherited(new);
                        }
                        new
                    }
                    // Another thread was first.
                    Err(bits) => Self::from_bits(bits).unwrap_or(new),
                }
            }
        }
    }

    /// Whether this is the identity of the current process. Does not block.
    pub fn is_current(self) -> bool {
        self == Self::current()
    }

    /// The process ID when the process first asked for its identity.
    pub fn pid(self) -> u32 {
        self.pid
    }

    /// Checks that this is the identity of the current process. Does not block.
    ///
    /// # Errors
    /// [`Error::Forked`] if it is not.
    pub fn check(self) -> Result<()> {
        if self.is_current() {
            return Ok(());
        }
        Err(Error::Forked { initialised_by: self.pid, pid: process::id() })
    }

    /// A nonzero number, to store in an atomic.
    pub(crate) fn to_bits(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.pid)
    }

    /// The inverse of [`Self::to_bits`]; `None` for 0.
    pub(crate) fn from_bits(bits: u64) -> Option<Self> {
        (bits != 0).then_some(Self { generation: (bits >> 32) as u32, pid: bits as u32 })
    }
}

/// Returns the page, and maps it first if necessary. Uses no lock, because another thread might hold the lock during a fork.
fn page() -> Option<&'static AtomicU64> {
    let mut page = PAGE.load(Ordering::Acquire);
    if page.is_null() {
        let mapped = map().map_or_else(
            |error| {
                tracing::debug!(%error, "no MADV_WIPEONFORK: detecting forks by process ID alone");
                (&raw const MISSING).cast_mut()
            },
            NonNull::as_ptr,
        );
        page = match PAGE.compare_exchange(ptr::null_mut(), mapped, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => mapped,
            // Another thread was first. This thread's page is leaked.
            Err(other) => other,
        };
    }
    if ptr::eq(page, &raw const MISSING) {
        return None;
    }
    // SAFETY: `map` returned the page, aligned and zeroed. It is never unmapped and only accessed through atomics. The kernel wipes it
    // only in a new process, before that process runs.
    Some(unsafe { &*page })
}

/// Maps a page that the kernel zeroes in each fork.
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
    // SAFETY: the mapping was just made, and no other code has its address.
    if unsafe { libc::madvise(start, SIZE, libc::MADV_WIPEONFORK) } != 0 {
        let error = io::Error::last_os_error();
        // SAFETY: as above; the mapping is not used again.
        unsafe { libc::munmap(start, SIZE) };
        return Err(error);
    }
    NonNull::new(start.cast()).ok_or_else(|| io::ErrorKind::Other.into())
}

/// A static value that each process creates for itself. A fork creates a new value, whatever the state of its parent's.
#[derive(Debug)]
pub struct PerProcess<T: 'static> {
    current: AtomicPtr<(ProcessIdentity, T)>,
    create: fn() -> T,
}

impl<T: Sync> PerProcess<T> {
    /// Each process calls `create` on its first [`PerProcess::get`].
    pub const fn new(create: fn() -> T) -> Self {
        Self { current: AtomicPtr::new(ptr::null_mut()), create }
    }

    /// The value of this process. It is never dropped. Blocks only if `create` does.
    pub fn get(&self) -> &'static T {
        let identity = ProcessIdentity::current();
        let mut current = self.current.load(Ordering::Acquire);
        loop {
            // SAFETY: the pointer is null or was leaked below; the value is never freed and only read.
            if let Some((owner, value)) = unsafe { current.as_ref::<'static>() }
                && *owner == identity
            {
                return value;
            }
            let new = Box::into_raw(Box::new((identity, (self.create)())));
            match self.current.compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => current = new,
                Err(other) => {
                    // SAFETY: the box was just leaked, and no other code has seen the pointer.
                    drop(unsafe { Box::from_raw(new) });
                    current = other;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        os::{fd::AsFd, unix::net::UnixStream},
        thread,
    };

    use nix::{
        sys::wait::{WaitStatus, waitpid},
        unistd::{ForkResult, fork},
    };

    use super::{super::inherited::ClosedInForks, *};

    /// Runs `check` in a fork of this process and returns its result.
    fn holds_in_fork(check: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child reads and writes atomics, allocates, and calls `_exit`.
        match unsafe { fork() }.unwrap() {
            ForkResult::Child => {
                let held = check();
                // SAFETY: the call does not return.
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
    fn forks_own_sockets_stay_open() {
        let (inherited, mut others) = UnixStream::pair().unwrap();
        let _registered = ClosedInForks::new(inherited.as_fd());
        assert!(holds_in_fork(|| {
            // As a thread that connects while another thread closes the inherited sockets.
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            let _registered = ClosedInForks::new(ours.as_fd());
            close_inherited(ProcessIdentity::current());
            theirs.write_all(b"x").is_ok() && (&ours).read(&mut [0; 2]).is_ok_and(|length| length == 1)
        }));
        others.write_all(b"x").unwrap();
    }

    #[test]
    fn forks_create_their_own_values() {
        static VALUE: PerProcess<AtomicU32> = PerProcess::new(AtomicU32::default);
        VALUE.get().store(7, Ordering::Relaxed);
        assert!(holds_in_fork(
            || VALUE.get().swap(8, Ordering::Relaxed) == 0 && VALUE.get().load(Ordering::Relaxed) == 8
        ));
        assert_eq!(VALUE.get().load(Ordering::Relaxed), 7);
    }
}
