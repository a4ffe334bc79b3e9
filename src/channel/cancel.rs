//! A request that cancels the waits of this crate.

use std::{
    array,
    cell::Cell,
    fmt,
    os::fd::{AsFd, BorrowedFd},
    process,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::eventfd::EventFd,
};

pub use crate::error::CancelReason;
use crate::{
    error::{Error, Result},
    sys::{self, fork::ProcessIdentity},
};

/// Creates an unsignalled eventfd, close-on-exec and non-blocking. See eventfd(2).
pub fn eventfd() -> Result<EventFd> {
    sys::eventfd().map_err(|error| Error::system("create an eventfd", error))
}

/// The time after a duration, or a very late time if that overflows.
pub fn deadline_after(time: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(time).unwrap_or_else(|| now + Duration::from_secs(u32::MAX.into()))
}

/// Cancels the calls that it was passed to: their waits fail with [`Error::Interrupted`]. Clones share the request. A fork has its own
/// copy: it cancels only its own waits, at most 40 ms later, and not a broker's server, which refuses such a copy.
///
/// ```
/// use std::{thread, time::Duration};
/// use vmmfd::{Error, channel::{Cancel, CancelReason}, session::{Config, stream::{SubscribeOptions, Subscriber}}};
/// # use vmmfd::driver::{Backend, Choice, open};
/// # let driver = open(Choice::Only(Backend::Host))?.driver;
/// # let folder = vmmfd::internals::ExampleFolder::new()?;
/// # let path = folder.path().join("s.sock");
///
/// let cancel = Cancel::new()?;
/// let config = Config::default().cancel(&cancel);
/// // From another thread, or for a signal:
/// thread::spawn(move || cancel.cancel(CancelReason::Program));
/// let waited = Subscriber::connect(&driver, None, &path, &SubscribeOptions::default(), &config);
/// assert!(matches!(waited, Err(Error::Interrupted { .. })), "no publisher listens");
/// # Ok::<(), vmmfd::Error>(())
/// ```
#[derive(Clone)]
pub struct Cancel {
    inner: Arc<Inner>,
    check: Option<Check>,
}

/// A program's check during waits: see [`Cancel::with_check`].
type Check = Arc<dyn Fn() -> bool + Send + Sync>;

#[derive(Debug)]
struct Inner {
    /// Forks share it, so only the creator writes and polls it.
    event: EventFd,
    creator: ProcessIdentity,
    /// [`NOT_CANCELLED`], [`BY_PROGRAM`], or [`BY_SIGNAL`] with the signal number in the lower half.
    reason: AtomicU64,
}

const NOT_CANCELLED: u64 = 0;
const BY_PROGRAM: u64 = 1;
const BY_SIGNAL: u64 = 1 << 32;

thread_local! {
    /// Set on this library's own threads.
    static HAS_NO_CHECKS: Cell<bool> = const { Cell::new(false) };
}

/// Calls no check of the program on this thread: it is about the program's calls, and its panic would end the thread.
pub(crate) fn call_no_checks() {
    HAS_NO_CHECKS.set(true);
}

/// The interval of the program's check during a wait, and of a fork's look at the request.
pub(crate) const CHECK_INTERVAL: Duration = Duration::from_millis(25);

/// The number of descriptors that a wait supports without an allocation, including the request's own.
const MAX_UNALLOCATED: usize = 4;

impl Cancel {
    /// Creates an uncancelled request.
    ///
    /// # Errors
    /// [`Error::System`]. See eventfd(2).
    pub fn new() -> Result<Self> {
        let event = eventfd()?;
        let creator = ProcessIdentity::current();
        Ok(Self { inner: Arc::new(Inner { event, creator, reason: AtomicU64::new(NOT_CANCELLED) }), check: None })
    }

    /// Returns the same request with a check for all waits that it or a clone of it is passed to. The waiting thread calls the check at the
    /// start, after a signal handler has run on it (`EINTR`), and at least every 40 ms. If the check returns true, only this wait fails,
    /// with [`Error::Interrupted`] and [`CancelReason::Program`]: the request is not made.
    ///
    /// Use it in programs whose signal handlers only set a flag that a thread must check, such as interpreters. The check should return
    /// soon. It runs while the wait's connection is in use: on that connection a request of the same thread fails with [`Error::Misuse`].
    /// It does not run on the threads with which clients resume leases.
    #[must_use]
    pub fn with_check(self, check: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self { check: Some(Arc::new(check)), ..self }
    }

    /// Cancels permanently. The reason of the first call is kept.
    pub fn cancel(&self, reason: CancelReason) {
        let bits = match reason {
            CancelReason::Program => BY_PROGRAM,
            CancelReason::Signal(number) => BY_SIGNAL | u64::from(number.cast_unsigned()),
        };
        let first = self.inner.reason.compare_exchange(NOT_CANCELLED, bits, Ordering::AcqRel, Ordering::Acquire);
        if first.is_ok() && self.inner.creator.is_current() && self.inner.event.write(1).is_err() {
            tracing::error!("can't write to an eventfd: a wait may last until its deadline");
        }
    }

    /// Checks whether the request has been made. Does not block.
    ///
    /// # Errors
    /// [`Error::Interrupted`] if it has.
    pub fn check(&self) -> Result<()> {
        match self.inner.reason.load(Ordering::Acquire) {
            NOT_CANCELLED => Ok(()),
            BY_PROGRAM => Err(Error::Interrupted { reason: CancelReason::Program }),
            bits => Err(Error::Interrupted { reason: CancelReason::Signal((bits as u32).cast_signed()) }),
        }
    }

