//! Handing an array to other processes at a path, as the commands `produce` and `consume` do.

use std::sync::Arc;

use pyo3::prelude::*;
use vmmfd::{
    bindings,
    channel::{Listener, socket_path},
    driver::Access,
    session::{
        Config,
        handoff::{self, Consumer, ServeOptions, Unchecked},
    },
};

use crate::{
    array::Array,
    device::Wanted,
    driver,
    error::{Failure, Outcome},
    memory::{Memory, RegionMemory},
    text::{FilePath, Text},
    time::required,
    waiting::interruptibly,
};

/// A consumer that was served: its pid, its uid, and its error.
type Served = (i32, u32, Option<String>);

/// Serves an array in memory that this process created.
#[pyfunction]
#[pyo3(name = "_serve", signature = (path, array, consumers, wait))]
pub(crate) fn serve(
    py: Python<'_>,
    path: Option<FilePath>,
    array: &Bound<'_, Array>,
    consumers: u64,
    wait: &Bound<'_, PyAny>,
) -> Outcome<Vec<Served>> {
    let wait = required(wait, "wait")?;
    let array = array.get();
    array.check()?;
    let owner = array.owner();
    let owner =
        owner.ok_or_else(|| Failure::invalid("another process created this memory: only its creator can serve it"))?;
    let descriptor = array.descriptor().clone();
    interruptibly(py, |cancel| {
        let path = socket_path(path.as_ref().map(|FilePath(path)| path.as_path()))?;
        // Finish the work that other libraries queued before a consumer reads.
        owner.device().wait_for_work()?;
        let buffer = handoff::Buffer::new(Arc::clone(owner.shared()), Unchecked, Some(descriptor))?;
        let config = Config::default().timeout(wait).cancel(cancel);
        let listener = Listener::bind(&path, &config)?;
        let options = ServeOptions::default().consumers(consumers);
        let report = handoff::serve(listener, &buffer, &options, &config, &|_| {});
        if let Some(error) = report.error {
            return Err(error.into());
        }
        let outcome = |one: handoff::Served| {
            let peer = one.peer;
            (peer.pid, peer.uid, one.into_result().err().map(|error| error.in_full()))
        };
        Ok(report.served.into_iter().map(outcome).collect())
    })
}

/// Takes an array that another process serves.
#[pyfunction]
#[pyo3(name = "_take", signature = (path, device, backend, readonly, wait))]
pub(crate) fn take(
    py: Python<'_>,
    path: Option<FilePath>,
    device: Option<Wanted>,
    backend: Option<Text>,
    readonly: bool,
    wait: &Bound<'_, PyAny>,
) -> Outcome<Array> {
    let wait = required(wait, "wait")?;
    interruptibly(py, |cancel| {
        let path = socket_path(path.as_ref().map(|FilePath(path)| path.as_path()))?;
        let driver = driver::driver(backend.as_deref())?;
        let config = Config::default().timeout(wait).cancel(cancel);
        let consumer = Consumer::connect(&driver, device.map(|Wanted(selector)| selector), &path, &config, &|_| {})?;
        let access = if readonly { Access::ReadOnly } else { Access::ReadWrite };
        let (object, descriptor) = bindings::take(consumer, access)?;
        Array::new(RegionMemory::new(Arc::new(object)) as Arc<dyn Memory>, descriptor)
    })
}
