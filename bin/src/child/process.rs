//! A child process, its group and its exit status.

use std::{
    fmt,
    os::unix::process::CommandExt,
    process::{Child, ChildStderr, ChildStdout, Command},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    sys::{
        signal::{Signal, kill, killpg},
        wait::{Id, WaitPidFlag, WaitStatus, waitid},
    },
    unistd::Pid,
};
use vmmfd::{
    channel::Cancel,
    error::{Error, PeerError, Result},
};

use super::shm;
use crate::error::ToolError;

/// How long a process may take to exit after it closed its connection.
const EXIT_TIMEOUT: Duration = Duration::from_secs(1);

/// The interval between two checks of a process.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The process group of a child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Group {
    /// This process's group.
    Inherited,
    /// A new group, led by the child. Signals from the terminal do not reach it.
    Own,
    /// The group of another process.
    Of(Pid),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessEnd {
    Exited(i32),
    /// Killed by a signal; `None` if the signal has no name.
    Killed(Option<Signal>),
}

impl ProcessEnd {
    pub fn is_success(self) -> bool {
        self == Self::Exited(0)
    }
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
    leads: bool,
    /// Whether it was reaped: its pid may belong to another process by now.
    reaped: bool,
}

impl Process {
    pub fn spawn(name: &'static str, command: &mut Command, group: Group) -> Result<Self> {
        match group {
            Group::Inherited => {}
            Group::Own => drop(command.process_group(0)),
            Group::Of(leader) => drop(command.process_group(leader.as_raw())),
        }
        let child = command.spawn().map_err(|error| Error::system(format!("start {name}"), error))?;
        Ok(Self { child, name, leads: group == Group::Own, reaped: false })
    }

    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The pid, also of its group if it leads one.
    pub fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().cast_signed())
    }

    /// Standard output, if piped. `None` on later calls.
    pub fn take_stdout(&mut self) -> Option<ChildStdout> {
        self.child.stdout.take()
    }

    /// Keeps standard output open, so that the process can still write.
    pub fn keep_stdout(&mut self, stdout: ChildStdout) {
        self.child.stdout = Some(stdout);
    }

    /// Standard error, if piped. `None` on later calls.
    pub fn take_stderr(&mut self) -> Option<ChildStderr> {
        self.child.stderr.take()
    }

    /// The exit status, if the process has exited. It stays a zombie until it is killed or dropped, so its pid is not reused.
    pub fn ended(&self) -> Option<ProcessEnd> {
        ended(self.pid(), WaitPidFlag::WNOHANG)
    }

    /// Waits for the exit. Returns its status and time; `None` at the deadline. A separate thread waits, so the time is exact.
    ///
    /// # Errors
    /// [`Error::Interrupted`], [`Error::System`]. See waitid(2).
    pub fn wait(&self, deadline: Instant, cancel: &Cancel) -> Result<Option<(ProcessEnd, Instant)>> {
        let (pid, (sender, receiver)) = (self.pid(), mpsc::channel());
        let wait = move || {
            let end = ended(pid, WaitPidFlag::empty());
            // Fails if the caller stopped waiting.
            let _ = sender.send((end, Instant::now()));
        };
        let spawned = thread::Builder::new().name("wait".to_owned()).spawn(wait);
        spawned.map_err(|error| Error::system("start a thread", error))?;
        loop {
            if let Ok((Some(end), at)) = receiver.recv_timeout(Duration::from_millis(20)) {
                return Ok(Some((end, at)));
            }
            cancel.check()?;
            if Instant::now() > deadline {
                return Ok(None);
            }
        }
    }

    /// Replaces an error of the connection by the reason: the process exited, or did not respond within `limit`.
    pub fn explain(&self, error: Error, limit: Duration) -> Error {
        match error {
            Error::Peer(PeerError::Gone { .. }) => {}
            Error::Peer(PeerError::Timeout { .. }) => return overdue(self.name, "did not respond", limit),
            _ => return error,
        }
        let deadline = Instant::now() + EXIT_TIMEOUT;
        loop {
            match self.ended() {
                Some(end) => return failure(self.name, end.to_string()),
                None if Instant::now() < deadline => thread::sleep(POLL_INTERVAL),
                None => return error,
            }
        }
    }

    /// Sends SIGTERM.
    pub fn terminate(&self) {
        // Fails if the process has exited.
        let _ = kill(self.pid(), Signal::SIGTERM);
    }

    /// Kills the process, with its group if it leads one, and reaps it. Removes files that the driver leaves behind for a killed process.
    pub fn kill(&mut self) {
        if self.reaped {
            return;
        }
        // Both fail if the process has exited.
        if self.leads {
            let _ = killpg(self.pid(), Signal::SIGKILL);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.reaped = true;
        shm::sweep(self.child.id());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The exit status of a child, without reaping it.
fn ended(pid: Pid, flags: WaitPidFlag) -> Option<ProcessEnd> {
    loop {
        return match waitid(Id::Pid(pid), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT | flags) {
            Ok(WaitStatus::Exited(_, code)) => Some(ProcessEnd::Exited(code)),
            Ok(WaitStatus::Signaled(_, signal, _)) => Some(ProcessEnd::Killed(Some(signal))),
            // A real-time signal.
            Err(Errno::EINVAL) => Some(ProcessEnd::Killed(None)),
            Err(Errno::EINTR) => continue,
            _ => None,
        };
    }
}

pub fn failure(process: &str, message: String) -> Error {
    Error::from(ToolError::Child { process: process.to_owned(), message, hint: None })
}

pub fn overdue(process: &str, what: &str, limit: Duration) -> Error {
    failure(process, format!("{what} within {limit:?}, the longest that a step may take"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmmfd::error::{CancelReason, LoadError};

    fn shell(script: &str, group: Group) -> Process {
        Process::spawn("the shell", Command::new("sh").args(["-c", script]), group).unwrap()
    }

    fn end_of(script: &str) -> ProcessEnd {
        let process = shell(script, Group::Inherited);
        let deadline = Instant::now() + Duration::from_secs(60);
        process.wait(deadline, &Cancel::new().unwrap()).unwrap().unwrap().0
    }

    #[test]
    fn exit_status_as_text() {
        assert_eq!(end_of("exit 0"), ProcessEnd::Exited(0));
        assert_eq!(end_of("exit 7").to_string(), "exited with code 7");
        assert_eq!(end_of("kill -ABRT $$").to_string(), "was killed by SIGABRT");
        assert_eq!(end_of("kill -35 $$").to_string(), "was killed by a signal");
    }

    #[test]
    fn connection_errors_name_the_process() {
        let limit = Duration::from_millis(5);
        let gone = || Error::Peer(PeerError::Gone { pid: 0, purpose: "for a test" });
        let dead = shell("exit 3", Group::Inherited);
        assert_eq!(dead.explain(gone(), limit).to_string(), "the shell exited with code 3");
        let stuck = shell("sleep 60", Group::Inherited);
        let timeout = stuck.explain(Error::Peer(PeerError::Timeout { purpose: "for a test", waited: limit }), limit);
        assert_eq!(timeout.to_string(), "the shell did not respond within 5ms, the longest that a step may take");
        // A process that closed its connection but still runs.
        assert!(matches!(stuck.explain(gone(), limit), Error::Peer(PeerError::Gone { .. })));
        assert!(matches!(stuck.explain(Error::Load(LoadError::NoDevice), limit), Error::Load(LoadError::NoDevice)));
    }

    #[test]
    fn wait_has_deadline_and_cancellation() {
        let stuck = shell("sleep 60", Group::Inherited);
        let cancel = Cancel::new().unwrap();
        assert_eq!(stuck.wait(Instant::now(), &cancel).unwrap(), None);
        cancel.cancel(CancelReason::Signal(2));
        let late = stuck.wait(Instant::now() + Duration::from_secs(60), &cancel);
        assert!(matches!(late, Err(Error::Interrupted { reason: CancelReason::Signal(2) })));
    }

    #[test]
    fn kill_reaches_the_group() {
        for script in ["sleep 60 & sleep 60 & wait", "sleep 60 & sleep 60 & exit 0"] {
            let mut leader = shell(script, Group::Own);
            let member = shell("sleep 60", Group::Of(leader.pid()));
            if script.ends_with("exit 0") {
                while leader.ended().is_none() {
                    thread::sleep(Duration::from_millis(1));
                }
            }
            leader.kill();
            while member.ended().is_none() {
                thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(member.ended(), Some(ProcessEnd::Killed(Some(Signal::SIGKILL))));
            leader.kill();
        }
    }
}
