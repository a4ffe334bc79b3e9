//! The probes as data: their functions, their requirements, and the meaning of their errors.

mod broker;
mod checkpoint;
mod killed_owner;
mod machine;
mod one_process;
mod two_devices;

use vmmfd::driver::code;

use self::Run::{Machine, OnDevice, Pair, Share};
use super::{
    Reason,
    report::{Figures, micros, skipped, unsupported},
    sharing::{MemoryKind, event},
};
use crate::doctor::prelude::*;

pub(super) use self::{
    checkpoint::park,
    killed_owner::{hold, make},
};

#[derive(Debug)]
pub struct Probe {
    pub name: &'static str,
    /// A description in one line.
    pub about: &'static str,
    /// The meaning of a failure.
    broken: &'static str,
    /// The driver calls under test: with an error of another call, the test could not run. `None`: every error means `broken`.
    calls: Option<&'static [&'static str]>,
    flags: &'static [Flag],
    run: Run,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flag {
    /// The verdict requires it.
    Required,
    /// It provokes a GPU fault, which the kernel logs (Xid). Such a probe runs only on request.
    Faults,
    /// It needs a separate process because it corrupts the context or kills the process.
    Alone,
    /// It tests an optional feature: `CUDA_ERROR_NOT_SUPPORTED` means that the feature is missing. For any other probe it is a failure.
    Feature,
}

/// The function of a probe, with its inputs.
#[derive(Debug, Clone, Copy)]
enum Run {
    Machine(fn(Backend, &mut Figures) -> ProbeResult),
    OnDevice(fn(&mut ProbeContext) -> ProbeResult),
    /// Shares memory with a peer process, like a producer with a consumer.
    Share(MemoryKind),
    Pair(fn(&mut ProbeContext, &Device) -> ProbeResult),
}

/// The subject of a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    Machine,
    Device,
    /// Each ordered pair of devices.
    Pair,
}

const fn probe(
    name: &'static str,
    run: Run,
    flags: &'static [Flag],
    about: &'static str,
    broken: &'static str,
    calls: Option<&'static [&'static str]>,
) -> Probe {
    Probe { name, about, broken, calls, flags, run }
}

impl Probe {
    pub fn named(name: &str) -> Option<&'static Self> {
        PROBES.iter().find(|probe| probe.name == name)
    }

    pub fn is(&self, flag: Flag) -> bool {
        self.flags.contains(&flag)
    }

    pub fn scope(&self) -> Scope {
        match self.run {
            Machine(_) => Scope::Machine,
            OnDevice(_) | Share(_) => Scope::Device,
            Pair(_) => Scope::Pair,
        }
    }

    /// The finding of a probe that an external error interrupted.
    pub(super) fn cut_short(&self, us: Option<u64>, error: ErrorDetails) -> Finding {
        Finding { us, ..Finding::new(self.name, Status::Failed, self.meaning_of(&error)).with_error(error) }
    }

    pub(super) fn skipped(&self, why: &str) -> Finding {
        Finding { probe: self.name.to_owned(), ..skipped(why) }
    }

    /// Runs a test, and names and times its finding.
    pub(super) fn examine(&self, attempt: impl FnOnce() -> ProbeResult) -> Finding {
        let started = Instant::now();
        let finding = attempt().unwrap_or_else(|error| self.finding_of(error));
        Finding { probe: self.name.to_owned(), us: Some(micros(started.elapsed())), ..finding }
    }

    /// The finding for an error on either side.
    fn finding_of(&self, error: ErrorDetails) -> Finding {
        let finding = match (self.is_unsupported(&error), self.is(Flag::Required)) {
            (true, true) => unsupported(self.broken),
            (true, false) => unsupported("Not supported on this system."),
            (false, _) => failed(self.meaning_of(&error)),
        };
        finding.with_error(error)
    }

    /// Whether an error means that the system does not support the feature.
    fn is_unsupported(&self, error: &ErrorDetails) -> bool {
        // Every feature needs a context, so errors about contexts are not about the feature.
        let is_context = |call: &str| ["cuCtx", "cuDevicePrimaryCtx"].iter().any(|start| call.starts_with(start));
        let context = error.call.as_deref().is_some_and(is_context);
        match error.code {
            Some(code::NOT_PERMITTED) => self.name == "fabric" && !context,
            Some(code::NOT_SUPPORTED) => self.is(Flag::Feature) && !context,
            // A library that exists but does not load is broken.
            _ => error.is_unsupported() && error.reason != Some(Reason::LibraryBroken),
        }
    }

    /// The meaning of an error, in one sentence.
    fn meaning_of(&self, error: &ErrorDetails) -> String {
        let under_test = |calls: &[&str]| error.call.as_deref().is_some_and(|call| calls.contains(&call));
        // Any probe can run out of memory.
        match self.calls.is_some_and(|calls| !under_test(calls) || error.code == Some(code::OUT_OF_MEMORY)) {
            true => "It could not be tested: another step failed.".to_owned(),
            false => self.broken.to_owned(),
        }
    }

    pub(super) fn run_machine(&self, backend: Backend) -> Option<Finding> {
        let Machine(run) = self.run else { return None };
        let mut figures = Figures::new();
        let mut finding = self.examine(|| run(backend, &mut figures));
        finding.figures.append(&mut figures);
        Some(finding)
    }

    pub(super) fn run_device(&self, context: &mut ProbeContext, owner: Option<&Device>) -> Option<Finding> {
        match (self.run, owner) {
            (OnDevice(run), None) => Some(self.examine(|| run(context))),
            (Share(kind), None) => Some(self.examine(|| kind.share(context))),
            (Pair(run), Some(owner)) => Some(self.examine(|| run(context, owner))),
            _ => None,
        }
    }
}

