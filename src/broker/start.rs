//! The processes of `vmmfd serve` and `vmmfd keeper`: they execute the same command line, and the role of each decides what it does.

use std::{os::fd::OwnedFd, path::Path};

use super::{
    keeper::{Inherited, KeeperProcess, Role, answer_check, replace_supervisor},
    server::check_catalogues,
};
use crate::{channel::Cancel, error::Result};

/// What a process of `vmmfd serve` is to do.
#[derive(Debug)]
pub enum ServiceProcess {
    /// To serve. If the keeper started it, cancelling this ends it for the next server.
    Server(Option<Cancel>),
    /// Nothing more: it was a keeper or a check, and this is its exit code.
    Ended(i32),
}

/// Does the part of a broker's process that is not the server's. `starts_server` is whether the first process becomes a keeper that starts
/// the server; `socket` returns where the broker listens. Blocks while the keeper runs.
///
/// # Errors
/// Those of the keeper, and of a check that fails.
pub fn begin_service(
    starts_server: bool,
    socket: impl FnOnce() -> Result<std::path::PathBuf>,
) -> Result<ServiceProcess> {
    let role = Role::of_this_process();
    name_process(role);
    match role {
        Role::Server => Ok(ServiceProcess::Server(Some(Cancel::new()?))),
        Role::UnderSupervisor => Err(replace_supervisor()),
        Role::Check => check().map(|()| ServiceProcess::Ended(0)),
        Role::First if !starts_server => Ok(ServiceProcess::Server(None)),
        Role::First | Role::Reloaded(_) | Role::Another(_) | Role::AfterSupervisor(_) => {
            KeeperProcess::of_service(&socket()?, role)?.run().map(ServiceProcess::Ended)
        }
    }
}

/// Runs a keeper that listens at a path: the whole of its process. Returns the exit code. Blocks.
///
/// # Errors
/// Those of the keeper, and of a check that fails.
pub fn run_keeper(socket: &Path) -> Result<i32> {
    let role = Role::of_this_process();
    name_process(role);
    if role == Role::Check {
        return check().map(|()| 0);
    }
    if matches!(role, Role::Another(_)) {
        leave_standard_streams();
    }
    KeeperProcess::at(socket, role, &Cancel::new()?)?.run()
}

/// Names a process that was executed through a link in /proc, whose name would be a number.
fn name_process(role: Role) {
    if !role.is_first() {
        // The name is for people: no failure matters.
        let _ = nix::sys::prctl::set_name(c"vmmfd");
    }
}

/// Closes the input and the output of the program that started this keeper: a reader of its output must see the program's end.
fn leave_standard_streams() {
    if let Ok(null) = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null") {
        // They fail only without a free descriptor, and replace one that is open.
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
