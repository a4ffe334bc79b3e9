//! `keeper`: the process that holds the descriptors of a broker's server.

use std::process::ExitCode;

use vmmfd::internals::keeper;

use crate::cli::{
    Output,
    prelude::*,
    run::{raise_file_limit, run_service},
};

/// Holds a broker's memory while its server restarts
///
/// It holds all objects and the listening socket. The server is `vmmfd serve --keeper PATH`. An init may restart keeper and server in any
/// order, one at a time: a restart, stop or crash of one process loses nothing. Plain `vmmfd serve` starts a keeper itself.
///
/// The keeper runs until SIGTERM or SIGINT, and then exits with 0. Without a server, that frees the memory. With a server, a copy of this
/// process stays until another keeper takes over. If a keeper already listens at the path, the new one takes over from it, and the old one
/// exits: start the new program to upgrade.
#[derive(Debug, Args)]
#[command(after_help = exit_codes!("stopped by a signal, or another keeper took over"; 2 4 5))]
pub(in super::super) struct KeeperOptions {
    /// Unix socket to listen on; its folder is created if absent. Only this user may connect
    #[arg(long, value_name = "PATH", help_heading = "Meeting")]
    socket: PathBuf,

    /// A server starts this keeper: it has its own session, and exits if no server uses it
    #[arg(long, hide = true, help_heading = "Meeting")]
    detached: bool,
}

impl KeeperOptions {
    pub(in super::super) const NAME: &'static str = "keeper";

    /// Runs the keeper.
    pub(in super::super) fn start(self, output: &Output) -> ExitCode {
        run_service(Self::NAME, output, || {
            match self.detached {
                true => output.start_broker_log(),
                false => output.start_service_log(),
            }
            // The keeper holds a descriptor per segment.
            raise_file_limit();
            let code = keeper::run_keeper(&self.socket, self.detached)?;
            Ok(ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX)))
        })
    }
}
