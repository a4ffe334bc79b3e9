//! Start and exit of a child process.

use std::{
    fs,
    io::{self, Write},
    os::fd::{AsFd, OwnedFd},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use nix::{
    poll::PollFlags,
    sys::{
        prctl::set_pdeathsig,
        signal::{Signal, killpg},
    },
    unistd::{Pid, getpgrp, getppid},
};
use serde_json::Value;
use vmmfd::{
    channel::Cancel,
    error::{Error, PeerError, Result},
    internals::{RecordSocket, exit_at_once, wait},
};

use super::{Assignment, OnParentDeath};
use crate::{line::Line, temporary::PREFIX};

/// Runs the task of a child process and exits.
pub fn run(task: &str, work: impl FnOnce(Value) -> Result<()>) -> ! {
    exit_with(work(attach_to_parent(task)))
}

/// Parses the subcommand's argument and ties this process to its parent: it dies with the parent. Exits at once if the argument is invalid
/// or the parent is gone.
fn attach_to_parent(text: &str) -> Value {
    let Ok(assignment) = serde_json::from_str::<Assignment>(text) else { exit_at_once(2) };
    let tied = match assignment.on_parent_death {
        OnParentDeath::Killed => set_pdeathsig(Signal::SIGKILL).map_err(io::Error::from),
        OnParentDeath::KillGroup { remove } => kill_group_with_parent(remove.as_deref()),
    };
    if tied.is_err() || getppid().as_raw() != assignment.parent {
        exit_at_once(1);
    }
    assignment.task
}

/// The child's side of the connection to its parent. It has no timeout: the parent may be busy, and this process never outlives its parent.
pub fn line_to_parent() -> Result<Line> {
    let stdin = stdin().map_err(|error| Error::system("duplicate standard input", error))?;
    Ok(Line::new(RecordSocket::blocking(stdin, &Cancel::new()?), "for the parent process"))
}

/// Exits with the code of the result. An error is written to standard error unless the parent is gone.
fn exit_with(result: Result<()>) -> ! {
    let code = match result {
        Ok(()) | Err(Error::Peer(PeerError::Gone { .. })) => 0,
        Err(error) => {
            // Fails if standard error is closed.
            let _ = writeln!(io::stderr(), "{}", error.in_full());
            1
        }
    };
    // Skip the driver's exit handlers, which may hang.
    exit_at_once(code)
}

fn stdin() -> io::Result<OwnedFd> {
    io::stdin().as_fd().try_clone_to_owned()
}

/// Starts a thread that kills this process group when the parent closes its side of the connection, also by dying.
fn kill_group_with_parent(remove: Option<&Path>) -> io::Result<()> {
    let (remove, stdin) = (remove.map(Path::to_owned), stdin()?);
    let cancel = Cancel::new().map_err(io::Error::other)?;
    let watch = move || {
        // POLLHUP only: the task's thread reads the records.
        let never = || Instant::now() + Duration::from_secs(24 * 3600);
        while let Ok(false) = wait(&cancel, stdin.as_fd(), PollFlags::empty(), never()) {}
        // The parent would have removed the folder. The name check protects other folders from an argument written by hand.
        let own = |folder: &Path| folder.file_name().is_some_and(|name| name.to_string_lossy().starts_with(PREFIX));
        if let Some(folder) = remove.as_deref().filter(|folder| own(folder)) {
            let _ = fs::remove_dir_all(folder);
        }
        // Also kills this process. A process that does not lead its group was started by hand.
        if getpgrp() == Pid::this() {
            let _ = killpg(Pid::this(), Signal::SIGKILL);
        }
        exit_at_once(1)
    };
    thread::Builder::new().name("parent".to_owned()).spawn(watch).map(drop)
}
