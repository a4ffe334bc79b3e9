//! The probe of memory that a process without the driver keeps, as a broker does.

use std::{fs, os::fd::AsFd, sync::Arc, time::Instant};

use serde_json::Value;
use vmmfd::{
    driver::Access,
    error::{Error, PeerError, Result},
    memory::{Allocation, Device, Mapping},
};

use super::{
    machine::loaded,
    one_process::{matches_pattern, write},
};
use crate::{
    check::pattern::{Pattern, random_salt},
    doctor::{
        ErrorDetails,
        context::ProbeContext,
        process::Role,
        report::{ProbeResult, failed, ok, skipped, timed},
    },
    line::{Line, only},
    verbs::HasVerbs,
};

/// The size of the memory that a process made, or its error.
type Made = std::result::Result<u64, ErrorDetails>;

pub(super) fn held_descriptor(context: &mut ProbeContext) -> ProbeResult {
    let pattern = random_salt()?;
    let make = Role::Make { device: context.device.ordinal(), pattern };
    let mut maker = context.start_child("the process that makes the memory", make)?;
    let mut holder = context.start_child("the process that holds the descriptor", Role::Hold)?;
    let started = Instant::now();
    let (made, fds) = maker.line.receive_with::<Made>().map_err(|error| maker.explain(error, started))?;
    let size = made.map_err(ErrorDetails::of_other_end)?;
    // This process has the driver, so it must not keep the memory alive itself.
    holder.line.send_with(&(), &[only(fds)?.as_fd()])?;
    // The descriptor has arrived. The answer is a driver library that the process has mapped.
    if let Some(library) = holder.receive::<Option<String>>()? {
        let meaning = format!("Every process here has {library} mapped, so none can hold a descriptor without it.");
        return Ok(skipped(meaning));
    }
    maker.kill();
    // The process returns the descriptor and closes its own.
    holder.line.send(&())?;
    let started = Instant::now();
    let ((), fds) = holder.line.receive_with().map_err(|error| holder.explain(error, started))?;
    holder.kill();
    let fd = only(fds)?;
    let (imported, import_us) = timed(|| Allocation::import(&context.device, fd, size))?;
    let mapping = Mapping::new(&imported, Access::ReadOnly)?;
    if !matches_pattern(&mapping, Pattern::new(pattern))? {
        return Ok(failed("The bytes changed while a descriptor alone held the memory."));
    }
    let meaning =
        "A descriptor in a process without the driver keeps memory, with its bytes, when its maker is killed.";
    Ok(ok(meaning).figure("bytes", size).figure("import_us", import_us))
}

/// Creates memory of one granule with a pattern, sends its descriptor, and waits to be killed.
pub(in crate::doctor) fn make(device: Result<Device>, pattern: u32, line: &Line) -> Result<()> {
    let made = device.and_then(|device| {
        device.require_sharing()?;
        let allocation: Arc<Allocation> = Allocation::create(&device, 1)?;
        let mapping = Mapping::new(&allocation, Access::ReadWrite)?;
        write(&mapping, Pattern::new(pattern))?;
        // No work of this process may be pending on the device when it is killed.
        device.verbs().synchronize(device.ordinal())?;
        allocation.export()?;
        Ok((allocation, mapping))
    });
    match &made {
        Ok((allocation, _)) => line.send_with(&Made::Ok(allocation.size()), &[allocation.export()?])?,
        Err(error) => line.send(&Made::Err(ErrorDetails::of(error)))?,
    }
    wait_for_parent(line)
}

/// Holds a descriptor until the parent requests it, without loading the driver.
pub(in crate::doctor) fn hold(line: &Line) -> Result<()> {
    let ((), fds) = line.receive_with()?;
    let library = loaded(&fs::read("/proc/self/maps").unwrap_or_default()).map(|path| path.display().to_string());
    line.send(&library)?;
    let () = line.receive()?;
    line.send_with(&(), &[only(fds)?.as_fd()])?;
    wait_for_parent(line)
}

/// Waits until the parent kills this process or exits.
fn wait_for_parent(line: &Line) -> Result<()> {
    match line.receive::<Value>() {
        Ok(_) | Err(Error::Peer(PeerError::Gone { .. })) => Ok(()),
        Err(error) => Err(error),
    }
}
