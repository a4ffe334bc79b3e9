//! Rules that give a finding its cause and remedy.
//!
//! Each rule covers a failure that was observed or reported. Other findings have no explanation. The rules are the rows of `rules.md`, the
//! most specific first: a name, a condition, and sentences, which docs/diagnose.md repeats. A condition has alternatives (`or`) of facts that
//! must all hold (`and`). A fact is a flag, or a name with the values that fit, such as `code=100`: see [`Facts`].

use super::environment::{CLibrary, Node};
use crate::doctor::prelude::*;

/// A known cause of failures.
#[derive(Debug, Clone, Copy)]
pub struct Rule {
    pub name: &'static str,
    when: &'static str,
    /// The symptom for the user.
    pub symptom: &'static str,
    pub cause: &'static str,
    pub remedy: &'static str,
}

/// All rules in order.
pub fn rules() -> impl Iterator<Item = Rule> {
    include_str!("rules.md").lines().filter_map(|row| {
        let mut cells = row.strip_prefix("| `")?.strip_suffix(" |")?.split(" | ");
        let mut next = || cells.next();
        Some(Rule {
            name: next()?.trim_end_matches('`'),
            when: next()?,
            symptom: next()?,
            cause: next()?,
            remedy: next()?,
        })
    })
}

impl Rule {
    /// The alternatives of the condition, each a list of facts.
    fn alternatives(self) -> impl Iterator<Item = impl Iterator<Item = &'static str>> {
        self.when.split(" or ").map(|all| all.split(" and "))
    }

    fn matches(&self, facts: &Facts) -> bool {
        self.alternatives().any(|mut all| all.all(|fact| facts.holds(fact)))
    }
}

/// The probes of virtual memory management.
#[rustfmt::skip]
const VMM: [&str; 11] = [
    "attributes", "granularity", "import", "round-trip", "aliases", "read-only-copy", "read-only-store", "wrong-descriptor",
    "exporter-killed", "memory-returned", "held-descriptor",
];

/// The probes in which one process or handle uses memory of another.
#[rustfmt::skip]
const SHARING: [&str; 13] = [
    "export", "import", "round-trip", "wrong-descriptor", "exporter-killed", "memory-returned", "held-descriptor",
    "read-only-copy", "read-only-store", "host-numa", "pool", "legacy", "event",
];

/// The other probes that need memory.
const MEMORY: [&str; 4] = ["dma-buf", "fabric", "peer", "memory"];

