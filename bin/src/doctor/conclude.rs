//! From the findings to the causes, the remedies and the verdict.

use super::{DoctorReport, Status, rules, verdict};

/// Explains the findings that are not `ok`, and concludes.
pub(super) fn conclude(report: &mut DoctorReport) {
    let DoctorReport { environment, peer, machine, devices, pairs, .. } = report;
    // The compute mode of a device explains its other errors.
    for device in devices.iter_mut() {
        let mode = device.findings.iter().find_map(|finding| finding.figures.get("compute_mode")).cloned();
        let Some(mode) = mode.filter(|mode| mode.as_u64() != Some(0)) else { continue };
        for finding in device.findings.iter_mut().filter(|finding| finding.status == Status::Failed) {
            finding.figures.insert("compute_mode".to_owned(), mode.clone());
        }
    }
    let findings = machine
        .iter_mut()
        .chain(devices.iter_mut().flat_map(|device| &mut device.findings))
        .chain(pairs.iter_mut().flat_map(|pair| &mut pair.findings));
    for finding in findings.filter(|finding| finding.status != Status::Ok) {
        rules::explain(finding, environment, peer.as_ref());
    }
    (report.verdict, report.exit_code) = verdict::of(report);
}
