//! Finds or starts a server's keeper, and takes over its descriptors; the process at the other end of such a connection.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs, io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::{fs::MetadataExt, process::CommandExt},
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    unistd::geteuid,
};
use rustix::process::{Signal, pidfd_send_signal};

use super::{
    HANDOVER_TIMEOUT, Store,
    entries::Entry,
    handover::{Handover, NO_ANSWER, receive_all},
    message::{Message, Role, send},
};
use crate::{
    channel::{Cancel, Peer, Trust, connect_socket},
    error::{Error, Result, SocketError},
    sys::{self, pidfd_of},
};

/// The keeper of a [`Server`](crate::broker::Server): a process that also holds the server's descriptors, so that objects outlive the
/// server's process.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum KeeperPath {
    /// The path of the `vmmfd` program. The server runs it as `vmmfd keeper`, unless the keeper of an earlier server at the same path still
    /// runs, and starts another if it dies. The keeper listens at `PATH.keeper`, beside the broker's socket `PATH`, in its own session. It
    /// exits when a server exits on request without any version. Otherwise it holds the versions for the next server, without a time
    /// limit; SIGTERM ends it and frees them.
    Program(PathBuf),
    /// The socket of a `vmmfd keeper` that an init starts and restarts.
    Socket(PathBuf),
}

/// When a server that exits on request ends its keeper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ends {
    /// An init owns the keeper.
    Never,
    /// If the server has no versions.
    Unused,
    Always,
}

/// How a server gets its keeper.
#[derive(Debug)]
pub(in crate::broker) struct Link {
    /// Where the keeper listens.
    path: PathBuf,
    /// The program that this server starts as its keeper, unless an init starts it.
    program: Option<PathBuf>,
    /// More arguments for that program.
    arguments: Vec<OsString>,
    ends: Ends,
    /// Waits for the exit of the keeper that this server started.
    started: Option<JoinHandle<()>>,
}

/// A service's own program, even if the file at its path was replaced: server and keeper then have the same version.
const OWN_PROGRAM: &str = "/proc/self/exe";

/// How often to look for the socket of a keeper that was started.
const START_RETRY: Duration = Duration::from_millis(1);

impl Link {
    /// The link of the broker at a path.
    ///
    /// # Errors
    /// [`Error::System`] if there is no current folder.
    pub(in crate::broker) fn of(keeper: &KeeperPath, broker: &Path) -> Result<Self> {
        match keeper {
            KeeperPath::Socket(path) => Ok(Self::to(path)),
            KeeperPath::Program(program) => Self::starting(&absolute(program)?, Vec::new(), Ends::Unused, broker),
        }
    }

    /// The link of `vmmfd serve`, which starts its own program with `arguments` as its keeper.
    ///
    /// # Errors
    /// As for [`Link::of`].
    pub(in crate::broker) fn own(arguments: Vec<OsString>, broker: &Path) -> Result<Self> {
        Self::starting(Path::new(OWN_PROGRAM), arguments, Ends::Always, broker)
    }

    fn starting(program: &Path, arguments: Vec<OsString>, ends: Ends, broker: &Path) -> Result<Self> {
        let mut beside = absolute(broker)?.into_os_string();
        beside.push(".keeper");
        Ok(Self { path: beside.into(), program: Some(program.to_owned()), arguments, ends, started: None })
    }

    /// A link that starts no keeper.
    pub(super) fn to(path: &Path) -> Self {
        Self { path: path.to_owned(), program: None, arguments: Vec::new(), ends: Ends::Never, started: None }
    }

    /// Whether this server starts its keeper.
    pub(in crate::broker) fn starts_keeper(&self) -> bool {
        self.program.is_some()
    }

    /// Whether a server ends its keeper when it exits on request. `is_empty`: it has no names and no leases.
    pub(in crate::broker) fn ends_keeper(&self, is_empty: bool) -> bool {
        match self.ends {
            Ends::Never => false,
            Ends::Unused => is_empty,
            Ends::Always => true,
        }
    }

