//! `_native.Watch`: the events of names. `vmmfd.Watch` wraps it.
//!
//! An event is handed over in two steps, so that an interrupted or cancelled call never loses it: [`Watch::wait`] waits for an event and
//! keeps it, and reading the attribute `taken` takes it.

use std::{
    os::fd::{AsRawFd, RawFd},
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::{Duration, Instant},
};

use pyo3::prelude::*;
use vmmfd::{
    Error,
    bindings::{EventFd, eventfd, lock, spawn},
    broker::{self, WatchPlace, Watched},
    fork::ProcessIdentity,
};

use crate::{
    connections::Checkout,
    error::{Failure, Outcome},
    json,
    signals::{self, CloseFlag},
    time::{FOREVER, required},
};

/// The interval at which a call checks for signals while another thread reads.
const TICK: Duration = Duration::from_millis(20);

/// The events of names, on its own connection.
#[pyclass(name = "Watch", module = "vmmfd._native", frozen, weakref)]
pub(crate) struct Watch {
    shared: Arc<Shared>,
    made_by: ProcessIdentity,
}

/// The part of a watch that the thread of `fileno` uses too.
struct Shared {
    // No lock is held during a wait, and none while Python runs.
    state: Mutex<State>,
    changed: Condvar,
    closed: CloseFlag,
    connection_closed: CloseFlag,
}

struct State {
    /// The watch and its connection, which is returned to the pool when the watch is dropped. `None` while a thread reads, and after `close`.
    open: Option<(broker::Watch, Checkout)>,
    /// The event that was read and not taken, or the failure of the thread.
    next: Option<Outcome<Next>>,
    /// The position before `next`.
    place: WatchPlace,
    /// The descriptor of `fileno`: readable while there is a `next`, and after `close`.
    ready: Option<EventFd>,
}

struct Next {
    watched: Watched,
    after: WatchPlace,
    converted: Option<Py<PyAny>>,
}

impl State {
    fn put(&mut self, next: Outcome<Next>) {
        self.next = Some(next);
        self.show();
    }

    /// Makes the descriptor readable.
    fn show(&self) {
        // Fails only if the counter is full, and then it is readable.
        let _ = self.ready.as_ref().map(|ready| ready.write(1));
    }

    /// Takes the next event or failure if it is a failure, or converted.
    fn take(&mut self) -> Option<Outcome<Next>> {
        let is_ready = |next: &mut Outcome<Next>| next.as_ref().map_or(true, |next| next.converted.is_some());
        let next = self.next.take_if(is_ready)?;
        let _ = self.ready.as_ref().map(EventFd::read);
        Some(next)
    }
}

impl Shared {
    /// Waits until there is an event, and returns a copy: it stays the next one. Returns `None` if none arrives within `wait`.
    fn fill(&self, wait: Duration) -> Outcome<Option<Watched>> {
        let filled = self.fill_open(Instant::now() + wait);
        self.release_if_closed();
        filled
    }

