//! `_native.Watch`: the events of names. `vmmfd.Watch` is made of it.

use std::{
    process,
    sync::{Mutex, PoisonError, TryLockError},
    time::Duration,
};

use pyo3::prelude::*;
use vmmfd::broker::{self, Event, WatchPlace, Watched};

use crate::{
    client::{Taken, check_process, seconds},
    error::{Failure, Outcome},
    json,
    signals::{self, Ended},
};

/// How long the library is asked to wait at once, where there is no end.
const LONG: Duration = Duration::from_secs(3600);

/// What happens to names. It has a connection of its own.
#[pyclass(name = "Watch", module = "vmmfd._native", frozen, weakref)]
pub(crate) struct Watch {
    /// The watch, and its connection, which is given back behind it.
    open: Mutex<Option<(broker::Watch, Taken)>>,
    ended: Ended,
    of: Ended,
    pid: u32,
}

impl Watch {
    pub(crate) fn new(client: Taken, prefix: &str, after: Option<(String, u64)>) -> Outcome<Self> {
        let after = after.map(|(instance, seq)| WatchPlace { instance, seq });
        let watch = client.watch(prefix, after.as_ref())?;
        let of = client.ended().clone();
        Ok(Self { open: Mutex::new(Some((watch, client))), ended: Ended::default(), of, pid: process::id() })
    }

    fn check(&self) -> Outcome<()> {
        check_process(self.pid, "began this watch", "connect again")
    }
}

fn closed() -> Failure {
    Failure::unusable("the watch was closed: begin another one")
}

#[pymethods]
impl Watch {
    /// The next event as a dict: kind, seq, at_ms, name, version, id, uid, pid, message. Of kind `lost` it has no more. None at the timeout.
    fn next<'py>(&self, py: Python<'py>, timeout: &Bound<'_, PyAny>) -> Outcome<Option<Bound<'py, PyAny>>> {
        self.check()?;
        let timeout = seconds(timeout, "timeout")?;
        let watched = signals::run(py, &[&self.ended, &self.of], || {
            let mut open = match self.open.try_lock() {
                Ok(open) => open,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => {
                    return Err(Failure::unusable("another thread waits in this watch: begin one for each thread"));
                }
            };
            let (watch, _) = open.as_mut().ok_or_else(closed)?;
            loop {
                let watched = watch.next(timeout.unwrap_or(LONG))?;
                if watched.is_some() || timeout.is_some() {
                    return Ok(watched);
                }
            }
        });
        // What ended it may have been this very watch.
        let watched = match watched {
            Err(Failure::Caller(..)) if self.ended.is_ended() => return Err(closed()),
            watched => watched?,
        };
        match watched {
            None => Ok(None),
            Some(Watched::Event(event)) => shown(py, &event).map(Some),
            Some(_) => Ok(Some(json::to_python(py, &serde_json::json!({"kind": "lost"}))?)),
        }
    }

    /// Behind which event of which broker it is.
    #[getter]
    fn place(&self, py: Python<'_>) -> Outcome<(String, u64)> {
        self.check()?;
        py.detach(|| {
            let open = match self.open.try_lock() {
                Ok(open) => open,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => {
                    return Err(Failure::unusable("another thread waits in this watch: ask it for its place"));
                }
            };
            let (watch, _) = open.as_ref().ok_or_else(closed)?;
            Ok((watch.place().instance.clone(), watch.place().seq))
        })
    }

    #[getter]
    fn is_closed(&self) -> bool {
        self.ended.is_ended()
    }

    /// Ends it, and a wait of another thread in it.
    fn close(&self, py: Python<'_>) {
        if process::id() != self.pid {
            return;
        }
        self.ended.end();
        // A thread that waits has the lock: it looks whether it was closed.
        let open = py.detach(|| self.open.lock().unwrap_or_else(PoisonError::into_inner).take());
        py.detach(|| drop(open));
    }
}

fn shown<'py>(py: Python<'py>, event: &Event) -> Outcome<Bound<'py, PyAny>> {
    let value = serde_json::to_value(event);
    let value = value.map_err(|error| Failure::unusable(format!("the broker's event can't be shown: {error}")))?;
    Ok(json::to_python(py, &value)?)
}
