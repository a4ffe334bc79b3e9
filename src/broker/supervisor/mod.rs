//! The supervisor: a process that keeps the server's descriptors, and starts the next server when one has died.
//!
//! It speaks the part of systemd's protocol that the server uses, in systemd's place. It reads what the server sent it until nothing is
//! left before it starts another: what the kernel took from a server is kept, however that server ended.

mod kept;

use std::{
    ffi::OsString,
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::{ffi::OsStrExt, fs::PermissionsExt, net::UnixDatagram},
    },
    path::{Path, PathBuf},
    process,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        resource::{Resource, getrlimit, setrlimit},
        signal::{SigSet, Signal, kill},
        signalfd::{SfdFlags, SignalFd},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::Pid,
};
use rustix::process::{PidfdFlags, pidfd_open};

use self::kept::KeptHere;
pub(super) use self::kept::receive;
use super::store::{Inherited, LIFE, NOTIFY, Notice, read_notice};
use crate::{
    channel::{Cancel, Listener},
    error::{Error, Result},
    sys,
};

/// The variable of the environment that says what a process of `vmmfd serve` is.
const ROLE: &str = "VMMFD_SERVE_ROLE";

/// The variable with the path of the program: the kernel's own word for it changes when the file is replaced.
const PROGRAM: &str = "VMMFD_SERVE_PROGRAM";

/// How many descriptors the supervisor needs besides those that it keeps.
const OWN: u64 = 64;

/// How long a server may take to end that was asked to.
const STOP: Duration = Duration::from_secs(10);

/// The longest pause before a server is started again that never became ready.
const PAUSE: Duration = Duration::from_secs(5);

/// What a process of `vmmfd serve` is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// No process has said: to be the supervisor, unless systemd is.
    First,
    /// To serve, under a supervisor.
    Server,
    /// To say whether it could go on with what the supervisor keeps.
    Check,
    /// To be the supervisor, with what another one kept.
    Supervisor,
    /// To be the supervisor of a server that runs and has started this process.
    Another(i32),
}

impl Role {
    /// As the environment says.
    pub(crate) fn from_environment() -> Self {
        let role = std::env::var(ROLE).unwrap_or_default();
        match role.as_str() {
            "server" => Self::Server,
            "check" => Self::Check,
            "supervisor" => Self::Supervisor,
            other => match other.strip_prefix("another:").and_then(|pid| pid.parse().ok()) {
                Some(pid) => Self::Another(pid),
                None => Self::First,
            },
        }
    }

    fn text(self) -> OsString {
        match self {
            Self::First => OsString::new(),
            Self::Server => "server".into(),
            Self::Check => "check".into(),
            Self::Supervisor => "supervisor".into(),
            Self::Another(pid) => format!("another:{pid}").into(),
        }
    }
}

/// Where the supervisor of a socket is reached.
fn notify_path(socket: &Path) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(".store");
    path.into()
}

/// The program and its arguments: to start the same again.
#[derive(Debug, Clone)]
struct Image {
    program: PathBuf,
    arguments: Vec<OsString>,
}

impl Image {
    fn of_this_process() -> io::Result<Self> {
        let program = match std::env::var_os(PROGRAM) {
            Some(program) if Role::from_environment() != Role::First => PathBuf::from(program),
            _ => std::env::current_exe()?,
        };
        Ok(Self { program, arguments: std::env::args_os().collect() })
    }

    fn program(
        &self,
        role: Role,
        more: &[(&str, OsString)],
        fds: &[(&str, BorrowedFd<'_>)],
    ) -> io::Result<sys::Program> {
        let mut variables = vec![(ROLE, role.text()), (PROGRAM, self.program.clone().into_os_string())];
        variables.extend(more.iter().cloned());
        sys::Program::new(&self.program, self.arguments.iter().map(OsString::as_os_str), &variables, fds)
    }
}

/// A child process that is not waited for.
#[derive(Debug)]
pub(super) struct Child(i32);

impl Child {
    /// Takes its end from the kernel, if it has ended.
    pub(super) fn reap(self) {
        let _ = waitpid(Pid::from_raw(self.0), Some(WaitPidFlag::WNOHANG));
    }
}

/// Starts another supervisor for this process, which is a server: its socket is there when this returns. Returns it, and the pipe that
/// ends with it.
///
/// # Errors
/// Those of socket(2), bind(2), fork(2) and execve(2).
pub(super) fn start_another(path: &Path) -> io::Result<(Child, OwnedFd)> {
    let notify = bind_notify(path)?;
    let (reader, writer) = pipe()?;
    let fds = [(NOTIFY, notify.as_fd()), (LIFE, writer.as_fd())];
    let role = Role::Another(process::id().cast_signed());
    let program = Image::of_this_process()?.program(role, &[], &fds)?;
    Ok((Child(program.spawn()?), reader))
}

/// A socket at a path that only this user can reach. What was there is replaced.
fn bind_notify(path: &Path) -> io::Result<UnixDatagram> {
    let _ = std::fs::remove_file(path);
    let socket = UnixDatagram::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    socket.set_nonblocking(true)?;
    rustix::net::sockopt::set_socket_passcred(&socket, true)?;
    Ok(socket)
}

fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC)?)
}

