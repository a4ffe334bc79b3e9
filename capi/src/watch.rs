//! Watches: events of names, with a descriptor to wait for.

use std::{
    collections::VecDeque,
    ffi::{c_char, c_int},
    mem::MaybeUninit,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    path::Path,
    ptr,
    sync::{
        Arc, Condvar, Mutex, PoisonError, Weak,
        mpsc::{self, RecvTimeoutError},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use nix::sys::eventfd::EventFd;
use vmmfd::{
    Error,
    bindings::{eventfd, lock, of_known_broker, spawn},
    broker::{Client, Event, EventKind, Watch, Watched},
    channel::{Cancel, CancelReason},
    session::Config,
};

use crate::{
    argument::{is_readable, milliseconds, out},
    error::{Outcome, run, run_logged, vmmfd_error_t},
    handle::{self, handle},
    owned::Kept,
    versioned::{Facts, versioned},
};

/// A watch of names. One thread may use it at a time.
#[derive(Debug)]
pub struct vmmfd_watch_t {
    _opaque: [u8; 0],
}

handle!(vmmfd_watch_t, 7, "a watch", Watching);

/// The kind of an event.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum vmmfd_event_kind_t {
    /// A kind that this version of the library does not know.
    VMMFD_EVENT_UNKNOWN = 0,
    /// The first version of a name was published.
    VMMFD_EVENT_PUBLISHED = 1,
    /// The next version of a name was published.
    VMMFD_EVENT_REPLACED = 2,
    /// The name was deleted.
    VMMFD_EVENT_DELETED = 3,
    /// A reader reported that the version differs from its description.
    VMMFD_EVENT_REPORTED = 4,
    /// A lease was granted.
    VMMFD_EVENT_LEASED = 5,
    /// A lease was released.
    VMMFD_EVENT_ENDED = 6,
    /// Events are missing: the watch fell too far behind, or the broker lost its state. List the names to catch up.
    VMMFD_EVENT_LOST = 7,
    /// The readers of the version were asked to release it.
    VMMFD_EVENT_RECALLED = 8,
}

/// An event. The texts are valid until the next call of `vmmfd_watch_next` with the watch, or until it is freed.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct vmmfd_event_t {
    /// The size of this struct: `sizeof` it.
    pub struct_size: usize,
    /// The kind. The other fields of `VMMFD_EVENT_LOST` are 0 or NULL.
    pub kind: vmmfd_event_kind_t,
    /// The object's name.
    pub name: *const c_char,
    /// The version's UUID.
    pub id: *const c_char,
    /// The sentence of `VMMFD_EVENT_REPORTED`; NULL otherwise.
    pub message: *const c_char,
    /// The version's number.
    pub version: u64,
    /// The event's number in the broker's log.
    pub sequence: u64,
    /// The time, in milliseconds since 1970.
    pub at_ms: u64,
    /// The user of the process that caused it.
    pub uid: u32,
    /// The process that caused it, or 0.
    pub pid: i32,
}

versioned!(vmmfd_event_t);

/// The most events that wait for the program. The broker then keeps the newest.
const MOST: usize = 1024;

/// The pause after a failure, before the thread asks the broker again.
const PAUSE: Duration = Duration::from_secs(1);

/// The interval at which a wait looks at the descriptor that stops it.
const CHECK_INTERVAL: Duration = Duration::from_millis(25);

/// The longest single wait of the thread.
const LONG: Duration = Duration::from_secs(3600);

pub(crate) struct Watching {
    shared: Arc<Queue>,
    cancel: Cancel,
    thread: Option<JoinHandle<()>>,
    /// The texts of the last event.
    texts: Mutex<Kept>,
    stop: Option<Arc<OwnedFd>>,
}

pub(crate) struct Queue {
    /// Readable while events wait.
    ready: EventFd,
    state: Mutex<Pending>,
    changed: Condvar,
}

#[derive(Default)]
struct Pending {
    waiting: VecDeque<vmmfd::Result<Watched>>,
    /// The number of interruptions.
    interrupted: u64,
    ended: bool,
}

/// The watches of a connection.
#[derive(Default)]
pub(crate) struct Watches(Mutex<Vec<Weak<Queue>>>);

impl Watches {
    pub(crate) fn add(&self, watch: &Watching) {
        let mut watches = lock(&self.0);
        watches.retain(|watch| watch.strong_count() > 0);
        watches.push(Arc::downgrade(&watch.shared));
    }

