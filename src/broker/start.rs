//! The process of `vmmfd keeper`.

use std::path::Path;

use super::keeper::KeeperProcess;
use crate::{channel::Cancel, error::Result};

/// Runs a keeper that listens at a path. `is_detached`: a server started it. Returns its exit code. Blocks until the keeper exits. No other
/// thread may run: the keeper forks.
///
/// # Errors
/// All errors of the keeper.
pub fn run_keeper(socket: &Path, is_detached: bool) -> Result<i32> {
    if is_detached {
        // Executed through /proc/self/exe, its name would be `exe`. Only for people, so a failure does not matter.
        let _ = nix::sys::prctl::set_name(c"vmmfd");
        // Its own session: signals of a terminal are for the server. Fails if it leads a process group already.
        let _ = nix::unistd::setsid();
    }
    KeeperProcess::at(socket, is_detached, &Cancel::new()?)?.run()
}