/// A server that runs.
#[derive(Debug)]
struct Server {
    pid: i32,
    pidfd: OwnedFd,
    /// Whether this process started it, and so learns how it ended.
    own: bool,
    /// Ends with this process.
    _life: OwnedFd,
}

/// How a server ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Code(i32),
    Signal(i32),
    /// It was not this process's child.
    Unknown,
}

/// The supervisor.
#[derive(Debug)]
pub(crate) struct Supervisor {
    image: Image,
    socket: PathBuf,
    path: PathBuf,
    notify: UnixDatagram,
    kept: KeptHere,
    server: Option<Server>,
    /// Whether some server of this or an earlier supervisor has served.
    served: bool,
    /// Whether the server that runs has said that it serves, and that it ends because it was asked to.
    ready: bool,
    stopping: bool,
    /// How many servers in a row ended before they served.
    failures: u32,
}

impl Supervisor {
    /// The supervisor of the broker at a path, with what `role` says another one kept.
    ///
    /// # Errors
    /// [`Error::System`].
    pub(crate) fn new(socket: &Path, role: Role) -> Result<Self> {
        let failed = |error| Error::system("start the supervisor", error);
        let path = notify_path(socket);
        let image = Image::of_this_process().map_err(failed)?;
        let passed = if role == Role::First { Vec::new() } else { sys::take_passed().map_err(failed)? };
        let (mut kept, mut notify, mut life) = (KeptHere::default(), None, None);
        for (name, fd) in passed {
            match name.as_str() {
                NOTIFY => notify = Some(UnixDatagram::from(fd)),
                LIFE => life = Some(fd),
                _ => kept.keep(name, fd),
            }
        }
        if role == Role::First {
            // Another broker may serve this path: its supervisor keeps its socket then.
            Listener::check_free(socket)?;
        }
        let notify = match notify {
            Some(notify) => notify,
            None => bind_notify(&path)
                .map_err(|error| Error::system(format!("make the supervisor's socket {}", path.display()), error))?,
        };
        notify.set_nonblocking(true).map_err(failed)?;
        let server = match (role, life) {
            (Role::Another(pid), Some(life)) => {
                Some(Server { pid, pidfd: pidfd_of(pid).map_err(failed)?, own: false, _life: life })
            }
            _ => None,
        };
        let socket = socket.to_owned();
        let (served, ready) = (role != Role::First, server.is_some());
        Ok(Self { image, socket, path, notify, kept, server, served, ready, stopping: false, failures: 0 })
    }

