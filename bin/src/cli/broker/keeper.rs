//! `keeper`: the process that holds the descriptors of a broker's server.

use std::{path::PathBuf, process::ExitCode};

use clap::Args;
use vmmfd::internals::keeper::{self, Role};

use crate::cli::{
    Output, Running, Tool, ToolOutput,
    exit::{Exit, exit_codes},
    run::{raise_file_limit, run_service, run_tool},
};

/// Holds a broker's memory while its server restarts
///
/// It holds the descriptors, the listening socket and the catalogue. The server is `vmmfd serve --keeper PATH`. An init may restart keeper and server in any order, one at a time: a restart, stop or crash
/// of one process loses nothing. If neither process runs, the memory is freed. Plain `vmmfd serve` starts a keeper itself.
///
/// The keeper runs until SIGTERM or SIGINT, and then exits with 0. SIGHUP, or --reload from another process, replaces it with the program
/// that is now at its path; the pid stays the same.
#[derive(Debug, Args)]
#[command(after_help = exit_codes!("stopped by a signal, or the keeper was reloaded"; 2 4 5))]
pub(in super::super) struct KeeperOptions {
    /// Unix socket to listen on, in a folder that only its user may open; the folder is created if absent
    #[arg(long, value_name = "PATH", help_heading = "Meeting")]
    socket: PathBuf,

    /// Make the running keeper execute the program at its path, and report the result
    #[arg(long, help_heading = "Meeting")]
    reload: bool,
}

impl KeeperOptions {
    /// Runs the keeper, or requests a reload.
    pub(in super::super) fn start(self, output: &Output) -> ExitCode {
        if self.reload && Role::of_this_process().is_first() {
            return run_tool(self, output);
        }
        run_service(Self::NAME, output, || {
            output.start_service_log();
            // The keeper holds a descriptor per segment.
            raise_file_limit();
            let code = keeper::run_keeper(&self.socket)?;
            Ok(ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX)))
        })
    }
}

impl Tool for KeeperOptions {
    const NAME: &'static str = "keeper";

    fn run(&self, Running { cancel, .. }: Running<'_>) -> anyhow::Result<ToolOutput> {
        keeper::reload(&self.socket, cancel)?;
        Ok(ToolOutput { text: String::new(), exit: Exit::Verified })
    }
}
