//! Child processes: this program again, with a task, and a socket for records as standard input. A child ends with its parent.
//!
//! The program passes the argument of the hidden subcommand [`SUBCOMMAND`] to [`run`].

use std::{
    fmt,
    fs::{self, File},
    io::{self, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::{fs::FileExt, process::CommandExt},
    },
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    fcntl::{FcntlArg, SealFlag, fcntl},
    poll::PollFlags,
    sys::{
        memfd::{MFdFlags, memfd_create},
        signal::{Signal, killpg},
        wait::{Id, WaitPidFlag, WaitStatus, waitid},
    },
    unistd::{Pid, getpgrp},
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use vmmfd::{
    channel::Cancel,
    error::{Error, PeerError, Result},
    internals::{RecordSocket, clean, exit_at_once, wait},
};

use crate::{error::ToolError, line::Line, temporary::PREFIX};

/// This program, even if its file was replaced since it was started.
const PROGRAM: &str = "/proc/self/exe";

/// The hidden subcommand of a child. Its only argument is the task.
pub const SUBCOMMAND: &str = "child";

/// How long a process may take to exit after it closed its connection.
const EXIT_TIMEOUT: Duration = Duration::from_secs(1);

/// The interval between two checks of a process. The benchmarks measure when a process ends.
const POLL_INTERVAL: Duration = Duration::from_micros(100);

/// The most bytes kept of standard error: the first ones.
const MAX_KEPT: usize = 64 << 10;

/// The argument of the subcommand.
#[derive(Debug, Serialize, Deserialize)]
struct Assignment {
    /// The folder to remove if the parent dies.
    remove: Option<PathBuf>,
    task: Value,
}

/// The command that runs a task in another process of this program. `remove` is a folder to remove when the parent dies.
///
/// # Errors
/// [`Error::System`] if the task can't be written as JSON.
pub fn command(remove: Option<&Path>, task: &impl Serialize) -> Result<Command> {
    let failed = |error: serde_json::Error| Error::system("describe a task", io::Error::from(error));
    let assignment =
        Assignment { remove: remove.map(Path::to_owned), task: serde_json::to_value(task).map_err(failed)? };
    let mut command = Command::new(PROGRAM);
    command.arg0("vmmfd").arg(SUBCOMMAND).arg(serde_json::to_string(&assignment).map_err(failed)?);
    Ok(command)
}

/// Starts a child that users call `name`, with a connection. Its standard output is discarded. If it leads, see [`Process::spawn`].
///
/// # Errors
/// [`Error::System`] if it can't be started.
pub fn start(
    name: &'static str,
    command: &mut Command,
    leads: bool,
    timeout: Duration,
    cancel: &Cancel,
) -> Result<(Process, Line)> {
    let (line, other) = Line::pair(timeout, cancel, "for another process of this tool")?;
    Ok((Process::spawn(name, command.stdin(other).stdout(Stdio::null()), leads)?, line))
}

/// Runs the task of a child process and exits. It ends with its parent. An error is written to standard error unless the parent is gone.
pub fn run(text: &str, work: impl FnOnce(Value) -> Result<()>) -> ! {
    let Ok(Assignment { remove, task }) = serde_json::from_str(text) else { exit_at_once(2) };
    if end_with_parent(remove).is_err() {
        exit_at_once(1);
    }
    let code = match work(task) {
        Ok(()) => 0,
        Err(Error::Peer(PeerError::Gone { .. })) => {
            // The thread that watches the parent sees its end too. It cleans up first, and ends this process.
            thread::sleep(EXIT_TIMEOUT);
            0
        }
        Err(error) => {
            // Fails if standard error is closed.
            let _ = writeln!(io::stderr(), "{}", error.in_full());
            1
        }
    };
    // Skip the driver's exit handlers, which may hang.
    exit_at_once(code)
}

/// The child's side of the connection to its parent. It has no timeout: the parent may be busy, and this process never outlives its parent.
pub fn line_to_parent() -> Result<Line> {
    let stdin = stdin().map_err(|error| Error::system("duplicate standard input", error))?;
    Ok(Line::new(RecordSocket::blocking(stdin, &Cancel::new()?), "for the parent process"))
}

fn stdin() -> io::Result<OwnedFd> {
    io::stdin().as_fd().try_clone_to_owned()
}

/// Starts a thread that ends this process, and its group if it leads one, when the parent closes its side of the connection, also by dying.
fn end_with_parent(remove: Option<PathBuf>) -> io::Result<()> {
    let stdin = stdin()?;
    let cancel = Cancel::new().map_err(io::Error::other)?;
    let watch = move || {
        // POLLHUP only: the task's thread reads the records.
        let never = || Instant::now() + Duration::from_secs(24 * 3600);
        while let Ok(false) = wait(&cancel, stdin.as_fd(), PollFlags::empty(), never()) {}
        // The parent would have removed the folder. The name check protects other folders from an argument written by hand.
        let own = |folder: &PathBuf| folder.file_name().is_some_and(|name| name.to_string_lossy().starts_with(PREFIX));
        if let Some(folder) = remove.filter(own) {
            let _ = fs::remove_dir_all(folder);
            // Also kills this process. A process that does not lead its group was started by hand.
            if getpgrp() == Pid::this() {
                let _ = killpg(Pid::this(), Signal::SIGKILL);
            }
        }
        exit_at_once(1)
    };
    thread::Builder::new().name("parent".to_owned()).spawn(watch).map(drop)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessEnd {
    Exited(i32),
    /// Killed by a signal; `None` if the signal has no name.
    Killed(Option<Signal>),
}

impl fmt::Display for ProcessEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited(code) => write!(f, "exited with code {code}"),
            Self::Killed(Some(signal)) => write!(f, "was killed by {signal}"),
            Self::Killed(None) => f.write_str("was killed by a signal"),
        }
    }
}

