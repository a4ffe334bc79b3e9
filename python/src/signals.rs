//! Waits that Ctrl-C ends: the library's own look at Python's signals, and at whether their object was closed.
//!
//! A signal's handler in Python only sets a flag. The main thread, which is in a wait of the library with the GIL released, has to look at
//! it: [`cancel`] is what the library asks, at `EINTR` and some times a second.

use std::{
    cell::RefCell,
    process,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use pyo3::prelude::*;
use vmmfd::{Error, channel::Cancel};

use crate::error::{Class, Failure, Outcome};

/// Whether an object was closed, by which thread ever: its waits end.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ended(Arc<AtomicBool>);

impl Ended {
    /// Ends them. Returns whether they were ended before.
    pub(crate) fn end(&self) -> bool {
        self.0.swap(true, Ordering::AcqRel)
    }

    pub(crate) fn is_ended(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// What this thread is doing for Python.
struct Call {
    ended: Vec<Ended>,
    /// Whether Python runs its signals' handlers on this thread.
    main: bool,
    /// What a handler raised.
    raised: Option<PyErr>,
}

thread_local! {
    static CALL: RefCell<Option<Call>> = const { RefCell::new(None) };
}

/// What each session of the library is given: its waits end when a signal's handler raises, or when what they are made for is closed.
/// For waits inside of [`run`] alone; others last.
///
/// # Errors
/// [`Error::System`]. See eventfd(2).
pub(crate) fn cancel() -> Outcome<Cancel> {
    static CANCEL: OnceLock<Cancel> = OnceLock::new();
    if let Some(cancel) = CANCEL.get() {
        return Ok(cancel.clone());
    }
    let cancel = Cancel::new()?.with_check(must_end);
    Ok(CANCEL.get_or_init(|| cancel).clone())
}

/// Runs work of the library with the GIL released. It ends with the exception that a signal's handler raises on the main thread, and with
/// `Interrupted` once one of `ended` is.
pub(crate) fn run<T: Send>(py: Python<'_>, ended: &[&Ended], work: impl FnOnce() -> Outcome<T> + Send) -> Outcome<T> {
    /// The call around this one: a signal's handler may make one.
    struct Outer(Option<Call>);

    impl Drop for Outer {
        fn drop(&mut self) {
            CALL.replace(self.0.take());
        }
    }

    let ended: Vec<Ended> = ended.iter().map(|&ended| ended.clone()).collect();
    let outer = Outer(CALL.replace(Some(Call { ended, main: is_main_thread(), raised: None })));
    let done = py.detach(work);
    let call = CALL.take();
    drop(outer);
    let Some(call) = call else { return done };
    match (call.raised, done) {
        // Also where the work was done all the same: what was raised is not to be lost.
        (Some(raised), done) => {
            py.detach(|| drop(done));
            Err(Failure::Python(raised))
        }
        (None, Err(Failure::Library(error))) if call.ended.iter().any(Ended::is_ended) && is_end(&error) => {
            Err(closed())
        }
        (None, done) => done,
    }
}

/// What a call fails with whose object is closed.
pub(crate) fn closed() -> Failure {
    Failure::Caller(Class::Interrupted, "it was closed: connect again".to_owned())
}

/// Whether an error is what a wait ends with that was to end.
fn is_end(error: &Error) -> bool {
    use vmmfd::error::{BrokerError, RefusalCode};
    matches!(error, Error::Interrupted { .. } | Error::Broker(BrokerError { code: RefusalCode::Stopped, .. }))
}

/// Looks for signals between the steps of long work inside of [`run`], at most some times a second.
pub(crate) struct Looks {
    next: Instant,
    steps: u32,
    bytes: u64,
}

impl Looks {
    /// How often a signal is looked for: each look takes the GIL.
    const PAUSE: Duration = Duration::from_millis(20);

    pub(crate) fn new() -> Self {
        Self { next: Instant::now() + Self::PAUSE, steps: 0, bytes: 0 }
    }

    /// One more step is done, of so many bytes.
    ///
    /// # Errors
    /// If a signal's handler raised, which is what [`run`] then raises.
    pub(crate) fn step(&mut self, bytes: u64) -> Outcome<()> {
        (self.steps, self.bytes) = (self.steps + 1, self.bytes.saturating_add(bytes));
        if self.steps < 4096 && self.bytes < 4 << 20 {
            return Ok(());
        }
        (self.steps, self.bytes) = (0, 0);
        let now = Instant::now();
        if now < self.next {
            return Ok(());
        }
        self.next = now + Self::PAUSE;
        if must_end() { Err(closed()) } else { Ok(()) }
    }
}

/// Whether this thread's wait must end.
fn must_end() -> bool {
    // Without a call it is a thread of the library's own.
    let is_ended = || CALL.with_borrow(|call| call.as_ref().is_some_and(|call| call.ended.iter().any(Ended::is_ended)));
    if is_ended() || !CALL.with_borrow(|call| call.as_ref().is_some_and(|call| call.main)) {
        return is_ended();
    }
    // Without a borrow: a handler may make calls of its own, and close what is waited in. An interpreter that ends has no handlers any more.
    let Some(Err(raised)) = Python::try_attach(|py| py.check_signals()) else { return is_ended() };
    CALL.with_borrow_mut(|call| {
        if let Some(call) = call {
            call.raised = Some(raised);
        }
    });
    true
}

/// Whether this is the process's first thread, the one on which Python runs signals' handlers.
fn is_main_thread() -> bool {
    u32::try_from(rustix::thread::gettid().as_raw_nonzero().get()) == Ok(process::id())
}
