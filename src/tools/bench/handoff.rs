//! Handing memory over: each way in turn, at each size, to so many consumers.

use std::collections::BTreeMap;

use tempfile::TempDir;

use super::{
    Bench, FOLDER, Run, ask,
    orders::{Answer, Order, Way},
    process::BenchProcess,
    stats::Samples,
    task::Role,
    tell,
    text::human,
    unfit, warm_up,
};
use crate::{driver::Backend, error::Result, memory::MOST_OF_A_POOL, tools::temporary::temporary_folder};

/// What is measured: its bench, its name, whether it must be alone with exported descriptors, and whether its memory is the one
/// that is shared by all that share any.
struct Contestant {
    bench: Bench,
    name: &'static str,
    way: Way,
    alone: bool,
    shares: bool,
}

const fn contestant(bench: Bench, name: &'static str, way: Way, alone: bool, shares: bool) -> Contestant {
    Contestant { bench, name, way, alone, shares }
}

/// In the order in which memory is given to them, where there is not enough for all.
const CONTESTANTS: [Contestant; 9] = [
    contestant(Bench::Handoff, "floor", Way::Floor, false, true),
    contestant(Bench::Handoff, "vmmfd", Way::Fresh, false, true),
    contestant(Bench::Handoff, "vmmfd, with description", Way::Described, false, true),
    contestant(Bench::Repeat, "floor", Way::Hop, false, true),
    contestant(Bench::Repeat, "vmmfd again", Way::Again, false, true),
    contestant(Bench::Handoff, "export each, anchor", Way::ExportEach, false, false),
    contestant(Bench::Handoff, "export each, no anchor", Way::ExportEach, true, false),
    contestant(Bench::Handoff, "legacy", Way::Legacy, false, false),
    contestant(Bench::Handoff, "pool", Way::Pool, false, false),
];

const GPU_SIZES: [u64; 4] = [2 << 20, 64 << 20, 1 << 30, 8 << 30];
const HOST_SIZES: [u64; 2] = [2 << 20, 64 << 20];

pub(super) fn measure(run: &mut Run<'_>) -> Result<()> {
    let folder = temporary_folder(FOLDER)?;
    let cuda = run.plan.backend == Backend::Cuda;
    let mut numbers = run.plan.consumers.clone();
    numbers.sort_unstable();
    numbers.dedup();
    for consumers in numbers {
        let several = consumers > 1;
        let wanted = |contestant: &&Contestant| {
            let only_cuda = contestant.alone || matches!(contestant.way, Way::Legacy | Way::Pool);
            // To several at the same time, what the session adds is the question.
            let compared = !several || matches!(contestant.way, Way::Floor | Way::Fresh | Way::Hop | Way::Again);
            run.plan.benches.contains(&contestant.bench) && compared && (cuda || !only_cuda)
        };
        let contestants: Vec<&Contestant> = CONTESTANTS.iter().filter(wanted).collect();
        measure_all(run, &folder, consumers, &contestants)?;
    }
    Ok(())
}

/// Measures what is compared, in three rounds with processes of their own: what must not meet an exported descriptor in any
/// process, the other handoffs, and what is handed over again.
fn measure_all(run: &mut Run<'_>, folder: &TempDir, consumers: usize, contestants: &[&Contestant]) -> Result<()> {
    let rounds = [(Bench::Handoff, true), (Bench::Handoff, false), (Bench::Repeat, false)];
    let mut sizes = Vec::new();
    let mut measured: BTreeMap<(u64, &str, Bench), Samples> = BTreeMap::new();
    for (bench, alone) in rounds {
        let here = contestants.iter().filter(|contestant| (contestant.bench, contestant.alone) == (bench, alone));
        let here: Vec<&Contestant> = here.copied().collect();
        if here.is_empty() {
            continue;
        }
        run.tick("starting the processes", 0, 1)?;
        let role = Role::Producer { folder: folder.path().to_owned(), consumers: if alone { 1 } else { consumers } };
        let (process, room) = run.start(role, &[])?;
        let default = match run.plan.backend {
            Backend::Cuda => &GPU_SIZES[..],
            Backend::Host => &HOST_SIZES[..],
        };
        sizes = run.sizes(default, room);
        for &size in &sizes {
            let fitting = fitting(run, room.free, size, &here);
            let samples = measure_size(run, &process, size, &fitting)?;
            let named = fitting.iter().zip(samples);
            measured.extend(named.map(|(contestant, samples)| ((size, contestant.name, bench), samples)));
        }
    }
    for size in sizes {
        for bench in [Bench::Handoff, Bench::Repeat] {
            let suffix = if consumers > 1 { format!(", {consumers} at once") } else { String::new() };
            let series = contestants.iter().filter(|contestant| contestant.bench == bench).filter_map(|contestant| {
                let samples = measured.remove(&(size, contestant.name, bench))?;
                Some((format!("{}{suffix}", contestant.name), samples))
            });
            let series = series.collect();
            run.add(bench, size, series, &format!("floor{suffix}"));
        }
    }
    Ok(())
}

/// Those for which there is memory, the first ones first.
fn fitting<'a>(run: &mut Run<'_>, usable: u64, size: u64, contestants: &[&'a Contestant]) -> Vec<&'a Contestant> {
    let mut needed: u64 = 0;
    let mut fitting: Vec<&Contestant> = Vec::new();
    for &contestant in contestants {
        let Contestant { bench, name, way, shares, .. } = contestant;
        let bench = bench.as_str();
        if *way == Way::Pool && size > MOST_OF_A_POOL {
            run.leave_out(format!("{bench} {name} at {}: the driver can't import so much", human(size)));
            continue;
        }
        // All that share memory need it once.
        let there = fitting.iter().any(|other| other.shares);
        let more = if *shares && there { 0 } else { size };
        if needed.saturating_add(more) > usable {
            let (size, usable) = (human(size), human(usable));
            run.leave_out(format!("{bench} {name} at {size}: there are {usable} for all that is compared"));
            continue;
        }
        needed += more;
        fitting.push(contestant);
    }
    fitting
}

/// The samples of each contestant, in their order.
fn measure_size(
    run: &mut Run<'_>,
    process: &BenchProcess,
    size: u64,
    contestants: &[&Contestant],
) -> Result<Vec<Samples>> {
    let (count, warm_up) = (run.plan.count, warm_up(run.plan.count));
    let mut samples = vec![Samples::default(); contestants.len()];
    let what = format!("handing over {}", human(size));
    tell(process, &Order::Prepare { size, ways: contestants.iter().map(|contestant| contestant.way).collect() })?;
    for round in 0..warm_up + count {
        run.tick(&what, round, warm_up + count)?;
        for turn in 0..contestants.len() {
            // Nobody comes always first, or always after the same one.
            let number = (turn + round) % contestants.len();
            match ask(process, &Order::Measure { way: contestants[number].way })? {
                Answer::Took { us } if round >= warm_up => samples[number].0.push(us),
                Answer::Took { .. } => {}
                _ => return unfit(),
            }
        }
    }
    tell(process, &Order::Clear)?;
    Ok(samples)
}
