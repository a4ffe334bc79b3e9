//! What a child does first and last.

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

/// Does the task of a child process, and exits.
pub fn run(task: &str, work: impl FnOnce(Value) -> Result<()>) -> ! {
    leave(work(enter(task)))
}

/// Reads the argument of the subcommand, and ties this process to its parent: it ends when that does. Exits at once if the
/// argument is no task, or the parent is gone.
fn enter(text: &str) -> Value {
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

/// The line of a child to its parent. It has no timeout: the parent may have other work before the next record, and this process ends with
/// it.
///
/// # Errors
/// [`Error::System`].
pub fn line_to_parent() -> Result<Line> {
    let stdin = stdin().map_err(|error| Error::system("duplicate standard input", error))?;
    Ok(Line::new(RecordSocket::blocking(stdin, &Cancel::new()?), "for the parent process"))
}

/// Ends this process with the code of its result. An error is written to standard error, unless the parent has gone.
fn leave(result: Result<()>) -> ! {
    let code = match result {
        Ok(()) | Err(Error::Peer(PeerError::Gone { .. })) => 0,
        Err(error) => {
            // Fails if no process reads it.
            let _ = writeln!(io::stderr(), "{}", error.in_full());
            1
        }
    };
    // Without the driver's exit handlers, which may hang.
    exit_at_once(code)
}

fn stdin() -> io::Result<OwnedFd> {
    io::stdin().as_fd().try_clone_to_owned()
}

/// Starts a thread that waits until the parent closes its end of the line, as it does by dying, and then kills this process's
/// group.
fn kill_group_with_parent(remove: Option<&Path>) -> io::Result<()> {
    let (remove, stdin) = (remove.map(Path::to_owned), stdin()?);
    let cancel = Cancel::new().map_err(io::Error::other)?;
    let watch = move || {
        // POLLHUP alone: the records are for the thread that does the task.
        let never = || Instant::now() + Duration::from_secs(24 * 3600);
        while let Ok(false) = wait(&cancel, stdin.as_fd(), PollFlags::empty(), never()) {}
        // The parent would have removed it. The check of the name keeps an argument written by hand from removing others.
        let own = |folder: &Path| folder.file_name().is_some_and(|name| name.to_string_lossy().starts_with(PREFIX));
        if let Some(folder) = remove.as_deref().filter(|folder| own(folder)) {
            let _ = fs::remove_dir_all(folder);
        }
        // It kills this process too. One that does not lead its group was started by hand.
        if getpgrp() == Pid::this() {
            let _ = killpg(Pid::this(), Signal::SIGKILL);
        }
        exit_at_once(1)
    };
    thread::Builder::new().name("parent".to_owned()).spawn(watch).map(drop)
}
