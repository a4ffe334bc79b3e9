//! What is of the machine as a whole.

use std::sync::Arc;

use nix::sys::resource::{Resource, getrlimit};
use serde_json::json;

use super::Found;
use crate::{
    driver::{Backend, Choice, Driver, host::HostDriver, open},
    error::{Error, Result},
    memory::Device,
};

pub(super) fn driver(backend: Backend) -> Result<Found> {
    let driver: Arc<dyn Driver> = open(Choice::Only(backend))?.driver;
    let version = driver.version()?;
    let devices = Device::all(&driver)?;
    let listed: Vec<_> = devices
        .iter()
        .map(|device| json!({ "ordinal": device.ordinal(), "name": device.name(), "uuid": device.uuid() }))
        .collect();
    let meaning = match backend {
        Backend::Host => "Ordinary memory of this machine stands in for a GPU.".to_owned(),
        Backend::Cuda => format!(
            "The driver starts, supports CUDA {}.{}, and has {}.",
            version / 1000,
            version % 1000 / 10,
            match devices.len() {
                1 => "1 device".to_owned(),
                count => format!("{count} devices"),
            }
        ),
    };
    let found = Found::ok(meaning).figure("devices", listed);
    // The host backend is of no library, and of no version.
    let found = if backend == Backend::Cuda { found.figure("version", version) } else { found };
    Ok(match driver.diagnosis().and_then(|diagnosis| diagnosis.library()) {
        Ok(library) => found.figure("library", library.display().to_string()),
        Err(_) => found,
    })
}

pub(super) fn descriptors(_: Backend) -> Result<Found> {
    /// What a buffer of many chunks may come to need: at 2 MiB each, 2 GiB.
    const PLENTY: u64 = 1024;
    let limit = getrlimit(Resource::RLIMIT_NOFILE);
    let (soft, hard) = limit.map_err(|errno| Error::system("read the limit of open files", errno))?;
    let found = match hard {
        0..PLENTY => Found::failed(format!(
            "A process may hold only {hard} descriptors: a buffer of many chunks needs one for each."
        )),
        // The commands raise the limit that holds now as far as they may.
        _ => Found::ok(format!("A process may hold {hard} descriptors: one for each allocation that it shares.")),
    };
    Ok(found.figure("soft", soft).figure("hard", hard))
}

pub(super) fn host_memory(_: Backend) -> Result<Found> {
    let info = HostDriver::new().memory_info(0)?;
    let meaning = "What the machine, or the control group that this runs in, has left.";
    Ok(Found::ok(meaning).figure("free_bytes", info.free).figure("total_bytes", info.total))
}
