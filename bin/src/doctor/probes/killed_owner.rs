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
        Status,
        context::ProbeContext,
        control::{ControlRecord, unexpected},
        outcome::{ProbeFailure, ProbeOutcome, ProbeResult, micros},
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
fn orphan(context: &ProbeContext, broken: &str) -> Result<Result<Orphan, ProbeOutcome>, ProbeFailure> {
    let mut peer = context.start_peer()?;
    let end = context.endpoint(&peer);
    let (probe, device) = ("exporter-killed".to_owned(), context.device.uuid());
    let control = peer.control();
    control.send(&ControlRecord::Share { probe, device })?;
    match control.receive()? {
        ControlRecord::Begin { .. } => {}
        ControlRecord::Shared { error: Some(error) } => {
            return Ok(Err(ProbeOutcome::failed(broken).with_error(error)));
        }
        other => return Err(unexpected(&other, "begin").into()),
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
        Err(outcome) => outcome,
        Ok(Orphan { intact: false, .. }) => {
            ProbeOutcome::failed("The bytes changed when the process that exported them was killed.")
        }
        Ok(Orphan { memory, intact: true }) => {
            let meaning = "Imported memory stays readable, with its bytes, when its exporter is killed.";
            ProbeOutcome::ok(meaning).figure("bytes", memory.mapped_size())
        }
    })
}

/// The driver's time limit for freeing a killed process's memory.
const FREE_TIMEOUT: Duration = Duration::from_secs(3);

pub(super) fn memory_returned(context: &mut ProbeContext) -> ProbeResult {
    if context.device.is_host() {
        let why = "The free memory of the whole machine changes all the time, and says nothing about one buffer.";
        return Ok(ProbeOutcome::new(Status::Skipped, why));
    }
    let before = context.device.memory_info()?.free;
    let memory = match orphan(context, "There was no memory to free.")? {
        Ok(orphan) => orphan.memory,
        Err(outcome) => return Ok(outcome),
    };
    let size = memory.mapped_size();
    let held = context.device.memory_info()?.free;
    drop(memory);
    let started = Instant::now();
    loop {
        let after = context.device.memory_info()?.free;
        let missing = before.saturating_sub(after);
        let measured = |outcome: ProbeOutcome| {
            outcome
                .figure("before_bytes", before)
                .figure("held_bytes", held)
                .figure("after_bytes", after)
                .figure("returned_us", micros(started.elapsed()))
        };
        // Other processes use the device too: a smaller difference may be theirs.
        if missing < size / 2 {
            let meaning = "All memory of a killed process is free again once its importer has released it.";
            return Ok(measured(ProbeOutcome::ok(meaning)));
        }
        if started.elapsed() > FREE_TIMEOUT {
            let missing = about(missing);
            let meaning = format!("{missing} are still in use after the last process has released them.");
            return Ok(measured(ProbeOutcome::failed(meaning)));
        }
        thread::sleep(Duration::from_millis(5));
    }
}
