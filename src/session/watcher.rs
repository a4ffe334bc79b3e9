//! The library's thread: it accepts and watches the subscribers of all publishers of this process, and ends GPU waits for dead or late
//! peers. It makes no driver call, because the driver may block it.
//!
//! It sleeps while buffers pass: the threads of the program send and receive the records themselves. It wakes for connections, for
//! subscribers that join, leave or die, and for a subscriber for which a buffer waits. It runs while a publisher or
//! such a wait exists.

use std::{
    collections::HashMap,
    io,
    os::fd::BorrowedFd,
    sync::{
        Arc, Mutex, MutexGuard, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use nix::sys::{
    epoll::{Epoll, EpollEvent, EpollFlags, EpollTimeout},
    eventfd::EventFd,
};

use crate::{
    error::{Error, Result},
    sys::{
        epoll, eventfd,
        fork::{PerProcess, ProcessIdentity},
        lock,
        thread::spawn,
    },
};

/// The token of the eventfd that wakes the thread.
const WAKE: u64 = 0;

/// The longest sleep, because epoll_wait(2) takes milliseconds in an `int`.
const LONGEST: Duration = Duration::from_secs(3600);

/// A publisher, or the waits for a peer.
pub(crate) trait Source: Send + Sync {
    /// A descriptor is ready. `key` is the number with which it was added.
    fn ready(&self, key: u64, flags: EpollFlags);

    /// Acts on deadlines that have passed. Returns the time of the next call.
    fn tick(&self, now: Instant) -> Option<Instant>;
}

/// The thread, while any publisher refers to it.
#[derive(Debug)]
pub(crate) struct Watcher {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    pub(crate) creator: ProcessIdentity,
}

struct Shared {
    epoll: Epoll,
    wake: EventFd,
    stops: AtomicBool,
    next: AtomicU64,
    sources: Mutex<Sources>,
    /// Locked while the thread refers to a source.
    serving: Mutex<()>,
}

#[derive(Default)]
struct Sources {
    /// By token.
    watched: HashMap<u64, (Weak<dyn Source>, u64)>,
    /// Each source once.
    all: Vec<Weak<dyn Source>>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("epoll", &self.epoll).finish_non_exhaustive()
    }
}

/// A watched descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Token(u64);

impl Watcher {
    /// The running thread, or a new one.
    ///
    /// # Errors
    /// [`Error::System`].
    pub(crate) fn get() -> Result<Arc<Self>> {
        static WATCHER: PerProcess<Mutex<Weak<Watcher>>> = PerProcess::new(|| Mutex::new(Weak::new()));
        let mut current = lock(WATCHER.get());
        if let Some(watcher) = current.upgrade() {
            return Ok(watcher);
        }
        let watcher = Arc::new(Self::start().map_err(|error| Error::system("start the thread of streams", error))?);
        *current = Arc::downgrade(&watcher);
        Ok(watcher)
    }

    fn start() -> io::Result<Self> {
        let (epoll, wake) = (epoll()?, eventfd()?);
        epoll.add(&wake, EpollEvent::new(EpollFlags::EPOLLIN, WAKE))?;
        let (stops, next) = (AtomicBool::new(false), AtomicU64::new(WAKE + 1));
        let shared =
            Arc::new(Shared { epoll, wake, stops, next, sources: Mutex::default(), serving: Mutex::default() });
        let run = Arc::clone(&shared);
        let thread = Some(spawn("vmmfd-streams", move || run.run())?);
        Ok(Self { shared, thread, creator: ProcessIdentity::current() })
    }

    /// Calls [`Source::tick`] of a source from now on.
    pub(crate) fn attach(&self, source: Weak<dyn Source>) {
        self.shared.sources().all.push(source);
        self.wake();
    }

    /// Forgets a source, whose descriptors are no longer watched. When this returns, the thread does not refer to it.
    pub(crate) fn detach(&self, source: &Weak<dyn Source>) {
        self.shared.sources().all.retain(|other| !Weak::ptr_eq(other, source));
        drop(lock(&self.shared.serving));
    }

    /// Watches a descriptor.
    pub(crate) fn add(
        &self,
        fd: BorrowedFd<'_>,
        flags: EpollFlags,
        source: Weak<dyn Source>,
        key: u64,
    ) -> io::Result<Token> {
        let token = self.shared.next.fetch_add(1, Ordering::Relaxed);
        self.shared.sources().watched.insert(token, (source, key));
        if let Err(errno) = self.shared.epoll.add(fd, EpollEvent::new(flags, token)) {
            self.shared.sources().watched.remove(&token);
            return Err(errno.into());
        }
        Ok(Token(token))
    }

    /// Watches a descriptor for other events.
    pub(crate) fn modify(&self, token: Token, fd: BorrowedFd<'_>, flags: EpollFlags) {
        if let Err(errno) = self.shared.epoll.modify(fd, &mut EpollEvent::new(flags, token.0)) {
            tracing::error!(%errno, "can't watch a subscriber");
        }
    }

    /// Stops watching a descriptor, which is still open. A copy of it in a fork would otherwise be watched for ever. Does nothing in a
    /// fork, which shares the epoll instance with its parent.
    pub(crate) fn remove(&self, token: Token, fd: BorrowedFd<'_>) {
        if !self.creator.is_current() {
            return;
        }
        self.shared.sources().watched.remove(&token.0);
        let _ = self.shared.epoll.delete(fd);
    }

    /// Lets the thread ask all sources for their next deadlines.
    pub(crate) fn wake(&self) {
        if let Err(errno) = self.shared.wake.write(1) {
            tracing::error!(%errno, "can't wake the thread of streams");
        }
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if !self.creator.is_current() {
            // A fork has no such thread.
            std::mem::forget(thread);
            return;
        }
        self.shared.stops.store(true, Ordering::Release);
        self.wake();
        // The thread itself drops the last reference if a publisher ends while it serves the publisher.
        if thread.thread().id() != thread::current().id() && thread.join().is_err() {
            tracing::error!("the thread of streams panicked");
        }
    }
}

impl Shared {
    fn sources(&self) -> MutexGuard<'_, Sources> {
        lock(&self.sources)
    }

    fn run(&self) {
        let mut events = [EpollEvent::empty(); 64];
        while !self.stops.load(Ordering::Acquire) {
            let sleep = self.tick().map_or(LONGEST, |next| next.saturating_duration_since(Instant::now()));
            // Rounded up to avoid spinning before the deadline.
            let sleep = (sleep.min(LONGEST) + Duration::from_micros(999)).as_millis();
            let timeout = EpollTimeout::try_from(sleep).unwrap_or(EpollTimeout::ZERO);
            // EINTR is like no event.
            let count = self.epoll.wait(&mut events, timeout).unwrap_or(0);
            for event in &events[..count] {
                if event.data() == WAKE {
                    let _ = self.wake.read();
                    continue;
                }
                let _serving = lock(&self.serving);
                let watched = self.sources().watched.get(&event.data()).cloned();
                if let Some((source, key)) = watched.and_then(|(source, key)| Some((source.upgrade()?, key))) {
                    source.ready(key, event.events());
                }
            }
        }
    }

    fn tick(&self) -> Option<Instant> {
        let _serving = lock(&self.serving);
        let all: Vec<_> = {
            let mut sources = self.sources();
            sources.all.retain(|source| source.strong_count() > 0);
            sources.all.clone()
        };
        let now = Instant::now();
        all.iter().filter_map(|source| source.upgrade()?.tick(now)).min()
    }
}
