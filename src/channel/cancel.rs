//! A request to stop, which ends every wait of this crate at once.

use std::{
    array, fmt,
    os::fd::{AsFd, BorrowedFd},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::eventfd::{EfdFlags, EventFd},
};

pub use crate::error::CancelReason;
use crate::error::{Error, Result};

/// An eventfd that is not readable, close-on-exec and non-blocking. See eventfd(2).
pub fn eventfd() -> Result<EventFd> {
    EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
        .map_err(|errno| Error::system("make an eventfd", errno))
}

/// Cancels the calls that it was passed to: their waits end with [`Error::Interrupted`]. Clones are the same request.
#[derive(Clone)]
pub struct Cancel {
    inner: Arc<Inner>,
    check: Option<Check>,
}

/// What a waiting thread asks of its program: see [`Cancel::with_check`].
type Check = Arc<dyn Fn() -> bool + Send + Sync>;

#[derive(Debug)]
struct Inner {
    event: EventFd,
    /// [`NOT_CANCELLED`], [`BY_PROGRAM`] or [`BY_SIGNAL`] with the signal's number in the lower half.
    reason: AtomicU64,
}

const NOT_CANCELLED: u64 = 0;
const BY_PROGRAM: u64 = 1;
const BY_SIGNAL: u64 = 1 << 32;

/// How often a waiting thread calls its program's check.
const CHECK_EVERY: Duration = Duration::from_millis(25);

/// How many descriptors can be waited for without an allocation, with the request's own.
const MOST_AT_ONCE: usize = 4;

impl Cancel {
    /// A request that is not made yet.
    ///
    /// # Errors
    /// [`Error::System`]. See eventfd(2).
    pub fn new() -> Result<Self> {
        let inner = Arc::new(Inner { event: eventfd()?, reason: AtomicU64::new(NOT_CANCELLED) });
        Ok(Self { inner, check: None })
    }

    /// The same request, with a check for waits that it or a clone of it is passed to. A waiting thread calls it at the beginning, when a
    /// signal's handler has run on it (`EINTR`), and at least every 40 ms. If it returns true that wait ends with
    /// [`Error::Interrupted`] and the reason [`CancelReason::Program`], and no other: the request is not made.
    ///
    /// It is for a program whose signal handlers only set a flag that a thread has to look at, an interpreter say, and should return
    /// soon. It runs while the wait's connection is in use: it must not wait for another request on it.
    #[must_use]
    pub fn with_check(self, check: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self { check: Some(Arc::new(check)), ..self }
    }

    /// Makes the request, permanently. The reason of the first call counts.
    pub fn cancel(&self, reason: CancelReason) {
        let bits = match reason {
            CancelReason::Program => BY_PROGRAM,
            CancelReason::Signal(number) => BY_SIGNAL | u64::from(number.cast_unsigned()),
        };
        let first = self.inner.reason.compare_exchange(NOT_CANCELLED, bits, Ordering::AcqRel, Ordering::Acquire);
        if first.is_ok() && self.inner.event.write(1).is_err() {
            tracing::error!("cannot write to an eventfd: a wait may last until its deadline");
        }
    }

    /// Checks whether the request was made. Does not block.
    ///
    /// # Errors
    /// [`Error::Interrupted`] if it was.
    pub fn check(&self) -> Result<()> {
        match self.inner.reason.load(Ordering::Acquire) {
            NOT_CANCELLED => Ok(()),
            BY_PROGRAM => Err(Error::Interrupted { reason: CancelReason::Program }),
            bits => Err(Error::Interrupted { reason: CancelReason::Signal((bits as u32).cast_signed()) }),
        }
    }

    /// Readable once the request was made.
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.event.as_fd()
    }

    /// Waits until `fd` is ready for one of `events` (true), or until the deadline (false).
    ///
    /// # Errors
    /// [`Error::Interrupted`]; [`Error::System`]. See poll(2).
    pub(crate) fn wait(&self, fd: BorrowedFd<'_>, events: PollFlags, deadline: Instant) -> Result<bool> {
        self.wait_any([(fd, events)], deadline).map(|ready| ready.is_some())
    }

    /// Waits until one of several is ready, and returns which, or until the deadline.
    ///
    /// # Errors
    /// As [`Cancel::wait`].
    pub(crate) fn wait_any<const N: usize>(
        &self,
        fds: [(BorrowedFd<'_>, PollFlags); N],
        deadline: Instant,
    ) -> Result<Option<usize>> {
        const { assert!(N < MOST_AT_ONCE) };
        // Without an allocation, since it runs for every record.
        let mut fds = fds.into_iter();
        let mut polled: [PollFd<'_>; MOST_AT_ONCE] =
            array::from_fn(|_| fds.next().map_or_else(|| self.polled(), |(fd, events)| PollFd::new(fd, events)));
        self.wait_for(&mut polled[..=N], deadline)
    }

    /// Waits until one of any number is readable, and returns which, or until the deadline.
    ///
    /// # Errors
    /// As [`Cancel::wait`].
    pub(crate) fn wait_readable<'a>(
        &'a self,
        fds: impl Iterator<Item = BorrowedFd<'a>>,
        deadline: Instant,
    ) -> Result<Option<usize>> {
        let mut polled: Vec<PollFd<'_>> = fds.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
        polled.push(self.polled());
        self.wait_for(&mut polled, deadline)
    }

    /// This request, as poll(2) waits for it.
    fn polled(&self) -> PollFd<'_> {
        PollFd::new(self.inner.event.as_fd(), PollFlags::POLLIN)
    }

    /// Waits for any of these, the last of which is this request.
    fn wait_for(&self, fds: &mut [PollFd<'_>], deadline: Instant) -> Result<Option<usize>> {
        let others = fds.len() - 1;
        let longest = if self.check.is_some() { CHECK_EVERY } else { Duration::from_secs(3600) };
        loop {
            self.check()?;
            if self.check.as_ref().is_some_and(|check| check()) {
                return Err(Error::Interrupted { reason: CancelReason::Program });
            }
            let left = deadline.saturating_duration_since(Instant::now());
            // Rounded up, so that the last wait does not end early and spin; long waits are split.
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

    /// Waits for this time, or until the request is made.
    ///
    /// # Errors
    /// As [`Cancel::wait`].
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
    /// Readable once the request is made.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.event.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn a_check_ends_one_wait_and_does_not_make_the_request() {
        let cancel = Cancel::new().unwrap();
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&calls);
        let checked = cancel.clone().with_check(move || counted.fetch_add(1, Ordering::AcqRel) == 3);
        let begun = Instant::now();
        let ended = checked.pause(Duration::from_secs(30));
        assert!(matches!(ended, Err(Error::Interrupted { reason: CancelReason::Program })), "{ended:?}");
        // At the beginning, and then three times.
        assert!(
            begun.elapsed() >= CHECK_EVERY * 3 && begun.elapsed() < Duration::from_secs(10),
            "{:?}",
            begun.elapsed()
        );
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
    fn a_check_that_finds_nothing_lets_a_wait_last() {
        let checked = Cancel::new().unwrap().with_check(|| false);
        let begun = Instant::now();
        checked.pause(CHECK_EVERY * 2).unwrap();
        assert!(begun.elapsed() >= CHECK_EVERY * 2);
    }
}
