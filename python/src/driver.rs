//! The drivers of this process: each is opened when it is first asked for, and kept.

use std::sync::{Mutex, PoisonError};

use vmmfd::{
    driver::{Backend, Choice, Driver, open},
    fork::PerProcess,
    memory::{Device, Selector},
};

use crate::error::{Failure, Outcome};

/// The drivers that were opened: a fork opens its own, or learns that it can't. What its parent opened is not closed in it.
static OPEN: PerProcess<Mutex<Opened>> = PerProcess::new(Mutex::default);

#[derive(Default)]
struct Opened {
    cuda: Option<Driver>,
    host: Option<Driver>,
    auto: Option<Driver>,
}

/// The driver of a backend: `"auto"` (CUDA; the host only where there is no driver or no device), `"cuda"` or `"host"`.
///
/// Blocks for 50 to 95 ms the first time on CUDA: release the GIL. It is never closed.
///
/// # Errors
/// `ValueError` for another name; those of [`open`].
pub(crate) fn driver(backend: &str) -> Outcome<Driver> {
    let choice: Choice =
        backend.parse().map_err(|_| Failure::invalid(format!("backend={backend:?} is none of auto, cuda and host")))?;
    let mut opened = OPEN.get().lock().unwrap_or_else(PoisonError::into_inner);
    let slot = match choice {
        Choice::Auto => &mut opened.auto,
        Choice::Only(Backend::Cuda) => &mut opened.cuda,
        Choice::Only(Backend::Host) => &mut opened.host,
    };
    if let Some(driver) = slot {
        return Ok(driver.clone());
    }
    let driver = open(choice)?.driver;
    *slot = Some(driver.clone());
    Ok(driver)
}

/// The device that a caller names: `None` is the first one.
///
/// # Errors
/// Those of [`Device::find`].
pub(crate) fn device(driver: &Driver, wanted: Option<Selector>) -> Outcome<Device> {
    Ok(Device::find(driver, wanted.unwrap_or_default())?)
}
