//! The broker process and its resource usage.

use std::{
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use vmmfd::{
    broker::{Server, ServerConfig},
    channel::Cancel,
    error::{Error, Result},
    internals,
};

use crate::{
    process::{BenchProcess, beside},
    protocol::ProducerResponse,
    run::{BenchRun, receive, unexpected},
    task::{Role, Task},
};
use vmmfd_cli::line::Line;

/// CPU time ticks per second in `/proc`: the kernel's `USER_HZ` on every machine with CUDA.
const TICKS: f64 = 100.0;

/// The interval between checks of the broker's descriptors.
const LOOK: Duration = Duration::from_millis(2);

/// Runs the broker until the process is killed.
pub(crate) fn serve(task: &Task, socket: &Path, emulated: bool, line: &Line) -> Result<()> {
    let cancel = Cancel::new()?;
    let mut config = ServerConfig::default();
    config.timeout = task.timeout;
    if emulated {
        config = internals::emulated(config);
    }
    let server = Server::bind(socket, config, &cancel)?;
    line.send(&ProducerResponse::Done)?;
    server.run().map(drop)
}

/// The process of a broker. Dropping it kills the process.
pub(super) struct Broker {
    process: BenchProcess,
    pub(super) socket: PathBuf,
}

/// `vmmfd serve` with its default keeper. Dropping it kills the keeper and the server.
pub(super) struct Kept {
    keeper: Child,
    pub(super) socket: PathBuf,
}

impl Kept {
    /// Starts the processes and waits until the broker listens.
    pub(super) fn start(socket: PathBuf, emulated: bool) -> Result<Self> {
        let failed = |error| Error::system("start vmmfd serve", error);
        let mut command =
            Command::new(beside("vmmfd", None).ok_or_else(|| failed(std::io::ErrorKind::NotFound.into()))?);
        command.args(["serve", "--quiet", "--socket"]).arg(&socket).args(emulated.then_some("--emulated"));
        let mut keeper = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().map_err(failed)?;
        let mut line = String::new();
        // The read returns if the process exits, and the process has its own deadline for its start.
        let read = keeper.stdout.take().map(|stdout| BufReader::new(stdout).read_line(&mut line));
        let started = Self { keeper, socket };
        match read {
            Some(Ok(1..)) => Ok(started),
            _ => Err(failed(std::io::ErrorKind::UnexpectedEof.into())),
        }
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        let pid = Pid::from_raw(self.keeper.id().cast_signed());
        if kill(pid, Signal::SIGTERM).is_err() || self.keeper.wait().is_err() {
            tracing::warn!(%pid, "the broker's keeper can't be ended");
        }
    }
}

/// The CPU time of a process, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct CpuTime {
    /// User and system time.
    pub(super) total_us: f64,
    /// The user time, in steps of 10 ms.
    pub(super) user_us: f64,
    /// The system time, in steps of 10 ms.
    pub(super) system_us: f64,
}

impl Broker {
    /// Starts a broker, and waits until it listens.
    pub(super) fn start(run: &BenchRun<'_>, socket: PathBuf, emulated: bool) -> Result<Self> {
        let role = Role::BrokerServer { socket: socket.clone(), emulated };
        let process = BenchProcess::leader(&run.task(role), run.cancel, &[])?;
        match receive(&process)? {
            ProducerResponse::Done => Ok(Self { process, socket }),
            _ => Err(unexpected()),
        }
    }

    pub(super) fn cpu(&self) -> Result<CpuTime> {
        let stat = self.read("stat")?;
        let [user_us, system_us] = ticks(&stat).ok_or_else(|| self.odd("stat"))?.map(|ticks| ticks / TICKS * 1e6);
        // `schedstat` counts nanoseconds, if the kernel has it.
        let total_us = self.scheduled_us().unwrap_or(user_us + system_us);
        Ok(CpuTime { total_us, user_us, system_us })
    }

    fn scheduled_us(&self) -> Option<f64> {
        let threads = fs::read_dir(self.path("task")).ok()?;
        let times = threads.map(|thread| {
            let text = fs::read_to_string(thread.ok()?.path().join("schedstat")).ok()?;
            text.split(' ').next()?.parse::<f64>().ok()
        });
        // A thread may have exited, and the kernel may lack `schedstat`.
        let ns: f64 = times.sum::<Option<f64>>()?;
        (ns > 0.0).then_some(ns / 1e3)
    }

    /// Returns the resident memory in bytes.
    pub(super) fn resident(&self) -> Result<f64> {
        let status = self.read("status")?;
        let kib = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB"));
        let kib = kib.and_then(|kib| kib.trim().parse::<f64>().ok()).ok_or_else(|| self.odd("status"))?;
        Ok(kib * 1024.0)
    }

    /// Returns the number of open descriptors.
    pub(super) fn descriptors(&self) -> Result<usize> {
        let open = fs::read_dir(self.path("fd")).map_err(|error| self.unreadable("fd", error))?;
        Ok(open.count())
    }

    /// Waits until at most `most` descriptors are open. The broker closes the descriptors of deleted objects in another thread.
    pub(super) fn wait_for_descriptors(&self, run: &BenchRun<'_>, most: usize) -> Result<()> {
        let deadline = Instant::now() + run.step();
        loop {
            let open = self.descriptors()?;
            if open <= most {
                return Ok(());
            }
            if Instant::now() > deadline {
                let limit = run.step();
                let message = format!("has {open} descriptors open, and {most} belong to it, {limit:?} after a delete");
                return Err(self.process.failure(message));
            }
            run.cancel.check()?;
            thread::sleep(LOOK);
        }
    }

    fn path(&self, file: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{file}", self.process.pid()))
    }

    fn read(&self, file: &str) -> Result<String> {
        fs::read_to_string(self.path(file)).map_err(|error| self.unreadable(file, error))
    }

    fn unreadable(&self, file: &str, error: std::io::Error) -> Error {
        Error::system(format!("read {}", self.path(file).display()), error)
    }

    fn odd(&self, file: &str) -> Error {
        self.process.failure(format!("has a file that this program can't read: {}", self.path(file).display()))
    }
}

/// Returns the user and system ticks from the text of `/proc/PID/stat`: see proc_pid_stat(5).
fn ticks(stat: &str) -> Option<[f64; 2]> {
    // The name, in parentheses, may contain any characters.
    let (_, behind) = stat.rsplit_once(')')?;
    let mut fields = behind.split_ascii_whitespace().skip(11).map(|field| field.parse().ok());
    Some([fields.next()??, fields.next()??])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_fields_14_and_15() {
        let stat = "4242 (a) b) (c) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17";
        assert_eq!(ticks(stat), Some([11.0, 12.0]));
        assert_eq!([ticks("4242 (a) S 1 2"), ticks("")], [None, None]);
    }
}
