//! Child processes: this program again, with a task, and a socket for records as standard input.
//!
//! Dropping `Process` kills the child. A child dies with its parent. The task is any JSON. The program passes the argument
//! of the hidden subcommand [`SUBCOMMAND`] to [`run`].

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

/// This program, even if its file was replaced since it was started.
const PROGRAM: &str = "/proc/self/exe";

/// The hidden subcommand of a child. Its only argument is the task.
pub const SUBCOMMAND: &str = "child";

/// How a child dies with its parent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnParentDeath {
    /// The kernel kills it (`PR_SET_PDEATHSIG`, prctl(2)).
    Killed,
    /// It leads a process group: it removes this folder and kills the group.
    KillGroup { remove: Option<PathBuf> },
}

#[derive(Debug, Serialize, Deserialize)]
struct Assignment {
    /// The parent's pid. If a child has another parent, it was started by hand or the parent has died.
    parent: i32,
    on_parent_death: OnParentDeath,
    task: Value,
}

/// How to start a child.
#[derive(Debug)]
pub struct Launch<'a> {
    /// What users call it: `the producer`.
    pub name: &'static str,
    pub on_parent_death: OnParentDeath,
    /// Its process group: a new one if it may start other processes.
    pub group: Group,
    /// Additional environment variables.
    pub variables: &'a [(&'a str, &'a str)],
    /// Whether standard error is piped to [`StderrTail`] instead of inherited.
    pub keep_stderr: bool,
    /// The timeout of each call on its connection.
    pub timeout: Duration,
    /// Cancels waits on its connection.
    pub cancel: &'a Cancel,
}

impl Launch<'_> {
    /// Starts the child. Its standard output is discarded.
    pub fn start(&self, task: &impl Serialize) -> Result<(Process, Line)> {
        let (line, other) = Line::pair(self.timeout, self.cancel, "for another process of this tool")?;
        let mut command = command(self.on_parent_death.clone(), task)?;
        command.stdin(Stdio::from(other)).stdout(Stdio::null());
        command.stderr(if self.keep_stderr { Stdio::piped() } else { Stdio::inherit() });
        command.envs(self.variables.iter().copied());
        Ok((Process::spawn(self.name, &mut command, self.group)?, line))
    }
}

/// The command of a child, for callers that connect its standard streams themselves.
///
/// # Errors
/// [`Error::System`] if the task can't be written as JSON.
pub fn command(on_parent_death: OnParentDeath, task: &impl Serialize) -> Result<Command> {
    let invalid = |error| Error::system("describe a child's task", error);
    let task = serde_json::to_value(task).map_err(invalid)?;
    let parent = nix::unistd::getpid().as_raw();
    let assignment = Assignment { parent, on_parent_death, task };
    let text = serde_json::to_string(&assignment).map_err(invalid)?;
    let mut command = Command::new(PROGRAM);
    command.arg0("vmmfd").arg(SUBCOMMAND).arg(text);
    Ok(command)
}
