//! `producer`: fills a buffer and shares it: `vmmfd produce` as a program of its own.

use std::process::ExitCode;

use vmmfd_cli::cli::{self, Produce};

fn main() -> ExitCode {
    cli::main_of::<Produce>()
}
