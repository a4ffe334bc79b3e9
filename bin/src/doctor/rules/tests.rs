use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::*;
use crate::doctor::{Probe, Reason};

/// The first rule for facts written as in a condition. Of several values, the one at this index is used.
fn rule_for(facts: impl Iterator<Item = &'static str>, at: usize) -> Option<&'static str> {
    let facts = facts.map(|fact| {
        let (name, values) = fact.split_once('=').unwrap_or((fact, ""));
        let values: Vec<&str> = values.split('/').collect();
        (name, values[at % values.len()].to_owned())
    });
    let facts = Facts(facts.collect());
    rules().find(|rule| rule.matches(&facts)).map(|rule| rule.name)
}

#[test]
fn each_alternative_finds_its_rule() {
    for rule in rules() {
        for facts in rule.alternatives() {
            let facts: Vec<&str> = facts.collect();
            for at in 0..6 {
                assert_eq!(rule_for(facts.iter().copied(), at), Some(rule.name), "{facts:?}");
            }
        }
    }
    assert_eq!(rule_for(["code=12345", "call=cuMemMap", "status=failed"].into_iter(), 0), None);
}

/// A finding and its environment, with these changes to fields.
fn facts(finding: &Value, own: &Value) -> Facts {
    let node = |path: &str| json!({ "path": path, "mode": "", "uid": 0, "gid": 0, "usable": true });
    let mut environment = json!({
        "nodes": [node("/dev/nvidia-uvm")], "imex_channels": [node("channel0")], "module": "595.58.03",
        "shared_memory": { "exists": true, "writable": true },
    });
    environment.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
    let mut fields = json!({ "probe": "any", "status": "ok", "meaning": "" });
    fields.as_object_mut().unwrap().extend(finding.as_object().unwrap().clone());
    Facts::of(&serde_json::from_value(fields).unwrap(), &serde_json::from_value(environment).unwrap())
}

/// Returns what the changes add to the facts about a finding without an error.
fn added(finding: &Value, own: &Value) -> BTreeSet<String> {
    let before = facts(&json!({}), &json!({})).0;
    let new = facts(finding, own).0.into_iter().filter(|fact| !before.contains(fact));
    new.map(|(name, value)| if value.is_empty() { name.to_owned() } else { format!("{name}={value}") }).collect()
}

#[test]
fn facts_follow_finding_and_environment() {
    let none = json!({});
    let node = |path: &str, usable: bool| json!([{ "path": path, "mode": "", "uid": 0, "gid": 0, "usable": usable }]);
    let mut seen = BTreeSet::from(["no-gpu-node", "no-error", "no-code"].map(str::to_owned));
    let mut assert_added = |finding: &Value, own: &Value, want: &str| {
        let want: BTreeSet<String> = want.split_whitespace().map(str::to_owned).collect();
        assert_eq!(added(finding, own), want, "{finding} {own}");
        seen.extend(want);
    };
    let driver = json!({ "kind": "driver", "code": 2, "call": "cuMemMap", "message": "" });
    let killed = |name: &str| json!({ "kind": "signal", "name": name, "reason": "file-limit", "message": "" });
    for (finding, want) in [
        (json!({ "probe": "export", "status": "failed" }), "probe=export status=failed shares-memory uses-memory"),
        (json!({ "probe": "peer" }), "probe=peer uses-memory"),
        (json!({ "probe": "aliases" }), "probe=aliases uses-vmm"),
        (json!({ "error": driver }), "error kind=driver code=2 call=cuMemMap"),
        (json!({ "error": killed("SIGKILL") }), "error kind=signal signal=SIGKILL reason=file-limit"),
        (json!({ "error": killed("SIGSEGV") }), "error kind=signal signal=other reason=file-limit"),
        (json!({ "figures": { "problem": "stale" } }), "problem=stale"),
        (json!({ "figures": { "compute_mode": 3 } }), "compute-mode"),
        (json!({ "figures": { "compute_mode": 0 } }), ""),
    ] {
        assert_added(&finding, &none, want);
    }
    for (own, want) in [
        (json!({ "library": { "path": "p" } }), "driver"),
        (json!({ "library": { "path": "p", "stub": true } }), "driver stub"),
        (json!({ "nodes": [], "module": null }), "no-gpu no-uvm-node old-module"),
        (json!({ "nodes": [], "module": null, "wsl": true }), "no-gpu old-module wsl"),
        (json!({ "nodes": [], "module": null, "pci_gpus": ["0000:01:00.0"] }), "no-uvm-node old-module"),
        (json!({ "nodes": node("/dev/nvidia0", true) }), "gpu-node no-uvm-node"),
        (json!({ "nodes": node("/dev/nvidia-uvm", false) }), "denied-node"),
        (json!({ "imex_channels": node("channel0", false) }), "no-usable-channel"),
        (json!({ "imex_channels": [] }), "no-channel no-usable-channel"),
        (json!({ "c_library": "musl" }), "musl"),
        (json!({ "c_library": "glibc" }), ""),
        (json!({ "container": "docker" }), "container seccomp"),
        (json!({ "container": "docker", "seccomp": 0 }), "container"),
        (json!({ "seccomp": 2 }), "seccomp"),
        (json!({ "driver_capabilities": "utility,video" }), "no-compute"),
        (json!({ "driver_capabilities": "utility, compute" }), ""),
        (json!({ "driver_capabilities": "all" }), ""),
        (json!({ "driver_capabilities": "" }), ""),
        (json!({ "own_proc": false, "visible_devices": "" }), "other-proc visible-devices"),
        (json!({ "gvisor": true, "confidential": "tdx", "mig": true }), "gvisor confidential mig"),
        (json!({ "module_open": false, "module": "580.159.04" }), "closed-module old-module"),
        (json!({ "shared_memory": { "exists": true, "writable": false } }), "no-shm"),
        (json!({ "shared_memory": { "exists": false, "writable": true } }), "no-shm"),
    ] {
        assert_added(&none, &own, want);
    }
    // No rule names a fact that never holds.
    let names: BTreeSet<&str> = seen.iter().map(|fact| fact.split('=').next().unwrap()).collect();
    for fact in rules().flat_map(|rule| rule.alternatives().flatten()) {
        let (name, values) = fact.split_once('=').unwrap_or((fact, ""));
        let known = |value: &str| match name {
            "probe" => Probe::named(value).is_some(),
            "reason" => serde_json::from_value::<Reason>(json!(value)).unwrap() != Reason::Other,
            _ => names.contains(name),
        };
        assert!(values.split('/').all(known), "{fact}");
    }
    let env = Environment::default();
    let flags = of_finding(&Finding::default()).into_iter().chain(of_environment(&env));
    flags.for_each(|(flag, _)| assert!(names.contains(flag), "no case has {flag}"));
}

#[test]
fn sentences_fit_their_rules() {
    assert_eq!(rules().count(), include_str!("../rules.md").lines().skip(2).count(), "a row has no five cells");
    assert_eq!(rules().map(|rule| rule.name).collect::<BTreeSet<_>>().len(), rules().count());
    for Rule { name, when, symptom, cause, remedy } in rules() {
        for text in [cause, remedy] {
            assert!(text.ends_with('.') && !text.contains(". ") && !text.contains("  "), "{name}: {text}");
        }
        // The symptom's numbers are the codes of the condition.
        let codes = when.split([' ']).filter_map(|fact| fact.strip_prefix("code=")).flat_map(|codes| codes.split('/'));
        let codes: Vec<&str> = codes.collect();
        let shown = symptom.split('(').filter_map(|part| Some(part.split_once(')')?.0));
        for number in shown.filter(|text| text.bytes().all(|byte| byte.is_ascii_digit())) {
            assert!(codes.contains(&number), "{name}: {number} is not in {codes:?}");
        }
    }
}

#[test]
fn only_failures_are_explained() {
    for (status, explained) in
        [(Status::Failed, true), (Status::Unsupported, true), (Status::Ok, false), (Status::Skipped, false)]
    {
        let error = ErrorDetails { code: Some(800), ..ErrorDetails::new("driver", String::new()) };
        let mut finding = Finding::new("fabric", status, "").with_error(error);
        explain(&mut finding, &Environment::default());
        assert_eq!(finding.rule.as_deref(), explained.then_some("fabric-no-channel"));
    }
}
