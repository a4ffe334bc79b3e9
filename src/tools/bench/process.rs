//! The processes of a bench: this program again, each with a line to the one that started it.

use std::{
    env,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::{
        signal::{Signal, killpg},
        wait::{Id, WaitPidFlag, WaitStatus, waitid},
    },
    unistd::Pid,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    channel::Cancel,
    driver::{Backend, Choice, Driver, open},
    error::{Error, Result},
    memory::{Device, Selector},
    tools::line::Line,
};

/// This program, also where it was replaced since it was started.
const PROGRAM: &str = "/proc/self/exe";

/// The hidden subcommand that the program must hand to [`super::run_errand`].
pub const ERRAND: &str = "bench-errand";

/// What a process is to do.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Errand {
    pub(super) backend: Backend,
    /// By ordinal or UUID, as it was written.
    pub(super) device: String,
    pub(super) timeout: Duration,
    pub(super) parent: i32,
    pub(super) task: Task,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Task {
    /// Lends memory to consumers that it starts, and takes the time.
    Produce { folder: PathBuf, consumers: usize },
    /// Takes what it is lent.
    Consume,
    /// Measures what takes one process.
    Single,
    /// Starts the driver, says so, and ends.
    Start,
    /// Leads a group of programs that know nothing of a bench, and ends all of it when whoever measures has gone.
    Lead,
}

impl Task {
    /// Whose part it is, for a person.
    fn process(&self) -> &'static str {
        match self {
            Self::Produce { .. } => "the producer",
            Self::Consume => "a consumer",
            Self::Single => "the process that is measured",
            Self::Start => "a bare start",
            Self::Lead => "the leader of the commands",
        }
    }
}

impl Errand {
    pub(super) fn open(&self) -> Result<(Driver, Device)> {
        let driver = open(Choice::Only(self.backend))?.driver;
        let device = Device::find(&driver, self.selector())?;
        Ok((driver, device))
    }

    pub(super) fn selector(&self) -> Selector {
        self.device.parse().unwrap_or_default()
    }

    /// The process that does it.
    fn command(&self) -> Result<Command> {
        let errand = Self { parent: nix::unistd::getpid().as_raw(), ..self.clone() };
        let text = serde_json::to_string(&errand).map_err(|error| Error::system("describe a child's task", error))?;
        let mut command = Command::new(PROGRAM);
        command.arg0("vmmfd").arg(ERRAND).arg(text);
        Ok(command)
    }
}

/// A process with a line to it. Dropping it kills it, and all that it started.
#[derive(Debug)]
pub(super) struct Process {
    child: Child,
    pub(super) line: Line,
    pub(super) name: &'static str,
    timeout: Duration,
    /// Whether it leads a group.
    leads: bool,
}

/// How much longer who measures waits than a producer does for its consumers: the producer knows who keeps it waiting.
const HEAD_START: Duration = Duration::from_secs(1);

impl Process {
    /// Starts one that belongs to who starts it.
    pub(super) fn start(errand: &Errand) -> Result<Self> {
        Self::spawn(errand, None, &[])
    }

    /// Starts one that leads a group, as it may start others, with more in its environment.
    pub(super) fn leader(errand: &Errand, cancel: &Cancel, variables: &[(&str, &str)]) -> Result<Self> {
        Self::spawn(errand, Some(cancel.clone()), variables)
    }

    fn spawn(errand: &Errand, cancel: Option<Cancel>, variables: &[(&str, &str)]) -> Result<Self> {
        let timeout = if cancel.is_some() { errand.timeout + HEAD_START } else { errand.timeout };
        let waits = cancel.clone().map_or_else(Cancel::new, Ok)?;
        let (line, other) = Line::pair(timeout, &waits, "for another process of the bench")?;
        let mut command = errand.command()?;
        command.stdin(Stdio::from(other)).stdout(Stdio::null()).stderr(Stdio::inherit());
        command.envs(variables.iter().copied());
        if cancel.is_some() {
            command.process_group(0);
        }
        let child = command.spawn().map_err(|error| Error::system("start another process", error))?;
        Ok(Self { child, line, name: errand.task.process(), timeout: errand.timeout, leads: cancel.is_some() })
    }

    /// The number of its group, if it leads one.
    pub(super) fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().cast_signed())
    }

    pub(super) fn send(&self, say: &impl Serialize) -> Result<()> {
        self.line.send(say).map_err(|error| self.explain(error))
    }

    pub(super) fn receive<T: DeserializeOwned>(&self) -> Result<T> {
        self.line.receive().map_err(|error| self.explain(error))
    }

    /// An error of it.
    pub(super) fn fault(&self, message: String) -> Error {
        fault(self.name, message)
    }

    fn silent(&self) -> Error {
        overdue(self.name, "nothing", self.timeout)
    }

    /// That it is stuck, or how it ended.
    fn explain(&self, error: Error) -> Error {
        match error {
            Error::PeerGone { .. } => {}
            Error::Timeout { .. } => return self.silent(),
            _ => return error,
        }
        let deadline = Instant::now() + Duration::from_secs(1);
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        let how = loop {
            match waitid(Id::Pid(self.pid()), flags) {
                Ok(WaitStatus::Exited(_, code)) => break format!("ended with code {code}"),
                Ok(WaitStatus::Signaled(_, signal, _)) => break format!("was ended by {signal}"),
                Ok(_) if Instant::now() < deadline => thread::sleep(Duration::from_millis(5)),
                _ => return error,
            }
        };
        self.fault(how)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.leads {
            // It may have ended by itself.
            let _ = killpg(self.pid(), Signal::SIGKILL);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An error of a process.
pub(super) fn fault(process: &str, message: String) -> Error {
    Error::Child { process: process.to_owned(), message, hint: None }
}

/// That a process did not do in time what was its turn to do.
pub(super) fn overdue(process: &str, did: &str, limit: Duration) -> Error {
    fault(process, format!("did {did} within {limit:?}, the longest that a step may take"))
}

/// The process that starts the driver and ends.
pub(super) fn starter(errand: &Errand) -> Result<Command> {
    let mut command = Errand { task: Task::Start, ..errand.clone() }.command()?;
    command.stdin(Stdio::null());
    Ok(command)
}

/// A file beside this program, or where a build of the project has it.
pub(super) fn beside(name: &str, built: Option<&str>) -> Option<PathBuf> {
    let program = env::current_exe().ok()?;
    let folder = program.parent()?;
    let others = built.map(|built| folder.join(built));
    [Some(folder.join(name)), others].into_iter().flatten().find(|path: &PathBuf| Path::is_file(path))
}
