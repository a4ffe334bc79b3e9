//! The conclusion of a report: explanations, the verdict in one sentence, and the exit code.

use std::collections::BTreeSet;

use vmmfd::driver::Backend;

use super::{DeviceReport, DoctorReport, Finding, PROBES, PairReport, Probe, Scope, Status, rules::explain};

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
    findings.for_each(|finding| explain(finding, environment, None));
    (report.verdict, report.exit_code) = verdict(report);
}

/// The verdict and exit code of a report. A required probe without a finding counts as failed.
pub(super) fn verdict(report: &DoctorReport) -> (String, u8) {
    let driver = report.machine.iter().find(|finding| finding.probe == "driver");
    if let Some(driver) = driver.filter(|driver| driver.status != Status::Ok) {
        let error = driver.error.as_ref();
        let why = driver.cause.as_ref().or(error.map(|error| &error.message)).map_or("", String::as_str);
        let why = why.trim_end_matches('.');
        return match error.is_some_and(|error| error.is_nothing_to_test()) {
            true => (format!("There is nothing here to test: {why}."), 3),
            false => (format!("The driver can't be used: {why}."), 1),
        };
    }
    let mut failures = Vec::new();
    for name in required(report, Scope::Machine) {
        failures.extend(failure_of(&report.machine, name).map(|why| format!("the machine fails at {name}{why}")));
    }
    // A meeting that was cut short reports that as a finding about the machine, with the probe that ran then.
    let of_device = |name: &str| Probe::named(name).is_some_and(|probe| probe.scope() == Scope::Device);
    let cut = report.machine.iter().filter(|finding| finding.status != Status::Ok && of_device(&finding.probe));
    failures.extend(cut.map(|finding| format!("{} was cut short{}", finding.probe, reason(finding))));
    let mut passed = report.devices.len();
    for device in &report.devices {
        let failed = required(report, Scope::Device).find_map(|name| {
            failure_of(&device.findings, name).map(|why| format!("device {} fails at {name}{why}", device.ordinal))
        });
        passed -= usize::from(failed.is_some());
        failures.extend(failed);
    }
    for PairReport { device, owner, findings } in &report.pairs {
        for name in required(report, Scope::Pair) {
            let why = failure_of(findings, name);
            failures.extend(why.map(|why| format!("device {device} fails at {name} with device {owner}{why}")));
        }
    }
    let asked = |scope: Scope| required(report, scope).next().is_some();
    if report.pairs.is_empty() && asked(Scope::Pair) {
        failures.push("no pair of devices was tried".to_owned());
    }
    if report.devices.is_empty() && asked(Scope::Device) {
        failures.push("no device was tried".to_owned());
    }
    let mut sentence = subject(report, passed);
    for part in failures.iter().chain(&remarks(report)) {
        sentence += &format!("; {part}");
    }
    (sentence + ".", u8::from(!failures.is_empty()))
}

fn required(report: &DoctorReport, scope: Scope) -> impl Iterator<Item = &String> {
    let named = move |name: &&String| PROBES.iter().any(|probe| probe.name == **name && probe.scope() == scope);
    report.required.iter().filter(named)
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
        let of_device = |device: &'_ DeviceReport| device.findings.iter().filter(optional).find(lacks).cloned();
        let without: Vec<(String, Finding)> =
            report.devices.iter().filter_map(|device| Some((device.ordinal.to_string(), of_device(device)?))).collect();
        if report.backend == Backend::Cuda
            && let Some((_, first)) = without.first()
        {
            let ordinals: Vec<&str> = without.iter().map(|(ordinal, _)| ordinal.as_str()).collect();
            let which = match without.len() == report.devices.len() {
                true => String::new(),
                false => format!(" on device {}", ordinals.join(", ")),
            };
            remarks.push(format!("{feature}{which}{}", reason(first)));
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
