//! `producer`: `vmmfd produce` as a separate program.

use std::process::ExitCode;

use vmmfd_cli::cli::{self, Produce};

fn main() -> ExitCode {
    cli::main_of::<Produce>()
}
