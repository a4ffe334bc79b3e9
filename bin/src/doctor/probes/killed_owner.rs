//! Probes of memory whose owner is killed: by a process that imported it, and by a descriptor in a process without the driver, as a broker is.

use std::{
    fs,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    thread,
};

use serde_json::Value;
use vmmfd::{
    driver::Access,
    memory::{Allocation, Mapping, Region},
};

use super::{
    machine::loaded,
    one_process::{matches_pattern, write},
};
use crate::{
    check::pattern::{Pattern, random_salt},
    doctor::{
        prelude::*,
        process::{Child, Role},
        report::{micros, skipped, timed},
    },
    line::only,
    units::about,
};

/// The size of the memory in bytes, before rounding up: more than one granule.
const SIZE: u64 = 4 << 20;

/// The size of the memory that a process made, or its error.
type Made = std::result::Result<u64, ErrorDetails>;

/// Memory of another process, which can be killed.
struct Foreign {
    maker: Child,
    size: u64,
    pattern: Pattern,
}

impl Foreign {
    /// Starts a process that makes memory. Also returns a descriptor of the memory.
    fn make(context: &ProbeContext) -> Result<(Self, OwnedFd), ErrorDetails> {
        let salt = random_salt()?;
        let role = Role::Make { device: context.device.ordinal(), pattern: salt };
        let mut maker = context.start_child("the process that makes the memory", role)?;
        let (made, fds) = maker.receive_with::<Made>()?;
        let size = made.map_err(ErrorDetails::of_other_end)?;
        Ok((Self { maker, size, pattern: Pattern::new(salt) }, only(fds)?))
    }

    /// Imports the memory, and kills its maker. Also returns whether its bytes are unchanged.
    fn orphan(context: &ProbeContext) -> Result<(Mapping, bool), ErrorDetails> {
        let (Self { mut maker, size, pattern }, fd) = Self::make(context)?;
        let mapping = Mapping::new(&Allocation::import(&context.device, fd, size)?, Access::ReadOnly)?;
        let before = matches_pattern(&mapping, pattern)?;
        maker.kill();
        let after = matches_pattern(&mapping, pattern)?;
        Ok((mapping, before && after))
    }
}

pub(super) fn exporter_killed(context: &mut ProbeContext) -> ProbeResult {
    let (memory, intact) = Foreign::orphan(context)?;
    if !intact {
        return Ok(failed("The bytes changed when the process that exported them was killed."));
    }
    let meaning = "Imported memory stays readable, with its bytes, when its exporter is killed.";
    Ok(ok(meaning).figure("bytes", memory.size()))
}

/// The driver's time limit for freeing a killed process's memory.
const FREE_TIMEOUT: Duration = Duration::from_secs(3);

pub(super) fn memory_returned(context: &mut ProbeContext) -> ProbeResult {
    if context.device.is_host() {
        let why = "The free memory of the whole machine changes all the time, and says nothing about one buffer.";
        return Ok(skipped(why));
    }
    let before = context.device.memory_info()?.free;
    let (memory, _) = Foreign::orphan(context)?;
    let size = memory.size();
    let held = context.device.memory_info()?.free;
    drop(memory);
    let started = Instant::now();
    loop {
        let after = context.device.memory_info()?.free;
        let missing = before.saturating_sub(after);
        let measured = |finding: Finding| {
            finding
                .figure("before_bytes", before)
                .figure("held_bytes", held)
                .figure("after_bytes", after)
                .figure("returned_us", micros(started.elapsed()))
        };
        // Other processes use the device too: a smaller difference may be theirs.
        if missing < size / 2 {
            let meaning = "All memory of a killed process is free again once its importer has released it.";
            return Ok(measured(ok(meaning)));
        }
        if started.elapsed() > FREE_TIMEOUT {
            let missing = about(missing);
            let meaning = format!("{missing} are still in use after the last process has released them.");
            return Ok(measured(failed(meaning)));
        }
        thread::sleep(Duration::from_millis(5));
    }
}

pub(super) fn held_descriptor(context: &mut ProbeContext) -> ProbeResult {
    let (Foreign { mut maker, size, pattern }, fd) = Foreign::make(context)?;
    let mut holder = context.start_child("the process that holds the descriptor", Role::Hold)?;
    // This process has the driver, so it must not keep the memory alive itself.
    holder.line.send_with(&(), &[fd.as_fd()])?;
    drop(fd);
    // The descriptor has arrived. The answer is a driver library that the process has mapped.
    if let (Some(library), _) = holder.receive_with::<Option<String>>()? {
        let meaning = format!("Every process here has {library} mapped, so none can hold a descriptor without it.");
        return Ok(skipped(meaning));
    }
    maker.kill();
    // The process returns the descriptor and closes its own.
    holder.line.send(&())?;
    let ((), fds) = holder.receive_with()?;
    holder.kill();
    let fd = only(fds)?;
    let (imported, import_us) = timed(|| Allocation::import(&context.device, fd, size))?;
    let mapping = Mapping::new(&imported, Access::ReadOnly)?;
    if !matches_pattern(&mapping, pattern)? {
        return Ok(failed("The bytes changed while a descriptor alone held the memory."));
    }
    let meaning =
        "A descriptor in a process without the driver keeps memory, with its bytes, when its maker is killed.";
    Ok(ok(meaning).figure("bytes", size).figure("import_us", import_us))
}

/// Creates memory with a pattern, sends its descriptor, and waits to be killed.
pub(in crate::doctor) fn make(device: Result<Device>, salt: u32, line: &Line) -> Result<()> {
    let made = device.and_then(|device| {
        device.require_sharing()?;
        let allocation: Arc<Allocation> = Allocation::create(&device, SIZE)?;
        let mapping = Mapping::new(&allocation, Access::ReadWrite)?;
        write(&mapping, Pattern::new(salt))?;
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
pub(super) fn wait_for_parent(line: &Line) -> Result<()> {
    match line.receive::<Value>() {
        Ok(_) | Err(Error::Peer(PeerError::Gone { .. })) => Ok(()),
        Err(error) => Err(error),
    }
}