    /// Supervises until it is asked to end (SIGTERM, SIGINT) or the server ends of itself. Returns the code that the process is to
    /// exit with. Blocks.
    ///
    /// # Errors
    /// [`Error::System`].
    pub(crate) fn run(mut self) -> Result<i32> {
        let signals = SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP]);
        let failed = |errno: Errno| Error::system("wait for signals", errno);
        signals.thread_block().map_err(failed)?;
        let signals = SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK).map_err(failed)?;
        let mut restart_at = self.server.is_none().then(Instant::now);
        loop {
            if restart_at.is_some_and(|at| at <= Instant::now()) {
                restart_at = match self.start_server() {
                    Ok(()) => None,
                    Err(error) if !self.served => return Err(Error::system("start the server", error)),
                    Err(error) => {
                        complain(&format!("the server can't be started: {error}"));
                        Some(self.pause())
                    }
                };
            }
            self.wait(&signals, restart_at)?;
            self.read_notices();
            while let Ok(Some(signal)) = signals.read_signal() {
                match Signal::try_from(signal.ssi_signo.cast_signed()) {
                    Ok(Signal::SIGHUP) => self.upgrade()?,
                    Ok(signal) => return Ok(self.stop(signal)),
                    Err(_) => {}
                }
            }
            let Some(end) = self.server_end() else { continue };
            // What it sent before it died.
            self.read_notices();
            let ready = std::mem::take(&mut self.ready);
            match end {
                _ if self.stopping => return Ok(self.finish(if let End::Code(code) = end { code } else { 0 })),
                End::Code(code) if !self.served => return Ok(self.finish(code)),
                End::Code(code) => complain(&format!("the server has ended with exit code {code}: another is started")),
                End::Signal(signal) => {
                    complain(&format!("the server was killed by signal {signal}: another is started"))
                }
                End::Unknown => complain("the server was killed: another is started"),
            }
            restart_at = Some(if ready { Instant::now() } else { self.pause() });
        }
    }

    /// When a server that never served is to be started again.
    fn pause(&mut self) -> Instant {
        self.failures = self.failures.saturating_add(1);
        let pause = Duration::from_millis(10 << self.failures.min(10)).min(PAUSE);
        Instant::now() + pause
    }

    fn wait(&self, signals: &SignalFd, until: Option<Instant>) -> Result<()> {
        let mut fds =
            vec![PollFd::new(signals.as_fd(), PollFlags::POLLIN), PollFd::new(self.notify.as_fd(), PollFlags::POLLIN)];
        fds.extend(self.server.as_ref().map(|server| PollFd::new(server.pidfd.as_fd(), PollFlags::POLLIN)));
        let timeout = match until {
            None => PollTimeout::NONE,
            Some(at) => {
                let left = at.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
                PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
            }
        };
        match poll(&mut fds, timeout) {
            Ok(_) | Err(Errno::EINTR) => Ok(()),
            Err(errno) => Err(Error::system("wait for the server", errno)),
        }
    }

    fn start_server(&mut self) -> io::Result<()> {
        let (reader, writer) = pipe()?;
        let mut fds = vec![(LIFE, reader.as_fd())];
        fds.extend(self.kept.all());
        let program = self.image.program(Role::Server, &self.variables(), &fds)?;
        let pid = program.spawn()?;
        let pidfd = pidfd_of(pid)?;
        (self.ready, self.stopping) = (false, false);
        self.server = Some(Server { pid, pidfd, own: true, _life: writer });
        Ok(())
    }

    fn variables(&self) -> [(&'static str, OsString); 2] {
        let most = getrlimit(Resource::RLIMIT_NOFILE).map_or(1024, |(soft, _)| soft).saturating_sub(OWN);
        [("NOTIFY_SOCKET", self.path.clone().into_os_string()), ("FDSTORE", most.to_string().into())]
    }

    /// Reads all that the server has sent.
    fn read_notices(&mut self) {
        loop {
            let (text, fds) = match receive(&self.notify) {
                Ok(Some(notice)) => notice,
                Ok(None) => return,
                Err(error) => return complain(&format!("the server's word can't be read: {error}")),
            };
            match read_notice(&text) {
                Notice::Keep(name) => fds.into_iter().for_each(|fd| self.kept.keep(name.clone(), fd)),
                Notice::Remove(name) => self.kept.remove(&name),
                // Closing the descriptor is the answer.
                Notice::Barrier => drop(fds),
                Notice::Other(text) => self.heard(&text),
            }
        }
    }

    fn heard(&mut self, text: &str) {
        if text.lines().any(|line| line == "READY=1") {
            if self.served && !self.ready && self.server.as_ref().is_some_and(|server| server.own) {
                let pid = self.server.as_ref().map_or(0, |server| server.pid);
                complain(&format!("the server runs again, as pid {pid}"));
            }
            (self.ready, self.served, self.failures) = (true, true, 0);
            self.tell_systemd("READY=1");
        }
        if text.lines().any(|line| line == "STOPPING=1") {
            self.stopping = true;
        }
    }

    /// Passes on to systemd what it waits for, where it started this process with `Type=notify` and no store.
    fn tell_systemd(&self, text: &str) {
        // A supervisor that a server started has the variable from that: it names its own socket.
        let Some(path) = std::env::var_os("NOTIFY_SOCKET").filter(|path| *path != self.path) else { return };
        let address = match path.as_bytes().strip_prefix(b"@") {
            Some(name) => rustix::net::SocketAddrUnix::new_abstract_name(name),
            None => rustix::net::SocketAddrUnix::new(Path::new(&path)),
        };
        let sent = UnixDatagram::unbound().and_then(|socket| {
            Ok(rustix::net::sendto(&socket, text.as_bytes(), rustix::net::SendFlags::DONTWAIT, &address?)?)
        });
        if let Err(error) = sent {
            tracing::debug!(%error, "systemd can't be told");
        }
    }

    /// How the server ended, if it has.
    fn server_end(&mut self) -> Option<End> {
        let server = self.server.as_ref()?;
        let mut fds = [PollFd::new(server.pidfd.as_fd(), PollFlags::POLLIN)];
        if poll(&mut fds, PollTimeout::ZERO) == Ok(0) {
            return None;
        }
        let end = match waitpid(Pid::from_raw(server.pid), Some(WaitPidFlag::WNOHANG)) {
            Ok(WaitStatus::Exited(_, code)) => End::Code(code),
            Ok(WaitStatus::Signaled(_, signal, _)) => End::Signal(signal as i32),
            _ => End::Unknown,
        };
        self.server = None;
        Some(end)
    }

    /// Ends the server, and then this process.
    fn stop(mut self, signal: Signal) -> i32 {
        let code = match self.end_server(Signal::SIGTERM) {
            Some(End::Code(code)) => code,
            Some(_) => 128 + signal as i32,
            None => 0,
        };
        self.finish(code)
    }

    /// Asks the server to end, and waits for it.
    fn end_server(&mut self, signal: Signal) -> Option<End> {
        let server = self.server.as_ref()?;
        let pid = Pid::from_raw(server.pid);
        let _ = kill(pid, signal);
        let deadline = Instant::now() + STOP;
        loop {
            self.read_notices();
            if let Some(end) = self.server_end() {
                self.read_notices();
                return Some(end);
            }
            let server = self.server.as_ref()?;
            let mut fds = [
                PollFd::new(server.pidfd.as_fd(), PollFlags::POLLIN),
                PollFd::new(self.notify.as_fd(), PollFlags::POLLIN),
            ];
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                complain("the server does not end: it is killed");
                let _ = kill(pid, Signal::SIGKILL);
            }
            let _ =
                poll(&mut fds, PollTimeout::try_from(left.max(Duration::from_millis(20))).unwrap_or(PollTimeout::MAX));
        }
    }

    /// Closes everything, and removes the files.
    fn finish(self, code: i32) -> i32 {
        let Self { socket, path, kept, notify, .. } = self;
        drop((kept, notify));
        let _ = std::fs::remove_file(&path);
        let removed =
            Cancel::new().and_then(|cancel| Listener::remove_unserved(&socket, Duration::from_millis(200), &cancel));
        if let Err(error) = removed {
            tracing::debug!(%error, "the socket's file stays");
        }
        code
    }

    /// Goes on with the program that is at this one's path now. If that one can't, this one and its server go on.
    fn upgrade(&mut self) -> Result<()> {
        if let Err(why) = self.check() {
            complain(&format!("no upgrade: {why}; the server goes on"));
            return Ok(());
        }
        self.end_server(Signal::SIGHUP);
        let mut fds = vec![(NOTIFY, self.notify.as_fd())];
        fds.extend(self.kept.all());
        let error = match self.image.program(Role::Supervisor, &[], &fds) {
            // Nothing else here is needed any more: the program finds what is passed.
            Ok(program) => program.execute(),
            Err(error) => error,
        };
        Err(Error::system(format!("execute {}", self.image.program.display()), error))
    }

    /// Asks the program at this one's path whether it could go on.
    fn check(&self) -> std::result::Result<(), String> {
        let path = self.image.program.display();
        let catalogues: Vec<_> = self.kept.all().filter(|(name, _)| name.starts_with("CAT")).collect();
        let program = self.image.program(Role::Check, &self.variables(), &catalogues);
        let pid =
            program.and_then(sys::Program::spawn).map_err(|error| format!("{path} can't be executed: {error}"))?;
        let pidfd = pidfd_of(pid).map_err(|error| error.to_string())?;
        let mut fds = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
        let limit = PollTimeout::try_from(STOP).unwrap_or(PollTimeout::MAX);
        if !matches!(poll(&mut fds, limit), Ok(1..)) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        match waitpid(Pid::from_raw(pid), None) {
            Ok(WaitStatus::Exited(_, 0)) => Ok(()),
            Ok(WaitStatus::Exited(_, code)) => Err(format!("{path} can't go on with what is kept (exit code {code})")),
            _ => Err(format!("{path} did not say whether it can go on with what is kept")),
        }
    }
}

/// Says whether a server of this build could go on with what is passed to this process.
///
/// # Errors
/// Why not.
pub(crate) fn check() -> Result<()> {
    let passed = sys::take_passed().map_err(|error| Error::system("take the descriptors that were passed", error))?;
    super::server::check_catalogues(Inherited::of(passed).catalogues)
}

/// Raises the limit of open files as far as it may be: what is kept has a descriptor each.
pub(crate) fn raise_limit() {
    if let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE)
        && soft < hard
        && let Err(errno) = setrlimit(Resource::RLIMIT_NOFILE, hard, hard)
    {
        tracing::warn!(%errno, soft, hard, "cannot raise the limit of open files");
    }
}

fn pidfd_of(pid: i32) -> io::Result<OwnedFd> {
    let pid = rustix::process::Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(pidfd_open(pid, PidfdFlags::empty())?)
}

/// Says on standard error what an operator should see.
fn complain(text: &str) {
    use std::io::Write;
    let mut line = format!("broker    supervisor {text}");
    crate::wire::clean(&mut line);
    // Where that is closed nothing is to be seen.
    let _ = writeln!(io::stderr(), "{line}");
}
