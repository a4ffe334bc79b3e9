//! The cases of all rules in one file: a test compares them with the tables.

use std::{
    collections::{BTreeMap, HashSet},
    io,
};

use vmmfd::error::{Error, LoadError, MemoryError, ProtocolError, SocketError};

use super::*;
use crate::doctor::{
    ErrorDetails,
    environment::{CLibrary, Library, Node, SharedMemory},
};

fn finding(probe: &str, status: Status, error: Option<ErrorDetails>) -> Finding {
    Finding {
        probe: probe.to_owned(),
        status,
        us: None,
        figures: BTreeMap::new(),
        error,
        meaning: String::new(),
        cause: None,
        remedy: None,
        rule: None,
    }
}

/// A driver call that failed.
fn refused(probe: &str, call: &str, code: u32) -> Finding {
    let error = ErrorDetails::new("driver", format!("{call} failed: CUDA_ERROR ({code})"));
    finding(probe, Status::Failed, Some(ErrorDetails { call: Some(call.to_owned()), code: Some(code), ..error }))
}

fn said(probe: &str, kind: &str, message: &str) -> Finding {
    finding(probe, Status::Failed, Some(ErrorDetails::new(kind, message.to_owned())))
}

fn failed(probe: &str, error: impl Into<Error>) -> Finding {
    finding(probe, Status::Failed, Some(ErrorDetails::of(&error.into())))
}

/// A signal ended the probe's process.
fn killed(probe: &str, signal: &str) -> Finding {
    let error = ErrorDetails::new("signal", format!("its process was killed by {signal}"));
    finding(probe, Status::Failed, Some(ErrorDetails { name: Some(signal.to_owned()), ..error }))
}

fn lacking(probe: &str) -> Finding {
    finding(probe, Status::Unsupported, None)
}

fn with_mode(mut finding: Finding, mode: u32) -> Finding {
    finding.figures.insert("compute_mode".to_owned(), mode.into());
    finding
}

/// An environment that explains no failure.
fn plain() -> Environment {
    let node = |path: &str, usable| Node { path: path.to_owned(), mode: "0666".to_owned(), uid: 0, gid: 0, usable };
    let paths = ["/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm"];
    Environment {
        library: Some(Library { path: "/lib/libcuda.so.1".to_owned(), file: None, stub: false }),
        nodes: paths.map(|path| node(path, true)).into(),
        imex_channels: vec![node("/dev/nvidia-caps-imex-channels/channel0", true)],
        shared_memory: Some(SharedMemory { exists: true, writable: true, size: None, free: None }),
        module_open: Some(true),
        seccomp: Some(0),
        ..Environment::default()
    }
}

fn where_(change: impl FnOnce(&mut Environment)) -> Environment {
    let mut environment = plain();
    change(&mut environment);
    environment
}

fn container() -> Environment {
    where_(|here| here.container = Some("docker".to_owned()))
}

fn visible() -> Environment {
    where_(|here| here.visible_devices = Some("1".to_owned()))
}

fn wsl() -> Environment {
    where_(|here| here.wsl = true)
}

fn gvisor() -> Environment {
    where_(|here| here.gvisor = true)
}

fn confidential() -> Environment {
    where_(|here| here.confidential = Some("tdx".to_owned()))
}

/// The input of a rule.
type Input = (Finding, Environment);

