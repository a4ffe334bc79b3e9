//! `_native.Timeline`, which `vmmfd.Timeline` wraps, and the names of orders and completions.

#![allow(unsafe_code)]

use std::{
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
    sync::Mutex,
};

use pyo3::{ffi, prelude::*};
use vmmfd::{
    Error,
    bindings::lock,
    error::PeerError,
    memory::Device,
    session::order::{Completion, Order, Timeline as RustTimeline},
};

use crate::{
    closing::Side,
    device::Wanted,
    driver,
    error::{Failure, Outcome},
    memory::Tie,
    signals,
    stream_user::{Given, StreamUser},
    text::Text,
    time::required,
};

/// The name of a completion for Python.
pub(crate) fn name(completion: Completion) -> &'static str {
    match completion {
        Completion::Done => "done",
        Completion::Pending => "pending",
        Completion::Lost => "lost",
    }
}

/// The kind of an order, and the reason.
pub(crate) fn described(order: Order) -> (&'static str, Option<String>) {
    match order {
        Order::Gpu => ("gpu", None),
        Order::Cpu { reason } => ("cpu", Some(reason)),
    }
}

/// Duplicates a descriptor: an int, or an object with `fileno()`.
fn descriptor(given: &Bound<'_, PyAny>) -> Outcome<OwnedFd> {
    // SAFETY: the argument is an object.
    let number = unsafe { ffi::PyObject_AsFileDescriptor(given.as_ptr()) };
    if number < 0 {
        return Err(PyErr::fetch(given.py()).into());
    }
    // SAFETY: the caller's object keeps it open during this call. dup(2) reports a descriptor that is closed all the same.
    let duplicate = unsafe { BorrowedFd::borrow_raw(number) }.try_clone_to_owned();
    Ok(duplicate.map_err(|error| Error::system(format!("duplicate descriptor {number}"), error))?)
}

/// A timeline.
#[pyclass(name = "Timeline", module = "vmmfd._native", frozen, weakref)]
pub(crate) struct Timeline {
    side: Side<RustTimeline>,
    device: Option<Device>,
    /// Keeps the stream with the last record: the handle of a new stream could be the same.
    last: Mutex<Option<StreamUser>>,
}

#[pymethods]
impl Timeline {
    #[new]
    fn new(py: Python<'_>, device: Option<Wanted>, backend: Option<Text>) -> Outcome<Self> {
        signals::run(py, &[], || {
            let device = driver::open_device(backend.as_deref(), device)?;
            Ok(Self::of(RustTimeline::create(&device)?, &device, true))
        })
    }

    /// Opens a timeline of another process: without a device, no stream can use it.
    #[staticmethod]
    fn open(py: Python<'_>, fd: &Bound<'_, PyAny>, device: Option<Wanted>, backend: Option<Text>) -> Outcome<Self> {
        let file = descriptor(fd)?;
        signals::run(py, &[], || {
            let for_streams = device.is_some();
            let backend = if for_streams { backend.as_deref() } else { Some("host") };
            let device = driver::open_device(backend, device)?;
            Ok(Self::of(RustTimeline::open(file, for_streams.then_some(&device))?, &device, for_streams))
        })
    }

    fn record(&self, py: Python<'_>, stream: Given) -> Outcome<u64> {
        let (value, _former) = self.side.run(py, |timeline| {
            let user = StreamUser::new(self.device()?, stream)?;
            let mut last = lock(&self.last);
            let value = timeline.record(user.stream())?;
            Ok((value, last.replace(user)))
        })?;
        Ok(value)
    }

    fn wait(&self, py: Python<'_>, stream: Given, value: u64, timeout: &Bound<'_, PyAny>) -> Outcome<()> {
        let limit = required(timeout, "timeout")?;
        self.side
            .run(py, |timeline| Ok(timeline.wait(StreamUser::new(self.device()?, stream)?.stream(), value, limit)?))
    }

    /// Returns whether the value was reached in time.
    fn wait_cpu(&self, py: Python<'_>, value: u64, timeout: &Bound<'_, PyAny>) -> Outcome<bool> {
        let (limit, cancel) = (required(timeout, "timeout")?, signals::cancel()?);
        self.side.run(py, |timeline| match timeline.wait_cpu(value, limit, &cancel) {
            Err(Error::Peer(PeerError::Timeout { .. })) => Ok(false),
            reached => Ok(reached.map(|()| true)?),
        })
    }

    fn completion(&self, py: Python<'_>, value: u64) -> Outcome<&'static str> {
        self.side.run(py, |timeline| Ok(name(timeline.completion(value))))
    }

    #[getter]
    fn value(&self, py: Python<'_>) -> Outcome<u64> {
        self.side.run(py, |timeline| Ok(timeline.value()))
    }

    fn release(&self, py: Python<'_>) -> Outcome<()> {
        self.side.run(py, |timeline| {
            timeline.release();
            Ok(())
        })
    }

    fn release_with(&self, py: Python<'_>, peer: &Bound<'_, PyAny>) -> Outcome<()> {
        let peer = descriptor(peer)?;
        self.side.run(py, |timeline| Ok(timeline.release_with(peer)?))
    }

    fn fileno(&self, py: Python<'_>) -> Outcome<RawFd> {
        self.side.run(py, |timeline| Ok(timeline.as_fd().as_raw_fd()))
    }

    #[getter]
    fn is_closed(&self) -> bool {
        self.side.is_closed()
    }

    fn close(&self, py: Python<'_>) {
        self.side.close(py);
    }
}

impl Timeline {
    fn of(timeline: RustTimeline, device: &Device, for_streams: bool) -> Self {
        let side = Side::new(timeline, device, "timeline", Tie::Timed);
        Self { side, device: for_streams.then(|| device.clone()), last: Mutex::default() }
    }

    fn device(&self) -> Outcome<&Device> {
        let problem = "this timeline was opened without device=: no stream can use it";
        self.device.as_ref().ok_or_else(|| Failure::invalid(problem))
    }
}
