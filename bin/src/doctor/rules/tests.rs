use std::{collections::HashSet, io};

use vmmfd::error::{Error, LoadError, MemoryError, ProtocolError, SocketError};

use super::*;
use crate::doctor::{
    ErrorDetails,
    environment::{CLibrary, Library, Node, SharedMemory},
};

fn finding(probe: &str, status: Status, error: Option<ErrorDetails>) -> Finding {
    Finding { error, ..Finding::new(probe, status, "") }
}

/// A failed driver call.
fn call(probe: &str, call: &str, code: u32) -> Finding {
    let error = ErrorDetails::new("driver", format!("{call} failed: CUDA_ERROR ({code})"));
    finding(probe, Status::Failed, Some(ErrorDetails { call: Some(call.to_owned()), code: Some(code), ..error }))
}

fn init(code: u32) -> Finding {
    call("driver", "cuInit", code)
}

fn other(probe: &str, kind: &str, message: &str) -> Finding {
    finding(probe, Status::Failed, Some(ErrorDetails::new(kind, message.to_owned())))
}

fn failed(probe: &str, error: impl Into<Error>) -> Finding {
    finding(probe, Status::Failed, Some(ErrorDetails::of(&error.into())))
}

fn without_error(probe: &str) -> Finding {
    finding(probe, Status::Failed, None)
}

fn unsupported(probe: &str) -> Finding {
    finding(probe, Status::Unsupported, None)
}

fn skipped(probe: &str) -> Finding {
    finding(probe, Status::Skipped, None)
}

/// A probe whose process was killed.
fn killed(probe: &str, signal: &str) -> Finding {
    let error = ErrorDetails::new("signal", format!("its process was killed by {signal}"));
    finding(probe, Status::Failed, Some(ErrorDetails { name: Some(signal.to_owned()), ..error }))
}

fn with_figure(mut finding: Finding, name: &str, value: impl Into<serde_json::Value>) -> Finding {
    finding.figures.insert(name.to_owned(), value.into());
    finding
}

/// An environment that explains no failure, changed by a function.
fn env(change: impl FnOnce(&mut Environment)) -> Environment {
    let node = |path: &str| Node { path: path.to_owned(), mode: "0666".to_owned(), uid: 0, gid: 0, usable: true };
    let mut environment = Environment {
        library: Some(Library { path: "/lib/libcuda.so.1".to_owned(), file: None, stub: false }),
        nodes: ["/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm"].map(node).into(),
        imex_channels: vec![node("/dev/nvidia-caps-imex-channels/channel0")],
        shared_memory: Some(SharedMemory { exists: true, writable: true, size: None, free: None }),
        module_open: Some(true),
        seccomp: Some(0),
        ..Environment::default()
    };
    change(&mut environment);
    environment
}

fn container() -> Environment {
    env(|env| env.container = Some("docker".to_owned()))
}

/// A machine without a sign of a GPU.
fn bare(change: impl FnOnce(&mut Environment)) -> Environment {
    env(|env| {
        env.nodes.clear();
        change(env);
    })
}

fn without_gpu_node(mut environment: Environment) -> Environment {
    environment.nodes.remove(0);
    environment
}

/// The input of a rule: a finding, the environment, and the peer's environment.
struct Input(Finding, Environment, Option<Environment>);

impl From<Finding> for Input {
    fn from(finding: Finding) -> Self {
        Self(finding, env(|_| {}), None)
    }
}

impl From<(Finding, Environment)> for Input {
    fn from((finding, environment): (Finding, Environment)) -> Self {
        Self(finding, environment, None)
    }
}

impl From<(Finding, Environment, Environment)> for Input {
    fn from((finding, environment, peer): (Finding, Environment, Environment)) -> Self {
        Self(finding, environment, Some(peer))
    }
}

impl Input {
    fn rule(&self) -> Option<&'static str> {
        find(&self.0, &self.1, self.2.as_ref()).map(|rule| rule.name)
    }
}

