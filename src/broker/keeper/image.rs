//! The program that a process of the broker executes, and what it passes to the next one.

use std::{
    ffi::OsString,
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Path, PathBuf},
    process,
    time::{Duration, Instant},
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
    Inherited, PATIENCE,
    link::{Process, pair, pidfd_of, ready},
    supervisor,
};
use crate::{
    error::{Error, Result},
    sys,
};

/// The environment variable with a process's [`Role`].
const ROLE: &str = "VMMFD_ROLE";

/// The variable with the path of the program: the kernel's own word for it changes when the file is replaced.
const PROGRAM: &str = "VMMFD_PROGRAM";

/// The variable with the last words of a server, which the keeper logs when it frees what that held.
const WORDS: &str = "VMMFD_LAST_WORDS";

/// The program that this process executes, whatever is at its path now: only a reload executes another one, after a check.
const THIS: &str = "/proc/self/exe";

/// The answer of a program that can take over.
const PROOF: &str = "vmmfd: keeper 1, catalogue readable\n";

/// How many descriptors a keeper needs besides those that it holds.
const OWN: u64 = 64;

/// Names of passed descriptors: a kept one has its own name behind `KEPT`.
const KEPT: &str = "=";
const LINK: &str = "LINK";
const LISTENER: &str = "LISTENER";
const ASKER: &str = "ASKER";
const SERVER: &str = "SERVER";
const KEEPER: &str = "KEEPER";
const ANSWER: &str = "ANSWER";

/// What a process that the broker executes does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// No process of the broker executed it.
    First,
    /// Serves, under the keeper that executed it.
    Server,
    /// Answers whether it could go on with what the keeper holds.
    Check,
    /// A keeper in place of an older build. A server that it started has this pid.
    Reloaded(i32),
    /// The keeper of the server with this pid, which executed it.
    Another(i32),
    /// A keeper in place of a supervisor, which an older build had instead, with the server of this pid.
    AfterSupervisor(i32),
    /// A server that such a supervisor started.
    UnderSupervisor,
}

impl Role {
    /// What the environment says that it is.
    pub fn from_environment() -> Self {
        let Ok(role) = std::env::var(ROLE) else { return supervisor::role().unwrap_or(Self::First) };
        let of = |word| role.strip_prefix(word).and_then(|pid: &str| pid.parse().ok());
        match role.as_str() {
            "server" => Self::Server,
            "check" => Self::Check,
            _ => of("another:").map(Self::Another).or(of("reloaded:").map(Self::Reloaded)).unwrap_or(Self::First),
        }
    }

    fn text(self) -> OsString {
        match self {
            Self::First | Self::AfterSupervisor(_) | Self::UnderSupervisor => OsString::new(),
            Self::Server => "server".into(),
            Self::Check => "check".into(),
            Self::Reloaded(pid) => format!("reloaded:{pid}").into(),
            Self::Another(pid) => format!("another:{pid}").into(),
        }
    }
}

/// The program of this process with its arguments.
#[derive(Debug, Clone)]
pub(super) struct Image {
    path: PathBuf,
    arguments: Vec<OsString>,
}

/// What a keeper passes to the program that it executes in place, or has checked.
#[derive(Debug, Default)]
pub(super) struct Passed<'a> {
    pub(super) kept: Vec<(&'a str, BorrowedFd<'a>)>,
    pub(super) server: Option<BorrowedFd<'a>>,
    pub(super) listener: Option<BorrowedFd<'a>>,
    pub(super) asker: Option<BorrowedFd<'a>>,
    pub(super) words: &'a str,
}

impl<'a> Passed<'a> {
    /// The names under which the kept descriptors are passed.
    fn names(&self) -> Vec<String> {
        self.kept.iter().map(|(name, _)| format!("{KEPT}{name}")).collect()
    }

    /// The kept descriptors under their names, and others, in the order of their numbers: none must make room for another when they are
    /// numbered anew, as at the limit of open files there is no room.
    fn numbered<'n>(
        &self,
        names: &'n [String],
        others: impl IntoIterator<Item = (&'n str, Option<BorrowedFd<'a>>)>,
    ) -> Vec<(&'n str, BorrowedFd<'a>)> {
        let kept = names.iter().map(String::as_str).zip(self.kept.iter().map(|(_, fd)| *fd));
        let others = others.into_iter().filter_map(|(name, fd)| Some((name, fd?)));
        let mut fds: Vec<_> = kept.chain(others).collect();
        fds.sort_by_key(|(_, fd)| fd.as_raw_fd());
        fds
    }
}

