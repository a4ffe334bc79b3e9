//! The other processes of a run, and the records between them.

use std::{
    env,
    os::{
        fd::{BorrowedFd, OwnedFd},
        unix::process::{CommandExt, ExitStatusExt},
    },
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, killpg},
    unistd::{Pid, getpid},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use vmmfd::{
    channel::{Cancel, Channel},
    driver::Backend,
    error::{Error, PeerError, ProtocolError, Result},
    internals::{Record, RecordSocket},
};
use vmmfd_cli::error::ToolError;

use crate::{options::BenchOptions, report::Machine};

/// The hidden subcommand of a process of the bench.
pub(crate) const CHILD: &str = "child";

/// The longest record in bytes.
const LONGEST: usize = 128 << 10;

/// How long a process may take to exit. The driver's exit handlers may hang.
const EXIT: Duration = Duration::from_secs(1);

/// The interval between two checks for an exit.
const POLL: Duration = Duration::from_micros(100);

/// The argument of a process.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Task {
    /// The pid of its parent. If it has another parent, its parent has died.
    pub(crate) parent: i32,
    pub(crate) role: Role,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Role {
    /// Starts the driver if `driver` is set, reports the machine, and answers [`Request`]s.
    Peer { backend: Backend, device: String, timeout: Duration, driver: bool },
    /// Sends the descriptors of the last record back when it is woken.
    Sleeper,
    /// Starts the driver, prints `ready`, and exits.
    BareStart { backend: Backend, device: String },
    /// Becomes another program, which is stopped when this process dies.
    Program { path: PathBuf, arguments: Vec<String> },
}