/// All probes, in execution order.
#[rustfmt::skip]
pub static PROBES: &[Probe] = {
    use Flag::{Alone, Faults, Feature, Required};
    const EXPORT: &str = "cuMemExportToShareableHandle";
    const IMPORT: &str = "cuMemImportFromShareableHandle";
    &[
        probe("driver", Machine(machine::driver), &[Required], "the driver library loads, starts, and has devices",
            "The driver can't be used, so nothing else can be tried.", None),
        probe("descriptors", Machine(machine::descriptors), &[],
            "how many files a process may have open: each allocation that is shared takes one",
            "The limit of open files can't be read.", None),
        probe("host-memory", Machine(machine::host_memory), &[], "how much of the machine's memory this process can use",
            "The amount of memory can't be read.", None),
        probe("broker", Machine(broker::broker), &[],
            "the broker at this user's default socket answers; without one it is skipped",
            "The broker does not answer.", None),
        probe("attributes", OnDevice(one_process::attributes), &[], "the attributes that the device claims",
            "The device's attributes can't be read.", None),
        probe("granularity", OnDevice(one_process::granularity), &[], "the granularity of allocations",
            "The granularity can't be read.", None),
        probe("memory", OnDevice(one_process::memory), &[Required, Feature],
            "memory is created, mapped, made accessible, written and read back",
            "Virtual memory management does not work, so there is nothing to share.", Some(&[
                "cuMemGetAllocationGranularity", "cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess",
                "cuMemcpyHtoD_v2", "cuMemcpyDtoH_v2",
            ])),
        probe("export", OnDevice(one_process::export), &[Required, Feature],
            "memory is exported as a descriptor, and what kind of file that is",
            "Memory can't be exported as a descriptor.", Some(&[EXPORT])),
        probe("import", OnDevice(one_process::import), &[Required],
            "an exported descriptor is imported again in the same process",
            "An exported descriptor can't be imported.", Some(&[IMPORT])),
        probe("round-trip", Share(MemoryKind::ROUND_TRIP), &[Required],
            "two processes share memory over a socket, and each reads what the other wrote",
            "Two processes can't share memory here.", Some(&[EXPORT, IMPORT])),
        probe("aliases", OnDevice(one_process::aliases), &[], "two mappings of one allocation show the same bytes",
            "Two mappings of one allocation do not show the same bytes.", Some(&[])),
        probe("read-only-copy", OnDevice(one_process::read_only_copy), &[], "a copy into a read-only mapping is refused",
            "A read-only mapping does not keep a copy out.", Some(&[])),
        probe("read-only-store", OnDevice(one_process::read_only_store), &[Alone, Faults],
            "a kernel's store into a read-only mapping faults, in a process of its own",
            "A read-only mapping does not keep a kernel's store out.", Some(&[])),
        probe("wrong-descriptor", OnDevice(one_process::wrong_descriptor), &[],
            "a descriptor of another kind of file is refused, without side effects",
            "A wrong descriptor is not refused, or has side effects.", Some(&[])),
        probe("exporter-killed", OnDevice(killed_owner::exporter_killed), &[Alone],
            "memory stays readable where it was imported when its exporter is killed",
            "Imported memory does not outlive its exporter.", Some(&[])),
        probe("memory-returned", OnDevice(killed_owner::memory_returned), &[Alone],
            "all memory of a killed process is free again once its importer has released it",
            "Memory of a killed process stays in use.", Some(&[])),
        probe("held-descriptor", OnDevice(killed_owner::held_descriptor), &[],
            "memory of a killed process stays while a process without the driver holds its descriptor, as a broker does",
            "A descriptor alone does not keep memory: a broker can't.", Some(&[IMPORT, "cuMemMap"])),
        probe("persistence", OnDevice(one_process::persistence), &[],
            "the driver keeps the device's state, and so a broker's memory, while no process uses the device",
            "It can't be found out whether the driver keeps the device's state.", None),
        probe("checkpoint", OnDevice(checkpoint::checkpoint), &[Feature],
            "the driver takes all GPU memory from a process with a parked lease, and gives it back: `vmmfd suspend`",
            "A process can't be suspended here.", Some(&[
                "cuCheckpointProcessGetState", "cuCheckpointProcessLock", "cuCheckpointProcessCheckpoint",
                "cuCheckpointProcessRestore", "cuCheckpointProcessUnlock",
            ])),
        probe("host-numa", Share(MemoryKind::HOST), &[Feature],
            "two processes share the host's memory next to the device", "Host-NUMA memory can't be shared.",
            Some(&["cuMemCreate", EXPORT, IMPORT])),
        probe("dma-buf", OnDevice(one_process::dma_buf), &[Feature],
            "memory is exported as a dma-buf, for devices of other vendors", "Memory can't be exported as a dma-buf.",
            Some(&["cuMemCreate", "cuMemGetHandleForAddressRange"])),
        probe("fabric", OnDevice(one_process::fabric), &[Feature],
            "memory is created for, and exported as, a fabric handle, for other machines", "Fabric handles do not work.",
            Some(&["cuMemCreate", EXPORT])),
        probe("pool", Share(MemoryKind::POOL), &[Feature], "two processes share memory of a memory pool",
            "Memory pools can't be shared.", Some(&[
                "cuMemPoolCreate", "cuMemPoolExportToShareableHandle", "cuMemPoolImportFromShareableHandle",
                "cuMemPoolExportPointer", "cuMemPoolImportPointer", "cuMemPoolSetAccess", "cuMemAllocFromPoolAsync",
            ])),
        probe("legacy", Share(MemoryKind::LEGACY), &[Feature], "two processes share memory by a legacy handle (cuIpc)",
            "Legacy handles do not work.", Some(&["cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2"])),
        probe("event", OnDevice(event), &[Feature], "one process waits for another's event on the device",
            "Events can't be shared between processes.", Some(&["cuIpcGetEventHandle", "cuIpcOpenEventHandle"])),
        probe("order", OnDevice(one_process::order), &[Feature],
            "a stream waits for a word in host memory, which another process may store; and whether MPS runs",
            "Streams can't wait for another process's streams.",
            Some(&["cuMemHostRegister_v2", "cuMemHostGetDevicePointer_v2", "cuStreamBatchMemOp_v2"])),
        probe("peer", Pair(two_devices::peer), &[Feature], "one device reads, writes and copies memory of another",
            "One device can't use the other's memory.", Some(&["cuDeviceCanAccessPeer", "cuMemSetAccess"])),
    ]
};