/// What a keeper was passed.
#[derive(Debug, Default)]
pub(super) struct Received {
    pub(super) kept: Vec<(String, OwnedFd)>,
    pub(super) server: Option<OwnedFd>,
    pub(super) listener: Option<OwnedFd>,
    pub(super) asker: Option<OwnedFd>,
    /// The server's process, as a pidfd.
    pub(super) process: Option<OwnedFd>,
    pub(super) words: String,
    /// Whether some of what the server had is not among `kept`.
    pub(super) is_incomplete: bool,
}

impl Received {
    pub(super) fn take(role: Role) -> io::Result<Self> {
        if let Role::AfterSupervisor(server) = role {
            return supervisor::take_over(server);
        }
        let mut received = Self { words: std::env::var(WORDS).unwrap_or_default(), ..Self::default() };
        for (name, fd) in sys::take_passed()? {
            match name.as_str() {
                LINK => received.server = Some(fd),
                LISTENER => received.listener = Some(fd),
                ASKER => received.asker = Some(fd),
                SERVER => received.process = Some(fd),
                other => {
                    if let Some(kept) = other.strip_prefix(KEPT) {
                        received.kept.push((kept.to_owned(), fd));
                    }
                }
            }
        }
        Ok(received)
    }
}

/// How many descriptors a keeper may hold.
pub(super) fn allowed() -> u64 {
    use nix::sys::resource::{Resource, getrlimit};
    getrlimit(Resource::RLIMIT_NOFILE).map_or(1024, |(soft, _)| soft).saturating_sub(OWN)
}

impl Image {
    pub(super) fn of_this_process() -> io::Result<Self> {
        let path = match std::env::var_os(PROGRAM) {
            Some(path) if Role::from_environment() != Role::First => PathBuf::from(path),
            _ => std::env::current_exe()?,
        };
        Ok(Self { path, arguments: std::env::args_os().collect() })
    }

