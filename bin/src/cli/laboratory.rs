//! `bench`: runs the program `vmmfd-bench`, which is not part of this package.

use std::{
    env,
    ffi::OsString,
    io::{self, ErrorKind},
    os::unix::process::CommandExt,
    process::{Command, ExitCode},
};

use super::{Exit, output::complain};

pub(super) const BENCH: &str = "bench";

const PROGRAM: &str = "vmmfd-bench";

/// Executes `vmmfd-bench` in place of this process: beside this program, else the first on PATH. Returns only on failure.
///
/// See execve(2).
pub(super) fn run(options: &[OsString]) -> ExitCode {
    let beside = env::current_exe().ok().and_then(|program| Some(program.parent()?.join(PROGRAM)));
    let execute = |program: OsString| Command::new(program).args(options).exec();
    let mut error = beside.map_or_else(|| io::Error::from(ErrorKind::NotFound), |program| execute(program.into()));
    if error.kind() == ErrorKind::NotFound {
        error = execute(PROGRAM.into());
    }
    let exit = if error.kind() == ErrorKind::NotFound {
        complain(&format!(
            "error: `{PROGRAM}` is neither beside this program nor on PATH: install the Debian package or the bundle for GPU nodes, \
             or build it from source (`cargo build --release -p {PROGRAM}`)"
        ));
        Exit::Unsupported
    } else {
        complain(&format!("error: cannot execute `{PROGRAM}`: {error}"));
        Exit::System
    };
    ExitCode::from(exit.code())
}