    /// Checks that this process created the request: a fork can't wake a wait outside of this type.
    ///
    /// # Errors
    /// [`Error::Misuse`] if another process did.
    pub(crate) fn check_fork(&self) -> Result<()> {
        match self.inner.creator.is_current() {
            true => Ok(()),
            false => Err(Error::Misuse {
                problem: format!(
                    "process {} created the `Cancel` of this call, and process {} is a fork of it: create another",
                    self.inner.creator.pid(),
                    process::id()
                ),
            }),
        }
    }

    /// Readable once the request has been made.
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.event.as_fd()
    }

    /// Waits until `fd` is ready for one of `events` (true), or the deadline passes (false).
    ///
    /// # Errors
    /// [`Error::Interrupted`]; [`Error::System`]. See poll(2).
    pub(crate) fn wait(&self, fd: BorrowedFd<'_>, events: PollFlags, deadline: Instant) -> Result<bool> {
        self.wait_any([(fd, events)], deadline).map(|ready| ready.is_some())
    }

    /// Waits until one of several descriptors is ready, and returns its index. `None` after the deadline.
    ///
    /// # Errors
    /// The errors of [`Cancel::wait`].
    pub(crate) fn wait_any<const N: usize>(
        &self,
        fds: [(BorrowedFd<'_>, PollFlags); N],
        deadline: Instant,
    ) -> Result<Option<usize>> {
        const { assert!(N < MAX_UNALLOCATED) };
        // No allocation, because this runs for every record.
        let mut fds = fds.into_iter();
        let mut polled: [PollFd<'_>; MAX_UNALLOCATED] =
            array::from_fn(|_| fds.next().map_or_else(|| self.polled(), |(fd, events)| PollFd::new(fd, events)));
        self.wait_for(&mut polled[..=N], deadline)
    }

    /// Waits until one of any number of descriptors is readable, and returns its index. `None` after the deadline.
    ///
    /// # Errors
    /// The errors of [`Cancel::wait`].
    pub(crate) fn wait_readable<'a>(
        &'a self,
        fds: impl Iterator<Item = BorrowedFd<'a>>,
        deadline: Instant,
    ) -> Result<Option<usize>> {
        let mut polled: Vec<PollFd<'_>> = fds.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
        polled.push(self.polled());
        self.wait_for(&mut polled, deadline)
    }

    /// This request for poll(2).
    fn polled(&self) -> PollFd<'_> {
        let events = if self.inner.creator.is_current() { PollFlags::POLLIN } else { PollFlags::empty() };
        PollFd::new(self.inner.event.as_fd(), events)
    }

    /// As [`Cancel::check`], and calls the program's check.
    ///
    /// # Errors
    /// [`Error::Interrupted`].
    pub(crate) fn check_now(&self) -> Result<()> {
        self.check()?;
        match &self.check {
            Some(check) if !HAS_NO_CHECKS.get() && check() => Err(Error::Interrupted { reason: CancelReason::Program }),
            _ => Ok(()),
        }
    }

    /// Waits for any of `fds`. The last one is this request.
    fn wait_for(&self, fds: &mut [PollFd<'_>], deadline: Instant) -> Result<Option<usize>> {
        let others = fds.len() - 1;
        let polls = self.check.is_some() || !self.inner.creator.is_current();
        let longest = if polls { CHECK_INTERVAL } else { Duration::from_secs(3600) };
        loop {
            self.check_now()?;
            let left = deadline.saturating_duration_since(Instant::now());
            // Rounded up to avoid spinning before the deadline. Long waits are split.
            let left = (left + Duration::from_micros(999)).min(longest);
            match poll(fds, PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)) {
                Ok(_) => {}
                Err(Errno::EINTR) => continue,
                Err(errno) => return Err(Error::system("poll", errno)),
            }
            let ready = fds[..others].iter().position(|fd| fd.any().unwrap_or(false));
            if ready.is_some() || Instant::now() >= deadline {
                return self.check().map(|()| ready);
            }
        }
    }

    /// Waits for a time, or until the request is made.
    ///
    /// # Errors
    /// The errors of [`Cancel::wait`].
    pub(crate) fn pause(&self, time: Duration) -> Result<()> {
        self.wait(self.inner.event.as_fd(), PollFlags::empty(), Instant::now() + time).map(drop)
    }
}

impl fmt::Debug for Cancel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cancel").field("inner", &self.inner).field("check", &self.check.is_some()).finish()
    }
}

impl AsFd for Cancel {
    /// Readable once the request has been made, by the process that created it.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.event.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn check_interrupts_one_wait() {
        let cancel = Cancel::new().unwrap();
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&calls);
        let checked = cancel.clone().with_check(move || counted.fetch_add(1, Ordering::AcqRel) == 3);
        let begun = Instant::now();
        let ended = checked.pause(Duration::from_secs(30));
        assert!(matches!(ended, Err(Error::Interrupted { reason: CancelReason::Program })), "{ended:?}");
        // Once at the start, then three times.
        let elapsed = begun.elapsed();
        assert!(elapsed >= CHECK_INTERVAL * 3 && elapsed < Duration::from_secs(10), "{elapsed:?}");
        checked.pause(Duration::from_millis(1)).unwrap();
        checked.check().unwrap();
        cancel.check().unwrap();
        cancel.cancel(CancelReason::Signal(15));
        assert!(matches!(
            checked.pause(Duration::from_secs(30)),
            Err(Error::Interrupted { reason: CancelReason::Signal(15) })
        ));
    }

    #[test]
    fn false_check_does_not_interrupt() {
        let checked = Cancel::new().unwrap().with_check(|| false);
        let begun = Instant::now();
        checked.pause(CHECK_INTERVAL * 2).unwrap();
        assert!(begun.elapsed() >= CHECK_INTERVAL * 2);
    }
}
