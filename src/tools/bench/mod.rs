//! What a handoff costs, beside what the driver's own calls cost: measured, in one run, side by side.
//!
//! The processes are real ones: this program again, started for the run. One measures and touches no memory itself. A producer,
//! which it starts, lends memory to consumers of its own; a second pair does what must not happen in a process that holds an
//! exported descriptor (an export is far cheaper there). What is compared is measured in turn, one sample of each after the
//! other, so that whatever disturbs the machine disturbs all of it.

mod child;
mod consumer;
mod handoff;
mod orders;
mod pattern;
pub mod picture;
mod process;
mod producer;
mod single;
mod startup;
mod stats;
mod task;
pub mod text;

use std::{collections::BTreeMap, fs, str::FromStr, thread, time::Duration};

use serde::{Deserialize, Serialize};

pub use self::stats::Summary;
pub(super) use self::{child::run_task, process::TOOL};
use self::{
    orders::{Answer, Order},
    process::BenchProcess,
    stats::Samples,
    task::{Role, Task},
};
use crate::{
    channel::Cancel,
    driver::Backend,
    error::{ProtocolError, Result},
    memory::Selector,
};

/// The version of the JSON object.
const SCHEMA: u32 = 1;

/// What the names of the folders of a bench begin with.
const FOLDER: &str = "vmmfd-bench.";

/// Something to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Bench {
    /// Memory that the consumer does not hold, by each way there is.
    Handoff,
    /// Memory that the consumer holds.
    Repeat,
    /// Filling and verifying, by the GPU and by the host.
    Verify,
    /// Each call of the driver.
    Stages,
    /// From `exec` to ready, and the whole round trip.
    Startup,
}

impl Bench {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Handoff, Self::Repeat, Self::Verify, Self::Stages, Self::Startup];

    /// Its name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Handoff => "handoff",
            Self::Repeat => "repeat",
            Self::Verify => "verify",
            Self::Stages => "stages",
            Self::Startup => "startup",
        }
    }
}

impl FromStr for Bench {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = Self::ALL.into_iter().find(|bench| bench.as_str() == text);
        known.ok_or_else(|| {
            format!("no bench is called `{text}`: write handoff, repeat, verify, stages, startup or all")
        })
    }
}

/// What to measure, on what, and how often.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Which benches.
    pub benches: Vec<Bench>,
    /// On what.
    pub backend: Backend,
    /// On which device.
    pub device: Selector,
    /// Of how many bytes, rounded up to the granularity; none are the defaults of each bench.
    pub sizes: Vec<u64>,
    /// How many samples of each; of what takes long, fewer.
    pub count: usize,
    /// How many consumers at the same time.
    pub consumers: Vec<usize>,
    /// How long one step may take.
    pub timeout: Duration,
}

/// What is told while it goes on.
#[derive(Debug, Clone, Copy)]
pub struct Progress<'a> {
    /// What is measured.
    pub what: &'a str,
    /// How many samples are there.
    pub done: usize,
    /// Of how many.
    pub all: usize,
}

/// What was measured.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The version of this object.
    pub schema: u32,
    /// What made it.
    pub tool: String,
    /// When.
    pub made: String,
    /// On what.
    pub backend: Backend,
    /// On which machine.
    pub machine: Machine,
    /// How many samples there were to be of each.
    pub count: usize,
    /// How many came before them and do not count.
    pub warm_up: usize,
    /// The measurements.
    pub series: Vec<Series>,
    /// What was not measured, and why.
    pub left_out: Vec<String>,
}

/// Where it was measured.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Machine {
    /// The system.
    pub kernel: String,
    /// How many CPUs this process may use.
    pub cpus: usize,
    /// The device's name.
    pub device: String,
    /// Its identity.
    pub uuid: String,
    /// The version of NVIDIA's kernel module, if it is loaded.
    pub module: Option<String>,
    /// The newest CUDA that the driver supports, as 1000 * major + 10 * minor; 0 on the host backend.
    pub cuda: i32,
}

/// Measurements of one thing at one size.
#[derive(Debug, Clone, Serialize)]
pub struct Series {
    /// Of which bench.
    pub bench: Bench,
    /// What was measured.
    pub name: String,
    /// How many bytes it was about; 0 where it is about none.
    pub size: u64,
    /// What the samples come to.
    #[serde(flatten)]
    pub summary: Summary,
    /// How many times as long as the floor of the same bench and size, by their medians.
    pub ratio: Option<f64>,
    /// Bytes for each second, of what moves them.
    pub rate: Option<f64>,
    /// The samples, in microseconds.
    #[serde(skip)]
    pub samples: Vec<f64>,
}

