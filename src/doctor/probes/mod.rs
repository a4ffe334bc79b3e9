//! The probes: each tries one thing for real and says what came of it.

mod killed;
mod machine;
mod own;
mod pair;
mod two;

use std::{
    collections::BTreeMap,
    path::PathBuf,
    time::{Duration, Instant},
};

use serde_json::Value;

pub(super) use self::two::{End, Way, follow, lend, share_event, take};
use super::{Finding, Status, peer::Peer, report::Seen};
use crate::{
    driver::{Backend, code},
    error::{Error, Result},
    memory::Device,
};

/// One thing that is tried.
#[derive(Debug)]
pub struct Probe {
    /// Its name.
    pub name: &'static str,
    /// What it tries, in one line.
    pub about: &'static str,
    /// Whether it must be `ok` for the verdict.
    pub required: bool,
    /// What it means if it fails.
    broken: &'static str,
    /// Whether it needs a process for itself, because it ruins one.
    pub(super) alone: bool,
    run: Run,
}

#[derive(Debug, Clone, Copy)]
enum Run {
    Machine(fn(Backend) -> Result<Found>),
    Device(fn(&mut Bench) -> Result<Found>),
    Pair(fn(&mut Bench, &Device) -> Result<Found>),
}

/// Of what a probe is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// The machine as a whole.
    Machine,
    /// Each device.
    Device,
    /// Each ordered pair of devices.
    Pair,
}

const fn probe(name: &'static str, run: Run, about: &'static str, broken: &'static str) -> Probe {
    Probe { name, about, required: false, broken, alone: false, run }
}

impl Probe {
    const fn required(self) -> Self {
        Self { required: true, ..self }
    }

    const fn alone(self) -> Self {
        Self { alone: true, ..self }
    }

    /// Of what it is.
    pub fn scope(&self) -> Scope {
        match self.run {
            Run::Machine(_) => Scope::Machine,
            Run::Device(_) => Scope::Device,
            Run::Pair(_) => Scope::Pair,
        }
    }

    /// The probe of a name.
    pub fn named(name: &str) -> Option<&'static Self> {
        PROBES.iter().find(|probe| probe.name == name)
    }

    /// What is told of it when it did not come to an end by itself.
    pub(super) fn cut_short(&self, us: Option<u64>, seen: Seen) -> Finding {
        let found = Found::failed(self.broken).with(seen);
        self.finding(us, found)
    }

    /// What is told of it when it was not tried.
    pub(super) fn skipped(&self, why: &str) -> Finding {
        self.finding(None, Found::of(Status::Skipped, why))
    }

    pub(super) fn finding(&self, us: Option<u64>, found: Found) -> Finding {
        let Found { status, figures, meaning, error } = found;
        let probe = self.name.to_owned();
        Finding { probe, status, us, figures, error, meaning, cause: None, remedy: None, rule: None }
    }

    /// Tries something in its name.
    pub(super) fn examine(&self, attempt: impl FnOnce() -> Result<Found>) -> Finding {
        let begun = Instant::now();
        let found = attempt().unwrap_or_else(|error| self.of_error(&error));
        self.finding(Some(micros(begun.elapsed())), found)
    }

    fn of_error(&self, error: &Error) -> Found {
        self.of_seen(Seen::of(error))
    }

    /// What an error, of this end or of the other, makes of it.
    pub(super) fn of_seen(&self, seen: Seen) -> Found {
        match (seen.is_lacking(), self.required) {
            (true, true) => Found::of(Status::Unsupported, self.broken).with(seen),
            (true, false) => Found::of(Status::Unsupported, "There is no such thing here.").with(seen),
            (false, _) => Found::failed(self.broken).with(seen),
        }
    }

    pub(super) fn run_machine(&self, backend: Backend) -> Option<Finding> {
        let Run::Machine(run) = self.run else { return None };
        Some(self.examine(|| run(backend)))
    }

    pub(super) fn run_device(&self, bench: &mut Bench, owner: Option<&Device>) -> Option<Finding> {
        match (self.run, owner) {
            (Run::Device(run), None) => Some(self.examine(|| run(bench))),
            (Run::Pair(run), Some(owner)) => Some(self.examine(|| run(bench, owner))),
            _ => None,
        }
    }
}

