//! Handing memory over: each way in turn, at each size, to so many consumers.

use std::collections::BTreeMap;

use tempfile::TempDir;

use super::{
    Bench, Run, ask,
    orders::{Answer, Order, Way},
    process::{Process, Task},
    stats::Samples,
    tell, unfit, warm_up,
};
use crate::{
    driver::Backend,
    error::{Error, Result},
};

/// What is measured: its bench, its name, in which pair of processes, and which memory it needs.
struct Contestant {
    bench: Bench,
    name: &'static str,
    way: Way,
    alone: bool,
    memory: Memory,
}

const fn contestant(bench: Bench, name: &'static str, way: Way, alone: bool, memory: Memory) -> Contestant {
    Contestant { bench, name, way, alone, memory }
}

/// Which memory a contestant needs, of the size that is handed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Memory {
    /// What all of these share, or are compared with.
    Common,
    /// Its own beside the others'.
    Own,
    /// Its own while there is no other.
    Alone,
}

/// In the order in which memory is given to them, where there is not enough for all.
const CONTESTANTS: [Contestant; 8] = [
    contestant(Bench::Handoff, "floor", Way::Floor, false, Memory::Common),
    contestant(Bench::Handoff, "vmmfd", Way::Fresh, false, Memory::Common),
    contestant(Bench::Repeat, "floor", Way::Hop, false, Memory::Common),
    contestant(Bench::Repeat, "vmmfd again", Way::Again, false, Memory::Common),
    contestant(Bench::Handoff, "export each, anchor", Way::ExportEach, false, Memory::Own),
    contestant(Bench::Handoff, "export each, no anchor", Way::ExportEach, true, Memory::Alone),
    contestant(Bench::Handoff, "legacy", Way::Legacy, false, Memory::Own),
    contestant(Bench::Handoff, "pool", Way::Pool, false, Memory::Own),
];

const GPU_SIZES: [u64; 4] = [2 << 20, 64 << 20, 1 << 30, 8 << 30];
const HOST_SIZES: [u64; 2] = [2 << 20, 64 << 20];

pub(super) fn measure(run: &mut Run<'_>) -> Result<()> {
    let folder = tempfile::Builder::new().prefix("vmmfd-bench.").tempdir_in("/tmp");
    let folder = folder.map_err(|error| Error::system("make a folder in /tmp", error))?;
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

/// The processes: one pair that holds an exported descriptor, and one that holds none.
struct Pairs {
    main: Process,
    alone: Option<Process>,
}

impl Pairs {
    fn in_turn(&self) -> impl Iterator<Item = (&Process, bool)> {
        self.alone.iter().map(|alone| (alone, true)).chain([(&self.main, false)])
    }
}

fn measure_all(run: &mut Run<'_>, folder: &TempDir, consumers: usize, contestants: &[&Contestant]) -> Result<()> {
    run.tick("starting the processes", 0, 1)?;
    let task = |consumers| Task::Produce { folder: folder.path().to_owned(), consumers };
    let needs_other = contestants.iter().any(|contestant| contestant.alone);
    let alone = needs_other.then(|| run.start(task(1), &[])).transpose()?.map(|(alone, _)| alone);
    let (main, room) = run.start(task(consumers), &[])?;
    let pairs = Pairs { main, alone };
    let default = match run.plan.backend {
        Backend::Cuda => &GPU_SIZES[..],
        Backend::Host => &HOST_SIZES[..],
    };
    for size in run.sizes(default, room) {
        let fitting = fitting(run, room.free, size, contestants);
        measure_size(run, &pairs, size, consumers, &fitting)?;
    }
    Ok(())
}

/// Those for which there is memory, the first ones first.
fn fitting<'a>(run: &mut Run<'_>, usable: u64, size: u64, contestants: &[&'a Contestant]) -> Vec<&'a Contestant> {
    let mut needed: u64 = 0;
    let mut fitting: Vec<&Contestant> = Vec::new();
    for &contestant in contestants {
        let there = fitting.iter().any(|other| other.memory == Memory::Common);
        let (beside, more) = match contestant.memory {
            Memory::Common if there => (needed, 0),
            Memory::Common | Memory::Own => (needed, size),
            Memory::Alone => (0, size),
        };
        if beside.saturating_add(more) > usable {
            let Contestant { bench, name, .. } = contestant;
            let bench = bench.as_str();
            run.leave_out(format!("{bench} {name} at {size} bytes: there are {usable} bytes for all that is compared"));
            continue;
        }
        if contestant.memory != Memory::Alone {
            needed += more;
        }
        fitting.push(contestant);
    }
    fitting
}

fn measure_size(
    run: &mut Run<'_>,
    pairs: &Pairs,
    size: u64,
    consumers: usize,
    contestants: &[&Contestant],
) -> Result<()> {
    let (count, warm_up) = (run.plan.count, warm_up(run.plan.count));
    let mut samples: BTreeMap<usize, Samples> = BTreeMap::new();
    let what = format!("handoff of {size} bytes");
    // First those that would not be alone once the other producer has exported something.
    for (process, alone) in pairs.in_turn() {
        let here: Vec<usize> = (0..contestants.len()).filter(|&number| contestants[number].alone == alone).collect();
        let ways = here.iter().map(|&number| contestants[number].way).collect();
        tell(process, &Order::Prepare { size, ways })?;
        for round in 0..warm_up + count {
            run.tick(&what, round, warm_up + count)?;
            for turn in 0..here.len() {
                // Nobody comes always first, or always after the same one.
                let number = here[(turn + round) % here.len()];
                match ask(process, &Order::Measure { way: contestants[number].way })? {
                    Answer::Took { us } if round >= warm_up => samples.entry(number).or_default().0.push(us),
                    Answer::Took { .. } => {}
                    _ => return unfit(),
                }
            }
        }
        tell(process, &Order::Clear)?;
    }
    for bench in [Bench::Handoff, Bench::Repeat] {
        let suffix = if consumers > 1 { format!(", {consumers} at once") } else { String::new() };
        let measured = contestants.iter().enumerate().filter(|(_, contestant)| contestant.bench == bench);
        let measured = measured.map(|(number, contestant)| {
            (format!("{}{suffix}", contestant.name), samples.remove(&number).unwrap_or_default())
        });
        let measured = measured.collect();
        run.add(bench, size, measured, &format!("floor{suffix}"));
    }
    Ok(())
}
