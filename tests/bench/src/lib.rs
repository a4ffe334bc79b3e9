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
mod process;
mod report;
mod run;
mod startup;
mod switching;

use std::process::ExitCode;

use vmmfd_cli::cli;

/// The hidden subcommand of a process of the bench.
const CHILD: &str = "child";

pub fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    match (arguments.next().as_deref(), arguments.next()) {
        (Some(CHILD), Some(task)) => child::main(&task),
        _ => cli::main_of_tool::<options::BenchOptions>("vmmfd-bench"),
    }
}
