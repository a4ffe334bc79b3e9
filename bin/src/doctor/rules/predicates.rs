//! Conditions shared by several rules.

use vmmfd::error::code;

use crate::doctor::{Environment, Finding, Status, environment::Node, error_details::Reason};

/// The optional probes of virtual memory management, which fail if the required ones do.
pub(super) const VMM: &[&str] = &[
    "attributes",
    "granularity",
    "aliases",
    "read-only-copy",
    "read-only-store",
    "wrong-descriptor",
    "exporter-killed",
    "memory-returned",
    "held-descriptor",
    "export-cost",
];

/// The probes in which one process or handle uses memory of another.
pub(super) const SHARING: &[&str] = &[
    "export",
    "import",
    "round-trip",
    "wrong-descriptor",
    "exporter-killed",
    "memory-returned",
    "held-descriptor",
    "export-cost",
    "read-only-copy",
    "read-only-store",
    "host-numa",
    "pool",
    "legacy",
    "event",
];

pub(super) fn is_of(finding: &Finding, probes: &[&str]) -> bool {
    probes.contains(&finding.probe.as_str())
}

pub(super) fn has_error(finding: &Finding) -> bool {
    finding.error.is_some()
}

pub(super) fn error_code(finding: &Finding) -> Option<u32> {
    finding.error.as_ref()?.code
}

pub(super) fn error_kind(finding: &Finding) -> Option<&str> {
    Some(&finding.error.as_ref()?.kind)
}

pub(super) fn has_reason(finding: &Finding, reason: Reason) -> bool {
    finding.error.as_ref().is_some_and(|error| error.reason == Some(reason))
}

/// Whether the signal that killed the probe's process was SIGKILL; `None` if no signal did.
pub(super) fn is_killed(finding: &Finding) -> Option<bool> {
    let error = finding.error.as_ref().filter(|error| error.kind == "signal")?;
    Some(error.name.as_deref() == Some("SIGKILL"))
}

pub(super) fn is_call(finding: &Finding, call: &str) -> bool {
    finding.error.as_ref().is_some_and(|error| error.call.as_deref() == Some(call))
}

pub(super) fn no_library(finding: &Finding) -> bool {
    has_reason(finding, Reason::LibraryMissing) || has_reason(finding, Reason::LibraryBroken)
}

pub(super) fn no_device(finding: &Finding) -> bool {
    is_of(finding, &["driver"]) && error_code(finding) == Some(code::NO_DEVICE)
}

/// Whether nothing on this machine indicates an NVIDIA GPU.
pub(super) fn no_gpu(environment: &Environment) -> bool {
    environment.pci_gpus.is_empty() && environment.module.is_none() && environment.nodes.is_empty()
}

pub(super) fn cu_init_unknown(finding: &Finding) -> bool {
    is_of(finding, &["driver"]) && error_code(finding) == Some(code::UNKNOWN)
}

pub(super) fn fabric_denied(finding: &Finding) -> bool {
    is_of(finding, &["fabric"]) && error_code(finding) == Some(code::NOT_PERMITTED)
}

pub(super) fn device_hidden(finding: &Finding) -> bool {
    let imports = is_of(finding, SHARING) || is_call(finding, "cuMemImportFromShareableHandle");
    imports && error_code(finding) == Some(code::INVALID_DEVICE)
}

/// Whether a GPU's driver reports the feature as unsupported. Host memory supports few features, so its findings don't count.
pub(super) fn unsupported(finding: &Finding, environment: &Environment, probes: &[&str]) -> bool {
    is_of(finding, probes) && finding.status == Status::Unsupported && environment.library.is_some()
}

/// The categories of an SELinux label: `c1,c2` in `system_u:system_r:container_t:s0:c1,c2`. AppArmor labels have none.
pub(super) fn categories(environment: &Environment) -> Option<&str> {
    environment.label.as_deref()?.splitn(5, ':').nth(4)
}

/// Whether both sides have SELinux categories that differ.
pub(super) fn other_categories(own: &Environment, peer: &Environment) -> bool {
    let both = categories(own).zip(categories(peer));
    both.is_some_and(|(own, theirs)| own != theirs)
}

/// Whether a node is a GPU, such as `/dev/nvidia0`.
pub(super) fn is_gpu(node: &Node) -> bool {
    let number = node.path.strip_prefix("/dev/nvidia");
    number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Whether the probe `broker` found this problem.
pub(super) fn has_problem(finding: &Finding, problem: &str) -> bool {
    is_of(finding, &["broker"]) && finding.figures.get("problem").is_some_and(|found| found == problem)
}
