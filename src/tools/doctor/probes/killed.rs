//! What becomes of memory whose owner is killed.

use std::{
    thread,
    time::{Duration, Instant},
};

use super::{Bench, Found, micros};
use crate::{
    error::Result,
    memory::Selector,
    session::handoff::{Consumer, ImportedObject, Request, Verifier},
    tools::check::DataVerifier,
    tools::doctor::{
        control::{Say, unexpected},
        report::Seen,
    },
};

/// Takes memory from another process, kills that, and returns the memory and whether it is as it was.
fn orphan(bench: &mut Bench) -> Result<Result<(ImportedObject, bool), Seen>> {
    let mut peer = bench.start_peer()?;
    let end = bench.end(&peer);
    let (probe, device) = ("exporter-killed".to_owned(), bench.device.uuid());
    let cancel = {
        let control = peer.control();
        control.send(&Say::Lend { probe, device })?;
        match control.receive()? {
            Say::Begin { .. } => {}
            Say::Lent { error: Some(seen) } => return Ok(Err(seen)),
            other => return unexpected(&other, "begin"),
        }
        control.cancel().clone()
    };
    let config = end.config(&cancel);
    let here = Some(Selector::Uuid(device));
    let mut consumer = Consumer::connect(&end.driver, here, &end.socket, &config, &|_| {})?;
    let object = consumer.request(&Request::default())?;
    let mut verifier = DataVerifier::new(&|_| {});
    let before = consumer.verify(&object, &mut verifier)?;
    peer.kill();
    // The connection has ended with its owner.
    drop(consumer);
    let after = Verifier::verify(&mut verifier, &object, &mut || Ok(()))?;
    let checked = before.check.is_some() && after.check.is_some();
    Ok(Ok((object, checked && before.verified && after.verified)))
}

pub(super) fn exporter_killed(bench: &mut Bench) -> Result<Found> {
    Ok(match orphan(bench)? {
        Err(seen) => Found::failed("The process that was to be killed could not share its memory.").with(seen),
        Ok((_, false)) => Found::failed("The bytes changed when the process that they came from was killed."),
        Ok((object, true)) => {
            let meaning = "Imported memory stays readable, with its bytes, when its exporter is killed.";
            Found::ok(meaning).figure("bytes", object.mapped_size())
        }
    })
}

/// How long the driver may take to clear up after a killed process.
const CLEARING: Duration = Duration::from_secs(3);

pub(super) fn memory_returned(bench: &mut Bench) -> Result<Found> {
    if bench.device.is_host() {
        let why = "The free memory of the whole machine changes all the time, and tells nothing of one buffer.";
        return Ok(Found::of(crate::tools::doctor::Status::Skipped, why));
    }
    let before = bench.device.memory_info()?.free;
    let object = match orphan(bench)? {
        Ok((object, _)) => object,
        Err(seen) => return Ok(Found::failed("There was no memory to be given back.").with(seen)),
    };
    let size = object.mapped_size();
    let held = bench.device.memory_info()?.free;
    drop(object);
    let begun = Instant::now();
    loop {
        let after = bench.device.memory_info()?.free;
        let missing = before.saturating_sub(after);
        let found = |found: Found| {
            found
                .figure("before_bytes", before)
                .figure("held_bytes", held)
                .figure("after_bytes", after)
                .figure("returned_us", micros(begun.elapsed()))
        };
        // Others use the device too: less than the buffer may be theirs.
        if missing < size / 2 {
            return Ok(found(Found::ok("All memory of a killed process is free again once its importer lets go.")));
        }
        if begun.elapsed() > CLEARING {
            let meaning = format!("{missing} bytes are still in use after everybody has let go.");
            return Ok(found(Found::failed(meaning)));
        }
        thread::sleep(Duration::from_millis(5));
    }
}
