//! `_native.Watch`: the events of names. `vmmfd.Watch` is made of it.

use std::{
    sync::{Mutex, MutexGuard, TryLockError},
    time::Duration,
};

use pyo3::prelude::*;
use vmmfd::{
    broker::{self, Event, WatchPlace, Watched},
    fork::ProcessIdentity,
};

use crate::{
    connections::{Taken, check_process},
    error::{Failure, Outcome},
    json,
    signals::{self, Ended},
    time::seconds,
};

/// How long the library is asked to wait at once, where there is no end.
const LONG: Duration = Duration::from_secs(3600);

/// A watch, and its connection.
type Open = (broker::Watch, Taken);

/// What happens to names. It has a connection of its own.
#[pyclass(name = "Watch", module = "vmmfd._native", frozen, weakref)]
pub(crate) struct Watch {
    /// The watch, and its connection, which is given back behind it.
    open: Mutex<Option<Open>>,
    ended: Ended,
    of: Ended,
    made_by: ProcessIdentity,
}

impl Watch {
    pub(crate) fn new(client: Taken, prefix: &str, after: Option<(String, u64)>) -> Outcome<Self> {
        let after = after.map(|(instance, seq)| WatchPlace::new(instance, seq));
        let watch = client.watch(prefix, after.as_ref())?;
        let of = client.ended().clone();
        Ok(Self {
            open: Mutex::new(Some((watch, client))),
            ended: Ended::default(),
            of,
            made_by: ProcessIdentity::current(),
        })
    }

    fn check(&self) -> Outcome<()> {
        check_process(self.made_by, "began this watch", "connect again")
    }

    /// The right to use it, if no other thread has it.
    fn take(&self) -> Outcome<InUse<'_>> {
        let open = self.try_lock().ok_or_else(|| {
            Failure::unusable("another thread waits in this watch: begin one for each thread, and ask it for its place")
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

    /// Lets go of it once it is closed. Does not block: a thread that uses it lets go of it then.
    fn let_go(&self) {
        if self.ended.is_ended() {
            let open = self.try_lock().and_then(|mut open| open.take());
            drop(open);
        }
    }
}

/// A watch that a thread uses. It may be closed meanwhile, by another thread, or by a signal's handler on this one.
struct InUse<'a> {
    of: &'a Watch,
    open: Option<MutexGuard<'a, Option<Open>>>,
}

impl InUse<'_> {
    fn open(&mut self) -> Outcome<&mut broker::Watch> {
        self.open.as_mut().and_then(|open| open.as_mut()).map(|(watch, _)| watch).ok_or_else(closed)
    }
}

impl Drop for InUse<'_> {
    fn drop(&mut self) {
        self.open = None;
        self.of.let_go();
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
            let mut used = self.take()?;
            let watch = used.open()?;
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
            let mut used = self.take()?;
            let watch = used.open()?;
            Ok((watch.place().instance.clone(), watch.place().seq))
        })
    }

    #[getter]
    fn is_closed(&self) -> bool {
        self.ended.is_ended()
    }

    /// Ends it, and a wait in it, of another thread or of the one that runs this in a signal's handler.
    fn close(&self, py: Python<'_>) {
        if !self.made_by.is_current() {
            return;
        }
        self.ended.end();
        py.detach(|| self.let_go());
    }
}

fn shown<'py>(py: Python<'py>, event: &Event) -> Outcome<Bound<'py, PyAny>> {
    let value = serde_json::to_value(event);
    let value = value.map_err(|error| Failure::unusable(format!("the broker's event can't be shown: {error}")))?;
    Ok(json::to_python(py, &value)?)
}