impl Role {
    /// A peer with a driver.
    pub(crate) fn of(options: &BenchOptions) -> Self {
        let BenchOptions { backend, device, timeout, .. } = options;
        Self::Peer { backend: *backend, device: device.to_string(), timeout: *timeout, driver: true }
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

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Reply {
    /// Done. The first reply has the machine if the process has a driver.
    Ready(Option<Machine>),
    /// The time at which memory became usable, or the duration of a step, in nanoseconds.
    Time(u64),
    /// The times of the first and last get, and the durations.
    Gets {
        begun: u64,
        ended: u64,
        us: Vec<f64>,
    },
    Failed {
        message: String,
        hint: Option<String>,
    },
}

/// A connection for JSON records, and for raw records between them.
#[derive(Debug)]
pub(crate) struct Line(pub(crate) RecordSocket);

const PURPOSE: &str = "for another process of this tool";

impl Line {
    pub(crate) fn send(&self, record: &impl Serialize, fds: &[BorrowedFd<'_>]) -> Result<()> {
        let record = serde_json::to_vec(record).map_err(|error| ProtocolError::Content(error.to_string()))?;
        self.send_bare(&record, fds)
    }

    pub(crate) fn receive<T: DeserializeOwned>(&self) -> Result<(T, Vec<OwnedFd>)> {
        let mut bytes = vec![0; LONGEST];
        let record = self.receive_bare(&mut bytes)?;
        let read = serde_json::from_slice(&bytes[..record.length]);
        Ok((read.map_err(|error| ProtocolError::Content(error.to_string()))?, record.fds))
    }

    pub(crate) fn send_bare(&self, record: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        self.0.send("a record", record, fds)
    }

    /// The buffer is one byte longer than the longest record.
    pub(crate) fn receive_bare(&self, record: &mut [u8]) -> Result<Record> {
        self.0.receive(record, PURPOSE)
    }
}

/// Another process of the run, connected. Dropping it ends the process.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) program: Program,
    pub(crate) line: Line,
}

impl Peer {
    pub(crate) fn start(
        options: &BenchOptions,
        cancel: &Cancel,
        name: &'static str,
        role: &Role,
        variables: &[(&str, &str)],
    ) -> Result<Self> {
        let (own, other) = Channel::socket_pair()?;
        let mut command = this_program(role)?;
        command.stdin(other).stdout(Stdio::null()).envs(variables.iter().copied());
        let program = Program::start(name, &mut command)?;
        Ok(Self { program, line: Line(RecordSocket::new(own, options.timeout, cancel)?) })
    }

    pub(crate) fn send(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<()> {
        self.line.send(request, fds).map_err(|error| self.explain(error))
    }

    pub(crate) fn receive(&self) -> Result<Reply> {
        match self.line.receive().map_err(|error| self.explain(error))?.0 {
            Reply::Failed { message, hint } => {
                let process = self.program.name.to_owned();
                Err(ToolError::Child { process, message: format!("failed: {message}"), hint }.into())
            }
            reply => Ok(reply),
        }
    }

    pub(crate) fn call(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<()> {
        self.send(request, fds)?;
        self.ready()
    }

    pub(crate) fn ready(&self) -> Result<()> {
        match self.receive()? {
            Reply::Ready(_) => Ok(()),
            _ => Err(self.unexpected()),
        }
    }

    /// Waits until memory is usable, and returns the time.
    pub(crate) fn time(&self) -> Result<u64> {
        match self.receive()? {
            Reply::Time(time) => Ok(time),
            _ => Err(self.unexpected()),
        }
    }

    /// Lets the process take a step, and returns the microseconds that it measured.
    pub(crate) fn took(&self, request: &Request) -> Result<f64> {
        self.send(request, &[])?;
        Ok(self.time()? as f64 / 1e3)
    }

    pub(crate) fn unexpected(&self) -> Error {
        self.program.failure("sent the reply of another request".to_owned())
    }

    /// Replaces an error of the connection by its reason: the process exited, or hangs.
    fn explain(&self, error: Error) -> Error {
        match error {
            Error::Peer(PeerError::Timeout { waited, .. }) => {
                self.program.failure(format!("did not respond within {waited:?}"))
            }
            Error::Peer(PeerError::Gone { .. }) => match self.program.end_of_dead() {
                Some(end) => self.program.failure(end),
                None => error,
            },
            error => error,
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // The process exits at the end of the connection.
        let _ = self.line.0.shared().shutdown(std::net::Shutdown::Both);
        self.program.wait(EXIT);
    }
}

/// A child process in a group of its own: signals of the terminal do not reach it. Dropping it ends the group.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) name: &'static str,
    pub(crate) child: std::cell::RefCell<Child>,
}

impl Program {
    pub(crate) fn start(name: &'static str, command: &mut Command) -> Result<Self> {
        let child = command.process_group(0).spawn();
        let child = child.map_err(|error| Error::system(format!("start {name}"), error))?;
        Ok(Self { name, child: child.into() })
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_raw(self.child.borrow().id().cast_signed())
    }

    pub(crate) fn failure(&self, message: String) -> Error {
        ToolError::Child { process: self.name.to_owned(), message, hint: None }.into()
    }

    /// The status, when the process has exited; `None` after `limit`.
    pub(crate) fn wait(&self, limit: Duration) -> Option<ExitStatus> {
        let begun = Instant::now();
        loop {
            match self.child.borrow_mut().try_wait() {
                Ok(Some(status)) => return Some(status),
                Ok(None) if begun.elapsed() < limit => thread::sleep(POLL),
                _ => return None,
            }
        }
    }

    /// How a process ended that has closed its connection, as the rest of a sentence.
    pub(crate) fn end_of_dead(&self) -> Option<String> {
        let status = self.wait(EXIT)?;
        Some(match status.signal().map(Signal::try_from) {
            Some(Ok(signal)) => format!("was killed by {signal}"),
            _ => format!("exited with code {}", status.code().unwrap_or(-1)),
        })
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if self.wait(Duration::ZERO).is_none() {
            // Fails if the process has just exited.
            let _ = killpg(self.pid(), Signal::SIGTERM);
        }
        if self.wait(EXIT).is_none() {
            let _ = killpg(self.pid(), Signal::SIGKILL);
            let _ = self.child.borrow_mut().wait();
        }
    }
}

pub(crate) fn this_program(role: &Role) -> Result<Command> {
    let task = serde_json::to_string(&Task { parent: getpid().as_raw(), role: role.clone() });
    let mut command = Command::new("/proc/self/exe");
    command.arg(CHILD).arg(task.map_err(|error| Error::system("describe a process", error))?);
    Ok(command)
}

/// A program beside this one.
pub(crate) fn beside(name: &str) -> Option<PathBuf> {
    let path = env::current_exe().ok()?.with_file_name(name);
    Path::is_file(&path).then_some(path)
}