    fn fill_open(&self, deadline: Instant) -> Outcome<Option<Watched>> {
        loop {
            let mut state = lock(&self.state);
            if self.closed.is_set() {
                return Err(signals::closed_error());
            }
            if let Some(Ok(next)) = &state.next {
                return Ok(Some(next.watched.clone()));
            }
            if let Some(Err(failure)) = state.take() {
                self.changed.notify_all();
                return Err(failure);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            match state.open.take() {
                Some((mut watch, client)) => {
                    drop(state);
                    let read = watch.next(left);
                    let place = watch.place().clone();
                    let mut state = lock(&self.state);
                    state.open = Some((watch, client));
                    self.changed.notify_all();
                    match read? {
                        Some(watched) => state.put(Ok(Next { watched, after: place, converted: None })),
                        // It may be after events of other names.
                        None => {
                            state.place = place;
                            return Ok(None);
                        }
                    }
                }
                None if left.is_zero() => return Ok(None),
                None => {
                    drop(self.changed.wait_timeout(state, left.min(TICK)).unwrap_or_else(PoisonError::into_inner));
                    if signals::must_stop() {
                        return Err(signals::closed_error());
                    }
                }
            }
        }
    }

    /// Releases the connection if the watch is closed: not with the lock, and not while a thread reads, which then releases it itself.
    fn release_if_closed(&self) {
        if self.closed.is_set() {
            let unused = lock(&self.state).open.take();
            drop(unused);
        }
    }

    /// The thread of `fileno`: reads the next event as soon as the last one is taken.
    fn read_ahead(&self) {
        while !self.closed.is_set() {
            let filled = self.fill(FOREVER);
            let mut state = lock(&self.state);
            if let Err(failure) = filled
                && state.next.is_none()
            {
                state.put(Err(failure));
                self.changed.notify_all();
            }
            while state.next.is_some() && !self.closed.is_set() {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    fn close(&self) {
        self.closed.set();
        lock(&self.state).show();
        self.changed.notify_all();
        self.release_if_closed();
    }
}

fn closed_error() -> Failure {
    Failure::invalid("the watch is closed: start another")
}

impl Watch {
    pub(crate) fn new(client: Checkout, prefix: &str, after: Option<(String, u64)>) -> Outcome<Self> {
        let after = after.map(|(instance, seq)| WatchPlace::new(instance, seq));
        let watch = client.watch(prefix, after.as_ref())?;
        let connection_closed = client.closed().clone();
        let place = watch.place().clone();
        let state = State { open: Some((watch, client)), next: None, place, ready: None };
        let shared = Shared {
            state: Mutex::new(state),
            changed: Condvar::new(),
            closed: CloseFlag::default(),
            connection_closed,
        };
        Ok(Self { shared: Arc::new(shared), made_by: ProcessIdentity::current() })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // In a fork, a thread of the parent may have held the lock.
        if self.made_by.is_current() {
            self.shared.close();
        }
    }
}

#[pymethods]
impl Watch {
    /// Waits until there is an event that `taken` can take. Returns whether one arrived within `wait`. Threads may call it at once.
    fn wait(&self, py: Python<'_>, wait: &Bound<'_, PyAny>) -> Outcome<bool> {
        self.made_by.check()?;
        let wait = required(wait, "wait")?;
        let shared = &*self.shared;
        let observer = lock(&shared.state).open.as_ref().map(|(_, client)| client.observer());
        let closed = [&shared.closed, &shared.connection_closed];
        let watched = match signals::run_observed(py, &closed, observer, || shared.fill(wait)) {
            // Closing the watch has interrupted the call.
            Err(Failure::Caller(..)) if shared.closed.is_set() => return Err(closed_error()),
            watched => watched?,
        };
        let Some(watched) = watched else { return Ok(false) };
        let fields = match &watched {
            Watched::Event(event) => json::serialized(py, event)?,
            _ => json::serialized(py, serde_json::json!({"kind": "lost"}))?,
        };
        let event = py.import("vmmfd.records")?.getattr("Event")?.call_method1("_of", (fields,))?;
        if let Some(Ok(next)) = &mut lock(&shared.state).next
            && next.watched == watched
        {
            next.converted = Some(event.unbind());
        }
        Ok(true)
    }

    /// The event that a `wait` found. Reading it takes the event; `None` if another thread took it. It is not a method: Python runs signal
    /// handlers after a call, and their exceptions would lose its result.
    #[getter]
    fn taken(&self) -> Outcome<Option<Py<PyAny>>> {
        self.made_by.check()?;
        let mut state = lock(&self.shared.state);
        if self.shared.closed.is_set() {
            return Ok(None);
        }
        let Some(Ok(next)) = state.take() else { return Ok(None) };
        state.place = next.after;
        self.shared.changed.notify_all();
        Ok(next.converted)
    }

    /// Returns a descriptor that is readable while there is an event, a failure, or the end. From the first call on, a thread reads ahead.
    fn fileno(&self) -> Outcome<RawFd> {
        self.made_by.check()?;
        let mut state = lock(&self.shared.state);
        if let Some(ready) = &state.ready {
            return Ok(ready.as_raw_fd());
        }
        if self.shared.closed.is_set() {
            return Err(closed_error());
        }
        let system = |action: &'static str| move |source| Error::System { action: action.into(), source };
        let ready = eventfd().map_err(system("create an eventfd"))?;
        let number = ready.as_raw_fd();
        let observer = state.open.as_ref().map(|(_, client)| client.observer());
        let shared = Arc::clone(&self.shared);
        let started = spawn("vmmfd-watch", move || {
            signals::enter(vec![shared.closed.clone(), shared.connection_closed.clone()], observer);
            shared.read_ahead();
        });
        started.map_err(system("start a thread"))?;
        state.ready = Some(ready);
        if state.next.is_some() {
            state.show();
        }
        Ok(number)
    }

    /// The broker instance, and the sequence number of the last taken event.
    #[getter]
    fn place(&self) -> Outcome<(String, u64)> {
        self.made_by.check()?;
        let place = lock(&self.shared.state).place.clone();
        Ok((place.instance, place.seq))
    }

    #[getter]
    fn is_closed(&self) -> bool {
        self.shared.closed.is_set()
    }

    /// Closes the watch, and interrupts the waits in it, even from a signal handler on a waiting thread.
    fn close(&self, py: Python<'_>) {
        if self.made_by.is_current() {
            py.detach(|| self.shared.close());
        }
    }
}
