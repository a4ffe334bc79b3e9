//! Handing an array to other processes at a path, as the commands `produce` and `consume` do.

use std::{path::PathBuf, sync::Arc, time::Duration};

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
    time::seconds,
    waiting::interruptibly,
};

/// A consumer that was served: its pid, its uid, and its error.
type Served = (i32, u32, Option<String>);

/// Serves an array in memory that this process created.
#[pyfunction]
#[pyo3(name = "_serve", signature = (path, array, consumers, wait))]
pub(crate) fn serve(
    py: Python<'_>,
    path: Option<PathBuf>,
    array: &Bound<'_, Array>,
    consumers: u64,
    wait: &Bound<'_, PyAny>,
) -> Outcome<Vec<Served>> {
    let wait = limit(wait, "wait")?;
    let array = array.get();
    array.check()?;
    let owner = array.owner();
    let owner =
        owner.ok_or_else(|| Failure::invalid("another process created this memory: only its creator can serve it"))?;
    let descriptor = array.descriptor().clone();
    interruptibly(py, |cancel| {
        let path = socket_path(path.as_deref())?;
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
    path: Option<PathBuf>,
    device: Option<Wanted>,
    backend: Option<&str>,
    readonly: bool,
    wait: &Bound<'_, PyAny>,
) -> Outcome<Array> {
    let wait = limit(wait, "wait")?;
    interruptibly(py, |cancel| {
        let path = socket_path(path.as_deref())?;
        let driver = driver::driver(backend)?;
        let config = Config::default().timeout(wait).cancel(cancel);
        let consumer = Consumer::connect(&driver, device.map(|Wanted(selector)| selector), &path, &config, &|_| {})?;
        let access = if readonly { Access::ReadOnly } else { Access::ReadWrite };
        let (object, descriptor) = bindings::take(consumer, access)?;
        Array::new(RegionMemory::new(Arc::new(object)) as Arc<dyn Memory>, descriptor)
    })
}

/// Parses a timeout, which must not be `None`.
fn limit(given: &Bound<'_, PyAny>, name: &str) -> Outcome<Duration> {
    seconds(given, name)?
        .ok_or_else(|| Failure::invalid(format!("{name}=None is not a time: give seconds, or float(\"inf\")")))
}
