//! The processes of `vmmfd serve` and `vmmfd keeper`. They execute the same command line, and each acts according to its role.

use std::{os::fd::OwnedFd, path::Path};

use super::{
    keeper::{Inherited, KeeperProcess, Role, answer_check},
    server::check_catalogues,
};
use crate::{channel::Cancel, error::Result};

/// The result of [`begin_service`].
#[derive(Debug)]
pub enum ServiceProcess {
    /// This process must serve. If a keeper started it, cancelling stops this server for the next one.
    Server(Option<Cancel>),
    /// This process was a keeper or a check and is done. Holds its exit code.
    Ended(i32),
}

/// Handles all roles of a broker's process except the server's. `starts_server`: the first process becomes a keeper that starts the server.
/// `socket` returns the broker's path. Blocks while the keeper runs.
///
/// # Errors
/// All errors of the keeper or of a failed check.
pub fn begin_service(
    starts_server: bool,
    socket: impl FnOnce() -> Result<std::path::PathBuf>,
) -> Result<ServiceProcess> {
    let role = Role::of_this_process();
    name_process(role);
    match role {
        Role::Server => Ok(ServiceProcess::Server(Some(Cancel::new()?))),
        Role::Check => check().map(|()| ServiceProcess::Ended(0)),
        Role::First if !starts_server => Ok(ServiceProcess::Server(None)),
        Role::First | Role::Reloaded(_) | Role::Another(_) => {
            KeeperProcess::of_service(&socket()?, role)?.run().map(ServiceProcess::Ended)
        }
    }
}

/// Runs a keeper that listens at a path. Returns its exit code. Blocks until the keeper exits.
///
/// # Errors
/// All errors of the keeper or of a failed check.
pub fn run_keeper(socket: &Path) -> Result<i32> {
    let role = Role::of_this_process();
    name_process(role);
    if role == Role::Check {
        return check().map(|()| 0);
    }
    if matches!(role, Role::Another(_)) {
        detach_standard_streams();
    }
    KeeperProcess::at(socket, role, &Cancel::new()?)?.run()
}

/// Names a process that was executed through /proc/self/fd, whose name would otherwise be a number.
fn name_process(role: Role) {
    if !role.is_first() {
        // Only for people, so failures do not matter.
        let _ = nix::sys::prctl::set_name(c"vmmfd");
    }
}

/// Detaches the keeper from the stdin and stdout of the program that started it: a reader of stdout must see EOF when the program
/// exits.
fn detach_standard_streams() {
    if let Ok(null) = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null") {
        // The streams are open already, so no new descriptors are needed.
        let _ = nix::unistd::dup2_stdin(&null);
        let _ = nix::unistd::dup2_stdout(&null);
    }
}

fn check() -> Result<()> {
    answer_check(|kept: Vec<(String, OwnedFd)>| {
        let mut inherited = Inherited::default();
        kept.into_iter().for_each(|(name, fd)| inherited.add(name, fd));
        check_catalogues(inherited.catalogues)
    })
}