#[cfg(test)]
mod tests {
    use vmmfd::error::{Error, LoadError};

    use super::*;

    fn finding(probe: &str, call: &'static str, number: u32) -> Finding {
        let error = Error::Driver { call, code: number, name: "CUDA_ERROR".into(), source: None };
        Probe::named(probe).unwrap().examine(|| Err(error.into()))
    }

    #[test]
    fn broken_library_is_a_failure() {
        const GONE: &str = "cannot open shared object file: No such file or directory";
        for (tried, missing) in [
            (format!("libcuda.so.1: {GONE}; libcuda.so: {GONE}"), true),
            (format!("/opt/libcuda.so.1: file too short; libcuda.so: {GONE}"), false),
            (format!("libcuda.so.1: wrong ELF class: ELFCLASS32; libcuda.so: {GONE}"), false),
            (format!("libcuda.so.1: {GONE}; /opt/libcuda.so: invalid ELF header"), false),
            (format!("libnvidia-x.so.1: {GONE}; libcuda.so: {GONE}"), false),
            ("Error loading libnvidia-x.so: No such file or directory (needed by /opt/libcuda.so.1)".to_owned(), false),
        ] {
            let error = ErrorDetails::of(&Error::Load(LoadError::NoLibrary { tried }));
            assert_eq!(error.is_nothing_to_test(), missing, "{}", error.message);
            let status = Probe::named("driver").unwrap().finding_of(error).status;
            assert_eq!(status == Status::Unsupported, missing);
        }
    }

    #[test]
    fn unsupported_codes_depend_on_the_probe() {
        for probe in PROBES {
            let status = |call, number| finding(probe.name, call, number).status == Status::Unsupported;
            assert_eq!(status("cuMemCreate", 800), probe.name == "fabric", "{}", probe.name);
            assert_eq!(status("cuMemCreate", 801), probe.is(Flag::Feature), "{}", probe.name);
            assert!(!status("cuDevicePrimaryCtxRetain", 801), "{}", probe.name);
        }
    }

    #[test]
    fn other_errors_do_not_mean_broken() {
        for probe in PROBES {
            let untested = |call, number| finding(probe.name, call, number).meaning.contains("could not be tested");
            assert_eq!(untested("cuDevicePrimaryCtxRetain", 46), probe.calls.is_some(), "{}", probe.name);
            for call in probe.calls.unwrap_or_default() {
                assert!(untested(call, code::OUT_OF_MEMORY) && !untested(call, 1), "{}: {call}", probe.name);
            }
        }
    }
}