    /// Connects to the keeper. If none listens, starts one where this server does that, and returns `None`: try again soon. Does not wait.
    ///
    /// # Errors
    /// If no keeper can be reached or started.
    pub(in crate::broker) fn connect(&mut self) -> io::Result<Option<(OwnedFd, Process)>> {
        let in_full = |error: Error| io::Error::other(error.in_full());
        let cancel = Cancel::new().map_err(in_full)?;
        if !self.starts_keeper() {
            return dial(&self.path, Duration::ZERO, &cancel).map(Some).map_err(in_full);
        }
        match dial_if_there(&self.path, Duration::ZERO, &cancel).map_err(in_full)? {
            Some(connected) => Ok(Some(connected)),
            None => self.start().map(|()| None),
        }
    }

    /// Connects to the keeper if one listens.
    pub(in crate::broker) fn connect_if_there(&self) -> Option<(OwnedFd, Process)> {
        let cancel = Cancel::new().ok()?;
        dial_if_there(&self.path, Duration::ZERO, &cancel).ok().flatten()
    }

    /// Starts a keeper, unless one that this server started still runs. It takes over from a running keeper.
    ///
    /// # Errors
    /// All errors of fork(2) and execve(2).
    pub(in crate::broker) fn start(&mut self) -> io::Result<()> {
        if self.started.as_ref().is_some_and(|waiter| !waiter.is_finished()) {
            return Ok(());
        }
        self.start_another()
    }

    /// Starts a keeper that takes over from the one that this server started.
    ///
    /// # Errors
    /// As for [`Link::start`].
    pub(in crate::broker) fn start_another(&mut self) -> io::Result<()> {
        let Some(program) = &self.program else { return Ok(()) };
        let mut command = Command::new(program);
        command.args(["keeper", "--detached", "--socket"]).arg(&self.path).args(&self.arguments);
        if program == Path::new(OWN_PROGRAM) {
            command.arg0("vmmfd");
        }
        // Its standard error stays: a reader of standard output must see its end when this program exits.
        command.stdin(Stdio::null()).stdout(Stdio::null());
        // These are for this process only.
        for name in ["NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PID"] {
            command.env_remove(name);
        }
        let occupied = sys::occupy_standard();
        let mut child = command.spawn()?;
        drop(occupied);
        // Without this thread, a dead keeper would remain a zombie.
        let waiter = thread::Builder::new().name("keeper".to_owned()).spawn(move || drop(child.wait()))?;
        self.started = Some(waiter);
        Ok(())
    }

    /// Connects to the keeper of a starting server. Waits up to `wait` for an init's keeper, and for its own until it listens or dies.
    fn first_connection(&mut self, wait: Duration, cancel: &Cancel) -> Result<(OwnedFd, Process)> {
        let Some(program) = self.program.clone() else { return dial(&self.path, wait, cancel) };
        if let Some(running) = dial_if_there(&self.path, Duration::ZERO, cancel)? {
            return Ok(running);
        }
        let failed = |error: io::Error| Error::system(format!("start the keeper {}", program.display()), error);
        require_other_program(&program).and_then(|()| self.start()).map_err(failed)?;
        let deadline = Instant::now() + HANDOVER_TIMEOUT;
        loop {
            let is_dead = self.started.as_ref().is_none_or(JoinHandle::is_finished);
            if let Some(connected) = dial_if_there(&self.path, Duration::ZERO, cancel)? {
                return Ok(connected);
            }
            if is_dead {
                return Err(failed(io::Error::other("it died before it listened")));
            }
            if Instant::now() >= deadline {
                return Err(failed(io::Error::other(format!("it did not listen within {HANDOVER_TIMEOUT:?}"))));
            }
            cancel.pause(START_RETRY)?;
        }
    }

    /// Describes a failure to take over from the keeper.
    fn failed(&self, error: io::Error) -> Error {
        match &self.program {
            Some(program) if self.started.is_some() => {
                Error::system(format!("start the keeper {}", program.display()), error)
            }
            _ => unreachable(&self.path, error),
        }
    }
}

fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).map_err(|error| Error::system(format!("find {}", path.display()), error))
}