/// All of them, in the order in which they run.
pub static PROBES: &[Probe] = &[
    probe(
        "driver",
        Run::Machine(machine::driver),
        "the driver library loads, starts, and has devices",
        "The driver can't be used, and so nothing else can be tried.",
    )
    .required(),
    probe(
        "descriptors",
        Run::Machine(machine::descriptors),
        "how many files a process may have open: each allocation that is shared takes one",
        "The limit of open files can't be told.",
    ),
    probe(
        "host-memory",
        Run::Machine(machine::host_memory),
        "how much of the machine's memory this process can use",
        "How much memory there is can't be told.",
    ),
    probe(
        "attributes",
        Run::Device(own::attributes),
        "what the device claims",
        "The device does not even say what it can do.",
    ),
    probe(
        "granularity",
        Run::Device(own::granularity),
        "what sizes of allocations are multiples of",
        "What sizes memory comes in can't be told.",
    ),
    probe(
        "memory",
        Run::Device(own::memory),
        "memory is created, mapped, made accessible, written and read back",
        "Virtual memory management does not work, so there is nothing to share.",
    )
    .required(),
    probe(
        "export",
        Run::Device(own::export),
        "memory is exported as a descriptor, and what that is",
        "Memory can't be handed out as a descriptor.",
    )
    .required(),
    probe(
        "import",
        Run::Device(own::import),
        "an exported descriptor is imported again in the same process",
        "An exported descriptor can't be turned back into memory.",
    )
    .required(),
    probe(
        "round-trip",
        Run::Device(two::round_trip),
        "two processes share memory over a socket, and each reads what the other wrote",
        "Two processes can't share memory here.",
    )
    .required(),
    probe(
        "aliases",
        Run::Device(own::aliases),
        "two mappings of one allocation show the same bytes",
        "Two mappings of one allocation do not show the same bytes.",
    ),
    probe(
        "read-only-copy",
        Run::Device(own::read_only_copy),
        "a copy into a read-only mapping is refused",
        "A read-only mapping does not keep a copy out.",
    ),
    probe(
        "read-only-store",
        Run::Device(own::read_only_store),
        "a kernel's store into a read-only mapping faults, in a process of its own",
        "A read-only mapping does not keep a kernel's store out.",
    )
    .alone(),
    probe(
        "wrong-descriptor",
        Run::Device(own::wrong_descriptor),
        "a descriptor of something else is refused, and nothing is harmed",
        "A wrong descriptor is not simply refused.",
    ),
    probe(
        "exporter-killed",
        Run::Device(killed::exporter_killed),
        "the memory of a process that is killed stays readable where it was imported",
        "Imported memory does not outlive the process that it came from.",
    )
    .alone(),
    probe(
        "memory-returned",
        Run::Device(killed::memory_returned),
        "all of a killed process's memory is free again once its importer lets go",
        "Memory of a killed process stays in use.",
    )
    .alone(),
    probe(
        "export-cost",
        Run::Device(own::export_cost),
        "what an export costs, with and without another one held open",
        "The cost of an export can't be measured.",
    ),
    probe(
        "host-numa",
        Run::Device(two::host_numa),
        "two processes share the host's memory next to the device",
        "Host-NUMA memory can't be shared.",
    ),
    probe(
        "dma-buf",
        Run::Device(own::dma_buf),
        "memory is exported as a dma-buf, for devices of other makers",
        "Memory can't be exported as a dma-buf.",
    ),
    probe(
        "fabric",
        Run::Device(own::fabric),
        "memory is created for, and exported as, a fabric handle, for other machines",
        "Fabric handles do not work.",
    ),
    probe(
        "pool",
        Run::Device(two::pool),
        "two processes share memory of a memory pool",
        "Memory pools can't be shared.",
    ),
    probe(
        "legacy",
        Run::Device(two::legacy),
        "two processes share memory by a legacy handle (cuIpc)",
        "Legacy handles do not work.",
    ),
    probe(
        "event",
        Run::Device(two::event),
        "one process waits for another's event on the device",
        "Events can't be shared between processes.",
    ),
    probe(
        "peer",
        Run::Pair(pair::peer),
        "one device reads, writes and copies memory of another",
        "One device can't use the other's memory.",
    ),
];

