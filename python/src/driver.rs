//! The drivers of this process: each is opened on first use, and never closed.

use vmmfd::{
    bindings,
    driver::{Backend, Choice, Driver},
    memory::{Device, Selector},
};

use crate::{
    device::Wanted,
    error::{Failure, Outcome},
};

/// The environment's backend, as for the commands.
const VARIABLE: &str = "VMMFD_BACKEND";

/// Returns the chosen backend: without a choice, the environment's `VMMFD_BACKEND`, else `auto`.
///
/// # Errors
/// `ValueError` for another name.
pub(crate) fn choice(chosen: Option<&str>) -> Outcome<Choice> {
    let set = std::env::var_os(VARIABLE).filter(|set| !set.is_empty());
    let (name, from) = match (chosen, &set) {
        (Some(chosen), _) => (chosen.into(), "backend"),
        (None, Some(set)) => (set.to_string_lossy(), VARIABLE),
        (None, None) => return Ok(Choice::Auto),
    };
    name.parse().map_err(|_| Failure::invalid(format!("{from}={name:?} is not one of auto, cuda, host")))
}

/// Returns the name of the chosen backend.
///
/// # Errors
/// As [`choice`].
pub(crate) fn backend(chosen: Option<&str>) -> Outcome<&'static str> {
    Ok(match choice(chosen)? {
        Choice::Auto => "auto",
        Choice::Only(Backend::Cuda) => "cuda",
        Choice::Only(Backend::Host) => "host",
    })
}

/// Returns the driver of a backend: `"auto"` (CUDA, or the host if there is no driver or no device), `"cuda"` or `"host"`.
///
/// `None` is the choice of the environment, as for [`choice`]. On CUDA, the first call blocks for 50 to 95 ms: release the GIL.
///
/// # Errors
/// As [`choice`] and [`vmmfd::driver::open`].
pub(crate) fn driver<'a>(backend: impl Into<Option<&'a str>>) -> Outcome<Driver> {
    Ok(bindings::driver(choice(backend.into())?)?.0)
}

/// Opens a caller's device of a backend: `None` is the first device. Blocks as [`driver`].
///
/// # Errors
/// As [`driver`] and [`Device::find`].
pub(crate) fn open_device<'a>(backend: impl Into<Option<&'a str>>, wanted: Option<Wanted>) -> Outcome<Device> {
    device(&driver(backend)?, wanted.map(|Wanted(selector)| selector))
}

/// Returns the named device; `None` is the first device.
///
/// # Errors
/// As [`Device::find`].
pub(crate) fn device(driver: &Driver, wanted: Option<Selector>) -> Outcome<Device> {
    Ok(Device::find(driver, wanted.unwrap_or_default())?)
}
