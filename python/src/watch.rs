//! `_native.Watch`: the events of names. `vmmfd.Watch` wraps it.

use std::{
    sync::{Mutex, MutexGuard, TryLockError},
    time::Duration,
};

use pyo3::prelude::*;
use vmmfd::{
    broker::{self, WatchPlace, Watched},
    fork::ProcessIdentity,
};

use crate::{
    connections::Checkout,
    error::{Failure, Outcome},
    json,
    signals::{self, CloseFlag},
    time::seconds,
};

/// The longest single wait of a library call when there is no timeout.
const LONG: Duration = Duration::from_secs(3600);

type Open = (broker::Watch, Checkout);

/// The events of names, on its own connection.
#[pyclass(name = "Watch", module = "vmmfd._native", frozen, weakref)]
pub(crate) struct Watch {
    /// The watch and its connection, which is returned to the pool when the watch is dropped.
    open: Mutex<Option<Open>>,
    closed: CloseFlag,
    connection_closed: CloseFlag,
    made_by: ProcessIdentity,
}

impl Watch {
    pub(crate) fn new(client: Checkout, prefix: &str, after: Option<(String, u64)>) -> Outcome<Self> {
        let after = after.map(|(instance, seq)| WatchPlace::new(instance, seq));
        let watch = client.watch(prefix, after.as_ref())?;
        let connection_closed = client.closed().clone();
        Ok(Self {
            open: Mutex::new(Some((watch, client))),
            closed: CloseFlag::default(),
            connection_closed,
            made_by: ProcessIdentity::current(),
        })
    }

    fn check(&self) -> Outcome<()> {
        Ok(self.made_by.check()?)
    }

    /// Locks the watch, unless another thread uses it.
    fn take(&self) -> Outcome<InUse<'_>> {
        let open = self.try_lock().ok_or_else(|| {
            Failure::unusable(
                "another thread waits in this watch: start one for each thread, and ask this one for its place",
            )
        })?;
        Ok(InUse { of: self, open: Some(open) })
    }

    fn try_lock(&self) -> Option<MutexGuard<'_, Option<Open>>> {
        match self.open.try_lock() {
            Ok(open) => Some(open),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Releases the watch if it is closed. Does not block: a thread that uses it releases it when done.
    fn release_if_closed(&self) {
        if self.closed.is_set() {
            let open = self.try_lock().and_then(|mut open| open.take());
            drop(open);
        }
    }
}

/// A watch in use by a thread. Another thread, or a signal handler on this thread, may close it in the meantime.
struct InUse<'a> {
    of: &'a Watch,
    open: Option<MutexGuard<'a, Option<Open>>>,
}

impl InUse<'_> {
    fn open(&mut self) -> Outcome<&mut broker::Watch> {
        self.open.as_mut().and_then(|open| open.as_mut()).map(|(watch, _)| watch).ok_or_else(closed_error)
    }
}

impl Drop for InUse<'_> {
    fn drop(&mut self) {
        self.open = None;
        self.of.release_if_closed();
    }
}

fn closed_error() -> Failure {
    Failure::unusable("the watch is closed: start another")
}

#[pymethods]
impl Watch {
    /// Returns the next event as a dict: kind, seq, at_ms, name, version, id, uid, pid, message. An event of kind `lost` only has its kind.
    /// Returns None if none arrives within `wait`.
    fn next<'py>(&self, py: Python<'py>, wait: &Bound<'_, PyAny>) -> Outcome<Option<Bound<'py, PyAny>>> {
        self.check()?;
        let wait = seconds(wait, "wait")?;
        let observer = self.try_lock().and_then(|open| open.as_ref().map(|(_, client)| client.observer()));
        let watched = signals::run_observed(py, &[&self.closed, &self.connection_closed], observer, || {
            let mut used = self.take()?;
            let watch = used.open()?;
            loop {
                let watched = watch.next(wait.unwrap_or(LONG))?;
                if watched.is_some() || wait.is_some() {
                    return Ok(watched);
                }
            }
        });
        // Closing the watch may have interrupted the call.
        let watched = match watched {
            Err(Failure::Caller(..)) if self.closed.is_set() => return Err(closed_error()),
            watched => watched?,
        };
        match watched {
            None => Ok(None),
            Some(Watched::Event(event)) => json::serialized(py, event).map(Some),
            Some(_) => json::serialized(py, serde_json::json!({"kind": "lost"})).map(Some),
        }
    }

    /// The broker instance, and the sequence number of the last returned event.
    #[getter]
    fn place(&self, py: Python<'_>) -> Outcome<(String, u64)> {
        self.check()?;
        py.detach(|| {
            let mut used = self.take()?;
            let watch = used.open()?;
            Ok((watch.place().instance.clone(), watch.place().seq))
        })
    }

    #[getter]
    fn is_closed(&self) -> bool {
        self.closed.is_set()
    }

    /// Closes the watch, and interrupts a wait in it, even from a signal handler on the waiting thread.
    fn close(&self, py: Python<'_>) {
        if !self.made_by.is_current() {
            return;
        }
        self.closed.set();
        py.detach(|| self.release_if_closed());
    }
}
