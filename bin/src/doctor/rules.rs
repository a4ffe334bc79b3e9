//! Rules that give a finding its cause and remedy.
//!
//! Each rule covers a failure that was observed or reported. Other findings have no explanation. The conditions are here, the sentences in
//! `rules.md`, which docs/diagnose.md repeats.

use serde_json::Value;
use vmmfd::driver::code;

use super::{
    Environment, Finding, Status,
    environment::{CLibrary, Node},
    error_details::Reason,
};

/// A known cause of failures.
#[derive(Debug)]
pub struct Rule {
    pub name: &'static str,
    /// Alternatives: each is a list of facts that must all hold.
    when: &'static [&'static [Fact]],
}

/// The sentences of a rule.
#[derive(Debug)]
pub struct Sentences {
    /// The symptom for the user.
    pub symptom: &'static str,
    pub cause: &'static str,
    pub remedy: &'static str,
}

/// A condition on a finding, on the environment, or on the environments of both sides of a meeting.
#[derive(Debug, Clone, Copy)]
enum Fact {
    Probe(&'static [&'static str]),
    Code(&'static [u32]),
    NoCode,
    Kind(&'static str),
    Because(&'static [Reason]),
    Call(&'static [&'static str]),
    /// A signal killed the probe's process: SIGKILL, or another.
    Killed(bool),
    /// Whether there is an error.
    Error(bool),
    Is(Status),
    /// The probe `broker` found this problem.
    Problem(&'static str),
    /// The socket's mode lets this process connect.
    Permitted,
    /// The compute mode is not the default.
    Exclusive,
    /// A driver is loaded. Host memory supports few features, so its findings don't count.
    Driver,
    Stub,
    /// Nothing indicates an NVIDIA GPU.
    NoGpu,
    GpuNode(bool),
    DeniedNode,
    NoUvmNode,
    NoChannel,
    NoUsableChannel,
    Musl,
    Container,
    /// `NVIDIA_DRIVER_CAPABILITIES` lacks compute.
    NoCompute,
    /// The security label has SELinux categories.
    Categories,
    OtherCategories,
    OtherNamespaces,
    OtherProc,
    Visible,
    Wsl(bool),
    Gvisor,
    Confidential,
    Mig,
    ClosedModule,
    /// Older than r595, or unknown.
    OldModule,
    /// A seccomp filter, known or likely.
    Filtered,
    NoShm,
}

use Fact::{
    Because, Call, Categories, ClosedModule, Code, Confidential, Container, DeniedNode, Driver, Error, Exclusive,
    Filtered, GpuNode, Gvisor, Is, Killed, Kind, Mig, Musl, NoChannel, NoCode, NoCompute, NoGpu, NoShm,
    NoUsableChannel, NoUvmNode, OldModule, OtherCategories, OtherNamespaces, OtherProc, Permitted, Probe, Problem,
    Stub, Visible, Wsl,
};

const DRIVER: Fact = Probe(&["driver"]);
const BROKER: Fact = Probe(&["broker"]);
const FABRIC: Fact = Probe(&["fabric"]);
const PEER: Fact = Probe(&["peer"]);
const NUMA: Fact = Probe(&["host-numa"]);
const EVENT: Fact = Probe(&["event"]);
const DMA_BUF: Fact = Probe(&["dma-buf"]);
const HELD: Fact = Probe(&["held-descriptor"]);
const FAILED: Fact = Is(Status::Failed);
const UNSUPPORTED: Fact = Is(Status::Unsupported);
const TIMEOUT: Fact = Kind("timeout");
const NO_LIBRARY: Fact = Because(&[Reason::LibraryMissing]);
const UNUSABLE_LIBRARY: Fact = Because(&[Reason::LibraryMissing, Reason::LibraryBroken]);
const NO_DEVICE: Fact = Code(&[code::NO_DEVICE]);
const UNKNOWN: Fact = Code(&[code::UNKNOWN]);
const INVALID_VALUE: Fact = Code(&[code::INVALID_VALUE]);
const INVALID_DEVICE: Fact = Code(&[code::INVALID_DEVICE]);
const NOT_SUPPORTED: Fact = Code(&[code::NOT_SUPPORTED]);
const NOT_PERMITTED: Fact = Code(&[code::NOT_PERMITTED]);
const NO_MEMORY: Fact = Code(&[code::OUT_OF_MEMORY]);
const EXPORT: Fact = Call(&["cuMemExportToShareableHandle"]);
const IMPORT: Fact = Call(&["cuMemImportFromShareableHandle"]);
const SET_ACCESS: Fact = Call(&["cuMemSetAccess"]);

/// The probes of virtual memory management.
#[rustfmt::skip]
const VMM: Fact = Probe(&[
    "attributes", "granularity", "import", "round-trip", "aliases", "read-only-copy", "read-only-store", "wrong-descriptor",
    "exporter-killed", "memory-returned", "held-descriptor", "export-cost",
]);

/// The probes in which one process or handle uses memory of another.
#[rustfmt::skip]
const SHARING: Fact = Probe(&[
    "export", "import", "round-trip", "wrong-descriptor", "exporter-killed", "memory-returned", "held-descriptor", "export-cost",
    "read-only-copy", "read-only-store", "host-numa", "pool", "legacy", "event",
]);

/// The other probes that need memory.
const MEMORY: Fact = Probe(&["dma-buf", "fabric", "peer", "memory"]);

/// All rules, the most specific first.
#[rustfmt::skip]
pub const RULES: &[Rule] = &[
    rule("no-gpu-visible", &[&[NO_LIBRARY, NoGpu], &[DRIVER, NO_DEVICE, NoGpu]]),
    // Containers, and programs built for another C library.
    rule("musl", &[&[UNUSABLE_LIBRARY, Musl]]),
    rule("capability-missing", &[&[UNUSABLE_LIBRARY, NoCompute]]),
    rule("selinux-categories", &[
        &[Because(&[Reason::ConnectDenied]), Permitted, Categories],
        &[Because(&[Reason::DescriptorsLost]), OtherCategories],
    ]),
    rule("legacy-namespaces", &[&[Probe(&["legacy"]), Error(true), OtherNamespaces]]),
    // The broker's socket.
    rule("broker-folder", &[&[BROKER, Problem("folder")]]),
    rule("broker-stale", &[&[BROKER, Problem("stale")]]),
    rule("broker-silent", &[&[BROKER, Problem("silent")]]),
    rule("broker-denied", &[&[BROKER, Problem("denied")]]),
    rule("broker-refused", &[&[BROKER, Problem("refused")]]),
    rule("broker-other-program", &[&[BROKER, Problem("other-program")]]),
    // The driver does not start.
    rule("stub-library", &[&[DRIVER, Stub], &[DRIVER, Code(&[code::STUB_LIBRARY])]]),
    rule("library-broken", &[&[Because(&[Reason::LibraryBroken])]]),
    rule("library-not-found", &[&[NO_LIBRARY, GpuNode(true)]]),
    rule("library-missing-wsl", &[&[NO_LIBRARY, Wsl(true)]]),
    rule("library-missing-container", &[&[NO_LIBRARY, Container]]),
    rule("library-missing", &[&[NO_LIBRARY]]),
    rule("old-driver", &[&[Because(&[Reason::MissingFunction])]]),
    rule("fabric-manager", &[&[Code(&[802])]]),
    rule("version-mismatch", &[&[Code(&[code::SYSTEM_DRIVER_MISMATCH])]]),
    rule("compatibility-library", &[&[Code(&[804])]]),
    rule("nodes-denied", &[&[DRIVER, Error(true), DeniedNode]]),
    rule("devices-hidden", &[&[DRIVER, NO_DEVICE, Visible]]),
    rule("no-device-in-container", &[&[DRIVER, NO_DEVICE, Container, GpuNode(false)]]),
    rule("no-device", &[&[DRIVER, NO_DEVICE]]),
    rule("no-uvm-node", &[&[DRIVER, UNKNOWN, Wsl(false), NoUvmNode]]),
    rule("other-proc", &[&[DRIVER, Code(&[304]), OtherProc]]),
    rule("driver-broken", &[&[DRIVER, UNKNOWN]]),
    rule("driver-hangs", &[&[DRIVER, TIMEOUT]]),
    // Time limits, before the rules that hold for any error of a probe.
    rule("gvisor-confidential", &[&[Gvisor, Confidential, TIMEOUT]]),
    rule("hangs", &[&[TIMEOUT]]),
    // Limits and permissions of the process.
    rule("few-descriptors", &[&[Probe(&["descriptors"])], &[Because(&[Reason::FileLimit, Reason::DescriptorsLost])]]),
    rule("mps", &[&[Code(&[805, 806, 807, 808, 809, 810])]]),
    rule("exclusive", &[&[Code(&[46])], &[Exclusive, Code(&[code::INVALID_CONTEXT, code::UNKNOWN])]]),
    // Exhausted resources.
    rule("no-addresses", &[&[Call(&["cuMemAddressReserve"]), NO_MEMORY]]),
    rule("out-of-memory", &[&[NO_MEMORY]]),
    // WSL, gVisor, confidential machines and MIG.
    rule("wsl-rdma", &[&[Wsl(true), SET_ACCESS, UNKNOWN]]),
    rule("wsl-sharing", &[
        &[Wsl(true), SHARING, Code(&[code::INVALID_VALUE, code::INVALID_HANDLE, code::NOT_SUPPORTED])],
        &[Wsl(true), MEMORY, Code(&[code::INVALID_VALUE, code::INVALID_HANDLE, code::NOT_SUPPORTED])],
        &[Wsl(true), SHARING, UNSUPPORTED],
        &[Wsl(true), MEMORY, UNSUPPORTED],
    ]),
    rule("gvisor-export", &[&[Gvisor, EXPORT]]),
    rule("confidential", &[&[Confidential, NOT_SUPPORTED]]),
    rule("mig", &[
        &[Mig, Probe(&["peer", "legacy", "pool"]), Code(&[code::INVALID_DEVICE, code::PEER_ACCESS_UNSUPPORTED, code::NOT_SUPPORTED])],
        &[Mig, PEER, UNSUPPORTED],
    ]),
    // Fabric handles.
    rule("fabric-no-channel", &[&[FABRIC, NOT_PERMITTED, NoChannel]]),
    rule("fabric-channel-denied", &[&[FABRIC, NOT_PERMITTED, NoUsableChannel]]),
    rule("fabric-other-channel", &[&[FABRIC, NOT_PERMITTED]]),
    rule("fabric-export", &[&[FABRIC, EXPORT, INVALID_VALUE]]),
    rule("fabric-unsupported", &[&[FABRIC, UNSUPPORTED, Driver]]),
    // Pairs of devices.
    rule("peer-set-access", &[&[PEER, SET_ACCESS, INVALID_VALUE]]),
    rule("no-peer-access", &[&[Code(&[code::PEER_ACCESS_UNSUPPORTED])], &[PEER, UNSUPPORTED, Driver]]),
    // Imports.
    rule("gpu-hidden-by-variable", &[&[SHARING, INVALID_DEVICE, Visible], &[IMPORT, INVALID_DEVICE, Visible]]),
    rule("gpu-hidden", &[&[SHARING, INVALID_DEVICE], &[IMPORT, INVALID_DEVICE]]),
    // Host memory by NUMA node.
    rule("host-numa-crash", &[&[NUMA, Killed(false), OldModule]]),
    rule("host-numa-filtered", &[&[NUMA, Filtered, Call(&["cuMemCreate"]), FAILED]]),
    rule("host-numa-unsupported", &[&[NUMA, UNSUPPORTED, Driver]]),
    // Events.
    rule("event-without-shm", &[&[EVENT, Error(true), NoShm]]),
    rule("event-not-shared", &[&[EVENT, Code(&[205])]]),
    // Other missing features.
    rule("dma-buf-closed-module", &[&[ClosedModule, DMA_BUF, UNSUPPORTED], &[ClosedModule, DMA_BUF, NOT_SUPPORTED]]),
    rule("pool-unsupported", &[&[Probe(&["pool"]), UNSUPPORTED, Driver]]),
    rule("no-vmm", &[&[Kind("unsupported"), NoCode, VMM, Driver], &[UNSUPPORTED, Probe(&["memory", "export"]), Driver]]),
    // Memory.
    rule("memory-held", &[&[Probe(&["memory-returned"]), Error(false)]]),
    // Any probe.
    rule("killed", &[&[Killed(true)]]),
    rule("crashed", &[&[Kind("signal")]]),
    // Memory kept by a broker, for errors that no other rule explains.
    rule("persistence-off", &[&[Probe(&["persistence"]), UNSUPPORTED]]),
    rule("descriptor-not-kept", &[
        &[HELD, FAILED, Call(&["cuMemImportFromShareableHandle", "cuMemMap"])],
        &[HELD, FAILED, Error(false)],
    ]),
];

const fn rule(name: &'static str, when: &'static [&'static [Fact]]) -> Rule {
    Rule { name, when }
}

impl Rule {
    /// The sentences of this rule: its row of `rules.md`.
    pub fn sentences(&self) -> Option<Sentences> {
        include_str!("rules.md").lines().find_map(|row| {
            let row = row.strip_prefix("| `")?.strip_prefix(self.name)?.strip_prefix("` | ")?;
            let mut cells = row.strip_suffix(" |")?.split(" | ");
            Some(Sentences { symptom: cells.next()?, cause: cells.next()?, remedy: cells.next()? })
        })
    }

    fn matches(&self, finding: &Finding, environment: &Environment, peer: Option<&Environment>) -> bool {
        self.when.iter().any(|all| all.iter().all(|fact| fact.holds(finding, environment, peer)))
    }
}

/// The first rule that matches a `failed` or `unsupported` finding.
fn find(finding: &Finding, environment: &Environment, peer: Option<&Environment>) -> Option<&'static Rule> {
    if !matches!(finding.status, Status::Failed | Status::Unsupported) {
        return None;
    }
    RULES.iter().find(|rule| rule.matches(finding, environment, peer))
}

/// Sets the cause and remedy of a finding from the first matching rule. An error of the peer of a meeting is explained by its environment.
pub(super) fn explain(finding: &mut Finding, own: &Environment, peer: Option<&Environment>) {
    let theirs = finding.error.as_ref().is_some_and(|error| error.other_end);
    let (environment, other) = match peer {
        Some(peer) if theirs => (peer, Some(own)),
        _ => (own, peer),
    };
    if let Some(rule) = find(finding, environment, other)
        && let Some(Sentences { cause, remedy, .. }) = rule.sentences()
    {
        finding.cause = Some(cause.to_owned());
        finding.remedy = Some(remedy.to_owned());
        finding.rule = Some(rule.name.to_owned());
    }
}

impl Fact {
    fn holds(self, finding: &Finding, env: &Environment, peer: Option<&Environment>) -> bool {
        let error = finding.error.as_ref();
        let figure = |name: &str, holds: fn(&Value) -> bool| finding.figures.get(name).is_some_and(holds);
        match self {
            Probe(names) => names.contains(&finding.probe.as_str()),
            Code(codes) => error.and_then(|error| error.code).is_some_and(|code| codes.contains(&code)),
            NoCode => error.is_none_or(|error| error.code.is_none()),
            Kind(kind) => error.is_some_and(|error| error.kind == kind),
            Because(reasons) => error.and_then(|error| error.reason).is_some_and(|reason| reasons.contains(&reason)),
            Call(calls) => error.and_then(|error| error.call.as_deref()).is_some_and(|call| calls.contains(&call)),
            Killed(kill) => {
                error.is_some_and(|error| error.kind == "signal" && (error.name.as_deref() == Some("SIGKILL")) == kill)
            }
            Error(wanted) => error.is_some() == wanted,
            Is(status) => finding.status == status,
            Problem(problem) => finding.figures.get("problem").is_some_and(|found| found == problem),
            Permitted => figure("permitted", |permitted| permitted == true),
            Exclusive => figure("compute_mode", |mode| mode.as_u64() != Some(0)),
            OtherCategories => {
                let both = categories(env).zip(peer.and_then(categories));
                both.is_some_and(|(own, theirs)| own != theirs)
            }
            OtherNamespaces => peer.is_some_and(|peer| {
                let differ = |own: Option<u64>, theirs: Option<u64>| own.zip(theirs).is_some_and(|(a, b)| a != b);
                differ(env.pid_namespace, peer.pid_namespace) || differ(env.ipc_namespace, peer.ipc_namespace)
            }),
            _ => self.holds_in(env),
        }
    }

    /// Whether a fact about one environment holds.
    fn holds_in(self, env: &Environment) -> bool {
        match self {
            Driver => env.library.is_some(),
            Stub => env.library.as_ref().is_some_and(|library| library.stub),
            NoGpu => env.pci_gpus.is_empty() && env.module.is_none() && env.nodes.is_empty(),
            GpuNode(there) => env.nodes.iter().any(is_gpu) == there,
            DeniedNode => env.nodes.iter().any(|node| !node.usable),
            NoUvmNode => !env.nodes.iter().any(|node| node.path.ends_with("/nvidia-uvm")),
            NoChannel => env.imex_channels.is_empty(),
            NoUsableChannel => !env.imex_channels.iter().any(|node| node.usable),
            Musl => env.c_library == Some(CLibrary::Musl),
            Container => env.container.is_some(),
            // An empty value means the runtime's default, which includes compute.
            NoCompute => env.driver_capabilities.as_ref().is_some_and(|list| {
                !list.split(',').any(|capability| matches!(capability.trim(), "all" | "compute" | ""))
            }),
            Categories => categories(env).is_some(),
            OtherProc => env.own_proc == Some(false),
            Visible => env.visible_devices.is_some(),
            Wsl(wsl) => env.wsl == wsl,
            Gvisor => env.gvisor,
            Confidential => env.confidential.is_some(),
            Mig => env.mig,
            ClosedModule => env.module_open == Some(false),
            OldModule => {
                let major = env.module.as_deref().and_then(|module| module.split('.').next()?.parse::<u32>().ok());
                major.is_none_or(|major| major < 595)
            }
            // If the mode is unknown: containers have a filter.
            Filtered => env.seccomp.map_or(env.container.is_some(), |mode| mode == 2),
            NoShm => env.shared_memory.is_some_and(|folder| !folder.exists || !folder.writable),
            _ => false,
        }
    }
}

/// The categories of an SELinux label: `c1,c2` in `system_u:system_r:container_t:s0:c1,c2`. AppArmor labels have none.
fn categories(environment: &Environment) -> Option<&str> {
    environment.label.as_deref()?.splitn(5, ':').nth(4)
}

/// Whether a node is a GPU, such as `/dev/nvidia0`.
fn is_gpu(node: &Node) -> bool {
    let number = node.path.strip_prefix("/dev/nvidia");
    number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

#[cfg(test)]
mod tests;
