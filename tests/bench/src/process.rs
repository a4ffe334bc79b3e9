//! A bench process and the line to it.

use std::{
    env,
    path::{Path, PathBuf},
    time::Duration,
};

use nix::unistd::Pid;
use serde::{Serialize, de::DeserializeOwned};
use vmmfd::{
    channel::Cancel,
    error::{Error, Result},
};

use super::task::{Role, Task};
use vmmfd_cli::{
    child::{Group, Launch, OnParentDeath, Process, failure},
    line::Line,
};

/// How much longer the measuring process waits than a producer. The producer's timeout then expires first, and its error names the consumer
/// that is stuck.
const HEAD_START: Duration = Duration::from_secs(1);

/// A process with a line to it. Dropping it kills the process and its children.
#[derive(Debug)]
pub(super) struct BenchProcess {
    process: Process,
    pub(super) line: Line,
    /// How long one step may take.
    limit: Duration,
}

impl BenchProcess {
    /// Starts a process in this one's group.
    pub(super) fn start(task: &Task) -> Result<Self> {
        Self::launch(task, Group::Inherited, task.timeout, &Cancel::new()?, &[])
    }

    /// Starts a process that leads a group, since it may start others. `variables` are added to its environment.
    pub(super) fn leader(task: &Task, cancel: &Cancel, variables: &[(&str, &str)]) -> Result<Self> {
        Self::launch(task, Group::Own, task.timeout + HEAD_START, cancel, variables)
    }

    fn launch(
        task: &Task,
        group: Group,
        timeout: Duration,
        cancel: &Cancel,
        variables: &[(&str, &str)],
    ) -> Result<Self> {
        let on_parent_death = match task.role {
            // Programs in its group do not exit with this process.
            Role::GroupLeader => OnParentDeath::KillGroup { remove: None },
            _ => OnParentDeath::Killed,
        };
        let (name, keep_stderr) = (task.role.name(), false);
        let launch = Launch { name, on_parent_death, group, variables, keep_stderr, timeout, cancel };
        let (process, line) = launch.start(task)?;
        Ok(Self { process, line, limit: task.timeout })
    }

    pub(super) fn name(&self) -> &'static str {
        self.process.name()
    }

    /// The ID of the process, and of its group if it leads one.
    pub(super) fn pid(&self) -> Pid {
        self.process.pid()
    }

    pub(super) fn send(&self, record: &impl Serialize) -> Result<()> {
        self.line.send(record).map_err(|error| self.explain(error))
    }

    pub(super) fn receive<T: DeserializeOwned>(&self) -> Result<T> {
        self.line.receive().map_err(|error| self.explain(error))
    }

    pub(super) fn failure(&self, message: String) -> Error {
        failure(self.process.name(), message)
    }

    fn explain(&self, error: Error) -> Error {
        self.process.explain(error, self.limit)
    }
}

/// Finds a file beside this program, or in the build directory `built`.
pub(super) fn beside(name: &str, built: Option<&str>) -> Option<PathBuf> {
    let program = env::current_exe().ok()?;
    let folder = program.parent()?;
    let others = built.map(|built| folder.join(built));
    [Some(folder.join(name)), others].into_iter().flatten().find(|path: &PathBuf| Path::is_file(path))
}
