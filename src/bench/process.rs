//! The processes of a bench: this program again, each with a line to the one that started it.

use std::{
    env,
    io::{self, Write},
    os::{fd::AsFd, unix::process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::{
        prctl::set_pdeathsig,
        signal::{Signal, killpg},
        wait::{Id, WaitPidFlag, WaitStatus, waitid},
    },
    unistd::{Pid, getppid},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::{consumer, line::Line, producer, single};
use crate::{
    driver::{Backend, Choice, Driver, cuda::exit_at_once, open},
    error::{Error, Result},
    memory::{Device, Selector},
};

/// This program, also where it was replaced since it was started.
const PROGRAM: &str = "/proc/self/exe";

/// The hidden subcommand that the program must hand to [`run_errand`].
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
    Consume { folder: PathBuf },
    /// Measures what takes one process.
    Single,
    /// Starts the driver, says so, and ends.
    Start,
}

impl Errand {
    pub(super) fn open(&self) -> Result<(std::sync::Arc<dyn Driver>, Device)> {
        let driver = open(Choice::Only(self.backend))?.driver;
        let device = Device::find(&driver, self.selector())?;
        Ok((driver, device))
    }

    pub(super) fn selector(&self) -> Selector {
        self.device.parse().unwrap_or_default()
    }

    /// The process that does it, in its own group if it may start others.
    fn command(&self) -> Result<Command> {
        let errand = Self { parent: nix::unistd::getpid().as_raw(), ..self.clone() };
        let text = serde_json::to_string(&errand).map_err(|error| Error::system("describe a child's task", error))?;
        let mut command = Command::new(PROGRAM);
        command.arg0("vmmfd").arg(ERRAND).arg(text);
        Ok(command)
    }

    fn run(&self) -> Result<()> {
        let line = || {
            let stdin = io::stdin().as_fd().try_clone_to_owned();
            Line::of(stdin.map_err(|error| Error::system("take standard input", error))?, self.timeout)
        };
        match &self.task {
            Task::Produce { folder, consumers } => producer::serve(self, folder, *consumers, &line()?),
            Task::Consume { folder } => consumer::serve(self, folder, &line()?),
            Task::Single => single::serve(self, &line()?),
            Task::Start => {
                let (driver, device) = self.open()?;
                device.activate()?;
                // As a program ends that has nothing to add: what it holds is the kernel's to take back.
                std::mem::forget(driver);
                let said = writeln!(io::stdout(), "ready").and_then(|()| io::stdout().flush());
                said.map_err(|error| Error::system("write to standard output", error))
            }
        }
    }
}

/// Does what the parent asks for, as a process of its own, and never returns.
pub fn run_errand(text: &str) -> ! {
    let Ok(errand) = serde_json::from_str::<Errand>(text) else { exit_at_once(2) };
    // Nothing outlives who asked for it.
    let orphaned = set_pdeathsig(Signal::SIGKILL).is_err() || getppid().as_raw() != errand.parent;
    if orphaned {
        exit_at_once(1);
    }
    match errand.run() {
        Ok(()) | Err(Error::PeerGone { .. }) if matches!(errand.task, Task::Start) => std::process::exit(0),
        // Whoever asked has gone, and wants no answer.
        Ok(()) | Err(Error::PeerGone { .. }) => exit_at_once(0),
        Err(error) => {
            // Nobody may be reading any more.
            let _ = writeln!(io::stderr(), "{}", error.in_full());
            exit_at_once(1)
        }
    }
}

/// A process with a line to it. Dropping it kills it, and all that it started.
#[derive(Debug)]
pub(super) struct Process {
    child: Child,
    pub(super) line: Line,
    leads: bool,
}

impl Process {
    /// Starts one, as the leader of a group if it will start others.
    pub(super) fn start(errand: &Errand, leads: bool) -> Result<Self> {
        Self::start_with(errand, leads, &[])
    }

    /// As [`Process::start`], with more in its environment.
    pub(super) fn start_with(errand: &Errand, leads: bool, variables: &[(&str, &str)]) -> Result<Self> {
        let (line, other) = Line::pair(errand.timeout)?;
        let mut command = errand.command()?;
        command.stdin(Stdio::from(other)).stdout(Stdio::null()).stderr(Stdio::inherit());
        command.envs(variables.iter().copied());
        if leads {
            command.process_group(0);
        }
        let child = command.spawn().map_err(|error| Error::system("start another process", error))?;
        Ok(Self { child, line, leads })
    }
}

impl Process {
    pub(super) fn send(&self, say: &impl Serialize) -> Result<()> {
        self.line.send(say).map_err(|error| self.explain(error))
    }

    pub(super) fn receive<T: DeserializeOwned>(&self) -> Result<T> {
        self.line.receive().map_err(|error| self.explain(error))
    }

    /// How it ended, if it has gone.
    fn explain(&self, error: Error) -> Error {
        let Error::PeerGone { .. } = error else { return error };
        let deadline = Instant::now() + Duration::from_secs(1);
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        let pid = Pid::from_raw(self.child.id().cast_signed());
        let how = loop {
            match waitid(Id::Pid(pid), flags) {
                Ok(WaitStatus::Exited(_, code)) => break format!("it exited with code {code}"),
                Ok(WaitStatus::Signaled(_, signal, _)) => break format!("{signal} ended it"),
                Ok(_) if Instant::now() < deadline => thread::sleep(Duration::from_millis(5)),
                _ => return error,
            }
        };
        Error::system("go on: a process of the bench has gone", io::Error::other(how))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.leads {
            // It may have ended by itself.
            let _ = killpg(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGKILL);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The process that starts the driver and ends.
pub(super) fn starter(errand: &Errand) -> Result<Command> {
    let mut command = Errand { task: Task::Start, ..errand.clone() }.command()?;
    command.stdin(Stdio::null()).stderr(Stdio::null());
    Ok(command)
}

/// A file beside this program, or where a build of the project has it.
pub(super) fn beside(name: &str, built: Option<&str>) -> Option<PathBuf> {
    let program = env::current_exe().ok()?;
    let folder = program.parent()?;
    let others = built.map(|built| folder.join(built));
    [Some(folder.join(name)), others].into_iter().flatten().find(|path: &PathBuf| Path::is_file(path))
}
