//! The other processes of a run, and the records between them.

use std::{
    env,
    io::{BufRead, BufReader},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{ChildStdout, Command},
    time::{Duration, Instant},
};

use nix::poll::PollFlags;
use serde::{Deserialize, Serialize};
use tempfile::TempDir;
use vmmfd::{
    channel::Cancel,
    driver::Backend,
    error::{Error, Result},
    internals::wait,
};
use vmmfd_cli::{
    child::{Process, ProcessEnd, command, start},
    line::Line,
    temporary::temporary_folder,
};

use crate::{options::BenchOptions, report::Machine};

/// The task of another process of the run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Role {
    /// Starts the driver if `driver` is set, reports the machine, and answers [`Request`]s.
    Peer { backend: Backend, device: String, timeout: Duration, driver: bool },
    /// Sends the descriptors of the last record back when it is woken.
    Sleeper,
    /// Starts the driver, prints `ready`, and exits.
    BareStart { backend: Backend, device: String },
}

impl Role {
    /// A peer with the driver of the options.
    pub(crate) fn of(options: &BenchOptions) -> Self {
        Self::peer(options.backend, options.device.to_string(), options, true)
    }

    /// A peer with a driver, or without.
    pub(crate) fn peer(backend: Backend, device: String, options: &BenchOptions, driver: bool) -> Self {
        Self::Peer { backend, device, timeout: options.timeout, driver }
    }
}

/// The process group of a run. Its first process only waits: when this process dies, it removes the folder and kills the group.
#[derive(Debug)]
pub(crate) struct Family {
    first: Process,
    _line: Line,
    folder: TempDir,
}

impl Family {
    pub(crate) fn start(timeout: Duration, cancel: &Cancel) -> Result<Self> {
        let folder = temporary_folder("vmmfd-bench.")?;
        let mut command = command(Some(folder.path()), &Role::Sleeper)?;
        let (first, line) = start("the first process", &mut command, true, timeout, cancel)?;
        Ok(Self { first, _line: line, folder })
    }

    /// The folder for sockets.
    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Starts a program in the group, which signals of the terminal do not reach.
    pub(crate) fn spawn(&self, name: &'static str, command: &mut Command) -> Result<Process> {
        Process::spawn(name, command.process_group(self.first.pid().as_raw()), false)
    }
}

/// A way to hand over memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Way {
    /// The driver's calls and a socket. The same descriptors are sent each time.
    Floor,
    /// A stream of this library. The consumer has the description, but not the buffer.
    Fresh,
    /// Like `Fresh`, with the description sent each time.
    Described,
    /// A stream of this library. The consumer holds the buffer.
    Again,
    /// Like `Floor`, with an export each time.
    Export,
    Legacy,
    Pool,
    /// A record of one byte.
    Record,
}

impl Way {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Floor => "floor",
            Self::Fresh => "vmmfd",
            Self::Described => "vmmfd, with description",
            Self::Again => "vmmfd again",
            Self::Export => "export each, anchor",
            Self::Legacy => "legacy",
            Self::Pool => "pool",
            Self::Record => "record",
        }
    }

    pub(crate) fn is_stream(self) -> bool {
        matches!(self, Self::Fresh | Self::Described | Self::Again)
    }
}

/// A request to a peer.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Request {
    /// Subscribe to the session over the record's descriptor.
    Session,
    /// Import the pool of the record's descriptor.
    Pool,
    /// Answer, then take the next handoff.
    Take { way: Way, size: u64 },
    /// Answer, then let the session withdraw a buffer.
    Release,
    /// Use the sleeper at the record's descriptor.
    Sleeper,
    /// Wake the sleeper and map its memory of `size` bytes.
    Wake { size: u64 },
    /// Answer, then receive a record and close its descriptors.
    Receive,
    /// Connect to the broker at this socket.
    Connect { socket: PathBuf },
    /// Get an object and map it, and an array of it if `array` is set.
    Get { name: String, array: Option<String> },
    /// Switch to the other of two objects at the same addresses, by the driver's calls if `bare` is set.
    Switch { bare: bool },
    /// Close all memory.
    Close,
    /// Get an object `count` times from `at` on, and release it at once.
    Gets { name: String, count: usize, map: bool, at: u64 },
    /// Get an object until it is deleted, and release it at once.
    GetUntilDeleted { name: String },
    /// Compile or load the kernels.
    LoadKernels,
}