/// For each rule a case that it explains, and a similar one that it does not.
fn cases() -> Vec<(&'static str, Input, Input)> {
    const EXPORT: &str = "cuMemExportToShareableHandle";
    const IMPORT: &str = "cuMemImportFromShareableHandle";
    const GONE: &str = "libcuda.so.1: cannot open shared object file: No such file or directory";
    let of_loader = |tried: &str| failed("driver", LoadError::NoLibrary { tried: tried.to_owned() });
    let no_library = || of_loader(GONE);
    let cut_off = || of_loader("/lib/libcuda.so.1: file too short");
    let no_device = || failed("driver", LoadError::NoDevice);
    let library = || "libcuda.so.1".to_owned();
    let no_socket = |number| failed("round-trip", Error::system("make a socket", io::Error::from_raw_os_error(number)));
    let broker = |problem: &str| {
        let mut finding = finding("broker", Status::Failed, None);
        finding.figures.insert("problem".to_owned(), problem.into());
        finding
    };
    let timeout = |probe| said(probe, "timeout", "no answer within 5s");
    let segfault = |probe| killed(probe, "SIGSEGV");
    let closed = || where_(|here| here.module_open = Some(false));
    let mig = || where_(|here| here.mig = true);
    let no_shm = || where_(|here| here.shared_memory.as_mut().unwrap().exists = false);
    let no_gpu_node = |mut here: Environment| {
        here.nodes.remove(0);
        here
    };
    vec![
        (
            "stub-library",
            (failed("driver", LoadError::Stub { library: library() }), plain()),
            (refused("driver", "cuInit", 999), plain()),
        ),
        (
            "stub-library",
            (refused("driver", "cuInit", 999), where_(|here| here.library.as_mut().unwrap().stub = true)),
            (timeout("import"), where_(|here| here.library.as_mut().unwrap().stub = true)),
        ),
        ("library-broken", (cut_off(), container()), (no_library(), container())),
        ("library-not-found", (no_library(), plain()), (no_library(), no_gpu_node(plain()))),
        ("library-missing-wsl", (no_library(), no_gpu_node(wsl())), (no_library(), no_gpu_node(plain()))),
        ("library-missing-container", (no_library(), no_gpu_node(container())), (no_library(), no_gpu_node(plain()))),
        ("library-missing", (no_library(), no_gpu_node(plain())), (no_device(), plain())),
        (
            "old-driver",
            (failed("pool", LoadError::MissingSymbol { library: library(), symbol: "cuMemPoolCreate" }), plain()),
            (said("pool", "unsupported", "host lacks memory pools"), plain()),
        ),
        ("fabric-manager", (refused("driver", "cuInit", 802), plain()), (refused("driver", "cuInit", 801), plain())),
        ("version-mismatch", (refused("driver", "cuInit", 803), plain()), (refused("driver", "cuInit", 802), plain())),
        (
            "compatibility-library",
            (refused("driver", "cuInit", 804), plain()),
            (refused("driver", "cuInit", 803), plain()),
        ),
        (
            "nodes-denied",
            (no_device(), where_(|here| here.nodes[0].usable = false)),
            (refused("import", IMPORT, 999), where_(|here| here.nodes[0].usable = false)),
        ),
        ("devices-hidden", (no_device(), visible()), (no_device(), plain())),
        ("no-device-in-container", (no_device(), no_gpu_node(container())), (no_device(), container())),
        ("no-device", (no_device(), no_gpu_node(plain())), (refused("memory", "cuMemCreate", 100), plain())),
        (
            "no-uvm-node",
            (refused("driver", "cuInit", 999), where_(|here| drop(here.nodes.pop()))),
            (refused("driver", "cuInit", 999), plain()),
        ),
        (
            "other-proc",
            (refused("driver", "cuInit", 304), where_(|here| here.own_proc = Some(false))),
            (refused("driver", "cuInit", 304), plain()),
        ),
        (
            "driver-broken",
            (refused("driver", "cuInit", 999), plain()),
            (refused("memory", "cuCtxSynchronize", 999), plain()),
        ),
        ("driver-hangs", (timeout("driver"), plain()), (timeout("memory"), plain())),
        (
            "few-descriptors",
            (finding("descriptors", Status::Failed, None), plain()),
            (finding("host-memory", Status::Failed, None), plain()),
        ),
        ("few-descriptors", (no_socket(24), plain()), (no_socket(13), plain())),
        (
            "few-descriptors",
            (failed("memory", MemoryError::TooManyDescriptors { needed: 512, limit: 256 }), plain()),
            (said("memory", "system", "512 open files are needed"), plain()),
        ),
        (
            "few-descriptors",
            (failed("round-trip", ProtocolError::FdsTruncated { most: 128 }), plain()),
            (failed("round-trip", ProtocolError::LongRecord { most: 128 }), plain()),
        ),
        ("mps", (refused("driver", "cuInit", 807), plain()), (refused("driver", "cuInit", 804), plain())),
        (
            "exclusive",
            (refused("round-trip", "cuDevicePrimaryCtxRetain", 46), plain()),
            (refused("round-trip", "cuDevicePrimaryCtxRetain", 201), plain()),
        ),
        (
            "exclusive",
            (with_mode(refused("round-trip", "cuDevicePrimaryCtxRetain", 201), 3), plain()),
            (with_mode(refused("round-trip", "cuDevicePrimaryCtxRetain", 201), 0), plain()),
        ),
        (
            "wsl-rdma",
            (refused("dma-buf", "cuMemSetAccess", 999), wsl()),
            (refused("dma-buf", "cuMemSetAccess", 999), plain()),
        ),
        (
            "wsl-sharing",
            (refused("legacy", "cuIpcOpenMemHandle", 400), wsl()),
            (refused("legacy", "cuIpcOpenMemHandle", 2), wsl()),
        ),
        ("wsl-sharing", (lacking("export"), wsl()), (refused("export", EXPORT, 1), plain())),
        (
            "gvisor-confidential",
            (timeout("memory"), where_(|here| (here.gvisor, here.confidential) = (true, Some("tdx".to_owned())))),
            (timeout("memory"), gvisor()),
        ),
        ("gvisor-export", (refused("export", EXPORT, 1), gvisor()), (refused("export", EXPORT, 1), plain())),
        (
            "confidential",
            (refused("host-numa", "cuMemCreate", 801), confidential()),
            (refused("host-numa", "cuMemCreate", 1), confidential()),
        ),
        ("mig", (refused("peer", "cuMemSetAccess", 217), mig()), (refused("round-trip", "cuMemMap", 217), mig())),
        ("mig", (lacking("peer"), mig()), (lacking("pool"), mig())),
        (
            "mig",
            (refused("legacy", "cuIpcOpenMemHandle_v2", 801), mig()),
            (refused("legacy", "cuMemAlloc_v2", 2), mig()),
        ),
        ("mig", (refused("pool", "cuMemPoolCreate", 101), mig()), (refused("event", "cuEventCreate", 101), mig())),
        (
            "fabric-no-channel",
            (refused("fabric", "cuMemCreate", 800), where_(|here| here.imex_channels.clear())),
            (refused("memory", "cuMemCreate", 800), where_(|here| here.imex_channels.clear())),
        ),
        (
            "fabric-channel-denied",
            (refused("fabric", "cuMemCreate", 800), where_(|here| here.imex_channels[0].usable = false)),
            (refused("fabric", "cuMemCreate", 1), where_(|here| here.imex_channels[0].usable = false)),
        ),
        ("fabric-other-channel", (refused("fabric", IMPORT, 800), plain()), (refused("import", IMPORT, 800), plain())),
        ("fabric-export", (refused("fabric", EXPORT, 1), plain()), (refused("export", EXPORT, 1), plain())),
        ("fabric-unsupported", (lacking("fabric"), plain()), (lacking("fabric"), where_(|here| here.library = None))),
        ("peer-set-access", (refused("peer", "cuMemSetAccess", 1), plain()), (refused("peer", "cuMemMap", 1), plain())),
        (
            "no-peer-access",
            (refused("peer", "cuMemSetAccess", 217), plain()),
            (refused("peer", "cuMemSetAccess", 2), plain()),
        ),
        ("no-peer-access", (lacking("peer"), plain()), (finding("peer", Status::Skipped, None), plain())),
        (
            "gpu-hidden-by-variable",
            (refused("import", IMPORT, 101), visible()),
            (refused("import", IMPORT, 101), plain()),
        ),
        (
            "gpu-hidden",
            (refused("round-trip", IMPORT, 101), container()),
            (refused("memory", "cuMemCreate", 101), container()),
        ),
        ("host-numa-crash", (segfault("host-numa"), plain()), (segfault("memory"), plain())),
        (
            "host-numa-crash",
            (segfault("host-numa"), where_(|here| here.module = Some("580.159.04".to_owned()))),
            (segfault("host-numa"), where_(|here| here.module = Some("595.58.03".to_owned()))),
        ),
        (
            "host-numa-filtered",
            (refused("host-numa", "cuMemCreate", 1), where_(|here| here.seccomp = Some(2))),
            (refused("host-numa", "cuMemCreate", 1), plain()),
        ),
        (
            "host-numa-filtered",
            (
                refused("host-numa", "cuMemCreate", 1),
                where_(|here| (here.container, here.seccomp) = (Some("docker".to_owned()), None)),
            ),
            (refused("host-numa", "cuMemCreate", 1), container()),
        ),
        (
            "host-numa-unsupported",
            (lacking("host-numa"), plain()),
            (finding("host-numa", Status::Skipped, None), plain()),
        ),
        (
            "event-without-shm",
            (refused("event", "cuIpcGetEventHandle", 304), no_shm()),
            (refused("event", "cuIpcGetEventHandle", 304), plain()),
        ),
        (
            "event-without-shm",
            (
                refused("event", "cuIpcOpenEventHandle", 205),
                where_(|here| here.shared_memory.as_mut().unwrap().writable = false),
            ),
            (refused("legacy", "cuIpcOpenMemHandle", 205), no_shm()),
        ),
        (
            "event-not-shared",
            (refused("event", "cuIpcOpenEventHandle", 205), plain()),
            (refused("legacy", "cuIpcOpenMemHandle", 205), plain()),
        ),
        ("dma-buf-closed-module", (lacking("dma-buf"), closed()), (lacking("dma-buf"), plain())),
        ("pool-unsupported", (lacking("pool"), plain()), (lacking("legacy"), plain())),
        ("no-vmm", (lacking("export"), plain()), (lacking("export"), where_(|here| here.library = None))),
        ("no-vmm", (lacking("memory"), plain()), (refused("import", IMPORT, 801), plain())),
        (
            "no-vmm",
            (said("exporter-killed", "unsupported", "the device does not offer it"), plain()),
            (said("exporter-killed", "system", "no process can be started"), plain()),
        ),
        (
            "no-addresses",
            (refused("memory", "cuMemAddressReserve", 2), plain()),
            (refused("memory", "cuMemCreate", 2), plain()),
        ),
        (
            "out-of-memory",
            (refused("memory", "cuMemCreate", 2), plain()),
            (refused("memory", "cuMemCreate", 1), plain()),
        ),
        (
            "out-of-memory",
            (failed("memory", MemoryError::OutOfMemory { device: "a GPU".to_owned(), size: 9, free: 8 }), plain()),
            (said("memory", "usage", "size 9 is not a positive multiple"), plain()),
        ),
        (
            "memory-held",
            (finding("memory-returned", Status::Failed, None), plain()),
            (refused("memory-returned", "cuMemGetInfo_v2", 1), plain()),
        ),
        ("broker-folder", (broker("folder"), plain()), (broker("stale"), plain())),
        ("broker-stale", (broker("stale"), plain()), (broker("silent"), plain())),
        ("broker-silent", (broker("silent"), plain()), (broker("denied"), plain())),
        ("broker-silent", (timeout("broker"), plain()), (timeout("round-trip"), plain())),
        ("broker-denied", (broker("denied"), plain()), (broker("refused"), plain())),
        ("broker-refused", (broker("refused"), plain()), (broker("other-program"), plain())),
        (
            "broker-other-program",
            (broker("other-program"), plain()),
            (finding("broker", Status::Failed, None), plain()),
        ),
        (
            "descriptor-not-kept",
            (refused("held-descriptor", IMPORT, 999), plain()),
            (refused("held-descriptor", "cuMemCreate", 999), plain()),
        ),
        (
            "descriptor-not-kept",
            (finding("held-descriptor", Status::Failed, None), plain()),
            (finding("memory-returned", Status::Failed, None), plain()),
        ),
        (
            "persistence-off",
            (finding("persistence", Status::Unsupported, None), plain()),
            (finding("held-descriptor", Status::Unsupported, None), plain()),
        ),
        (
            "persistence-off",
            (finding("persistence", Status::Unsupported, None), plain()),
            (finding("persistence", Status::Failed, None), plain()),
        ),
        ("killed", (killed("memory", "SIGKILL"), plain()), (said("memory", "system", "SIGKILL failed"), plain())),
        ("crashed", (segfault("memory"), plain()), (killed("memory", "SIGKILL"), plain())),
        ("hangs", (timeout("round-trip"), plain()), (said("round-trip", "peer", "the peer hung up"), plain())),
    ]
}

