//! Measures handoffs and compares them with the driver's own calls in the same run.
//!
//! The bench uses real processes: this program again, started for the run. The measuring process touches no memory itself. It starts a
//! producer, which shares memory with its consumers. A second producer runs the methods for which a process must hold no exported
//! descriptor, as an open exported descriptor makes an export far cheaper. Compared methods take turns, one sample each, so that a
//! disturbance of the machine affects all of them.

#![allow(missing_docs, reason = "it is no interface")]

mod broker;
mod child;
mod consumer;
mod consumer_handle;
mod handoff;
mod options;
mod pattern;
pub mod picture;
mod plan;
mod process;
mod producer;
mod protocol;
mod report;
mod run;
mod single;
mod startup;
mod stats;
mod task;
pub mod text;

use vmmfd::{channel::Cancel, error::Result};

use self::run::BenchRun;
pub use self::{
    child::run_task,
    options::BenchOptions,
    plan::{Bench, BenchPlan, Observer, Printer, Progress},
    report::{BenchReport, Figure, Machine, Series},
    stats::Summary,
};

/// Runs the benches of a plan. Blocks until they finish. Each step is limited by the plan's timeout.
///
/// The program that calls this must call [`run_task`] for its hidden subcommand.
///
/// # Errors
/// [`LoadError`], [`DeviceError::NotFound`]; [`ToolError::Child`] if a process of the bench fails otherwise, hangs or dies;
/// [`Error::Interrupted`]; [`Error::System`].
///
/// [`LoadError`]: vmmfd::error::LoadError
/// [`DeviceError::NotFound`]: vmmfd::error::DeviceError::NotFound
/// [`ToolError::Child`]: vmmfd_cli::error::ToolError::Child
/// [`Error::Interrupted`]: vmmfd::Error::Interrupted
/// [`Error::System`]: vmmfd::Error::System
pub fn run(plan: &BenchPlan, cancel: &Cancel, observer: Observer<'_>, print: Printer<'_>) -> Result<BenchReport> {
    let mut run = BenchRun::new(plan, cancel, observer, print);
    let wants = |bench: Bench| plan.benches.contains(&bench);
    if wants(Bench::Handoff) || wants(Bench::Repeat) {
        handoff::measure(&mut run)?;
    }
    if wants(Bench::Verify) {
        pattern::measure(&mut run)?;
    }
    if wants(Bench::Stages) {
        pattern::measure_stages(&mut run)?;
    }
    if wants(Bench::Startup) {
        startup::measure(&mut run)?;
    }
    if wants(Bench::Broker) {
        broker::measure(&mut run)?;
    }
    Ok(run.report)
}
