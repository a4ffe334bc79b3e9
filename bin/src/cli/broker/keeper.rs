//! `keeper`: the process that holds what a server has.

use std::{path::PathBuf, process::ExitCode};

use clap::Args;
use vmmfd::{
    channel::Cancel,
    error::Error,
    internals::{
        keeper::{self, Role},
        stderr,
    },
};

use crate::cli::{
    Output, Tool, ToolOutput,
    exit::{Exit, exit_codes},
    output::Progress,
    run::{fail, raise_file_limit, run_tool},
};

/// Holds the descriptors, the listening socket and the catalogue of a broker's server while that is restarted
///
/// It does nothing else: `vmmfd serve --keeper PATH` serves. An init restarts both, in any order, one at a time: restart, stop or crash
/// of one of them loses nothing, and when neither runs, the memory is freed. Plain `vmmfd serve` has a keeper of its own and needs none.
///
/// It runs until SIGTERM or SIGINT, and then exits with 0. SIGHUP, or --reload from another process, executes the program that is at its
/// path then, in place: the pid stays.
#[derive(Debug, Args)]
#[command(after_help = exit_codes!("stopped by a signal, or the keeper was reloaded"; 2 4 5))]
pub(in super::super) struct KeeperOptions {
    /// Unix socket to listen on, in a folder that its user alone may open; the folder is made if it does not exist
    #[arg(long, value_name = "PATH", help_heading = "Meeting")]
    socket: PathBuf,

    /// Have the keeper that runs execute the program at its path, and report whether it does
    #[arg(long, help_heading = "Meeting")]
    reload: bool,

    #[command(flatten)]
    output: Output,
}

impl KeeperOptions {
    /// Runs the keeper, or the client that requests a reload.
    pub(in super::super) fn start(self) -> ExitCode {
        if self.reload && Role::of_this_process().is_first() {
            return run_tool(self);
        }
        if let Err(error) = stderr::never_block_on_stderr() {
            return fail::<Self>(&Error::system("start a thread", error), self.output.json);
        }
        self.output.start_service_log();
        // Each descriptor that it holds counts.
        raise_file_limit();
        let code = match keeper::run_keeper(&self.socket) {
            Ok(code) => ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX)),
            Err(error) => fail::<Self>(&error, self.output.json),
        };
        stderr::flush_stderr();
        code
    }
}

impl Tool for KeeperOptions {
    const NAME: &'static str = "keeper";

    fn output(&self) -> &Output {
        &self.output
    }

    fn run(&self, cancel: &Cancel, _progress: &Progress) -> anyhow::Result<ToolOutput> {
        keeper::reload(&self.socket, cancel)?;
        Ok(ToolOutput { text: String::new(), exit: Exit::Verified })
    }
}
