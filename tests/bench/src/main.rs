//! `vmmfd-bench`: measures handoffs and compares them with the driver's own calls. `vmmfd bench` runs it.

use std::process::ExitCode;

use vmmfd_bench::{BenchOptions, run_task};
use vmmfd_cli::cli;

fn main() -> ExitCode {
    cli::main_of_tool::<BenchOptions>("vmmfd-bench", run_task)
}
