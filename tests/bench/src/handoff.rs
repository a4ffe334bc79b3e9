//! The benches `handoff` and `repeat`: each method in turn, at each size, with each number of consumers.

use std::collections::BTreeMap;

use tempfile::TempDir;
use vmmfd::{driver::Backend, error::Result, memory::MOST_OF_A_POOL};

use super::{
    plan::Bench,
    process::BenchProcess,
    protocol::{Method, ProducerRequest, ProducerResponse},
    run::{BenchRun, FOLDER, ask, ask_done, unexpected, warm_up},
    stats::Samples,
    task::Role,
};
use vmmfd_cli::{temporary::temporary_folder, units::about};

/// A measurement that is compared with others.
struct Candidate {
    bench: Bench,
    name: &'static str,
    method: Method,
    /// Whether its processes must hold no other exported descriptor.
    alone: bool,
    /// Whether it uses the memory shared by most candidates.
    shares: bool,
}

const fn candidate(bench: Bench, name: &'static str, method: Method, alone: bool, shares: bool) -> Candidate {
    Candidate { bench, name, method, alone, shares }
}

/// Memory is allocated in this order, if it does not suffice for all candidates.
const CANDIDATES: [Candidate; 9] = [
    candidate(Bench::Handoff, "floor", Method::Floor, false, true),
    candidate(Bench::Handoff, "vmmfd", Method::Fresh, false, true),
    candidate(Bench::Handoff, "vmmfd, with description", Method::Described, false, true),
    candidate(Bench::Repeat, "floor", Method::Hop, false, true),
    candidate(Bench::Repeat, "vmmfd again", Method::Again, false, true),
    candidate(Bench::Handoff, "export each, anchor", Method::ExportEach, false, false),
    candidate(Bench::Handoff, "export each, no anchor", Method::ExportEach, true, false),
    candidate(Bench::Handoff, "legacy", Method::Legacy, false, false),
    candidate(Bench::Handoff, "pool", Method::Pool, false, false),
];

const GPU_SIZES: [u64; 4] = [2 << 20, 64 << 20, 1 << 30, 8 << 30];
const HOST_SIZES: [u64; 2] = [2 << 20, 64 << 20];

pub(super) fn measure(run: &mut BenchRun<'_>) -> Result<()> {
    let folder = temporary_folder(FOLDER)?;
    let cuda = run.plan.backend == Backend::Cuda;
    let mut numbers = run.plan.consumers.clone();
    numbers.sort_unstable();
    numbers.dedup();
    for consumers in numbers {
        let several = consumers > 1;
        let wanted = |candidate: &&Candidate| {
            let only_cuda = candidate.alone || matches!(candidate.method, Method::Legacy | Method::Pool);
            // With several consumers the bench measures only the overhead of the session.
            let compared =
                !several || matches!(candidate.method, Method::Floor | Method::Fresh | Method::Hop | Method::Again);
            run.plan.benches.contains(&candidate.bench) && compared && (cuda || !only_cuda)
        };
        let candidates: Vec<&Candidate> = CANDIDATES.iter().filter(wanted).collect();
        measure_all(run, &folder, consumers, &candidates)?;
    }
    Ok(())
}

/// Measures the candidates in three rounds, each with new processes: handoffs without other exported descriptors, the other handoffs, and
/// the repeats.
fn measure_all(run: &mut BenchRun<'_>, folder: &TempDir, consumers: usize, candidates: &[&Candidate]) -> Result<()> {
    let rounds = [(Bench::Handoff, true), (Bench::Handoff, false), (Bench::Repeat, false)];
    let suffix = if consumers > 1 { format!(", {consumers} at once") } else { String::new() };
    let mut measured: BTreeMap<(u64, &str, Bench), Samples> = BTreeMap::new();
    for (bench, alone) in rounds {
        let here = candidates.iter().filter(|candidate| (candidate.bench, candidate.alone) == (bench, alone));
        let here: Vec<&Candidate> = here.copied().collect();
        if here.is_empty() {
            continue;
        }
        run.tick("starting the processes", 0, 1)?;
        let role = Role::Producer { folder: folder.path().to_owned(), consumers: if alone { 1 } else { consumers } };
        let (process, capacity) = run.start(role, &[])?;
        let default = match run.plan.backend {
            Backend::Cuda => &GPU_SIZES[..],
            Backend::Host => &HOST_SIZES[..],
        };
        for size in run.sizes(default, capacity) {
            let fitting = fitting(run, capacity.usable, size, &here);
            let samples = measure_size(run, &process, size, &fitting)?;
            let named = fitting.iter().zip(samples);
            measured.extend(named.map(|(candidate, samples)| ((size, candidate.name, bench), samples)));
            if alone {
                continue;
            }
            let series = candidates.iter().filter(|candidate| candidate.bench == bench).filter_map(|candidate| {
                let samples = measured.remove(&(size, candidate.name, bench))?;
                Some((format!("{}{suffix}", candidate.name), samples))
            });
            run.add(bench, size, series.collect(), &format!("floor{suffix}"));
        }
    }
    Ok(())
}

/// Returns the candidates that fit into memory, in order.
fn fitting<'a>(run: &mut BenchRun<'_>, usable: u64, size: u64, candidates: &[&'a Candidate]) -> Vec<&'a Candidate> {
    let mut needed: u64 = 0;
    let mut fitting: Vec<&Candidate> = Vec::new();
    for &candidate in candidates {
        let Candidate { bench, name, method, shares, .. } = candidate;
        let bench = bench.as_str();
        if *method == Method::Pool && size > MOST_OF_A_POOL {
            run.leave_out(format!("{bench} {name} at {}: the driver can't import so much", about(size)));
            continue;
        }
        // The shared memory is counted once.
        let there = fitting.iter().any(|other| other.shares);
        let more = if *shares && there { 0 } else { size };
        if needed.saturating_add(more) > usable {
            let (size, usable) = (about(size), about(usable));
            run.leave_out(format!("{bench} {name} at {size}: there are {usable} for all candidates together"));
            continue;
        }
        needed += more;
        fitting.push(candidate);
    }
    fitting
}

/// Returns the samples of each candidate, in order.
fn measure_size(
    run: &BenchRun<'_>,
    process: &BenchProcess,
    size: u64,
    candidates: &[&Candidate],
) -> Result<Vec<Samples>> {
    let methods: Vec<Method> = candidates.iter().map(|candidate| candidate.method).collect();
    take_turns(run, process, &format!("handing over {}", about(size)), size, None, &methods)
}

/// Prepares memory for all methods together. Returns the samples of each method, in order.
pub(super) fn take_turns(
    run: &BenchRun<'_>,
    process: &BenchProcess,
    what: &str,
    size: u64,
    segment: Option<u64>,
    methods: &[Method],
) -> Result<Vec<Samples>> {
    let (count, warm_up) = (run.plan.count, warm_up(run.plan.count));
    let mut samples = vec![Samples::default(); methods.len()];
    ask_done(process, &ProducerRequest::Prepare { size, segment, methods: methods.to_vec() })?;
    for round in 0..warm_up + count {
        run.tick(what, round, warm_up + count)?;
        for turn in 0..methods.len() {
            // Rotate the order: no method is always first, or always after the same method.
            let number = (turn + round) % methods.len();
            match ask(process, &ProducerRequest::Measure { method: methods[number] })? {
                ProducerResponse::Time { us } if round >= warm_up => samples[number].0.push(us),
                ProducerResponse::Time { .. } => {}
                _ => return Err(unexpected()),
            }
        }
    }
    ask_done(process, &ProducerRequest::Clear)?;
    Ok(samples)
}
