//! The last line.

use super::{Finding, Report, Status};
use crate::driver::Backend;

/// One sentence in plain words, and the exit code that goes with it.
pub(super) fn of(report: &Report) -> (String, u8) {
    let driver = report.machine.iter().find(|finding| finding.probe == "driver");
    if let Some(driver) = driver.filter(|driver| driver.status != Status::Ok) {
        let seen = driver.error.as_ref();
        let why = driver.cause.clone().or_else(|| seen.map(|seen| seen.message.clone())).unwrap_or_default();
        return match seen.is_some_and(|seen| seen.is_nothing_here()) {
            true => (format!("There is nothing here to test: {}.", why.trim_end_matches('.')), 3),
            false => (format!("The driver can't be used: {}.", why.trim_end_matches('.')), 1),
        };
    }
    let bad = |finding: &&Finding| report.required.contains(&finding.probe) && finding.status != Status::Ok;
    let machine = report.machine.iter().find(bad);
    let failing: Vec<(i32, &Finding)> = report
        .devices
        .iter()
        .filter_map(|device| device.findings.iter().find(bad).map(|finding| (device.ordinal, finding)))
        .collect();
    let (all, good) = (report.devices.len(), report.devices.len() - failing.len());
    let what = match (report.backend, all) {
        (Backend::Cuda, 1) => "GPU",
        (Backend::Cuda, _) => "GPUs",
        (Backend::Host, _) => "stand-in of host memory (no GPU was tested)",
    };
    let tested = report.required.iter().any(|probe| probe == "round-trip");
    let mut sentence = match (all, tested) {
        (0, _) => "No device was asked for".to_owned(),
        (_, true) => format!("VMM fd sharing works on {good} of {all} {what}"),
        (_, false) => format!("What was asked for works on {good} of {all} {what}"),
    };
    for (ordinal, finding) in &failing {
        sentence += &format!("; device {ordinal} fails at {}{}", finding.probe, reason(finding));
    }
    if let Some(finding) = machine {
        sentence += &format!("; the machine fails at {}{}", finding.probe, reason(finding));
    }
    for (probe, feature) in
        [("fabric", "fabric handles do not"), ("pool", "memory pools do not"), ("legacy", "legacy handles do not")]
    {
        let lacking = |finding: &&Finding| {
            finding.probe == probe && [Status::Failed, Status::Unsupported].contains(&finding.status)
        };
        if report.backend == Backend::Cuda
            && let Some(finding) = report.devices.iter().flat_map(|device| &device.findings).find(lacking)
        {
            sentence += &format!("; {feature}{}", reason(finding));
        }
    }
    let exit_code = u8::from(!failing.is_empty() || machine.is_some());
    (sentence + ".", exit_code)
}

fn reason(finding: &Finding) -> String {
    // In the middle of a sentence; a name that is all capitals stays.
    let lower = |cause: &str| match cause.split_at_checked(1) {
        Some((first, rest)) if rest.starts_with(|c: char| c.is_ascii_lowercase()) => first.to_lowercase() + rest,
        _ => cause.to_owned(),
    };
    let cause = finding.cause.as_deref().map(|cause| lower(cause.trim_end_matches('.')));
    let short = || finding.error.as_ref().map(|seen| seen.message.clone());
    match cause.or_else(short) {
        Some(why) => format!(": {why}"),
        None => String::new(),
    }
}
