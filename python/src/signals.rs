//! Waits that Ctrl-C interrupts: the library's check for Python signals and for closed objects.
//!
//! Python's C signal handler only sets a flag. The main thread, blocked in the library without the GIL, must poll it: the library calls the
//! check of [`cancel`] at `EINTR` and several times per second.

use std::{
    cell::RefCell,
    process,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use pyo3::prelude::*;
use vmmfd::{Error, bindings::interruptible, channel::Cancel};

use crate::error::{Failure, Outcome};

/// Whether an object was closed, by any thread: its waits are then interrupted.
#[derive(Debug, Clone, Default)]
pub(crate) struct CloseFlag(Arc<AtomicBool>);

impl CloseFlag {
    /// Sets the flag. Returns whether it was already set.
    pub(crate) fn set(&self) -> bool {
        self.0.swap(true, Ordering::AcqRel)
    }

    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// `_native.Stop`: interrupts a call in another thread.
#[pyclass(name = "Stop", module = "vmmfd._native", frozen)]
#[derive(Default)]
pub(crate) struct Stop(pub(crate) CloseFlag);

#[pymethods]
impl Stop {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Ends the waits inside [`Stop::run`] with `Interrupted`. Does not block: a wait notices it within 40 ms.
    fn set(&self) {
        self.0.set();
    }

    /// Calls `call` on this thread.
    fn run<'py>(&self, call: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        STOPS.with_borrow_mut(|stops| stops.push(self.0.clone()));
        let done = call.call0();
        STOPS.with_borrow_mut(Vec::pop);
        done
    }
}

/// Called during the waits of a call, about 40 times a second.
pub(crate) type Observer = Arc<dyn Fn() + Send + Sync>;

/// The call from Python that this thread runs.
struct Call {
    closed: Vec<CloseFlag>,
    observer: Option<Observer>,
    /// Whether Python runs signal handlers on this thread.
    main: bool,
    /// The exception that a handler raised.
    raised: Option<PyErr>,
}

thread_local! {
    static CALL: RefCell<Option<Call>> = const { RefCell::new(None) };
    static STOPS: RefCell<Vec<CloseFlag>> = const { RefCell::new(Vec::new()) };
}

/// Returns the cancellation for the library's sessions: waits inside [`run`] end when a signal handler raises, or when their object is
/// closed. Other waits are not affected.
///
/// # Errors
/// [`Error::System`]. See eventfd(2).
pub(crate) fn cancel() -> Outcome<Cancel> {
    static CANCEL: OnceLock<Cancel> = OnceLock::new();
    if let Some(cancel) = CANCEL.get() {
        return Ok(cancel.clone());
    }
    let cancel = Cancel::new()?.with_check(must_stop);
    Ok(CANCEL.get_or_init(|| cancel).clone())
}

/// Prepares a thread that never runs Python: its waits end when one of the objects is closed.
pub(crate) fn enter(closed: Vec<CloseFlag>, observer: Option<Observer>) {
    CALL.set(Some(Call { closed, observer, main: false, raised: None }));
}

/// Runs a library call with the GIL released. Returns the exception that a signal handler raises on the main thread, or `Interrupted` if
/// one of the objects is closed.
pub(crate) fn run<T: Send>(
    py: Python<'_>,
    closed: &[&CloseFlag],
    work: impl FnOnce() -> Outcome<T> + Send,
) -> Outcome<T> {
    run_observed(py, closed, None, work)
}

/// As [`run`], and calls `observer` during the waits.
pub(crate) fn run_observed<T: Send>(
    py: Python<'_>,
    closed: &[&CloseFlag],
    observer: Option<Observer>,
    work: impl FnOnce() -> Outcome<T> + Send,
) -> Outcome<T> {
    /// Restores the enclosing call: a signal handler may make calls too.
    struct Outer(Option<Call>);

    impl Drop for Outer {
        fn drop(&mut self) {
            CALL.replace(self.0.take());
        }
    }

    let closed: Vec<CloseFlag> =
        closed.iter().map(|&closed| closed.clone()).chain(STOPS.with_borrow(Clone::clone)).collect();
    let outer = Outer(CALL.replace(Some(Call { closed, observer, main: is_main_thread(), raised: None })));
    let done = py.detach(|| interruptible(must_stop, work));
    let call = CALL.take();
    drop(outer);
    let Some(call) = call else { return done };
    match (call.raised, done) {
        // Even if the call succeeded: the exception must not be lost.
        (Some(raised), done) => {
            py.detach(|| drop(done));
            Err(Failure::Python(raised))
        }
        (None, Err(Failure::Library(error)))
            if call.closed.iter().any(CloseFlag::is_set) && is_cancellation(&error) =>
        {
            Err(closed_error())
        }
        (None, done) => done,
    }
}

/// The error of calls whose object is closed.
pub(crate) fn closed_error() -> Failure {
    Failure::Caller("Interrupted", "the connection is closed: connect again".to_owned())
}

/// Whether an error is the result of a cancelled wait.
fn is_cancellation(error: &Error) -> bool {
    use vmmfd::error::{BrokerError, RefusalCode};
    matches!(error, Error::Interrupted { .. } | Error::Broker(BrokerError { code: RefusalCode::Stopped, .. }))
}

/// Checks for signals between the steps of long work inside [`run`], at most every 20 ms.
pub(crate) struct SignalPoll {
    next: Instant,
    steps: u32,
    bytes: u64,
}

impl SignalPoll {
    /// The shortest time between two checks: each takes the GIL.
    const PAUSE: Duration = Duration::from_millis(20);

    pub(crate) fn new() -> Self {
        Self { next: Instant::now() + Self::PAUSE, steps: 0, bytes: 0 }
    }

    /// Records one step of `bytes` bytes, and checks for signals if it is time.
    ///
    /// # Errors
    /// If the work must stop; [`run`] then returns the handler's exception.
    pub(crate) fn step(&mut self, bytes: u64) -> Outcome<()> {
        (self.steps, self.bytes) = (self.steps + 1, self.bytes.saturating_add(bytes));
        if self.steps < 4096 && self.bytes < 4 << 20 {
            return Ok(());
        }
        self.rest()
    }

    /// Checks for signals if it is time.
    ///
    /// # Errors
    /// As [`SignalPoll::step`].
    pub(crate) fn rest(&mut self) -> Outcome<()> {
        (self.steps, self.bytes) = (0, 0);
        let now = Instant::now();
        if now < self.next {
            return Ok(());
        }
        self.next = now + Self::PAUSE;
        if must_stop() { Err(closed_error()) } else { Ok(()) }
    }
}

/// Whether this thread's call must stop.
pub(crate) fn must_stop() -> bool {
    // Not while `CALL` is borrowed: it may call Python.
    if let Some(observer) = CALL.with_borrow(|call| call.as_ref().and_then(|call| call.observer.clone())) {
        observer();
    }
    // A thread of the library has no call.
    let is_set =
        || CALL.with_borrow(|call| call.as_ref().is_some_and(|call| call.closed.iter().any(CloseFlag::is_set)));
    if is_set() || !CALL.with_borrow(|call| call.as_ref().is_some_and(|call| call.main)) {
        return is_set();
    }
    // Not while `CALL` is borrowed: a handler may make calls, and close the object of this wait. During shutdown there are no handlers.
    let Some(Err(raised)) = Python::try_attach(|py| py.check_signals()) else { return is_set() };
    CALL.with_borrow_mut(|call| {
        if let Some(call) = call {
            call.raised = Some(raised);
        }
    });
    true
}

/// Lets other Python threads run during long work with the GIL held: Python itself switches between bytecodes only.
pub(crate) struct GilPause {
    next: Instant,
    steps: u32,
}

impl GilPause {
    /// The time between two pauses.
    const INTERVAL: Duration = Duration::from_millis(4);

    /// The length of a pause. Without a sleep this thread would take the GIL again before a waiting thread has woken up, and that thread
    /// would never wait the 5 ms after which Python forces a switch.
    const PAUSE: Duration = Duration::from_micros(50);

    pub(crate) fn new() -> Self {
        Self { next: Instant::now() + Self::INTERVAL, steps: 0 }
    }

    /// Records one step of at most some microseconds. Other threads may change mutable objects in the meantime.
    pub(crate) fn step(&mut self, py: Python<'_>) {
        self.steps += 1;
        if self.steps.is_multiple_of(32) && Instant::now() >= self.next {
            py.detach(|| thread::sleep(Self::PAUSE));
            self.next = Instant::now() + Self::INTERVAL;
        }
    }
}

/// Whether this is the process's first thread, on which Python runs signal handlers.
fn is_main_thread() -> bool {
    u32::try_from(rustix::thread::gettid().as_raw_nonzero().get()) == Ok(process::id())
}
