//! The other processes of a run, the records between them, and the clock.

use std::{
    env,
    io::Read,
    os::{fd::BorrowedFd, unix::process::CommandExt},
    path::{Path, PathBuf},
    process::Command,
};

use nix::{poll::PollFlags, unistd::Pid};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::Value;
use tempfile::TempDir;
use vmmfd::{
    driver::{Choice, open},
    error::ProtocolError,
    internals::{Location, Properties, wait},
    wire::Memory,
};
use vmmfd_cli::{
    child::{Process, ProcessEnd, command, start},
    line::{Line, typed},
    temporary::temporary_folder,
};

use crate::prelude::*;

/// The time for a process to fall asleep on its socket, as between two real handoffs.
const ASLEEP: Duration = Duration::from_micros(30);

/// Another process of the run, which answers [`Request`]s.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Task {
    pub(crate) backend: Backend,
    pub(crate) device: String,
    pub(crate) timeout: Duration,
    /// Whether it starts the driver.
    pub(crate) driver: bool,
}

/// A way to hand over memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Way {
    /// The driver's calls and a socket. The same descriptors are sent each time.
    Floor,
    /// The library's records and checks. The consumer has the description, but not the buffer.
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
}

/// A request to another process. The answer is a number, unless stated otherwise: a time or a duration in nanoseconds, or 0.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Request {
    /// Answer the machine and the device.
    Machine,
    /// Use the record's descriptor for the library's records.
    Channel,
    /// Answer, then subscribe to the stream over the record's descriptor.
    Subscribe,
    /// Keep this description of the memory of [`Way::Fresh`].
    Describe { memory: Box<Memory> },
    /// Import the pool of the record's descriptor.
    Pool,
    /// Answer, then take the next handoff. Answer the time at which the memory was usable.
    Take { way: Way, size: u64 },
    /// Wake the bench, which sleeps until then, and map the memory that it sends.
    Wake { size: u64 },
    /// Answer, then receive a record and close its descriptors.
    Receive,
    /// Answer, then receive publications until one without a time, on a stream if `on_stream` is set. Answer the number of each, and the
    /// microseconds from its time to its receipt, or until the stream is done.
    Follow { on_stream: bool },
    /// Answer, then let a stream wait for each of the first values of the record's timeline. Answer the time at which each wait was over.
    Await { values: u64 },
    /// Connect to the broker at this socket.
    Connect { socket: PathBuf },
    /// Get an object and map it, and an array of it if `array` is set.
    Get { name: String, array: Option<String> },
    /// Switch to the other of two objects at the same addresses, by the driver's calls if `bare` is set.
    Switch { bare: bool },
    /// Close all memory.
    Close,
    /// Get an object `count` times from `at` on, and release it at once. Answer the begin, the end and all durations in microseconds.
    Gets { name: String, count: usize, map: bool, at: u64 },
    /// Get an object until it is deleted, and release it at once. Answer the longest duration.
    GetUntilDeleted { name: String },
    /// Compile or load the kernels.
    LoadKernels,
    /// Exit like a program that has started the driver.
    Exit,
}

/// The error of a process, with its hint.
pub(crate) type Failure = (String, Option<String>);

/// The process group of a run. Its first process only waits: when this process dies, it removes the folder and kills the group.
#[derive(Debug)]
pub(crate) struct Family {
    first: Process,
    _line: Line,
    folder: TempDir,
}

impl Family {
    pub(crate) fn start(task: &Task, cancel: &Cancel) -> Result<Self> {
        let folder = temporary_folder("vmmfd-bench.")?;
        let mut command = command(Some(folder.path()), task)?;
        let (first, line) = start("the first process", &mut command, true, task.timeout, cancel)?;
        Ok(Self { first, _line: line, folder })
    }

    /// The folder for sockets.
    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The group, which signals of the terminal do not reach.
    fn group(&self) -> i32 {
        Pid::as_raw(self.first.pid())
    }

    /// Starts a program in the group.
    pub(crate) fn spawn(&self, name: &'static str, command: &mut Command) -> Result<Process> {
        Process::spawn(name, command.process_group(self.group()), false)
    }

    /// Starts a process of the bench in the group.
    pub(crate) fn peer(
        &self,
        name: &'static str,
        task: &Task,
        cancel: &Cancel,
        variables: &[(&str, &str)],
    ) -> Result<Peer> {
        let mut command = command(None, task)?;
        command.process_group(self.group()).envs(variables.iter().copied());
        let (process, line) = start(name, &mut command, false, task.timeout, cancel)?;
        Ok(Peer { process, line })
    }
}

/// Another process of the run, connected. It sends an answer when it is ready. Dropping it ends the process.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) process: Process,
    pub(crate) line: Line,
}

impl Peer {
    pub(crate) fn send(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<()> {
        self.line.send_with(request, fds).map_err(|error| self.process.explain(error, self.line.timeout()))
    }

    pub(crate) fn receive<T: DeserializeOwned>(&self) -> Result<T> {
        let answer: std::result::Result<Value, Failure> =
            self.line.receive().map_err(|error| self.process.explain(error, self.line.timeout()))?;
        typed(answer.map_err(|(message, hint)| self.process.failure(format!("failed: {message}"), hint))?)
    }

    pub(crate) fn call(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<()> {
        self.send(request, fds)?;
        self.receive::<u64>().map(drop)
    }

    /// Lets the process take a step, and returns the microseconds that it measured.
    pub(crate) fn took(&self, request: &Request) -> Result<f64> {
        self.send(request, &[])?;
        Ok(self.receive::<u64>()? as f64 / 1e3)
    }
}

/// Waits until a program has written `word`, in a single write.
pub(crate) fn wait_for_word(process: &mut Process, word: &str, limit: Duration, cancel: &Cancel) -> Result<()> {
    let deadline = Instant::now() + limit;
    let mut chunk = [0; 4096];
    loop {
        let output = process.stdout().ok_or_else(not_prepared)?;
        if !wait(cancel, output.as_fd(), PollFlags::POLLIN, deadline)? {
            return Err(process.failure(format!("was not ready within {limit:?}"), None));
        }
        let read = output.read(&mut chunk).map_err(|error| Error::system("read a program's output", error))?;
        if String::from_utf8_lossy(&chunk[..read]).contains(word) {
            return Ok(());
        }
        if read == 0 {
            wait_for_end(process, limit, cancel)?;
            return Err(process.failure("ended before it was ready".to_owned(), None));
        }
    }
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

pub(crate) fn open_device(backend: Backend, device: &str) -> Result<Device> {
    let driver = open(Choice::Only(backend))?.driver;
    let device = Device::find(&driver, device.parse().unwrap_or_default())?;
    device.activate()?;
    Ok(device)
}

/// The properties of exportable memory.
pub(crate) fn exportable(device: &Device) -> Properties {
    let location = Location::Device(device.ordinal());
    Properties { location, exportable: true, immutable: false, gpu_direct_rdma: false }
}

/// The time in nanoseconds on the clock that all processes of a machine share.
pub(crate) fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}

pub(crate) fn us(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// Spins until another process has had time to fall asleep on its socket.
pub(crate) fn until_asleep() {
    let begun = Instant::now();
    while begun.elapsed() < ASLEEP {
        std::hint::spin_loop();
    }
}

/// The error of a request whose preparation is missing.
pub(crate) fn not_prepared() -> Error {
    ProtocolError::Unexpected { got: "request", want: "its preparation" }.into()
}
