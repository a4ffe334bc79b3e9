//! The drivers of this process: each is opened when it is first asked for, and kept.

use std::{
    process,
    sync::{Mutex, PoisonError},
};

use vmmfd::{
    driver::{Backend, Choice, Driver, open},
    memory::{Device, Selector},
};

use crate::error::{Failure, Outcome};

/// The drivers that were opened, and by which process: a fork opens its own, or learns that it can't.
static OPEN: Mutex<Opened> = Mutex::new(Opened { by: 0, cuda: None, host: None, auto: None });

struct Opened {
    by: u32,
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
    let mut opened = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    if opened.by != process::id() {
        // What the parent opened stays its own: it is forgotten here, and not closed.
        let parents = std::mem::replace(&mut *opened, Opened { by: process::id(), cuda: None, host: None, auto: None });
        std::mem::forget(parents);
    }
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
