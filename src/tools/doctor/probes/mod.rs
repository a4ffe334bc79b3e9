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
use super::{Finding, Status, peer::PeerProcess, report::Seen};
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
    /// What it means if what is tried turns out not to work.
    broken: &'static str,
    /// What is not known where something else went wrong. Without it `broken` holds whatever went wrong.
    whether: Option<&'static str>,
    /// The driver's calls that it is about: if one of them fails, what is tried does not work.
    calls: &'static [&'static str],
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
    Probe { name, about, required: false, broken, whether: None, calls: &[], alone: false, run }
}

impl Probe {
    const fn required(self) -> Self {
        Self { required: true, ..self }
    }

    const fn alone(self) -> Self {
        Self { alone: true, ..self }
    }

    /// What it tells apart: that what is tried does not work, for which these calls must fail, and that it can't be tried.
    const fn whether(self, whether: &'static str, calls: &'static [&'static str]) -> Self {
        Self { whether: Some(whether), calls, ..self }
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
        let found = Found::failed(self.meaning_of(&seen)).with(seen);
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
        match (self.is_lacking(&seen), self.required) {
            (true, true) => Found::of(Status::Unsupported, self.broken).with(seen),
            (true, false) => Found::of(Status::Unsupported, "There is no such thing here.").with(seen),
            (false, _) => Found::failed(self.meaning_of(&seen)).with(seen),
        }
    }

    /// Whether an error says that what is tried does not exist here. From a probe of something else the same code is a fault.
    fn is_lacking(&self, seen: &Seen) -> bool {
        const FEATURES: &[&str] =
            &["memory", "export", "host-numa", "dma-buf", "fabric", "pool", "legacy", "event", "peer"];
        // A context is no part of any of them.
        let context = seen
            .call
            .as_deref()
            .is_some_and(|call| ["cuCtx", "cuDevicePrimaryCtx"].iter().any(|start| call.starts_with(start)));
        match seen.code {
            Some(code::NOT_PERMITTED) => self.name == "fabric" && !context,
            Some(code::NOT_SUPPORTED) => FEATURES.contains(&self.name) && !context,
            // A library that is there and broken is nobody's lack.
            _ => seen.is_lacking() && (!seen.is_dlopen() || seen.is_library_missing()),
        }
    }

    /// What an error, or an end before its time, says of what is tried.
    fn meaning_of(&self, seen: &Seen) -> String {
        let about = seen.call.as_deref().is_some_and(|call| self.calls.contains(&call));
        match self.whether {
            // Whatever needs memory can run out of it.
            Some(whether) if !about || seen.code == Some(code::OUT_OF_MEMORY) => {
                format!("It could not be tried whether {whether}.")
            }
            _ => self.broken.to_owned(),
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

/// The calls of virtual memory management, and the copies that show whether it works.
const VMM: &[&str] = &[
    "cuMemGetAllocationGranularity",
    "cuMemCreate",
    "cuMemAddressReserve",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemcpyHtoD_v2",
    "cuMemcpyDtoH_v2",
];

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
    .whether("memory can be created, mapped, written and read", VMM)
    .required(),
    probe(
        "export",
        Run::Device(own::export),
        "memory is exported as a descriptor, and what that is",
        "Memory can't be handed out as a descriptor.",
    )
    .whether("memory can be handed out as a descriptor", &["cuMemExportToShareableHandle"])
    .required(),
    probe(
        "import",
        Run::Device(own::import),
        "an exported descriptor is imported again in the same process",
        "An exported descriptor can't be turned back into memory.",
    )
    .whether("an exported descriptor can be turned back into memory", &["cuMemImportFromShareableHandle"])
    .required(),
    probe(
        "round-trip",
        Run::Device(two::round_trip),
        "two processes share memory over a socket, and each reads what the other wrote",
        "Two processes can't share memory here.",
    )
    .whether("two processes can share memory here", &["cuMemExportToShareableHandle", "cuMemImportFromShareableHandle"])
    .required(),
    probe(
        "aliases",
        Run::Device(own::aliases),
        "two mappings of one allocation show the same bytes",
        "Two mappings of one allocation do not show the same bytes.",
    )
    .whether("two mappings of one allocation show the same bytes", &[]),
    probe(
        "read-only-copy",
        Run::Device(own::read_only_copy),
        "a copy into a read-only mapping is refused",
        "A read-only mapping does not keep a copy out.",
    )
    .whether("a read-only mapping keeps a copy out", &[]),
    probe(
        "read-only-store",
        Run::Device(own::read_only_store),
        "a kernel's store into a read-only mapping faults, in a process of its own",
        "A read-only mapping does not keep a kernel's store out.",
    )
    .whether("a read-only mapping keeps a kernel's store out", &[])
    .alone(),
    probe(
        "wrong-descriptor",
        Run::Device(own::wrong_descriptor),
        "a descriptor of something else is refused, and nothing is harmed",
        "A wrong descriptor is not simply refused.",
    )
    .whether("a wrong descriptor is refused and harms nothing", &[]),
    probe(
        "exporter-killed",
        Run::Device(killed::exporter_killed),
        "the memory of a process that is killed stays readable where it was imported",
        "Imported memory does not outlive the process that it came from.",
    )
    .whether("imported memory outlives the process that it came from", &[])
    .alone(),
    probe(
        "memory-returned",
        Run::Device(killed::memory_returned),
        "all of a killed process's memory is free again once its importer lets go",
        "Memory of a killed process stays in use.",
    )
    .whether("memory of a killed process becomes free again", &[])
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
    )
    .whether(
        "host-NUMA memory can be shared",
        &["cuMemCreate", "cuMemExportToShareableHandle", "cuMemImportFromShareableHandle"],
    ),
    probe(
        "dma-buf",
        Run::Device(own::dma_buf),
        "memory is exported as a dma-buf, for devices of other makers",
        "Memory can't be exported as a dma-buf.",
    )
    .whether("memory can be exported as a dma-buf", &["cuMemCreate", "cuMemGetHandleForAddressRange"]),
    probe(
        "fabric",
        Run::Device(own::fabric),
        "memory is created for, and exported as, a fabric handle, for other machines",
        "Fabric handles do not work.",
    )
    .whether("fabric handles work", &["cuMemCreate", "cuMemExportToShareableHandle"]),
    probe(
        "pool",
        Run::Device(two::pool),
        "two processes share memory of a memory pool",
        "Memory pools can't be shared.",
    )
    .whether(
        "memory pools can be shared",
        &[
            "cuMemPoolCreate",
            "cuMemPoolExportToShareableHandle",
            "cuMemPoolImportFromShareableHandle",
            "cuMemPoolExportPointer",
            "cuMemPoolImportPointer",
            "cuMemPoolSetAccess",
            "cuMemAllocFromPoolAsync",
        ],
    ),
    probe(
        "legacy",
        Run::Device(two::legacy),
        "two processes share memory by a legacy handle (cuIpc)",
        "Legacy handles do not work.",
    )
    .whether("legacy handles work", &["cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2"]),
    probe(
        "event",
        Run::Device(two::event),
        "one process waits for another's event on the device",
        "Events can't be shared between processes.",
    )
    .whether("events can be shared between processes", &["cuIpcGetEventHandle", "cuIpcOpenEventHandle"]),
    probe(
        "peer",
        Run::Pair(pair::peer),
        "one device reads, writes and copies memory of another",
        "One device can't use the other's memory.",
    )
    .whether("one device can use the other's memory", &["cuDeviceCanAccessPeer", "cuMemSetAccess"]),
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
    pub(super) peer: Option<PeerProcess>,
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

    fn is_dlopen(&self) -> bool {
        self.call.as_deref() == Some("dlopen") && self.code.is_none()
    }

    /// Whether there is no driver library under any of its names. One that is there and does not load is broken.
    pub(super) fn is_library_missing(&self) -> bool {
        // A library that the driver's own needs may be what is missing: the loader then names that, or who needs it.
        let missing = |answer: &str| {
            let answer = answer.trim();
            answer.ends_with("No such file or directory")
                && (answer.starts_with("libcuda.so") || answer.contains(" libcuda.so"))
        };
        let answers = self.message.split_once(NO_LIBRARY).map(|(_, answers)| answers);
        answers.is_some_and(|answers| answers.split(';').all(missing))
    }

    /// Whether it says that there is nothing here to test: no driver library, or no device, and none that is withheld.
    pub(super) fn is_nothing_here(&self) -> bool {
        match self.code {
            Some(code::NO_DEVICE) => !self.message.contains(WITHHELD),
            _ => self.is_dlopen() && self.is_library_missing(),
        }
    }
}

/// How [`Error::NoDriver`] begins.
pub(super) const NO_LIBRARY: &str = "no CUDA driver library loads: ";

/// What is told of nodes of devices that this process may not open, where the driver finds no device.
const WITHHELD: &str = "this process may not open ";

pub(super) fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// What takes how long, in microseconds.
fn timed<T>(step: impl FnOnce() -> Result<T>) -> Result<(T, u64)> {
    let begun = Instant::now();
    let result = step()?;
    Ok((result, micros(begun.elapsed())))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GONE: &str = "cannot open shared object file: No such file or directory";

    fn seen(error: &Error) -> Seen {
        Seen::of(error)
    }

    fn driver(call: &'static str, number: u32) -> Seen {
        seen(&Error::Driver { call, code: number, name: "CUDA_ERROR".into(), source: None })
    }

    fn of(probe: &str, seen: Seen) -> Found {
        Probe::named(probe).unwrap().of_seen(seen)
    }

    #[test]
    fn only_a_library_that_is_nowhere_is_nothing_here() {
        let tried = |tried: String| seen(&Error::NoDriver { tried });
        let nowhere = tried(format!("libcuda.so.1: {GONE}; libcuda.so: {GONE}"));
        assert!(nowhere.is_nothing_here());
        assert_eq!(of("driver", nowhere).status, Status::Unsupported);
        for broken in [
            format!("/opt/libcuda.so.1: file too short; libcuda.so: {GONE}"),
            format!("libcuda.so.1: wrong ELF class: ELFCLASS32; libcuda.so: {GONE}"),
            format!("libcuda.so.1: {GONE}; /opt/libcuda.so: invalid ELF header"),
            format!("libnvidia-x.so.1: {GONE}; libcuda.so: {GONE}"),
            "Error loading shared library libnvidia-x.so: No such file or directory (needed by /opt/libcuda.so.1)"
                .to_owned(),
        ] {
            let seen = tried(broken);
            assert!(!seen.is_nothing_here(), "{}", seen.message);
            assert_eq!(of("driver", seen).status, Status::Failed);
        }
    }

    #[test]
    fn no_device_is_nothing_here_unless_it_is_withheld() {
        let mut none = seen(&Error::NoDevice);
        assert!(none.is_nothing_here());
        none.message += "; this process may not open /dev/nvidia0";
        assert!(!none.is_nothing_here());
    }

    #[test]
    fn a_code_is_a_lack_only_of_what_it_is_about() {
        let status = |probe, call, number| of(probe, driver(call, number)).status;
        assert_eq!(status("fabric", "cuMemCreate", 800), Status::Unsupported);
        for probe in ["memory", "export", "host-numa", "dma-buf", "pool", "round-trip"] {
            assert_eq!(status(probe, "cuMemCreate", 800), Status::Failed, "{probe}");
        }
        for probe in ["memory", "export", "host-numa", "dma-buf", "fabric", "pool", "legacy", "event", "peer"] {
            assert_eq!(status(probe, "cuMemCreate", 801), Status::Unsupported, "{probe}");
            assert_eq!(status(probe, "cuDevicePrimaryCtxRetain", 801), Status::Failed, "{probe}");
        }
        for probe in ["driver", "import", "round-trip", "aliases", "read-only-store", "export-cost"] {
            assert_eq!(status(probe, "cuMemExportToShareableHandle", 801), Status::Failed, "{probe}");
        }
    }

    #[test]
    fn what_something_else_kept_from_being_tried_is_not_said_to_be_broken() {
        let meaning = |probe, call, number| of(probe, driver(call, number)).meaning;
        for (probe, call, number) in [
            ("read-only-store", "cuMemCreate", 2),
            ("wrong-descriptor", "cuDevicePrimaryCtxRetain", 46),
            ("memory", "cuMemCreate", 2),
            ("event", "cuDevicePrimaryCtxRetain", 201),
        ] {
            assert!(meaning(probe, call, number).starts_with("It could not be tried whether "), "{probe}");
        }
        assert_eq!(meaning("memory", "cuMemMap", 1), Probe::named("memory").unwrap().broken);
        assert_eq!(meaning("driver", "cuInit", 999), Probe::named("driver").unwrap().broken);
        let timeout = Seen { call: None, code: None, name: None, kind: "timeout".to_owned(), message: String::new() };
        let cut = Probe::named("exporter-killed").unwrap().cut_short(None, timeout);
        assert_eq!((cut.status, cut.meaning.contains("could not be tried")), (Status::Failed, true));
    }

    #[test]
    fn the_words_are_those_of_the_error() {
        assert!(Error::NoDriver { tried: String::new() }.to_string().starts_with(NO_LIBRARY));
    }
}
