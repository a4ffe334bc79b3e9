//! Probes of memory whose owner is killed.

use std::{
    thread,
    time::{Duration, Instant},
};

use vmmfd::{
    memory::Selector,
    session::handoff::{Consumer, ImportedObject, Request, Verifier},
};

use crate::{
    check::DataVerifier,
    doctor::{
        ErrorDetails, Finding,
        context::ProbeContext,
        control::ControlRecord,
        report::{ProbeResult, failed, micros, ok, skipped},
    },
    units::about,
};

/// Memory whose owner was killed.
struct Orphan {
    memory: ImportedObject,
    /// Whether its bytes are unchanged.
    intact: bool,
}

/// Opens memory of another process and kills that process. `broken` is the meaning if that process can't share memory.
fn orphan(context: &ProbeContext, broken: &str) -> Result<Result<Orphan, Finding>, ErrorDetails> {
    let mut peer = context.start_peer()?;
    let probe = "exporter-killed".to_owned();
    let device = context.device.uuid();
    let end = &context.end;
    let control = &peer.line;
    control.send(&ControlRecord::Share { probe, device })?;
    match control.receive()? {
        ControlRecord::Begin { .. } => {}
        ControlRecord::Failed { error } => return Ok(Err(failed(broken).with_error(error))),
        other => return Err(other.unexpected("begin")),
    }
    let config = end.config(control.cancel());
    let here = Some(Selector::Uuid(device));
    let mut consumer = Consumer::connect(&end.driver, here, &end.socket, &config, &|_| {})?;
    let memory = consumer.request(&Request::default())?;
    let mut verifier = DataVerifier::new(&|_| {});
    let before = consumer.verify(&memory, &mut verifier)?;
    peer.kill();
    // The owner's end is closed; only the memory is still needed.
    drop(consumer);
    let after = Verifier::verify(&mut verifier, &memory, &mut || Ok(()))?;
    let checked = before.check.is_some() && after.check.is_some();
    Ok(Ok(Orphan { memory, intact: checked && before.verified && after.verified }))
}

pub(super) fn exporter_killed(context: &mut ProbeContext) -> ProbeResult {
    Ok(match orphan(context, "The process that was to be killed could not share its memory.")? {
        Err(finding) => finding,
        Ok(Orphan { intact: false, .. }) => failed("The bytes changed when the process that exported them was killed."),
        Ok(Orphan { memory, intact: true }) => {
            let meaning = "Imported memory stays readable, with its bytes, when its exporter is killed.";
            ok(meaning).figure("bytes", memory.mapped_size())
        }
    })
}

/// The driver's time limit for freeing a killed process's memory.
const FREE_TIMEOUT: Duration = Duration::from_secs(3);

pub(super) fn memory_returned(context: &mut ProbeContext) -> ProbeResult {
    if context.device.is_host() {
        let why = "The free memory of the whole machine changes all the time, and says nothing about one buffer.";
        return Ok(skipped(why));
    }
    let before = context.device.memory_info()?.free;
    let memory = match orphan(context, "There was no memory to free.")? {
        Ok(orphan) => orphan.memory,
        Err(finding) => return Ok(finding),
    };
    let size = memory.mapped_size();
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
