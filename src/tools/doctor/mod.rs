//! Can this machine share GPU memory between processes, and if not, why not: found out by doing it.
//!
//! Probes make a [`Report`], which is printed after it is made. See [`report`] for what it holds and [`rules`] for what
//! explains it; [`text`] prints it for people. Each device's probes run in a process of their own, which is replaced when one
//! of them hangs or takes it along: see [`run`].

mod child;
mod control;
pub mod environment;
mod meeting;
mod peer;
mod probes;
pub mod report;
pub mod rules;
mod runner;
mod task;
pub mod text;
mod verdict;

pub(super) use self::{child::run_task, task::TOOL};
pub use self::{
    environment::Environment,
    meeting::{Meeting, Part, meet},
    probes::{PROBES, Probe, Scope},
    report::{DeviceReport, Finding, PairReport, Report, Status},
    runner::{Plan, read, run},
};

/// What makes the reports.
fn tool() -> String {
    format!("vmmfd {}", env!("CARGO_PKG_VERSION"))
}

/// Now, as a report has it.
fn now() -> String {
    humantime::format_rfc3339_seconds(std::time::SystemTime::now()).to_string()
}

/// A report as one line of JSON.
pub fn to_json(report: &Report) -> String {
    match serde_json::to_string(report) {
        Ok(text) => text + "\n",
        Err(error) => format!("{{\"error\":\"{error}\"}}\n"),
    }
}
