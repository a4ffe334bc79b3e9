//! A run of the benches: its processes, its sizes, and its report.

use std::{collections::BTreeMap, fs, thread, time::Duration};

use vmmfd::{
    channel::Cancel,
    error::{Error, ProtocolError, Result},
};

use super::{
    plan::{Bench, BenchPlan, Observer, Printer, Progress},
    process::BenchProcess,
    protocol::{ProducerRequest, ProducerResponse},
    report::{BenchReport, Figure, Machine, Series},
    stats::{Samples, Summary},
    task::{Role, Task},
    text,
};
use vmmfd_cli::{schema::VERSION, stamp};

/// The prefix of the bench's folder names.
pub(super) const FOLDER: &str = "vmmfd-bench.";

/// The fraction of the free memory that is used.
const USED: f64 = 0.95;

/// A timeout that clocks and sockets can still represent.
const LONGEST_STEP: Duration = Duration::from_secs(24 * 3600);

/// The memory of a device.
#[derive(Debug, Clone, Copy)]
pub(super) struct Capacity {
    /// The bytes that may be used.
    pub(super) usable: u64,
    pub(super) granularity: u64,
}

/// A run of the benches.
pub(super) struct BenchRun<'a> {
    pub(super) plan: &'a BenchPlan,
    pub(super) cancel: &'a Cancel,
    observer: Observer<'a>,
    print: Printer<'a>,
    pub(super) report: BenchReport,
}

impl<'a> BenchRun<'a> {
    pub(super) fn new(plan: &'a BenchPlan, cancel: &'a Cancel, observer: Observer<'a>, print: Printer<'a>) -> Self {
        let text = |path: &str| fs::read_to_string(path).ok().map(|text| text.trim().to_owned());
        let machine = Machine {
            kernel: text("/proc/sys/kernel/osrelease").unwrap_or_default(),
            cpus: thread::available_parallelism().map_or(0, usize::from),
            module: text("/sys/module/nvidia/version"),
            ..Machine::default()
        };
        let report = BenchReport {
            schema: VERSION,
            tool: stamp::tool(),
            made: stamp::now(),
            backend: plan.backend,
            machine,
            count: plan.count,
            warm_up: warm_up(plan.count),
            series: Vec::new(),
            figures: Vec::new(),
            left_out: Vec::new(),
        };
        Self { plan, cancel, observer, print, report }
    }

    pub(super) fn task(&self, role: Role) -> Task {
        let BenchPlan { backend, device, .. } = self.plan;
        Task { backend: *backend, device: device.to_string(), timeout: self.step(), role }
    }

    /// How long one step may take.
    pub(super) fn step(&self) -> Duration {
        self.plan.timeout.min(LONGEST_STEP)
    }

    /// Starts a process and waits until its driver is ready. Also returns the capacity of its device.
    pub(super) fn start(&mut self, role: Role, variables: &[(&str, &str)]) -> Result<(BenchProcess, Capacity)> {
        let process = BenchProcess::leader(&self.task(role), self.cancel, variables)?;
        match receive(&process)? {
            ProducerResponse::Started { name, uuid, version, granularity, free } => {
                let machine = &mut self.report.machine;
                (machine.device, machine.uuid, machine.cuda) = (name, uuid, version);
                Ok((process, Capacity { usable: (free as f64 * USED) as u64, granularity }))
            }
            _ => Err(unexpected()),
        }
    }

    /// Returns the sizes to measure, without duplicates.
    pub(super) fn sizes(&self, default: &[u64], capacity: Capacity) -> Vec<u64> {
        let mut sizes = Vec::new();
        for size in if self.plan.sizes.is_empty() { default } else { &self.plan.sizes } {
            let largest = u64::MAX - u64::MAX % capacity.granularity;
            let size = size.checked_next_multiple_of(capacity.granularity).unwrap_or(largest);
            if !sizes.contains(&size) {
                sizes.push(size);
            }
        }
        sizes
    }

    /// Reports the progress. Fails if the run is cancelled.
    pub(super) fn tick(&self, what: &str, done: usize, all: usize) -> Result<()> {
        (self.observer)(Progress { what, done, all });
        self.cancel.check()
    }

    pub(super) fn leave_out(&mut self, what: String) {
        self.report.left_out.push(what);
    }

    pub(super) fn figure(&mut self, figure: Figure) {
        self.report.figures.push(figure);
    }

    /// Adds and prints measurements, with their ratios to the measurement named `floor`.
    pub(super) fn add(&mut self, bench: Bench, size: u64, measured: Vec<(String, Samples)>, floor: &str) {
        let summaries: BTreeMap<&String, Summary> =
            measured.iter().filter_map(|(name, samples)| Some((name, samples.summary()?))).collect();
        let floor = summaries.get(&floor.to_owned()).map(|floor| floor.p50_us);
        let before = self.report.series.len();
        for (name, samples) in &measured {
            let Some(&summary) = summaries.get(name) else { continue };
            let rate = (bench == Bench::Verify && size > 0).then(|| size as f64 / (summary.p50_us / 1e6));
            let ratio = floor.filter(|floor| *floor > 0.0).map(|floor| summary.p50_us / floor);
            let (name, samples) = (name.clone(), samples.0.clone());
            self.report.series.push(Series { bench, name, size, summary, ratio, rate, samples });
        }
        let added = &self.report.series[before..];
        if !added.is_empty() {
            let head = if before == 0 { text::head(&self.report) } else { String::new() };
            (self.print)(&(head + &text::table(bench, size, added)));
        }
    }
}

/// Returns the number of warm-up samples.
pub(super) fn warm_up(count: usize) -> usize {
    (count / 10).clamp(2, 20)
}

pub(super) fn ask(process: &BenchProcess, request: &ProducerRequest) -> Result<ProducerResponse> {
    process.send(request)?;
    receive(process)
}

pub(super) fn receive(process: &BenchProcess) -> Result<ProducerResponse> {
    match process.receive()? {
        ProducerResponse::Failed(failure) => Err(failure.of(process.name())),
        answer => Ok(answer),
    }
}

/// Sends a request without a result.
pub(super) fn ask_done(process: &BenchProcess, request: &ProducerRequest) -> Result<()> {
    match ask(process, request)? {
        ProducerResponse::Done => Ok(()),
        _ => Err(unexpected()),
    }
}

/// The error for a response that does not match the request.
pub(super) fn unexpected() -> Error {
    ProtocolError::Unexpected { got: "response", want: "that of the request" }.into()
}
