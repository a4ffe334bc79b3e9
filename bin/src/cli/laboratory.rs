//! `bench`: runs the program `vmmfd-bench`, which is not part of this package.

use std::{
    env,
    ffi::OsString,
    io::ErrorKind,
    os::unix::process::CommandExt,
    process::{Command, ExitCode},
};

use super::run::fail;
use crate::error::ToolError;

pub(super) const BENCH: &str = "bench";

const PROGRAM: &str = "vmmfd-bench";

/// Executes `vmmfd-bench` in place of this process: beside this program, else the first on PATH. Returns only on failure.
///
/// See execve(2).
pub(super) fn run(options: &[OsString]) -> ExitCode {
    let beside = env::current_exe().unwrap_or_default().with_file_name(PROGRAM);
    let execute = |program: OsString| Command::new(program).args(options).exec();
    let mut error = execute(beside.clone().into());
    if error.kind() == ErrorKind::NotFound {
        error = execute(PROGRAM.into());
    }
    let absent = error.kind() == ErrorKind::NotFound;
    let error = ToolError::Child {
        process: PROGRAM.to_owned(),
        message: if absent {
            format!("is neither in {} nor on PATH", beside.with_file_name("").display())
        } else {
            format!("cannot be executed: {error}")
        },
        hint: absent.then(|| {
            "install it with `cargo install --locked --path tests/bench` in a copy of the source, or with the Debian package".to_owned()
        }),
    };
    ExitCode::from(fail(BENCH, &error.into(), options.iter().any(|option| option == "--json")).code())
}
