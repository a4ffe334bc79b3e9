//! The programs that processes of the broker execute.

use std::{
    ffi::{OsStr, OsString},
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Path, PathBuf},
    process,
};

use nix::{
    fcntl::OFlag,
    poll::PollFlags,
    sys::{
        signal::{Signal, kill},
        wait::{WaitStatus, waitpid},
    },
    unistd::Pid,
};
use rustix::fs::{Mode, OFlags};

use super::{
    HANDOVER_TIMEOUT, OWN_DESCRIPTORS,
    passed::{KEEPER, LINK, Passed, PassedForCheck, SERVER},
    peer::{Process, pair, pidfd_of, ready},
    role::{self, Role},
};
use crate::{
    error::{Error, Result},
    sys,
};

/// The running program, even if the file at its path has been replaced: only a reload executes the new file, after a check.
const OWN_IMAGE: &str = "/proc/self/exe";

/// The answer of a program that can take over.
pub(super) const PROOF: &str = "vmmfd: keeper 1, catalogue readable\n";

/// A program of the broker with its arguments.
#[derive(Debug, Clone)]
pub(in crate::broker) struct Image {
    /// Where a reload finds the next program.
    pub(super) path: PathBuf,
    /// The file to execute.
    file: PathBuf,
    arguments: Vec<OsString>,
}

impl Image {
    /// The program of this process. Only for programs of this project: no other program expects to be executed a second time.
    pub(super) fn of_this_process() -> io::Result<Self> {
        let path = role::program().map_or_else(std::env::current_exe, Ok)?;
        Ok(Self { path, file: OWN_IMAGE.into(), arguments: std::env::args_os().collect() })
    }

    /// The keeper's program at `path`, listening at `socket`.
    pub(super) fn of_keeper(path: &Path, socket: &Path) -> Self {
        let arguments = vec![path.into(), "keeper".into(), "--socket".into(), socket.into()];
        Self { path: path.to_owned(), file: path.to_owned(), arguments }
    }

    /// Prepares to execute `file` in a role.
    fn program(
        &self,
        file: &Path,
        role: Role,
        last_report: &str,
        fds: &[(&str, BorrowedFd<'_>)],
    ) -> io::Result<sys::Program> {
        let arguments = self.arguments.iter().map(OsString::as_os_str);
        sys::Program::new(file, arguments, &role.variables(&self.path, last_report), fds)
    }

    /// Starts a server. Returns its pid, its pidfd and the keeper's end of the connection.
    ///
    /// # Errors
    /// All errors of socketpair(2), pidfd_open(2), fork(2) and execve(2).
    pub(super) fn start_server(&self) -> io::Result<(i32, OwnedFd, OwnedFd)> {
        let (ours, theirs) = pair()?;
        let keeper = pidfd_of(process::id().cast_signed())?;
        let fds = [(LINK, theirs.as_fd()), (KEEPER, keeper.as_fd())];
        let pid = self.program(&self.file, Role::Server, "", &fds)?.spawn()?;
        Ok((pid, pidfd_or_kill(pid)?, ours))
    }

    /// Starts a keeper for this server process. Returns the server's end of the connection, and the keeper.
    ///
    /// # Errors
    /// All errors of socketpair(2), pidfd_open(2), fork(2) and execve(2).
    pub(super) fn start_keeper(&self) -> io::Result<(OwnedFd, Process)> {
        let (ours, theirs) = pair()?;
        let own = process::id().cast_signed();
        let server = pidfd_of(own)?;
        let fds = [(LINK, theirs.as_fd()), (SERVER, server.as_fd())];
        let pid = self.program(&self.file, Role::Another(own), "", &fds)?.spawn()?;
        Ok((ours, Process::of_child(pid, pidfd_or_kill(pid)?)))
    }

    /// Opens the program at the path and makes it prove that it can take over.
    ///
    /// # Errors
    /// The reason why it can't.
    pub(super) fn check(&self, passed: &Passed<'_>) -> std::result::Result<OwnedFd, String> {
        let path = self.path.display();
        // Open it once: the checked file is the executed file, even if the path is replaced in between. Its number is above the descriptors
        // passed to the next program.
        let above = i32::try_from(passed.held.len() as u64 + OWN_DESCRIPTORS).unwrap_or(i32::MAX);
        let opened = rustix::fs::open(&self.path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
            .and_then(|file| rustix::io::fcntl_dupfd_cloexec(&file, above));
        let file = opened.map_err(|errno| format!("{path} can't be opened: {errno}"))?;
        let (answer, writer) =
            nix::unistd::pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK).map_err(|errno| errno.to_string())?;
        let names = passed.names();
        let program = self.program(&executable(&file), Role::Check, "", &passed.for_check(&names, writer.as_fd()));
        let pid =
            program.and_then(sys::Program::spawn).map_err(|error| format!("{path} can't be executed: {error}"))?;
        let pidfd = pidfd_or_kill(pid).map_err(|error| error.to_string())?;
        if !ready(&pidfd, PollFlags::POLLIN, HANDOVER_TIMEOUT) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        match waitpid(Pid::from_raw(pid), None) {
            Ok(WaitStatus::Exited(_, 0)) => {}
            Ok(WaitStatus::Exited(_, code)) => {
                return Err(format!("{path} can't take over the keeper's descriptors (exit code {code})"));
            }
            _ => {
                return Err(format!(
                    "{path} did not report within {HANDOVER_TIMEOUT:?} whether it can take over the keeper's descriptors"
                ));
            }
        }
        let mut text = [0; 256];
        let length = nix::unistd::read(&answer, &mut text).unwrap_or(0);
        match String::from_utf8_lossy(&text[..length]) {
            text if text == PROOF => Ok(file),
            text => Err(format!("{path} printed {text:?} instead of {PROOF:?}: it is not a vmmfd that can take over")),
        }
    }

    /// Replaces this process by a checked program or, if that fails, by this program again. Returns only if both fail; the caller must exit
    /// then.
    pub(super) fn execute(
        &self,
        file: &OwnedFd,
        role: Role,
        process: Option<BorrowedFd<'_>>,
        passed: &Passed<'_>,
    ) -> io::Error {
        let names = passed.names();
        let fds = passed.for_successor(&names, process);
        sys::flush_stderr();
        match self.program(&executable(file), role, passed.last_report, &fds) {
            Ok(program) => program.execute(OsStr::from_bytes(OWN_IMAGE.as_bytes())),
            Err(error) => error,
        }
    }
}

/// Answers whether this build can take over the descriptors passed to this process. `check` reads their catalogue.
///
/// # Errors
/// The reason why it can't.
pub(in crate::broker) fn answer_check(check: impl FnOnce(Vec<(String, OwnedFd)>) -> Result<()>) -> Result<()> {
    let passed = PassedForCheck::take();
    let passed = passed.map_err(|error| Error::system("receive the passed descriptors", error))?;
    check(passed.held)?;
    let Some(answer) = passed.answer else { return Ok(()) };
    let written = nix::unistd::write(&answer, PROOF.as_bytes());
    written.map(drop).map_err(|errno| Error::system("answer the keeper", errno))
}

/// The path to execute an open file.
fn executable(file: &OwnedFd) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

/// Opens a child's pidfd, and kills the child if that fails.
fn pidfd_or_kill(pid: i32) -> io::Result<OwnedFd> {
    pidfd_of(pid).inspect_err(|_| {
        let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        let _ = waitpid(Pid::from_raw(pid), None);
    })
}
