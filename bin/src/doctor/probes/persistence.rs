//! The probe of persistence mode, which keeps memory that only descriptors hold.

use serde_json::json;
use vmmfd::{driver::Backend, internals::nvml};

use crate::doctor::{
    ErrorDetails, Status,
    context::ProbeContext,
    outcome::{ProbeOutcome, ProbeResult},
};

/// Queries the mode without changing it. A real test would require every process that uses the device to exit.
pub(super) fn persistence(context: &mut ProbeContext) -> ProbeResult {
    if context.device.backend() == Backend::Host {
        let meaning = "Host memory needs no driver: a descriptor keeps it until the machine restarts.";
        return Ok(ProbeOutcome::new(Status::Skipped, meaning));
    }
    Ok(match nvml::persistence(context.device.uuid()) {
        Ok(true) => ProbeOutcome::ok(
            "Persistence mode is on: memory that only descriptors hold stays while no process uses the device. It goes with a \
             reset of the device, a reload of the driver's module, or a restart of the machine.",
        )
        .figure("persistence_mode", json!(1)),
        Ok(false) => ProbeOutcome::new(
            Status::Unsupported,
            "Memory that only descriptors hold goes when the last process that uses the device ends.",
        )
        .figure("persistence_mode", json!(0))
        .with_error(ErrorDetails::new("unsupported", "persistence mode is off".to_owned())),
        Err(why) => {
            let meaning = format!("NVML, which knows whether persistence mode is on, can't be asked: {why}.");
            ProbeOutcome::new(Status::Skipped, meaning)
        }
    })
}
