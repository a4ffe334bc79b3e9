//! `consumer`: imports a buffer, verifies it and reports the result: `vmmfd consume` as a program of its own.

use std::process::ExitCode;

use vmmfd_cli::cli::{self, Consume};

fn main() -> ExitCode {
    cli::main_of::<Consume>()
}