    /// `file`, executed with the arguments of this process.
    fn program(
        &self,
        file: &Path,
        role: Role,
        words: &str,
        fds: &[(&str, BorrowedFd<'_>)],
    ) -> io::Result<sys::Program> {
        let program = self.path.clone().into_os_string();
        let variables =
            [(ROLE, role.text()), (PROGRAM, program), (WORDS, words.into()), (supervisor::ROLE, OsString::new())];
        sys::Program::new(file, self.arguments.iter().map(OsString::as_os_str), &variables, fds)
    }

    /// Starts a server. Returns its pid, a pidfd of it and the keeper's end of the connection with it.
    ///
    /// # Errors
    /// Those of socketpair(2), pidfd_open(2), fork(2) and execve(2).
    pub(super) fn start_server(&self) -> io::Result<(i32, OwnedFd, OwnedFd)> {
        let (ours, theirs) = pair()?;
        let keeper = pidfd_of(process::id().cast_signed())?;
        let fds = [(LINK, theirs.as_fd()), (KEEPER, keeper.as_fd())];
        let pid = self.program(Path::new(THIS), Role::Server, "", &fds)?.spawn()?;
        Ok((pid, pidfd_or_kill(pid)?, ours))
    }

    /// Opens the program at this one's path, and has it prove that it can take over. Meanwhile it calls `meanwhile` now and then.
    ///
    /// # Errors
    /// Why it can't.
    pub(super) fn check(&self, passed: &Passed<'_>) -> std::result::Result<OwnedFd, String> {
        let path = self.path.display();
        // The same file is checked and then executed, even if another one replaces it meanwhile. Its number is above those that the
        // next program is passed.
        let above = i32::try_from(passed.kept.len() as u64 + OWN).unwrap_or(i32::MAX);
        let opened = rustix::fs::open(&self.path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
            .and_then(|file| rustix::io::fcntl_dupfd_cloexec(&file, above));
        let file = opened.map_err(|errno| format!("{path} can't be opened: {errno}"))?;
        let (answer, writer) =
            nix::unistd::pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK).map_err(|errno| errno.to_string())?;
        let names = passed.names();
        let fds = passed.numbered(&names, [(ANSWER, Some(writer.as_fd()))]);
        let program = self.program(&executable(&file), Role::Check, "", &fds);
        let pid =
            program.and_then(sys::Program::spawn).map_err(|error| format!("{path} can't be executed: {error}"))?;
        let pidfd = pidfd_or_kill(pid).map_err(|error| error.to_string())?;
        if !ready(&pidfd, PollFlags::POLLIN, PATIENCE) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        match waitpid(Pid::from_raw(pid), None) {
            Ok(WaitStatus::Exited(_, 0)) => {}
            Ok(WaitStatus::Exited(_, code)) => {
                return Err(format!("{path} can't go on with what the keeper holds (exit code {code})"));
            }
            _ => return Err(format!("{path} did not answer whether it can go on with what the keeper holds")),
        }
        let mut text = [0; 256];
        let length = nix::unistd::read(&answer, &mut text).unwrap_or(0);
        match String::from_utf8_lossy(&text[..length]) {
            text if text == PROOF => Ok(file),
            text => Err(format!("{path} answers {text:?} in place of {PROOF:?}: it is no vmmfd that can take over")),
        }
    }

    /// Executes a checked program in place of this one; if that fails, this program again. Returns only if both fail: the caller must
    /// end then.
    pub(super) fn execute(
        &self,
        file: &OwnedFd,
        role: Role,
        process: Option<BorrowedFd<'_>>,
        passed: &Passed<'_>,
    ) -> io::Error {
        let names = passed.names();
        let others = [(LINK, passed.server), (LISTENER, passed.listener), (ASKER, passed.asker), (SERVER, process)];
        let fds = passed.numbered(&names, others);
        sys::flush_stderr();
        match self.program(&executable(file), role, passed.words, &fds) {
            Ok(program) => program.execute(std::ffi::OsStr::from_bytes(THIS.as_bytes())),
            Err(error) => error,
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

/// The path at which an open file can be executed.
fn executable(file: &OwnedFd) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

/// A pidfd of a child, which is killed if there can be none.
fn pidfd_or_kill(pid: i32) -> io::Result<OwnedFd> {
    pidfd_of(pid).inspect_err(|_| {
        let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        let _ = waitpid(Pid::from_raw(pid), None);
    })
}

/// Starts a keeper for this process, which is a server. Returns the server's end of the connection.
///
/// # Errors
/// Those of socketpair(2), pidfd_open(2), fork(2) and execve(2).
pub(super) fn start_keeper() -> io::Result<(OwnedFd, Process)> {
    let (ours, theirs) = pair()?;
    let own = process::id().cast_signed();
    let server = pidfd_of(own)?;
    let fds = [(LINK, theirs.as_fd()), (SERVER, server.as_fd())];
    let pid = Image::of_this_process()?.program(Path::new(THIS), Role::Another(own), "", &fds)?.spawn()?;
    Ok((ours, Process::of_child(pid, pidfd_or_kill(pid)?)))
}

/// The connection that the keeper passed to this server, and that keeper.
pub(super) fn passed_by_keeper() -> io::Result<(OwnedFd, Process)> {
    let (mut link, mut keeper) = (None, None);
    for (name, fd) in sys::take_passed()? {
        match name.as_str() {
            LINK => link = Some(fd),
            KEEPER => keeper = Some(fd),
            _ => {}
        }
    }
    match (link, keeper) {
        (Some(link), Some(keeper)) => Ok((link, Process::of_parent(keeper))),
        _ => Err(io::ErrorKind::NotFound.into()),
    }
}

/// Answers whether a server of this build could go on with what is passed to this process.
///
/// # Errors
/// Why not.
pub fn check() -> Result<()> {
    let failed = |error| Error::system("take the descriptors that were passed", error);
    let (mut inherited, mut answer) = (Inherited::default(), None);
    for (name, fd) in sys::take_passed().map_err(failed)? {
        match name.strip_prefix(KEPT) {
            Some(kept) => inherited.add(kept.to_owned(), fd),
            None if name == ANSWER => answer = Some(fd),
            None => inherited.add(supervisor::name(&name), fd),
        }
    }
    crate::broker::server::check_catalogues(inherited.catalogues)?;
    match answer {
        Some(answer) => {
            let written = nix::unistd::write(&answer, PROOF.as_bytes());
            written.map(drop).map_err(|errno| Error::system("answer the keeper", errno))
        }
        None => Ok(()),
    }
}

/// How long until a moment.
pub(super) fn until(at: Instant) -> Duration {
    at.saturating_duration_since(Instant::now())
}
