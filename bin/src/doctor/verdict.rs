//! The conclusion of a report: explanations, the verdict in one sentence, and the exit code.

use std::{collections::BTreeSet, iter};

use super::{DeviceReport, DoctorReport, PairReport, Probe, Scope, rules::explain};
use crate::doctor::prelude::*;

/// Explains the findings that are not `ok`, and sets the verdict.
pub(super) fn conclude(report: &mut DoctorReport) {
    let DoctorReport { environment, machine, devices, pairs, .. } = report;
    // A device's compute mode explains its other errors.
    for device in devices.iter_mut() {
        let mode = device.findings.iter().find_map(|finding| finding.figures.get("compute_mode")).cloned();
        let Some(mode) = mode.filter(|mode| mode.as_u64() != Some(0)) else { continue };
        for finding in device.findings.iter_mut().filter(|finding| finding.status == Status::Failed) {
            finding.figures.insert("compute_mode".to_owned(), mode.clone());
        }
    }
    let devices = devices.iter_mut().flat_map(|device| &mut device.findings);
    let findings = machine.iter_mut().chain(devices).chain(pairs.iter_mut().flat_map(|pair| &mut pair.findings));
    findings.for_each(|finding| explain(finding, environment));
    (report.verdict, report.exit_code) = verdict(report);
}

/// The verdict and exit code of a report. A required probe without a finding counts as failed.
fn verdict(report: &DoctorReport) -> (String, u8) {
    let driver = report.machine.iter().find(|finding| finding.probe == "driver");
    if let Some(driver) = driver.filter(|driver| driver.status != Status::Ok) {
        let error = driver.error.as_ref();
        let why = driver.cause.as_ref().or(error.map(|error| &error.message)).map_or("", String::as_str);
        let why = why.trim_end_matches('.');
        return match error.is_some_and(ErrorDetails::is_nothing_to_test) {
            true => (format!("There is nothing here to test: {why}."), 3),
            false => (format!("The driver can't be used: {why}."), 1),
        };
    }
    let machine = (Scope::Machine, "the machine".to_owned(), String::new(), &report.machine);
    let devices = report.devices.iter().map(|DeviceReport { ordinal, findings, .. }| {
        (Scope::Device, format!("device {ordinal}"), String::new(), findings)
    });
    let pairs = report.pairs.iter().map(|PairReport { device, owner, findings }| {
        (Scope::Pair, format!("device {device}"), format!(" with device {owner}"), findings)
    });
    let mut failures = Vec::new();
    let mut passed = report.devices.len();
    for (scope, subject, with, findings) in iter::once(machine).chain(devices).chain(pairs) {
        let failed = required(report, scope).find_map(|name| Some((name, failure_of(findings, name)?)));
        if let Some((name, why)) = failed {
            failures.push(format!("{subject} fails at {name}{with}{why}"));
            passed -= usize::from(scope == Scope::Device);
        }
    }
    for (untried, scope, what) in [
        (report.pairs.is_empty(), Scope::Pair, "no pair of devices was tried"),
        (report.devices.is_empty(), Scope::Device, "no device was tried"),
    ] {
        if untried && required(report, scope).next().is_some() {
            failures.push(what.to_owned());
        }
    }
    let parts: Vec<String> =
        [subject(report, passed)].into_iter().chain(failures.clone()).chain(remarks(report)).collect();
    (parts.join("; ") + ".", u8::from(!failures.is_empty()))
}

fn required(report: &DoctorReport, scope: Scope) -> impl Iterator<Item = &String> {
    report.required.iter().filter(move |name| Probe::named(name).is_some_and(|probe| probe.scope() == scope))
}

/// The number of devices that passed the required probes.
fn subject(report: &DoctorReport, passed: usize) -> String {
    let all = report.devices.len();
    let whole = report.required.iter().any(|probe| probe == "round-trip");
    let what = match (report.backend, all) {
        (Backend::Cuda, 1) => "GPU",
        (Backend::Cuda, _) => "GPUs",
        (Backend::Host, _) => "stand-in of host memory (no GPU was tested)",
    };
    let asked = |scope: Scope| required(report, scope).next().is_some();
    match (all, whole) {
        _ if !asked(Scope::Device) && !asked(Scope::Pair) => "The driver starts".to_owned(),
        (0, _) => "The driver starts".to_owned(),
        (_, true) => format!("VMM fd sharing works on {passed} of {all} {what}"),
        (_, false) => format!("The required probes succeed on {passed} of {all} {what}"),
    }
}

/// The additions to the verdict: missing features that users ask for most, and other failures.
fn remarks(report: &DoctorReport) -> Vec<String> {
    const FEATURES: [(&str, &str); 3] =
        [("fabric", "fabric handles do not"), ("pool", "memory pools do not"), ("legacy", "legacy handles do not")];
    let optional = |finding: &&Finding| !report.required.contains(&finding.probe);
    let mut remarks = Vec::new();
    for (probe, feature) in FEATURES {
        let lacks = |finding: &&Finding| {
            finding.probe == probe && matches!(finding.status, Status::Failed | Status::Unsupported)
        };
        let of_device = |device: &'_ DeviceReport| device.findings.iter().filter(optional).find(lacks).map(reason);
        let without = report.devices.iter().filter_map(|device| Some((device.ordinal.to_string(), of_device(device)?)));
        let (ordinals, reasons): (Vec<String>, Vec<String>) = without.unzip();
        if let (Backend::Cuda, Some(reason)) = (report.backend, reasons.first()) {
            let which = match ordinals.len() == report.devices.len() {
                true => String::new(),
                false => format!(" on device {}", ordinals.join(", ")),
            };
            remarks.push(format!("{feature}{which}{reason}"));
        }
    }
    let devices = report.devices.iter().flat_map(|device| &device.findings);
    let others = devices.filter(|finding| !FEATURES.iter().any(|(probe, _)| finding.probe == *probe));
    let all = others.chain(report.pairs.iter().flat_map(|pair| &pair.findings)).filter(optional);
    let failed = all.filter(|finding| finding.status == Status::Failed).map(|finding| finding.probe.as_str());
    let also: BTreeSet<&str> = failed.collect();
    if !also.is_empty() {
        remarks.push(format!("also failed: {}", also.into_iter().collect::<Vec<_>>().join(", ")));
    }
    remarks
}

/// The reason why a probe did not succeed; `None` if it did.
fn failure_of(findings: &[Finding], probe: &str) -> Option<String> {
    match findings.iter().find(|finding| finding.probe == probe) {
        Some(finding) if finding.status == Status::Ok => None,
        Some(finding) => Some(reason(finding)),
        None => Some(", which reported nothing".to_owned()),
    }
}

fn reason(finding: &Finding) -> String {
    // Lowercase for the middle of a sentence, except for names in capitals.
    let lower = |cause: &str| match cause.split_at_checked(1) {
        Some((first, rest)) if rest.starts_with(|c: char| c.is_ascii_lowercase()) => first.to_lowercase() + rest,
        _ => cause.to_owned(),
    };
    let cause = finding.cause.as_deref().map(|cause| lower(cause.trim_end_matches('.')));
    let short = || finding.error.as_ref().map(|error| error.message.clone());
    let meaning = || Some(lower(finding.meaning.trim_end_matches('.'))).filter(|_| finding.status == Status::Skipped);
    match cause.or_else(short).or_else(meaning) {
        Some(why) => format!(": {why}"),
        None => String::new(),
    }
}