/// Rejects this process's own program as the keeper of an embedded server: it would start itself endlessly.
fn require_other_program(program: &Path) -> io::Result<()> {
    let file = |path: &Path| fs::metadata(path).map(|metadata| (metadata.dev(), metadata.ino()));
    if program != Path::new(OWN_PROGRAM) && file(program)? == file(Path::new(OWN_PROGRAM))? {
        return Err(io::Error::other("it is this program itself: give the path of the `vmmfd` program"));
    }
    Ok(())
}

/// The state that a starting server takes over.
#[derive(Debug)]
pub(in crate::broker) struct Takeover {
    pub(in crate::broker) store: Store,
    pub(in crate::broker) inherited: BTreeMap<u64, Entry>,
    /// Whether the set of descriptors is complete.
    pub(in crate::broker) whole: bool,
    pub(in crate::broker) link: Link,
    pub(in crate::broker) keeper: Process,
}

impl Takeover {
    /// Takes over from the keeper of the broker. Waits up to `wait` for an init's keeper to listen.
    ///
    /// # Errors
    /// [`Error::System`] if the keeper can't be reached or started, refuses this server or does not answer: without its descriptors, the
    /// server would start without objects.
    pub(in crate::broker) fn of(mut link: Link, wait: Duration, cancel: &Cancel) -> Result<Self> {
        let (socket, keeper) = link.first_connection(wait, cancel)?;
        take_over(socket, keeper, link, cancel)
    }

    /// Ends the keeper if this server started it, and fails to start.
    pub(in crate::broker) fn ender(&self) -> Option<impl FnOnce() + use<>> {
        self.link.started.as_ref()?;
        let connection = self.store.connection()?.try_clone_to_owned().ok()?;
        Some(move || end(&connection))
    }
}

fn end(socket: &OwnedFd) {
    // Fails if the keeper is gone.
    let _ = send(socket.as_fd(), &Message::Exit(String::new()), &[]);
}

/// Receives everything that the keeper holds. If it dies, continues with its twin, or with the received descriptors. Blocks.
pub(super) fn take_over(mut socket: OwnedFd, mut keeper: Process, link: Link, cancel: &Cancel) -> Result<Takeover> {
    let deadline = Instant::now() + HANDOVER_TIMEOUT;
    loop {
        let handover = receive_all(&socket, &keeper, Role::NextServer, cancel).map_err(|error| {
            if link.started.is_some() {
                end(&socket);
            }
            link.failed(error)
        })?;
        let Handover { entries, allowed, is_cut, .. } = handover;
        if is_cut {
            cancel.pause(RETRY)?;
            if Instant::now() < deadline
                && let Some(next) = dial_if_there(&link.path, Duration::ZERO, cancel)?
            {
                (socket, keeper) = next;
                continue;
            }
            if entries.descriptors() == 0 {
                return Err(link.failed(io::Error::other(NO_ANSWER)));
            }
            // These may be the last copies of the descriptors.
            tracing::error!(descriptors = entries.descriptors(), "the keeper died during the handover");
        }
        let store = Store::over((!is_cut).then_some(socket), usize::try_from(allowed).unwrap_or(usize::MAX));
        return Ok(Takeover { store, whole: entries.is_whole, inherited: entries.into_all(), link, keeper });
    }
}

/// How long a twin may take to listen in its own name after its keeper died.
const TWIN_WAIT: Duration = Duration::from_millis(50);

/// Retry interval while a twin takes over.
const RETRY: Duration = Duration::from_millis(1);

/// A server or a keeper, from the view of the other. Dropping this leaves the process running.
#[derive(Debug)]
pub(in crate::broker) struct Process {
    pub(in crate::broker) pid: i32,
    /// `None` if the process is not visible in this PID namespace.
    pidfd: Option<OwnedFd>,
}

impl Process {
    pub(super) fn of(pid: i32) -> Self {
        Self { pid, pidfd: pidfd_of(pid).ok() }
    }

    /// A process that must be visible.
    ///
    /// # Errors
    /// See pidfd_open(2).
    pub(super) fn visible(pid: i32) -> io::Result<Self> {
        Ok(Self { pid, pidfd: Some(pidfd_of(pid)?) })
    }