/// The input of a rule about two ends that meet.
type Meeting = (Finding, Environment, Option<Environment>);

/// The same for the rules of containers, of which some look at both ends.
fn container_cases() -> Vec<(&'static str, Meeting, Meeting)> {
    let said_by_loader = |answer: &str| failed("driver", LoadError::NoLibrary { tried: format!("{answer}; {answer}") });
    let gone = || said_by_loader("libcuda.so.1: cannot open shared object file: No such file or directory");
    let built_for = |c_library| where_(|here| here.c_library = Some(c_library));
    let capabilities = |list: &str| where_(|here| here.driver_capabilities = Some(list.to_owned()));
    let label = |label: &str| where_(|here| here.label = Some(label.to_owned()));
    let own = || label("system_u:system_r:container_t:s0:c1,c2");
    let other = || label("system_u:system_r:container_t:s0:c3,c4");
    let denied = |permitted: bool| {
        let mut denied =
            failed("round-trip", SocketError::Denied { path: "/run/vmmfd/vmmfd.sock".into(), group: None });
        denied.figures.insert("permitted".to_owned(), permitted.into());
        denied
    };
    let cut_off = || failed("round-trip", ProtocolError::FdsTruncated { most: 128 });
    let inside = |pid, ipc| where_(|here| (here.pid_namespace, here.ipc_namespace) = (Some(pid), Some(ipc)));
    let legacy = || refused("legacy", "cuIpcOpenMemHandle_v2", 201);
    vec![
        (
            "musl",
            (said_by_loader("Dynamic loading not supported"), built_for(CLibrary::Musl), None),
            (said_by_loader("file too short"), built_for(CLibrary::Glibc), None),
        ),
        (
            "musl",
            (gone(), built_for(CLibrary::Musl), None),
            (refused("driver", "cuInit", 999), built_for(CLibrary::Musl), None),
        ),
        ("capability-missing", (gone(), capabilities("utility"), None), (gone(), capabilities("all"), None)),
        ("capability-missing", (gone(), capabilities("utility,video"), None), (gone(), plain(), None)),
        (
            "capability-missing",
            (gone(), capabilities("graphics"), None),
            (gone(), capabilities("utility, compute"), None),
        ),
        // Set and empty is the runtime's default, which has compute.
        ("capability-missing", (gone(), capabilities("utility"), None), (gone(), capabilities(""), None)),
        ("selinux-categories", (denied(true), own(), None), (denied(false), own(), None)),
        // AppArmor's labels, and SELinux's without categories.
        ("selinux-categories", (denied(true), own(), None), (denied(true), label("docker-default (enforce)"), None)),
        ("selinux-categories", (denied(true), own(), None), (denied(true), label("u:r:container_t:s0"), None)),
        ("selinux-categories", (cut_off(), own(), Some(other())), (cut_off(), own(), Some(own()))),
        ("selinux-categories", (cut_off(), own(), Some(other())), (cut_off(), own(), None)),
        (
            "legacy-namespaces",
            (legacy(), inside(1, 1), Some(inside(2, 1))),
            (legacy(), inside(1, 1), Some(inside(1, 1))),
        ),
        ("legacy-namespaces", (legacy(), inside(1, 1), Some(inside(1, 2))), (legacy(), inside(1, 1), None)),
        (
            "legacy-namespaces",
            (legacy(), inside(1, 1), Some(inside(2, 2))),
            (refused("pool", "cuMemPoolImportPointer", 1), inside(1, 1), Some(inside(2, 2))),
        ),
    ]
}