/// What a probe works with: a device, and what it needs to call in another process.
#[derive(Debug)]
pub(super) struct Bench {
    pub(super) device: Device,
    /// Where sockets may be made.
    pub(super) folder: PathBuf,
    /// How long the whole of a probe may take.
    pub(super) timeout: Duration,
    /// The other process, once there is one.
    pub(super) peer: Option<Peer>,
}

/// What a probe found out.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) status: Status,
    pub(super) figures: BTreeMap<String, Value>,
    pub(super) meaning: String,
    pub(super) error: Option<Seen>,
}

impl Found {
    pub(super) fn of(status: Status, meaning: impl Into<String>) -> Self {
        Self { status, figures: BTreeMap::new(), meaning: meaning.into(), error: None }
    }

    pub(super) fn ok(meaning: impl Into<String>) -> Self {
        Self::of(Status::Ok, meaning)
    }

    pub(super) fn failed(meaning: impl Into<String>) -> Self {
        Self::of(Status::Failed, meaning)
    }

    /// With something that was seen.
    pub(super) fn figure(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.figures.insert(name.to_owned(), value.into());
        self
    }

    pub(super) fn with(mut self, seen: Seen) -> Self {
        self.error = Some(seen);
        self
    }

    /// What the other end is told of it: nothing, if it is well.
    pub(super) fn into_seen(self) -> Option<Seen> {
        if self.status == Status::Ok {
            return None;
        }
        let seen = || Seen { call: None, code: None, name: None, kind: "mismatch".to_owned(), message: self.meaning };
        Some(self.error.unwrap_or_else(seen))
    }
}

impl Seen {
    /// An error, as a report tells it.
    pub fn of(error: &Error) -> Self {
        let seen =
            |kind: &str| Self { call: None, code: None, name: None, kind: kind.to_owned(), message: error.in_full() };
        let numbered = |call: &str, number: u32| {
            let name = code::name(number).map(str::to_owned);
            Self { call: Some(call.to_owned()), code: Some(number), name, ..seen("driver") }
        };
        match error {
            Error::Driver { call, code, name, .. } => {
                Self { name: Some(name.clone().into_owned()), ..numbered(call, *code) }
            }
            Error::NoDevice => numbered("cuDeviceGetCount", code::NO_DEVICE),
            Error::StubLibrary { .. } => numbered("cuInit", code::STUB_LIBRARY),
            Error::OutOfMemory { .. } => numbered("cuMemCreate", code::OUT_OF_MEMORY),
            Error::NoPeerAccess { source: Some(source), .. } => Self { message: error.in_full(), ..Self::of(source) },
            Error::NoDriver { .. } => Self { call: Some("dlopen".to_owned()), ..seen("unsupported") },
            Error::MissingSymbol { symbol, .. } => Self { call: Some((*symbol).to_owned()), ..seen("unsupported") },
            Error::Timeout { .. } | Error::NoConsumer { .. } | Error::Absent { .. } => seen("timeout"),
            other => seen(other.kind().as_str()),
        }
    }

    /// Whether it says that there is no such thing, rather than that it fails.
    pub(super) fn is_lacking(&self) -> bool {
        match self.code {
            Some(number) => [code::NOT_PERMITTED, code::NOT_SUPPORTED].contains(&number),
            None => self.kind == "unsupported",
        }
    }

    /// Whether it says that there is nothing here to test: no driver library, or no device.
    pub(super) fn is_nothing_here(&self) -> bool {
        self.code == Some(code::NO_DEVICE) || (self.call.as_deref() == Some("dlopen") && self.code.is_none())
    }
}

pub(super) fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// What takes how long, in microseconds.
fn timed<T>(step: impl FnOnce() -> Result<T>) -> Result<(T, u64)> {
    let begun = Instant::now();
    let result = step()?;
    Ok((result, micros(begun.elapsed())))
}
