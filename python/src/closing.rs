//! Values of Python objects that can be closed.

use std::sync::{Arc, Mutex};

use pyo3::prelude::*;
use vmmfd::{bindings::lock, fork::ProcessIdentity, memory::Device};

use crate::{
    error::{Failure, Outcome},
    memory::{Export, Tie},
    reaper::Reaped,
    signals::{self, CloseFlag},
};

/// The value of a Python object until it is closed, and the process that created it.
pub(crate) struct UntilClosed<T> {
    pub(crate) value: Mutex<Option<T>>,
    pub(crate) made_by: ProcessIdentity,
}

impl<T: Send> UntilClosed<T> {
    pub(crate) fn new(value: T, made_by: ProcessIdentity) -> Self {
        Self { value: Mutex::new(Some(value)), made_by }
    }

    pub(crate) fn is_closed(&self) -> bool {
        lock(&self.value).is_none()
    }

    /// Takes the value: the object is closed from now on. `None` if it is closed already, and in a fork.
    pub(crate) fn take(&self) -> Option<T> {
        self.made_by.is_current().then(|| lock(&self.value).take()).flatten()
    }

    /// Drops the value with the GIL released. Does nothing in a fork.
    pub(crate) fn close(&self, py: Python<'_>) {
        let value = self.take();
        py.detach(|| drop(value));
    }
}

impl<T: Send + Clone> UntilClosed<T> {
    /// # Errors
    /// `ValueError` with this sentence if it is closed; `ValueError` in a fork.
    pub(crate) fn get(&self, closed: &str) -> Outcome<T> {
        self.made_by.check()?;
        lock(&self.value).clone().ok_or_else(|| Failure::invalid(closed))
    }
}

/// One side of a stream until it is closed. Closing it interrupts its calls in other threads.
pub(crate) struct Side<T: Send + Sync + 'static> {
    open: UntilClosed<Arc<Reaped<T>>>,
    closed: CloseFlag,
    name: &'static str,
    _tie: Export,
}

impl<T: Send + Sync + 'static> Side<T> {
    pub(crate) fn new(value: T, device: &Device, name: &'static str, tie: Tie) -> Self {
        let open = UntilClosed::new(Arc::new(Reaped::new(device, value)), ProcessIdentity::current());
        Self { open, closed: CloseFlag::default(), name, _tie: tie.counted(device) }
    }

    /// Returns the value. Drop it without the GIL.
    ///
    /// # Errors
    /// `ValueError` if it is closed, and in a fork.
    pub(crate) fn get(&self) -> Outcome<Arc<Reaped<T>>> {
        self.open.get(&format!("the {} is closed", self.name))
    }

    /// Runs a call with the GIL released.
    ///
    /// # Errors
    /// The errors of [`signals::run`] and [`Side::get`].
    pub(crate) fn run<R: Send>(&self, py: Python<'_>, work: impl FnOnce(&T) -> Outcome<R> + Send) -> Outcome<R> {
        let value = self.get()?;
        let done = signals::run(py, &[&self.closed], move || {
            let done = work(&value);
            // The last reference, if it was closed meanwhile: without the GIL.
            drop(value);
            done
        });
        match done {
            Err(Failure::Caller("Interrupted", _)) if self.closed.is_set() => {
                Err(Failure::Caller("Interrupted", format!("the {} was closed during the call", self.name)))
            }
            done => done,
        }
    }

    /// Fails in a fork.
    pub(crate) fn check(&self) -> Outcome<()> {
        Ok(self.open.made_by.check()?)
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.open.is_closed()
    }

    /// Closes it as [`Side::close`], and drops what was received for a later call.
    pub(crate) fn close_with<Q: Default + Send>(&self, py: Python<'_>, received: &Mutex<Q>) {
        if self.check().is_ok() {
            let unused = std::mem::take(&mut *lock(received));
            py.detach(|| drop(unused));
        }
        self.close(py);
    }

    /// Closes it once its calls in other threads have returned. Does nothing in a fork.
    pub(crate) fn close(&self, py: Python<'_>) {
        let value = self.open.take();
        self.closed.set();
        py.detach(|| value.and_then(Arc::into_inner).map(Reaped::release_now));
    }
}
