//! Measures handoffs and compares them with the driver's own calls in the same run.
//!
//! This process is the producer and the clock. The consumer, and each client of a broker, is this program again ([`process`]). Compared rows
//! take turns, one sample each, so that a disturbance of the machine affects all of them.
//!
//! The statistics are own code: criterion compiles for longer than the whole package, and measures closures of one process.

#![allow(missing_docs, reason = "it is no interface")]

mod broker;
mod calls;
mod child;
mod handoff;
mod load;
mod options;
mod prelude;
mod process;
mod report;
mod run;
mod startup;
mod stream;

use std::process::ExitCode;

use vmmfd::error::Result;
use vmmfd_cli::{
    child::SUBCOMMAND,
    cli::{Exit, Running, Tool, ToolOutput, json_line, main_of_tool, raise_file_limit},
    schema::{Named, document},
};

use self::{
    options::BenchOptions,
    report::{Group, Report},
    run::Run,
};

pub fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    match (arguments.next().as_deref(), arguments.next()) {
        (Some(SUBCOMMAND), Some(task)) => vmmfd_cli::child::run(&task, child::run_task),
        _ => main_of_tool::<BenchOptions>("vmmfd-bench"),
    }
}

type Measure = fn(&mut Run<'_>) -> Result<()>;

/// The groups in the order of a run. `startup` is first: this process has not started the driver then.
const GROUPS: [(Group, Measure); 8] = [
    (Group::Startup, startup::measure),
    (Group::Handoff, handoff::measure),
    (Group::Repeat, handoff::measure),
    (Group::Verify, calls::verify),
    (Group::Stages, calls::stages),
    (Group::Copies, calls::copies),
    (Group::Broker, broker::measure),
    (Group::Stream, stream::measure),
];

impl Tool for BenchOptions {
    const NAME: &'static str = "bench";
    const REPORTS: &'static [Named] = &[("bench", document::<Report>)];

    fn run(&self, Running { output, cancel, progress }: Running<'_>) -> anyhow::Result<ToolOutput> {
        // This process has sockets and descriptors for each consumer.
        raise_file_limit();
        let mut run = Run::start(self, cancel, progress, !output.json)?;
        for (group, measure) in GROUPS {
            if self.group == group || self.group == Group::All {
                run.group = group;
                measure(&mut run)?;
            }
        }
        let report = run.report;
        let text = if output.json { json_line(&report) } else { report.end() };
        Ok(ToolOutput { text, exit: if report.rows.is_empty() { Exit::Mismatch } else { Exit::Verified } })
    }
}