/// Who is told how far it is.
pub type Observer<'a> = &'a dyn Fn(Progress<'_>);

/// Measures what is planned.
///
/// The program that calls this must call [`run_child`](super::run_child) for its hidden subcommand.
///
/// # Errors
/// [`Error::NoDriver`], [`Error::NoDevice`], [`Error::NoSuchDevice`]; [`Error::Child`] if a process of the bench fails otherwise,
/// hangs or dies; [`Error::Interrupted`]; [`Error::System`].
///
/// [`Error::NoDriver`]: crate::Error::NoDriver
/// [`Error::NoDevice`]: crate::Error::NoDevice
/// [`Error::NoSuchDevice`]: crate::Error::NoSuchDevice
/// [`Error::Child`]: crate::Error::Child
/// [`Error::Interrupted`]: crate::Error::Interrupted
/// [`Error::System`]: crate::Error::System
pub fn run(plan: &Plan, cancel: &Cancel, observer: Observer<'_>) -> Result<Report> {
    let mut run = Run::new(plan, cancel, observer);
    let wants = |bench: Bench| plan.benches.contains(&bench);
    if wants(Bench::Handoff) || wants(Bench::Repeat) {
        handoff::measure(&mut run)?;
    }
    if wants(Bench::Verify) {
        pattern::measure(&mut run)?;
    }
    if wants(Bench::Stages) {
        pattern::measure_stages(&mut run)?;
    }
    if wants(Bench::Startup) {
        startup::measure(&mut run)?;
    }
    Ok(run.report)
}

/// A report as one line of JSON.
pub fn to_json(report: &Report) -> String {
    match serde_json::to_string(report) {
        Ok(text) => text + "\n",
        Err(error) => format!("{{\"error\":\"{error}\"}}\n"),
    }
}

/// The part of the free memory that is used at most.
const USED: f64 = 0.95;

/// As good as no limit.
const LONGEST_STEP: Duration = Duration::from_secs(24 * 3600);

/// What memory there is.
#[derive(Debug, Clone, Copy)]
struct Room {
    /// How many bytes may be used.
    free: u64,
    granularity: u64,
}

/// A run under way.
struct Run<'a> {
    plan: &'a Plan,
    cancel: &'a Cancel,
    observer: Observer<'a>,
    report: Report,
}

impl<'a> Run<'a> {
    fn new(plan: &'a Plan, cancel: &'a Cancel, observer: Observer<'a>) -> Self {
        let text = |path: &str| fs::read_to_string(path).ok().map(|text| text.trim().to_owned());
        let machine = Machine {
            kernel: text("/proc/sys/kernel/osrelease").unwrap_or_default(),
            cpus: thread::available_parallelism().map_or(0, usize::from),
            module: text("/sys/module/nvidia/version"),
            ..Machine::default()
        };
        let report = Report {
            schema: SCHEMA,
            tool: format!("vmmfd {}", env!("CARGO_PKG_VERSION")),
            made: humantime::format_rfc3339_seconds(std::time::SystemTime::now()).to_string(),
            backend: plan.backend,
            machine,
            count: plan.count,
            warm_up: warm_up(plan.count),
            series: Vec::new(),
            left_out: Vec::new(),
        };
        Self { plan, cancel, observer, report }
    }

    fn task(&self, role: Role) -> Task {
        let Plan { backend, device, .. } = self.plan;
        Task { backend: *backend, device: device.to_string(), timeout: self.step(), role }
    }

    /// How long one step may take: what clocks and sockets can count.
    fn step(&self) -> Duration {
        self.plan.timeout.min(LONGEST_STEP)
    }

    /// Starts a process and waits until its driver is ready. Returns it with what memory it has.
    fn start(&mut self, role: Role, variables: &[(&str, &str)]) -> Result<(BenchProcess, Room)> {
        let process = BenchProcess::leader(&self.task(role), self.cancel, variables)?;
        match receive(&process)? {
            Answer::Started { name, uuid, version, granularity, free } => {
                let machine = &mut self.report.machine;
                (machine.device, machine.uuid, machine.cuda) = (name, uuid, version);
                Ok((process, Room { free: (free as f64 * USED) as u64, granularity }))
            }
            _ => unfit(),
        }
    }

    /// The sizes to measure at, each once.
    fn sizes(&self, default: &[u64], room: Room) -> Vec<u64> {
        let mut sizes = Vec::new();
        for size in if self.plan.sizes.is_empty() { default } else { &self.plan.sizes } {
            let largest = u64::MAX - u64::MAX % room.granularity;
            let size = size.checked_next_multiple_of(room.granularity).unwrap_or(largest);
            if !sizes.contains(&size) {
                sizes.push(size);
            }
        }
        sizes
    }

    /// Whether to go on, and how far it is.
    fn tick(&self, what: &str, done: usize, all: usize) -> Result<()> {
        (self.observer)(Progress { what, done, all });
        self.cancel.check()
    }

    fn leave_out(&mut self, what: String) {
        self.report.left_out.push(what);
    }

    /// Adds what was measured, in the order of `names`; the ratios are to the one called `floor`.
    fn add(&mut self, bench: Bench, size: u64, measured: Vec<(String, Samples)>, floor: &str) {
        let summaries: BTreeMap<&String, Summary> =
            measured.iter().filter_map(|(name, samples)| Some((name, samples.summary()?))).collect();
        let floor = summaries.get(&floor.to_owned()).map(|floor| floor.p50_us);
        for (name, samples) in &measured {
            let Some(&summary) = summaries.get(name) else { continue };
            let ratio = floor.filter(|floor| *floor > 0.0).map(|floor| summary.p50_us / floor);
            let (name, samples) = (name.clone(), samples.0.clone());
            self.report.series.push(Series { bench, name, size, summary, ratio, rate: None, samples });
        }
    }
}

/// How many samples come before those that count.
fn warm_up(count: usize) -> usize {
    (count / 10).clamp(2, 20)
}

/// Gives an order, and returns what comes of it.
fn ask(process: &BenchProcess, order: &Order) -> Result<Answer> {
    process.send(order)?;
    receive(process)
}

fn receive(process: &BenchProcess) -> Result<Answer> {
    match process.receive()? {
        Answer::Failed(failure) => Err(failure.of(process.name())),
        answer => Ok(answer),
    }
}

/// One that is only to be done.
fn tell(process: &BenchProcess, order: &Order) -> Result<()> {
    match ask(process, order)? {
        Answer::Done => Ok(()),
        _ => unfit(),
    }
}

fn unfit<T>() -> Result<T> {
    Err(ProtocolError::Unexpected { got: "answer", want: "another one" }.into())
}