/// A child process. Drop kills it, with its group if it leads one.
#[derive(Debug)]
pub struct Process {
    child: Child,
    /// What users call it: `the producer`.
    name: &'static str,
    /// Standard error, if it leads a group.
    stderr: Option<File>,
    /// Whether it was reaped: its pid may belong to another process by now.
    reaped: bool,
}

impl Process {
    /// Starts a process that users call `name`.
    ///
    /// If it leads, it has a process group of its own, for the processes that it starts, and its standard error is kept for
    /// [`Process::last_error_line`].
    ///
    /// # Errors
    /// [`Error::System`] if it can't be started.
    pub fn spawn(name: &'static str, command: &mut Command, leads: bool) -> Result<Self> {
        let mut spawn = || -> io::Result<_> {
            let stderr = leads.then(kept_stderr).transpose()?;
            if let Some(stderr) = &stderr {
                command.process_group(0).stderr(Stdio::from(stderr.try_clone()?));
            }
            Ok((command.spawn()?, stderr))
        };
        let (child, stderr) = spawn().map_err(|error| Error::system(format!("start {name}"), error))?;
        Ok(Self { child, name, stderr, reaped: false })
    }

    /// The standard output, if it is a pipe.
    pub fn stdout(&mut self) -> Option<&mut ChildStdout> {
        self.child.stdout.as_mut()
    }

