//! `vmmfd`: all commands in one program.

use std::process::ExitCode;

fn main() -> ExitCode {
    vmmfd_cli::cli::main()
}
