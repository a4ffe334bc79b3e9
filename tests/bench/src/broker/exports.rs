//! Exports of an unrelated process, while the broker holds memory and while it does not.
//!
//! An export is far slower while no process has an exported descriptor open. Therefore no other process of the bench that could hold one
//! runs at this point, and the broker closes its descriptors before the next sample.

use std::path::Path;

use vmmfd::{driver::Backend, error::Result};

use super::{Broker, ClientProcess, ClientRequest, ClientResponse, SMALL, figure, fits, median};
use crate::{
    plan::Bench,
    run::{BenchRun, Capacity, unexpected, warm_up},
    stats::Samples,
};

const NAME: &str = "bench/anchor";

/// How often the broker receives memory and deletes it.
const TURNS: usize = 5;

pub(super) fn measure(run: &mut BenchRun<'_>, folder: &Path, emulated: bool, capacity: Capacity) -> Result<()> {
    let size = SMALL.next_multiple_of(capacity.granularity);
    if !fits(run, "exports", 2 * size, capacity) {
        return Ok(());
    }
    let what = "exports of another process";
    run.tick(what, 0, TURNS)?;
    let broker = Broker::start(run, folder.join("exports.sock"), emulated)?;
    let maker = ClientProcess::start(run, Backend::Cuda, true, &broker)?;
    let exporter = ClientProcess::launch(run, Backend::Cuda, true)?;
    exporter.ready()?;
    let idle = broker.descriptors()?;
    // The export alone and all calls, with the broker's memory and without.
    let mut samples: [Samples; 4] = Default::default();
    for turn in 0..TURNS {
        for held in [true, false] {
            run.tick(what, turn, TURNS)?;
            if held {
                maker.call(&ClientRequest::Put { name: NAME.to_owned(), size })?;
            }
            let warm_up = warm_up(run.plan.count).div_ceil(TURNS);
            for number in 0..warm_up + run.plan.count.div_ceil(TURNS) {
                let (export_us, all_us) = export(&exporter, size)?;
                if number >= warm_up {
                    let first = if held { 0 } else { 2 };
                    samples[first].0.push(export_us);
                    samples[first + 1].0.push(all_us);
                }
            }
            if held {
                maker.call(&ClientRequest::Delete { name: NAME.to_owned() })?;
                broker.wait_for_descriptors(run, idle)?;
            }
        }
    }
    let ratio = median(&samples[2]) / median(&samples[0]);
    figure(run, "an export without the broker's memory, of one with it".to_owned(), 0, ratio, "x", None);
    let names = [
        "export, the broker holds memory",
        "create to release, the broker holds memory",
        "export, no process holds any",
        "create to release, no process holds any",
    ];
    run.add(Bench::Broker, 0, names.into_iter().map(str::to_owned).zip(samples).collect(), "");
    Ok(())
}

fn export(exporter: &ClientProcess, size: u64) -> Result<(f64, f64)> {
    exporter.0.send(&ClientRequest::Export { size })?;
    match exporter.receive()? {
        ClientResponse::Exported { export_us, all_us } => Ok((export_us, all_us)),
        _ => Err(unexpected()),
    }
}