    pub fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().cast_signed())
    }

    /// The exit status, if the process has exited. It stays a zombie until it is killed or dropped, so its pid is not reused.
    fn ended(&self) -> Option<ProcessEnd> {
        loop {
            let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT | WaitPidFlag::WNOHANG;
            return match waitid(Id::Pid(self.pid()), flags) {
                Ok(WaitStatus::Exited(_, code)) => Some(ProcessEnd::Exited(code)),
                Ok(WaitStatus::Signaled(_, signal, _)) => Some(ProcessEnd::Killed(Some(signal))),
                // A real-time signal.
                Err(Errno::EINVAL) => Some(ProcessEnd::Killed(None)),
                Err(Errno::EINTR) => continue,
                _ => None,
            };
        }
    }

    /// Waits for the exit; `None` at the deadline.
    ///
    /// # Errors
    /// [`Error::Interrupted`].
    pub fn wait(&self, deadline: Instant, cancel: &Cancel) -> Result<Option<ProcessEnd>> {
        loop {
            let end = self.ended();
            if end.is_some() || Instant::now() > deadline {
                return Ok(end);
            }
            cancel.check()?;
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Replaces an error of the connection by the reason: the process exited, or did not respond within `limit`.
    pub fn explain(&self, error: Error, limit: Duration) -> Error {
        let message = match error {
            Error::Peer(PeerError::Gone { .. }) => {
                let deadline = Instant::now() + EXIT_TIMEOUT;
                while self.ended().is_none() && Instant::now() < deadline {
                    thread::sleep(POLL_INTERVAL);
                }
                self.ended().map(|end| end.to_string())
            }
            Error::Peer(PeerError::Timeout { .. }) => {
                Some(format!("did not respond within {limit:?}, the longest that a step may take"))
            }
            _ => None,
        };
        message.map_or(error, |message| self.failure(message, None))
    }

    /// An error of this process. `message` is the event, as the rest of a sentence.
    pub fn failure(&self, message: String, hint: Option<String>) -> Error {
        ToolError::Child { process: self.name.to_owned(), message, hint }.into()
    }

    /// The last line on standard error, if this is kept.
    pub fn last_error_line(&self) -> Option<String> {
        let mut bytes = vec![0; MAX_KEPT];
        // Does not move the position, which is the child's too.
        self.stderr.as_ref()?.read_at(&mut bytes, 0).ok()?;
        let mut text = String::from_utf8_lossy(&bytes).replace('\0', "");
        text = text.lines().rfind(|line| !line.trim().is_empty())?.to_owned();
        clean(&mut text);
        Some(text)
    }

    /// Kills the process, with its group if it leads one, and reaps it. Removes files that the driver leaves behind for a killed process.
    pub fn kill(&mut self) {
        if self.reaped {
            return;
        }
        // Both fail if the process has exited.
        if self.stderr.is_some() {
            let _ = killpg(self.pid(), Signal::SIGKILL);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.reaped = true;
        sweep(Path::new("/dev/shm"), self.child.id());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A file in memory for the first bytes on standard error. Later writes fail, so that a child neither blocks nor fills the memory.
fn kept_stderr() -> io::Result<File> {
    let file = File::from(memfd_create(c"stderr", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?);
    file.set_len(MAX_KEPT as u64)?;
    fcntl(&file, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_GROW))?;
    Ok(file)
}

/// Removes the files of a killed process from `/dev/shm`. The driver creates a file per process, with the pid in hexadecimal in its name
/// (`cuda.shm.0.29f.1`), and removes it on exit.
fn sweep(folder: &Path, pid: u32) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    let number = format!("{pid:x}");
    for entry in entries.flatten() {
        let name = entry.file_name();
        let mut parts = name.to_str().unwrap_or_default().split('.');
        let driver = [parts.next(), parts.next()] == [Some("cuda"), Some("shm")];
        if driver && parts.nth(1) == Some(&number) {
            // Fails for files of other users.
            let _ = fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, leads: bool) -> Process {
        Process::spawn("the shell", Command::new("sh").args(["-c", script]), leads).unwrap()
    }

    fn end_of(process: &Process) -> ProcessEnd {
        process.wait(Instant::now() + Duration::from_secs(60), &Cancel::new().unwrap()).unwrap().unwrap()
    }

    #[test]
    fn connection_errors_name_the_process() {
        let limit = Duration::from_millis(5);
        let gone = || Error::Peer(PeerError::Gone { pid: 0, purpose: "for a test" });
        assert_eq!(shell("exit 3", false).explain(gone(), limit).to_string(), "the shell exited with code 3");
        let stuck = shell("sleep 60", false);
        let timeout = stuck.explain(Error::Peer(PeerError::Timeout { purpose: "for a test", waited: limit }), limit);
        assert_eq!(timeout.to_string(), "the shell did not respond within 5ms, the longest that a step may take");
        // A process that closed its connection but still runs.
        assert!(matches!(stuck.explain(gone(), limit), Error::Peer(PeerError::Gone { .. })));
        assert_eq!(stuck.wait(Instant::now(), &Cancel::new().unwrap()).unwrap(), None);
    }

    #[test]
    fn kill_reaches_the_group() {
        let mut leader = shell("sleep 60 & echo $! >&2; wait", true);
        let until = |done: &dyn Fn() -> bool| {
            let deadline = Instant::now() + Duration::from_secs(60);
            while !done() {
                assert!(Instant::now() < deadline);
                thread::sleep(POLL_INTERVAL);
            }
        };
        until(&|| leader.last_error_line().is_some());
        let member = leader.last_error_line().unwrap();
        leader.kill();
        // A zombie, until init reaps it.
        until(&|| {
            let status = fs::read_to_string(format!("/proc/{member}/stat")).unwrap_or_default();
            status.is_empty() || status.contains(") Z ")
        });
    }

    #[test]
    fn long_standard_error_is_cut() {
        let process = shell("head -c 65530 /dev/zero | tr '\\0' 'x' >&2; echo >&2; echo last >&2; echo lost >&2", true);
        end_of(&process);
        assert_eq!(process.last_error_line().as_deref(), Some("last"));
        assert_eq!(process.stderr.as_ref().unwrap().metadata().unwrap().len(), MAX_KEPT as u64);
    }

    #[test]
    fn removes_only_files_of_the_process() {
        let folder = tempfile::tempdir().unwrap();
        let own = ["cuda.shm.0.29f.1", "cuda.shm.3e8.29f.12"];
        let others = ["cuda.shm.0.29.1", "cuda.shm.29f.1.1", "cuda.shm.0.29f0.1", "other.shm.0.29f.1", "cuda.shm.0"];
        for name in own.iter().chain(&others) {
            fs::write(folder.path().join(name), "").unwrap();
        }
        sweep(folder.path(), 0x29f);
        let there = |name: &&&str| folder.path().join(name).exists();
        assert_eq!((own.iter().filter(there).count(), others.iter().filter(there).count()), (0, others.len()));
        sweep(&folder.path().join("none"), 1);
    }
}