fn all_cases() -> impl Iterator<Item = (&'static str, Meeting, Meeting)> {
    let alone = |(finding, environment): Input| (finding, environment, None);
    let general = cases().into_iter().map(move |(rule, meant, near)| (rule, alone(meant), alone(near)));
    general.chain(container_cases())
}

#[test]
fn each_rule_explains_its_case_and_not_a_similar_one() {
    let name = |(finding, own, peer): &Meeting| find(finding, own, peer.as_ref()).map(|rule| rule.name);
    for (rule, meant, near) in all_cases() {
        assert_eq!(name(&meant), Some(rule), "{:?}", meant.0);
        assert_ne!(name(&near), Some(rule), "{:?}", near.0);
    }
}

#[test]
fn every_rule_is_reached() {
    let reached: HashSet<&str> = all_cases()
        .filter_map(|(_, (finding, own, peer), _)| find(&finding, &own, peer.as_ref()))
        .map(|rule| rule.name)
        .collect();
    for rule in RULES {
        assert!(reached.contains(rule.name), "{} is hidden, or has no case", rule.name);
    }
    let names: HashSet<&str> = RULES.iter().map(|rule| rule.name).collect();
    assert_eq!(names.len(), RULES.len(), "two rules of one name");
}

#[test]
fn a_finding_that_is_ok_or_skipped_is_not_explained() {
    for (_, (mut finding, environment, peer), _) in all_cases() {
        for status in [Status::Ok, Status::Skipped] {
            finding.status = status;
            explain(&mut finding, &environment, peer.as_ref());
            assert_eq!((&finding.cause, &finding.remedy, &finding.rule), (&None, &None, &None));
        }
    }
}

