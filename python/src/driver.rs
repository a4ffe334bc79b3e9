//! The drivers of this process: each is opened on first use, and never closed.

use std::sync::{Mutex, PoisonError};

use vmmfd::{
    driver::{Backend, Choice, Driver, open},
    fork::PerProcess,
    memory::{Device, Selector},
};

use crate::error::{Failure, Outcome};

/// The open drivers. A fork opens its own, or fails; it does not close its parent's.
static OPEN: PerProcess<Mutex<OpenDrivers>> = PerProcess::new(Mutex::default);

#[derive(Default)]
struct OpenDrivers {
    cuda: Option<Driver>,
    host: Option<Driver>,
    auto: Option<Driver>,
}

/// Returns the driver of a backend: `"auto"` (CUDA, or the host if there is no driver or no device), `"cuda"` or `"host"`.
///
/// On CUDA, the first call blocks for 50 to 95 ms: release the GIL.
///
/// # Errors
/// `ValueError` for another name; as [`open`].
pub(crate) fn driver(backend: &str) -> Outcome<Driver> {
    let choice: Choice =
        backend.parse().map_err(|_| Failure::invalid(format!("backend={backend:?} is not one of auto, cuda, host")))?;
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

/// Returns the named device; `None` is the first device.
///
/// # Errors
/// As [`Device::find`].
pub(crate) fn device(driver: &Driver, wanted: Option<Selector>) -> Outcome<Device> {
    Ok(Device::find(driver, wanted.unwrap_or_default())?)
}
