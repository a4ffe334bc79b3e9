//! Child processes: this program again, with a task, and a line of records on standard input.
//!
//! A child is killed when its `Process` is dropped, and ends when its parent dies. How it ended is reported in a sentence.
//! The task is JSON of the program's own type; the program hands the argument of the hidden subcommand [`SUBCOMMAND`] to [`run`].

mod entry;
mod process;
mod shm;
mod stderr;

use std::{
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Command, Stdio},
    time::Duration,
};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use vmmfd::{
    channel::Cancel,
    error::{Error, Result},
};

pub use self::{
    entry::{line_to_parent, run},
    process::{Group, Process, ProcessEnd, failure, overdue},
    stderr::StderrTail,
};
use super::line::Line;

/// This program, also where its file was replaced since it was started.
const PROGRAM: &str = "/proc/self/exe";

/// The hidden subcommand of a child. Its one argument is the task.
pub const SUBCOMMAND: &str = "child";

/// What a child does when its parent dies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnParentDeath {
    /// The kernel kills it (`PR_SET_PDEATHSIG`, prctl(2)).
    Killed,
    /// It leads a group: it removes this folder, and kills the group.
    KillGroup { remove: Option<PathBuf> },
}

/// The argument of the subcommand.
#[derive(Debug, Serialize, Deserialize)]
struct Assignment {
    /// The parent's process. A child whose parent is another one was started by hand, or its parent has died.
    parent: i32,
    on_parent_death: OnParentDeath,
    task: Value,
}

/// How a child is started.
#[derive(Debug)]
pub struct Launch<'a> {
    /// Its part, for a person: `the producer`.
    pub name: &'static str,
    pub on_parent_death: OnParentDeath,
    /// Its process group: a new one if it may start other processes.
    pub group: Group,
    /// More variables of its environment.
    pub variables: &'a [(&'a str, &'a str)],
    /// Whether standard error is piped, for [`StderrTail`], rather than inherited.
    pub keep_stderr: bool,
    /// How long each call on its line waits.
    pub timeout: Duration,
    /// What cancels the waits on its line.
    pub cancel: &'a Cancel,
}

impl Launch<'_> {
    /// Starts the child. Its standard output is discarded.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn start(&self, task: &impl Serialize) -> Result<(Process, Line)> {
        let (line, other) = Line::pair(self.timeout, self.cancel, "for another process of this tool")?;
        let mut command = command(self.on_parent_death.clone(), task)?;
        command.stdin(Stdio::from(other)).stdout(Stdio::null());
        command.stderr(if self.keep_stderr { Stdio::piped() } else { Stdio::inherit() });
        command.envs(self.variables.iter().copied());
        Ok((Process::spawn(self.name, &mut command, self.group)?, line))
    }
}

/// The command of a child, for a caller that connects its standard streams itself.
///
/// # Errors
/// [`Error::System`] if the task is no JSON.
pub fn command(on_parent_death: OnParentDeath, task: &impl Serialize) -> Result<Command> {
    let unfit = |error| Error::system("describe a child's task", error);
    let task = serde_json::to_value(task).map_err(unfit)?;
    let parent = nix::unistd::getpid().as_raw();
    let assignment = Assignment { parent, on_parent_death, task };
    let text = serde_json::to_string(&assignment).map_err(unfit)?;
    let mut command = Command::new(PROGRAM);
    command.arg0("vmmfd").arg(SUBCOMMAND).arg(text);
    Ok(command)
}
