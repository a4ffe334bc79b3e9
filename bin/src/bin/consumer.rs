//! `consumer`: `vmmfd consume` as a separate program.

use std::process::ExitCode;

use vmmfd_cli::cli::{self, Consume};

fn main() -> ExitCode {
    cli::main_of::<Consume>()
}