    /// Ends all waits for events.
    pub(crate) fn interrupt(&self) {
        for queue in lock(&self.0).iter().filter_map(Weak::upgrade) {
            lock(&queue.state).interrupted += 1;
            queue.changed.notify_all();
        }
    }
}

impl Queue {
    /// Adds an event once there is room. Returns false if the watch was freed.
    fn push(&self, event: vmmfd::Result<Watched>) -> bool {
        let mut state = lock(&self.state);
        while state.waiting.len() >= MOST && !state.ended {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.ended {
            return false;
        }
        state.waiting.push_back(event);
        // Under the lock, so that the descriptor and the queue agree. Fails only if the counter is full, and then it is readable.
        let _ = self.ready.write(1);
        self.changed.notify_all();
        true
    }

    /// Takes the next event, waiting for it until the deadline.
    ///
    /// # Errors
    /// [`Error::Interrupted`] after an interruption, when `stop` is readable, and when the watch is freed.
    fn pop(&self, deadline: Instant, stop: Option<&OwnedFd>) -> vmmfd::Result<Option<Watched>> {
        let mut state = lock(&self.state);
        let interrupted = state.interrupted;
        loop {
            if let Some(event) = state.waiting.pop_front() {
                if state.waiting.is_empty() {
                    let _ = self.ready.read();
                }
                self.changed.notify_all();
                return event.map(Some);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            if state.ended || state.interrupted != interrupted || stop.is_some_and(is_readable) {
                return Err(Error::Interrupted { reason: CancelReason::Program });
            }
            let pause = stop.map_or(left, |_| left.min(CHECK_INTERVAL));
            state = self.changed.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Watching {
    /// Opens a connection and watches.
    ///
    /// The thread does both, so that `stop` ends the start but not the watch: a check for it in the connection's configuration would last
    /// as long as the connection, and wake the thread each 25 ms.
    ///
    /// # Errors
    /// [`Error::Interrupted`] when `stop` is readable; the errors of [`Client::connect`] and [`Client::watch`].
    pub(crate) fn start(path: &Path, config: &Config, prefix: &str, stop: Option<Arc<OwnedFd>>) -> Outcome<Self> {
        let cancel = Cancel::new()?;
        let ready = eventfd().map_err(|error| Error::system("create an eventfd", error))?;
        let shared = Arc::new(Queue { ready, state: Mutex::default(), changed: Condvar::new() });
        let (path, config, prefix) = (path.to_owned(), config.clone().cancel(&cancel), prefix.to_owned());
        let queue = Arc::clone(&shared);
        let (report, started) = mpsc::channel();
        let thread = spawn("vmmfd-watch", move || {
            let connected = Client::connect(&path, &config).map_err(of_known_broker);
            // A report is never lost: the receiver outlives this thread or has the report.
            match connected.and_then(|client| client.watch(&prefix, None)) {
                Ok(watch) => {
                    let _ = report.send(Ok(()));
                    follow(watch, &queue);
                }
                Err(error) => drop(report.send(Err(error))),
            }
        });
        let thread = thread.map_err(|error| Error::system("start a thread", error))?;
        let watching = Self { shared, cancel, thread: Some(thread), texts: Mutex::default(), stop };
        watching.wait_for_start(&started)?;
        Ok(watching)
    }

    fn wait_for_start(&self, started: &mpsc::Receiver<vmmfd::Result<()>>) -> vmmfd::Result<()> {
        loop {
            if self.stop.as_deref().is_some_and(is_readable) {
                return Err(Error::Interrupted { reason: CancelReason::Program });
            }
            match started.recv_timeout(self.stop.as_ref().map_or(LONG, |_| CHECK_INTERVAL)) {
                Ok(outcome) => return outcome,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => panic!("the thread of a watch panicked"),
            }
        }
    }

    /// Ends the thread and all waits.
    fn end(&self) {
        lock(&self.shared.state).ended = true;
        self.shared.changed.notify_all();
        self.cancel.cancel(CancelReason::Program);
    }

    fn show(&self, watched: Watched) -> vmmfd_event_t {
        let mut texts = lock(&self.texts);
        *texts = Kept::default();
        let Watched::Event(event) = watched else {
            return vmmfd_event_t { kind: vmmfd_event_kind_t::VMMFD_EVENT_LOST, ..NONE };
        };
        let Event { seq, at_ms, kind, name, version, id, uid, pid, message, .. } = event;
        let mut keep = |text: String| texts.text(text);
        vmmfd_event_t {
            struct_size: 0,
            kind: match kind {
                EventKind::Published => vmmfd_event_kind_t::VMMFD_EVENT_PUBLISHED,
                EventKind::Replaced => vmmfd_event_kind_t::VMMFD_EVENT_REPLACED,
                EventKind::Deleted => vmmfd_event_kind_t::VMMFD_EVENT_DELETED,
                EventKind::Reported => vmmfd_event_kind_t::VMMFD_EVENT_REPORTED,
                EventKind::Leased => vmmfd_event_kind_t::VMMFD_EVENT_LEASED,
                EventKind::Ended => vmmfd_event_kind_t::VMMFD_EVENT_ENDED,
                EventKind::Recalled => vmmfd_event_kind_t::VMMFD_EVENT_RECALLED,
                _ => vmmfd_event_kind_t::VMMFD_EVENT_UNKNOWN,
            },
            name: keep(name),
            id: keep(id),
            message: message.map_or(ptr::null(), keep),
            version,
            sequence: seq,
            at_ms,
            uid,
            pid,
        }
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        self.end();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was printed.
            let _ = thread.join();
        }
    }
}

/// Moves the broker's events to the queue until the watch is freed.
fn follow(mut watch: Watch, queue: &Queue) {
    loop {
        let more = match watch.next(LONG) {
            Ok(None) => !lock(&queue.state).ended,
            Ok(Some(event)) => queue.push(Ok(event)),
            Err(Error::Interrupted { .. }) => false,
            Err(error) => {
                let more = queue.push(Err(error));
                let state = lock(&queue.state);
                let pause = queue.changed.wait_timeout_while(state, PAUSE, |state| !state.ended);
                more && !pause.unwrap_or_else(PoisonError::into_inner).0.ended
            }
        };
        if !more {
            return;
        }
    }
}

/// An event without a kind.
const NONE: vmmfd_event_t = vmmfd_event_t {
    struct_size: 0,
    kind: vmmfd_event_kind_t::VMMFD_EVENT_UNKNOWN,
    name: ptr::null(),
    id: ptr::null(),
    message: ptr::null(),
    version: 0,
    sequence: 0,
    at_ms: 0,
    uid: 0,
    pid: 0,
};

/// Returns a descriptor that is readable, in poll(2) and epoll(7), while events wait. Then call `vmmfd_watch_next` until it finds none.
///
/// The watch owns the descriptor: do not close, read or write it. `*fd` is -1 after a failure. Does not block.
///
/// Errors: `VMMFD_INVALID`; `VMMFD_FORKED`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_watch_descriptor(
    watch: *const vmmfd_watch_t,
    fd: Option<&mut MaybeUninit<c_int>>,
) -> *mut vmmfd_error_t {
    run(|| {
        let fd = out(fd, "fd")?;
        fd.write(-1);
        fd.write(handle::get(watch)?.shared.ready.as_fd().as_raw_fd());
        Ok(())
    })
}

/// Returns the next event. `*found` is false if none arrived in time; the event is then unknown. Blocks for at most `timeout_ms`; 0 is not
/// to wait. One thread at a time may call it.
///
/// Errors: `VMMFD_INTERRUPTED` if another thread frees the watch or calls `vmmfd_broker_interrupt`, or `stop` of the connection is
/// readable. `VMMFD_DISCONNECTED` and others if the broker is gone or does not answer: the watch then tries again each second, continues
/// at its place, and the call may be repeated. `VMMFD_INVALID`; `VMMFD_FORKED`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_watch_next(
    watch: *const vmmfd_watch_t,
    timeout_ms: u64,
    event: *mut vmmfd_event_t,
    found: Option<&mut MaybeUninit<bool>>,
) -> *mut vmmfd_error_t {
    run(|| {
        let event = Facts::of(event, "event")?;
        let found = out(found, "found")?;
        let watch = handle::get(watch)?;
        let deadline = Instant::now() + milliseconds(timeout_ms, Duration::ZERO);
        if let Some(watched) = watch.shared.pop(deadline, watch.stop.as_deref())? {
            event.write(&watch.show(watched));
            found.write(true);
        }
        Ok(())
    })
}

/// Frees a watch, ends the wait of another thread for its next event, and stops its thread. Blocks until the thread has exited, usually for
/// less than a millisecond.
#[unsafe(no_mangle)]
pub extern "C" fn vmmfd_watch_free(watch: *mut vmmfd_watch_t) {
    run_logged(|| {
        if let Some(watch) = handle::optional(watch)? {
            watch.end();
        }
        handle::remove(watch)
    });
}