/// The facts about a finding and its environment: names with their values. A flag that holds has an empty value.
#[derive(Debug, Default)]
struct Facts(Vec<(&'static str, String)>);

impl Facts {
    fn of(finding: &Finding, env: &Environment) -> Self {
        let error = finding.error.as_ref();
        let signal = |error: &ErrorDetails| {
            let name = error.name.as_deref().filter(|name| *name == "SIGKILL").unwrap_or("other");
            (error.kind == "signal").then(|| name.to_owned())
        };
        let values = [
            ("probe", Some(finding.probe.clone())),
            ("status", name_of(finding.status)),
            ("problem", finding.figures.get("problem").and_then(name_of)),
            ("kind", error.map(|error| error.kind.clone())),
            ("code", error.and_then(|error| error.code).map(|code| code.to_string())),
            ("call", error.and_then(|error| error.call.clone())),
            ("reason", error.and_then(|error| error.reason).and_then(name_of)),
            ("signal", error.and_then(signal)),
        ];
        let flags = of_finding(finding).into_iter().chain(of_environment(env));
        let flags = flags.filter(|(_, holds)| *holds).map(|(name, _)| (name, String::new()));
        Self(values.into_iter().filter_map(|(name, value)| Some((name, value?))).chain(flags).collect())
    }

    fn holds(&self, fact: &str) -> bool {
        let (wanted, values) = fact.split_once('=').unwrap_or((fact, ""));
        self.0.iter().any(|(name, value)| *name == wanted && values.split('/').any(|fits| fits == value))
    }
}

/// The flags about a finding, and whether they hold.
fn of_finding(finding: &Finding) -> [(&'static str, bool); 7] {
    let Finding { probe, error, figures, .. } = finding;
    let probe = probe.as_str();
    [
        ("error", error.is_some()),
        ("no-error", error.is_none()),
        ("no-code", error.as_ref().is_none_or(|error| error.code.is_none())),
        ("uses-vmm", VMM.contains(&probe)),
        ("shares-memory", SHARING.contains(&probe)),
        ("uses-memory", SHARING.contains(&probe) || MEMORY.contains(&probe)),
        // Not the default.
        ("compute-mode", figures.get("compute_mode").is_some_and(|mode| mode.as_u64() != Some(0))),
    ]
}

fn of_environment(env: &Environment) -> [(&'static str, bool); 22] {
    let gpu_node = env.nodes.iter().any(is_gpu);
    let no_compute = |list: &String| {
        // An empty value means the runtime's default, which includes compute.
        !list.split(',').any(|capability| matches!(capability.trim(), "all" | "compute" | ""))
    };
    let major = env.module.as_deref().and_then(|module| module.split('.').next()?.parse::<u32>().ok());
    [
        // Host memory supports few features, so its findings say nothing about a driver.
        ("driver", env.library.is_some()),
        ("stub", env.library.as_ref().is_some_and(|library| library.stub)),
        ("no-gpu", env.pci_gpus.is_empty() && env.module.is_none() && env.nodes.is_empty()),
        ("gpu-node", gpu_node),
        ("no-gpu-node", !gpu_node),
        ("denied-node", env.nodes.iter().any(|node| !node.usable)),
        // WSL has none.
        ("no-uvm-node", !env.wsl && !env.nodes.iter().any(|node| node.path.ends_with("/nvidia-uvm"))),
        ("no-channel", env.imex_channels.is_empty()),
        ("no-usable-channel", !env.imex_channels.iter().any(|node| node.usable)),
        ("musl", env.c_library == Some(CLibrary::Musl)),
        ("container", env.container.is_some()),
        ("no-compute", env.driver_capabilities.as_ref().is_some_and(no_compute)),
        ("other-proc", env.own_proc == Some(false)),
        ("visible-devices", env.visible_devices.is_some()),
        ("wsl", env.wsl),
        ("gvisor", env.gvisor),
        ("confidential", env.confidential.is_some()),
        ("mig", env.mig),
        ("closed-module", env.module_open == Some(false)),
        // Older than r595, or unknown.
        ("old-module", major.is_none_or(|major| major < 595)),
        // If the mode is unknown: containers have a filter.
        ("seccomp", env.seccomp.map_or(env.container.is_some(), |mode| mode == 2)),
        ("no-shm", env.shared_memory.is_some_and(|folder| !folder.exists || !folder.writable)),
    ]
}

/// Whether a node is a GPU, such as `/dev/nvidia0`.
fn is_gpu(node: &Node) -> bool {
    let number = node.path.strip_prefix("/dev/nvidia");
    number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

/// The name of a value in JSON.
fn name_of(value: impl Serialize) -> Option<String> {
    serde_json::to_value(value).ok()?.as_str().map(str::to_owned)
}

/// Sets the cause and remedy of a `failed` or `unsupported` finding from the first matching rule.
pub(super) fn explain(finding: &mut Finding, environment: &Environment) {
    if !matches!(finding.status, Status::Failed | Status::Unsupported) {
        return;
    }
    let facts = Facts::of(finding, environment);
    if let Some(Rule { name, cause, remedy, .. }) = rules().find(|rule| rule.matches(&facts)) {
        finding.cause = Some(cause.to_owned());
        finding.remedy = Some(remedy.to_owned());
        finding.rule = Some(name.to_owned());
    }
}

#[cfg(test)]
mod tests;