/// The answer to a request.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Answer {
    /// The machine, in the first answer of a process with a driver.
    pub(crate) machine: Option<Machine>,
    /// The time at which memory became usable, or the duration of a step, in nanoseconds.
    pub(crate) time: u64,
    /// The times of the first and last get, and the durations.
    pub(crate) begun: u64,
    pub(crate) ended: u64,
    pub(crate) us: Vec<f64>,
}

impl Answer {
    pub(crate) fn time(time: u64) -> Self {
        Self { time, ..Self::default() }
    }
}

/// The error of a process, with its hint.
pub(crate) type Failure = (String, Option<String>);

/// Another process of the run, connected. Dropping it ends the process.
#[derive(Debug)]
pub(crate) struct Peer {
    process: Process,
    pub(crate) line: Line,
}

impl Peer {
    pub(crate) fn start(
        family: &Family,
        name: &'static str,
        role: &Role,
        timeout: Duration,
        cancel: &Cancel,
        variables: &[(&str, &str)],
    ) -> Result<Self> {
        let mut command = command(None, role)?;
        command.process_group(family.first.pid().as_raw()).envs(variables.iter().copied());
        let (process, line) = start(name, &mut command, false, timeout, cancel)?;
        Ok(Self { process, line })
    }

    pub(crate) fn send(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<()> {
        self.line.send_with(request, fds).map_err(|error| self.process.explain(error, self.line.timeout()))
    }

    pub(crate) fn receive(&self) -> Result<Answer> {
        let answer: std::result::Result<Answer, Failure> =
            self.line.receive().map_err(|error| self.process.explain(error, self.line.timeout()))?;
        answer.map_err(|(message, hint)| self.process.failure(format!("failed: {message}"), hint))
    }

    pub(crate) fn call(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<()> {
        self.send(request, fds)?;
        self.receive().map(drop)
    }

    /// Lets the process take a step, and returns the microseconds that it measured.
    pub(crate) fn took(&self, request: &Request) -> Result<f64> {
        self.send(request, &[])?;
        Ok(self.receive()?.time as f64 / 1e3)
    }
}

/// Waits for a line of a program's output that contains `word`.
pub(crate) fn wait_for_line(process: &mut Process, word: &str, limit: Duration, cancel: &Cancel) -> Result<()> {
    let found = process.stdout().map(|stdout| found(stdout, word, Instant::now() + limit, cancel)).transpose()?;
    match found.flatten() {
        Some(true) => Ok(()),
        Some(false) => {
            wait_for_end(process, limit, cancel)?;
            Err(process.failure("ended before it was ready".to_owned(), None))
        }
        None => Err(process.failure(format!("was not ready within {limit:?}"), None)),
    }
}

/// Whether an output has the word before its end; `None` at the deadline.
fn found(output: &mut ChildStdout, word: &str, deadline: Instant, cancel: &Cancel) -> Result<Option<bool>> {
    let mut line = String::new();
    let mut output = BufReader::new(output);
    while !line.contains(word) {
        line.clear();
        // The output has whole lines: the read does not block in the middle of one.
        if output.buffer().is_empty() && !wait(cancel, output.get_ref().as_fd(), PollFlags::POLLIN, deadline)? {
            return Ok(None);
        }
        if output.read_line(&mut line).map_err(|error| Error::system("read a program's output", error))? == 0 {
            return Ok(Some(false));
        }
    }
    Ok(Some(true))
}

/// Waits until a program has ended with success.
pub(crate) fn wait_for_end(process: &Process, limit: Duration, cancel: &Cancel) -> Result<()> {
    match process.wait(Instant::now() + limit, cancel)? {
        Some(ProcessEnd::Exited(0)) => Ok(()),
        Some(end) => Err(process.failure(end.to_string(), None)),
        None => Err(process.failure(format!("did not end within {limit:?}"), None)),
    }
}

/// A program beside this one.
pub(crate) fn beside(name: &str) -> Option<PathBuf> {
    let path = env::current_exe().ok()?.with_file_name(name);
    Path::is_file(&path).then_some(path)
}