#[test]
fn an_explanation_is_that_of_its_rule() {
    let mut finding = refused("fabric", "cuMemCreate", 800);
    explain(&mut finding, &where_(|here| here.imex_channels.clear()), None);
    let rule = RULES.iter().find(|rule| rule.name == "fabric-no-channel").unwrap();
    assert_eq!(finding.rule.as_deref(), Some(rule.name));
    assert_eq!((finding.cause.as_deref(), finding.remedy.as_deref()), (Some(rule.cause), Some(rule.remedy)));
}

#[test]
fn rules_do_not_read_messages() {
    for (rule, (mut finding, own, peer), _) in all_cases() {
        finding.meaning.clear();
        finding.error.iter_mut().for_each(|error| error.message.clear());
        assert_eq!(find(&finding, &own, peer.as_ref()).map(|rule| rule.name), Some(rule), "{finding:?}");
    }
}

#[test]
fn an_unknown_failure_is_not_explained() {
    assert!(find(&refused("memory", "cuMemMap", 12345), &plain(), None).is_none());
    assert!(find(&finding("aliases", Status::Failed, None), &plain(), None).is_none());
}

#[test]
fn each_text_is_one_sentence_that_fits_a_table() {
    for Rule { name, symptom, cause, remedy, .. } in RULES {
        for text in [symptom, cause, remedy] {
            assert!(!text.contains(['|', '\n']) && !text.contains("  "), "{name}: {text}");
        }
        for text in [cause, remedy] {
            assert!(text.ends_with('.') && !text.contains(". "), "{name}: {text}");
        }
    }
}