/// A rule, an input that it explains, and a similar input that it does not explain.
type Case = (&'static str, Input, Input);

fn case(rule: &'static str, matching: impl Into<Input>, similar: impl Into<Input>) -> Case {
    (rule, matching.into(), similar.into())
}

const EXPORT: &str = "cuMemExportToShareableHandle";
const IMPORT: &str = "cuMemImportFromShareableHandle";
const GONE: &str = "libcuda.so.1: cannot open shared object file: No such file or directory";

fn no_library(answer: &str) -> Finding {
    failed("driver", LoadError::NoLibrary { tried: format!("{answer}; {answer}") })
}

fn timeout(probe: &'static str) -> Finding {
    other(probe, "timeout", "no answer within 5s")
}

fn cases() -> Vec<Case> {
    [library_cases(), limit_cases(), feature_cases(), result_cases(), broker_cases(), container_cases()]
        .into_iter()
        .flatten()
        .collect()
}

/// The driver, its library and the devices.
fn library_cases() -> Vec<Case> {
    let gone = || no_library(GONE);
    let no_device = || failed("driver", LoadError::NoDevice);
    let library = || "libcuda.so.1".to_owned();
    let visible = || env(|env| env.visible_devices = Some("1".to_owned()));
    let wsl = || env(|env| env.wsl = true);
    let denied_node = || env(|env| env.nodes[0].usable = false);
    let stub = || env(|env| env.library.as_mut().unwrap().stub = true);
    vec![
        case(
            "no-gpu-visible",
            (gone(), bare(|_| {})),
            (gone(), bare(|env| env.pci_gpus = vec!["0000:01:00.0".to_owned()])),
        ),
        case(
            "no-gpu-visible",
            (no_device(), bare(|_| {})),
            (no_device(), bare(|env| env.module = Some("580.1".to_owned()))),
        ),
        case("no-gpu-visible", (gone(), bare(|env| env.container = Some("docker".to_owned()))), (gone(), container())),
        case("no-gpu-visible", (gone(), bare(|env| env.driver_capabilities = Some("utility".to_owned()))), init(999)),
        case("stub-library", failed("driver", LoadError::Stub { library: library() }), init(999)),
        case("stub-library", (init(999), stub()), (timeout("import"), stub())),
        case("library-broken", (no_library("/lib/libcuda.so.1: file too short"), container()), (gone(), container())),
        case("library-not-found", gone(), (gone(), without_gpu_node(env(|_| {})))),
        case("library-missing-wsl", (gone(), without_gpu_node(wsl())), (gone(), without_gpu_node(env(|_| {})))),
        case("library-missing-container", (gone(), without_gpu_node(container())), (gone(), container())),
        case("library-missing", (gone(), without_gpu_node(env(|_| {}))), no_device()),
        case(
            "old-driver",
            failed("pool", LoadError::MissingSymbol { library: library(), symbol: "cuMemPoolCreate" }),
            other("pool", "unsupported", "host lacks memory pools"),
        ),
        case("fabric-manager", init(802), init(801)),
        case("version-mismatch", init(803), init(802)),
        case("compatibility-library", init(804), init(803)),
        case("nodes-denied", (no_device(), denied_node()), (call("import", IMPORT, 999), denied_node())),
        case("devices-hidden", (no_device(), visible()), no_device()),
        case("no-device-in-container", (no_device(), without_gpu_node(container())), (no_device(), container())),
        case("no-device", (no_device(), without_gpu_node(env(|_| {}))), call("memory", "cuMemCreate", 100)),
        case("no-uvm-node", (init(999), env(|env| drop(env.nodes.pop()))), init(999)),
        case("other-proc", (init(304), env(|env| env.own_proc = Some(false))), init(304)),
        case("driver-broken", init(999), call("memory", "cuCtxSynchronize", 999)),
        case("driver-hangs", timeout("driver"), timeout("memory")),
    ]
}

/// Limits of the process and of the kind of machine.
fn limit_cases() -> Vec<Case> {
    let retain = |code| call("round-trip", "cuDevicePrimaryCtxRetain", code);
    let wsl = || env(|env| env.wsl = true);
    let gvisor = || env(|env| env.gvisor = true);
    let confidential = || env(|env| env.confidential = Some("tdx".to_owned()));
    let mig = || env(|env| env.mig = true);
    let no_socket = |errno| failed("round-trip", Error::system("make a socket", io::Error::from_raw_os_error(errno)));
    vec![
        case("few-descriptors", without_error("descriptors"), without_error("host-memory")),
        case("few-descriptors", no_socket(24), no_socket(13)),
        case(
            "few-descriptors",
            failed("memory", MemoryError::TooManyDescriptors { needed: 512, limit: 256 }),
            other("memory", "system", "512 open files are needed"),
        ),
        case(
            "few-descriptors",
            failed("round-trip", ProtocolError::FdsTruncated { most: 128 }),
            failed("round-trip", ProtocolError::LongRecord { most: 128 }),
        ),
        case("mps", init(807), init(804)),
        case("exclusive", retain(46), retain(201)),
        case("exclusive", with_figure(retain(201), "compute_mode", 3), with_figure(retain(201), "compute_mode", 0)),
        case("wsl-rdma", (call("dma-buf", "cuMemSetAccess", 999), wsl()), call("dma-buf", "cuMemSetAccess", 999)),
        case(
            "wsl-sharing",
            (call("legacy", "cuIpcOpenMemHandle", 400), wsl()),
            (call("legacy", "cuIpcOpenMemHandle", 2), wsl()),
        ),
        case("wsl-sharing", (unsupported("export"), wsl()), call("export", EXPORT, 1)),
        case(
            "gvisor-confidential",
            (timeout("memory"), env(|env| (env.gvisor, env.confidential) = (true, Some("tdx".to_owned())))),
            (timeout("memory"), gvisor()),
        ),
        case("gvisor-export", (call("export", EXPORT, 1), gvisor()), call("export", EXPORT, 1)),
        case(
            "confidential",
            (call("host-numa", "cuMemCreate", 801), confidential()),
            (call("host-numa", "cuMemCreate", 1), confidential()),
        ),
        case("mig", (call("peer", "cuMemSetAccess", 217), mig()), (call("round-trip", "cuMemMap", 217), mig())),
        case("mig", (unsupported("peer"), mig()), (unsupported("pool"), mig())),
        case("mig", (call("legacy", "cuIpcOpenMemHandle_v2", 801), mig()), (call("legacy", "cuMemAlloc_v2", 2), mig())),
        case("mig", (call("pool", "cuMemPoolCreate", 101), mig()), (call("event", "cuEventCreate", 101), mig())),
    ]
}

/// Features that a device may lack.
fn feature_cases() -> Vec<Case> {
    let visible = || env(|env| env.visible_devices = Some("1".to_owned()));
    let no_channel = || env(|env| env.imex_channels.clear());
    let denied_channel = || env(|env| env.imex_channels[0].usable = false);
    let no_driver = || env(|env| env.library = None);
    let module = |version: &str| env(|env| env.module = Some(version.to_owned()));
    let shm = |exists, writable| {
        env(|env| env.shared_memory = Some(SharedMemory { exists, writable, size: None, free: None }))
    };
    vec![
        case(
            "fabric-no-channel",
            (call("fabric", "cuMemCreate", 800), no_channel()),
            (call("memory", "cuMemCreate", 800), no_channel()),
        ),
        case(
            "fabric-channel-denied",
            (call("fabric", "cuMemCreate", 800), denied_channel()),
            (call("fabric", "cuMemCreate", 1), denied_channel()),
        ),
        case("fabric-other-channel", call("fabric", IMPORT, 800), call("import", IMPORT, 800)),
        case("fabric-export", call("fabric", EXPORT, 1), call("export", EXPORT, 1)),
        case("fabric-unsupported", unsupported("fabric"), (unsupported("fabric"), no_driver())),
        case("peer-set-access", call("peer", "cuMemSetAccess", 1), call("peer", "cuMemMap", 1)),
        case("no-peer-access", call("peer", "cuMemSetAccess", 217), call("peer", "cuMemSetAccess", 2)),
        case("no-peer-access", unsupported("peer"), skipped("peer")),
        case("gpu-hidden-by-variable", (call("import", IMPORT, 101), visible()), call("import", IMPORT, 101)),
        case("gpu-hidden", (call("round-trip", IMPORT, 101), container()), call("memory", "cuMemCreate", 101)),
        case("host-numa-crash", killed("host-numa", "SIGSEGV"), killed("memory", "SIGSEGV")),
        case(
            "host-numa-crash",
            (killed("host-numa", "SIGSEGV"), module("580.159.04")),
            (killed("host-numa", "SIGSEGV"), module("595.58.03")),
        ),
        case(
            "host-numa-filtered",
            (call("host-numa", "cuMemCreate", 1), env(|env| env.seccomp = Some(2))),
            call("host-numa", "cuMemCreate", 1),
        ),
        case(
            "host-numa-filtered",
            (call("host-numa", "cuMemCreate", 1), Environment { seccomp: None, ..container() }),
            (call("host-numa", "cuMemCreate", 1), container()),
        ),
        case("host-numa-unsupported", unsupported("host-numa"), skipped("host-numa")),
        case(
            "event-without-shm",
            (call("event", "cuIpcGetEventHandle", 304), shm(false, true)),
            call("event", "cuIpcGetEventHandle", 304),
        ),
        case(
            "event-without-shm",
            (call("event", "cuIpcOpenEventHandle", 205), shm(true, false)),
            (call("legacy", "cuIpcOpenMemHandle", 205), shm(false, true)),
        ),
        case("event-not-shared", call("event", "cuIpcOpenEventHandle", 205), call("legacy", "cuIpcOpenMemHandle", 205)),
        case(
            "dma-buf-closed-module",
            (unsupported("dma-buf"), env(|env| env.module_open = Some(false))),
            unsupported("dma-buf"),
        ),
    ]
}

/// Results of the remaining probes.
fn result_cases() -> Vec<Case> {
    let no_driver = || env(|env| env.library = None);
    vec![
        case("pool-unsupported", unsupported("pool"), unsupported("legacy")),
        case("no-vmm", unsupported("export"), (unsupported("export"), no_driver())),
        case("no-vmm", unsupported("memory"), call("import", IMPORT, 801)),
        case(
            "no-vmm",
            other("exporter-killed", "unsupported", "the device does not support it"),
            other("exporter-killed", "system", "no process can be started"),
        ),
        case("no-addresses", call("memory", "cuMemAddressReserve", 2), call("memory", "cuMemCreate", 2)),
        case("out-of-memory", call("memory", "cuMemCreate", 2), call("memory", "cuMemCreate", 1)),
        case(
            "out-of-memory",
            failed("memory", MemoryError::OutOfMemory { device: "a GPU".to_owned(), size: 9, free: 8 }),
            other("memory", "usage", "size 9 is not a positive multiple"),
        ),
        case("memory-held", without_error("memory-returned"), call("memory-returned", "cuMemGetInfo_v2", 1)),
        case("broker-silent", timeout("broker"), timeout("round-trip")),
        case("descriptor-not-kept", call("held-descriptor", IMPORT, 999), call("held-descriptor", "cuMemCreate", 999)),
        case("descriptor-not-kept", without_error("held-descriptor"), without_error("memory-returned")),
        case("persistence-off", unsupported("persistence"), unsupported("held-descriptor")),
        case("persistence-off", unsupported("persistence"), without_error("persistence")),
        case("killed", killed("memory", "SIGKILL"), other("memory", "system", "SIGKILL failed")),
        case("crashed", killed("memory", "SIGSEGV"), killed("memory", "SIGKILL")),
        case("hangs", timeout("round-trip"), other("round-trip", "peer", "the peer closed the connection")),
    ]
}

fn broker_cases() -> Vec<Case> {
    let problem = |problem: &str| with_figure(without_error("broker"), "problem", problem);
    [
        ("broker-folder", "folder", "stale"),
        ("broker-stale", "stale", "silent"),
        ("broker-silent", "silent", "denied"),
        ("broker-denied", "denied", "refused"),
        ("broker-refused", "refused", "other-program"),
        ("broker-other-program", "other-program", ""),
    ]
    .map(|(rule, value, similar)| case(rule, problem(value), problem(similar)))
    .into()
}

fn container_cases() -> Vec<Case> {
    let built_for = |c_library| env(|env| env.c_library = Some(c_library));
    let capabilities = |list: &str| (no_library(GONE), env(|env| env.driver_capabilities = Some(list.to_owned())));
    let label = |label: &str| env(|env| env.label = Some(label.to_owned()));
    let own = || label("system_u:system_r:container_t:s0:c1,c2");
    let theirs = || label("system_u:system_r:container_t:s0:c3,c4");
    let denied = |permitted: bool| {
        let error = SocketError::Denied { path: "/run/vmmfd/vmmfd.sock".into(), group: None };
        with_figure(failed("round-trip", error), "permitted", permitted)
    };
    let truncated = || failed("round-trip", ProtocolError::FdsTruncated { most: 128 });
    let inside = |pid, ipc| env(|env| (env.pid_namespace, env.ipc_namespace) = (Some(pid), Some(ipc)));
    let legacy = || call("legacy", "cuIpcOpenMemHandle_v2", 201);
    vec![
        case(
            "musl",
            (no_library("Dynamic loading not supported"), built_for(CLibrary::Musl)),
            (no_library("file too short"), built_for(CLibrary::Glibc)),
        ),
        case("musl", (no_library(GONE), built_for(CLibrary::Musl)), (init(999), built_for(CLibrary::Musl))),
        case("capability-missing", capabilities("utility"), capabilities("all")),
        case("capability-missing", capabilities("utility,video"), no_library(GONE)),
        case("capability-missing", capabilities("graphics"), capabilities("utility, compute")),
        // An empty value means the runtime's default, which includes compute.
        case("capability-missing", capabilities("utility"), capabilities("")),
        case("selinux-categories", (denied(true), own()), (denied(false), own())),
        // Labels of AppArmor, and of SELinux without categories.
        case("selinux-categories", (denied(true), own()), (denied(true), label("docker-default (enforce)"))),
        case("selinux-categories", (denied(true), own()), (denied(true), label("u:r:container_t:s0"))),
        case("selinux-categories", (truncated(), own(), theirs()), (truncated(), own(), own())),
        case("selinux-categories", (truncated(), own(), theirs()), (truncated(), own())),
        case("legacy-namespaces", (legacy(), inside(1, 1), inside(2, 1)), (legacy(), inside(1, 1), inside(1, 1))),
        case("legacy-namespaces", (legacy(), inside(1, 1), inside(1, 2)), (legacy(), inside(1, 1))),
        case(
            "legacy-namespaces",
            (legacy(), inside(1, 1), inside(2, 2)),
            (call("pool", "cuMemPoolImportPointer", 1), inside(1, 1), inside(2, 2)),
        ),
    ]
}

#[test]
fn rules_match_only_their_cases() {
    for (rule, matching, similar) in cases() {
        assert_eq!(matching.rule(), Some(rule), "{:?}", matching.0);
        assert_ne!(similar.rule(), Some(rule), "{:?}", similar.0);
    }
}

#[test]
fn every_rule_has_a_case() {
    let reached: HashSet<&str> = cases().iter().filter_map(|(_, matching, _)| matching.rule()).collect();
    for rule in RULES {
        assert!(reached.contains(rule.name), "{} has no case, or another rule matches first", rule.name);
    }
    let names: HashSet<&str> = RULES.iter().map(|rule| rule.name).collect();
    assert_eq!(names.len(), RULES.len(), "two rules have the same name");
}

#[test]
fn successes_are_not_explained() {
    for (_, Input(mut finding, environment, peer), _) in cases() {
        for status in [Status::Ok, Status::Skipped] {
            finding.status = status;
            explain(&mut finding, &environment, peer.as_ref());
            assert_eq!((&finding.cause, &finding.remedy, &finding.rule), (&None, &None, &None));
        }
    }
}

#[test]
fn explanation_copies_the_rule() {
    let mut finding = call("fabric", "cuMemCreate", 800);
    explain(&mut finding, &env(|env| env.imex_channels.clear()), None);
    let rule = RULES.iter().find(|rule| rule.name == "fabric-no-channel").unwrap();
    assert_eq!(finding.rule.as_deref(), Some(rule.name));
    assert_eq!((finding.cause.as_deref(), finding.remedy.as_deref()), (Some(rule.cause), Some(rule.remedy)));
}

#[test]
fn rules_ignore_messages() {
    for (rule, mut input, _) in cases() {
        input.0.meaning.clear();
        input.0.error.iter_mut().for_each(|error| error.message.clear());
        assert_eq!(input.rule(), Some(rule), "{:?}", input.0);
    }
}

#[test]
fn unknown_failures_are_not_explained() {
    assert_eq!(Input::from(call("memory", "cuMemMap", 12345)).rule(), None);
    assert_eq!(Input::from(without_error("aliases")).rule(), None);
}

#[test]
fn texts_are_single_sentences() {
    for Rule { name, symptom, cause, remedy, .. } in RULES {
        for text in [symptom, cause, remedy] {
            assert!(!text.contains(['|', '\n']) && !text.contains("  "), "{name}: {text}");
        }
        for text in [cause, remedy] {
            assert!(text.ends_with('.') && !text.contains(". "), "{name}: {text}");
        }
    }
}