    /// Waits until the process has died.
    pub(super) fn wait_for_death(&self) {
        let Some(pidfd) = &self.pidfd else { return };
        let mut fds = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
        while matches!(poll(&mut fds, PollTimeout::NONE), Ok(0) | Err(Errno::EINTR)) {}
    }

    /// Readable once the process has died.
    pub(in crate::broker) fn pidfd(&self) -> Option<BorrowedFd<'_>> {
        self.pidfd.as_ref().map(AsFd::as_fd)
    }

    /// Whether the process is visible and has died.
    pub(in crate::broker) fn is_dead(&self) -> bool {
        self.pid > 0 && self.exits_within(Duration::ZERO)
    }

    /// Waits up to `wait` for the process to exit. A process without a pidfd counts as exited.
    pub(in crate::broker) fn exits_within(&self, wait: Duration) -> bool {
        self.pidfd.as_ref().is_none_or(|pidfd| ready(pidfd, PollFlags::POLLIN, wait))
    }

    /// Kills the process, even if it is stopped. Does not block.
    pub(in crate::broker) fn kill(&self) {
        if let Some(pidfd) = &self.pidfd {
            // Fails if the process has exited.
            let _ = pidfd_send_signal(pidfd, Signal::KILL);
        }
    }
}

/// A connected pair of sockets.
#[cfg(test)]
pub(super) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

/// Checks that the peer runs as this user.
pub(super) fn require_own_user(peer: Peer) -> Result<(), String> {
    let own = geteuid().as_raw();
    if peer.uid == own {
        return Ok(());
    }
    Err(format!(
        "pid {} runs as uid {}, and this process as uid {own}: keeper and server must run as the same user",
        peer.pid, peer.uid
    ))
}

/// Waits up to `wait` until a descriptor is ready. Returns whether it is.
pub(super) fn ready(fd: impl AsFd, flags: PollFlags, wait: Duration) -> bool {
    let mut fds = [PollFd::new(fd.as_fd(), flags)];
    poll(&mut fds, PollTimeout::try_from(wait).unwrap_or(PollTimeout::MAX)).is_ok_and(|count| count > 0)
}

/// The time left until `at`.
pub(super) fn until(at: Instant) -> Duration {
    at.saturating_duration_since(Instant::now())
}

/// Connects to the keeper at a path. Waits up to `wait` for a listener; `None` if there is none.
pub(super) fn dial_if_there(path: &Path, wait: Duration, cancel: &Cancel) -> Result<Option<(OwnedFd, Process)>> {
    let begun = Instant::now();
    loop {
        let (socket, peer) = match connect_socket(path, wait, &Trust::default(), cancel) {
            Ok(connected) => connected,
            Err(Error::Socket(SocketError::Absent { .. })) => return Ok(None),
            Err(error) => return Err(error),
        };
        require_own_user(peer).map_err(|why| unreachable(path, io::Error::other(why)))?;
        let keeper = Process::of(peer.pid);
        // The kernel reports the process that listened first, until its twin listens again.
        if !keeper.is_dead() || begun.elapsed() > wait.max(TWIN_WAIT) {
            return Ok(Some((socket, keeper)));
        }
        cancel.pause(RETRY)?;
    }
}

/// Connects to the keeper at a path. Waits up to `wait` for a listener.
pub(super) fn dial(path: &Path, wait: Duration, cancel: &Cancel) -> Result<(OwnedFd, Process)> {
    dial_if_there(path, wait, cancel)?.ok_or_else(|| {
        unreachable(path, io::Error::other("no keeper listens there; start one with `vmmfd keeper --socket PATH`"))
    })
}

pub(super) fn unreachable(path: &Path, error: io::Error) -> Error {
    Error::system(format!("reach the keeper at {}", path.display()), error)
}

/// Checks that a keeper of this user listens at a path.
///
/// # Errors
/// [`Error::System`] if there is none; [`Error::Socket`] if this user may not connect.
pub fn check_reachable(path: &Path, cancel: &Cancel) -> Result<()> {
    dial(path, Duration::ZERO, cancel).map(drop)
}
