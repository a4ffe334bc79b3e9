//! The probe of memory that a process without the driver keeps, as a broker does.

use std::{
    fs,
    os::fd::{AsFd, OwnedFd},
};

use serde_json::Value;
use vmmfd::{
    driver::Access,
    error::{Error, PeerError, ProtocolError, Result},
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
        context::{ProbeContext, Role},
        report::{ProbeResult, failed, ok, skipped, timed},
    },
    line::Line,
    verbs::HasVerbs,
};

/// The record that carries a descriptor.
const DESCRIPTOR: &[u8] = b"descriptor";

/// The size of the memory that a process made, or its error.
type Made = std::result::Result<u64, ErrorDetails>;

pub(super) fn held_descriptor(context: &mut ProbeContext) -> ProbeResult {
    let pattern = random_salt()?;
    let (mut maker, made) = context
        .start_child("the process that makes the memory", Role::Make { device: context.device.ordinal(), pattern })?;
    let (mut holder, held) = context.start_child("the process that holds the descriptor", Role::Hold)?;
    let explain = |error| maker.explain(error, context.peer_timeout);
    let size = made.receive::<Made>().map_err(explain)?.map_err(ErrorDetails::of_other_end)?;
    let fd = receive_descriptor(&made).map_err(explain)?;
    // This process has the driver, so it must not keep the memory alive itself.
    held.send_bare(DESCRIPTOR, &[fd.as_fd()])?;
    drop(fd);
    let explain = |error| holder.explain(error, context.peer_timeout);
    // The descriptor has arrived. The answer is a driver library that the process has mapped.
    if let Some(library) = held.receive::<Option<String>>().map_err(explain)? {
        let meaning = format!("Every process here has {library} mapped, so none can hold a descriptor without it.");
        return Ok(skipped(meaning));
    }
    maker.kill();
    // The process returns the descriptor and closes its own.
    held.send(&Value::Null)?;
    let fd = receive_descriptor(&held).map_err(explain)?;
    holder.kill();
    let (imported, import_us) = timed(|| Allocation::import(&context.device, fd, size))?;
    let mapping = Mapping::new(&imported, Access::ReadOnly)?;
    if !matches_pattern(&mapping, Pattern::new(pattern))? {
        return Ok(failed("The bytes changed while a descriptor alone held the memory."));
    }
    let meaning =
        "A descriptor in a process without the driver keeps memory, with its bytes, when its maker is killed.";
    Ok(ok(meaning).figure("bytes", size).figure("import_us", import_us))
}

fn receive_descriptor(line: &Line) -> Result<OwnedFd> {
    let mut record = [0; DESCRIPTOR.len() + 1];
    let mut fds = line.receive_bare(&mut record)?.fds;
    match (fds.pop(), fds.is_empty()) {
        (Some(fd), true) => Ok(fd),
        _ => Err(ProtocolError::Content("a record that is to bring one descriptor".to_owned()).into()),
    }
}

/// Creates memory of one granule with a pattern, sends its descriptor, and waits to be killed.
pub(in crate::doctor) fn make(device: Result<Device>, pattern: u32, line: &Line) -> Result<()> {
    let made = device.and_then(|device| {
        device.require_sharing()?;
        let allocation = Allocation::create(&device, 1)?;
        let mapping = Mapping::new(&allocation, Access::ReadWrite)?;
        write(&mapping, Pattern::new(pattern))?;
        // No work of this process may be pending on the device when it is killed.
        device.verbs().synchronize(device.ordinal())?;
        allocation.export()?;
        Ok((allocation, mapping))
    });
    match &made {
        Ok((allocation, _)) => {
            line.send(&Made::Ok(allocation.size()))?;
            line.send_bare(DESCRIPTOR, &[allocation.export()?])?;
        }
        Err(error) => line.send(&Made::Err(ErrorDetails::of(error)))?,
    }
    wait_for_parent(line)
}

/// Holds a descriptor until the parent requests it, without loading the driver.
pub(in crate::doctor) fn hold(line: &Line) -> Result<()> {
    let fd = receive_descriptor(line)?;
    let library = loaded(&fs::read("/proc/self/maps").unwrap_or_default()).map(|path| path.display().to_string());
    line.send(&library)?;
    let _: Value = line.receive()?;
    line.send_bare(DESCRIPTOR, &[fd.as_fd()])?;
    drop(fd);
    wait_for_parent(line)
}

/// Waits until the parent kills this process or exits.
fn wait_for_parent(line: &Line) -> Result<()> {
    match line.receive::<Value>() {
        Ok(_) | Err(Error::Peer(PeerError::Gone { .. })) => Ok(()),
        Err(error) => Err(error),
    }
}
