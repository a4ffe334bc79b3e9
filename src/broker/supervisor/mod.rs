//! The supervisor: a process that keeps the server's descriptors, and starts the next server when one has died.
//!
//! It speaks the part of systemd's protocol that the server uses, in systemd's place. It reads what the server sent it until nothing is
//! left before it starts another: what the kernel took from a server is kept, however that server ended.

mod kept;

use std::{
    ffi::{OsStr, OsString},
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::{ffi::OsStrExt, net::UnixDatagram},
    },
    path::{Path, PathBuf},
    process, thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        resource::{Resource, getrlimit},
        signal::{SigSet, Signal, kill},
        signalfd::{SfdFlags, SignalFd},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::Pid,
};
use rustix::{
    fs::{Mode, OFlags},
    process::{PidfdFlags, Signal as PidfdSignal, pidfd_open, pidfd_send_signal},
};

use self::kept::KeptHere;
pub(super) use self::kept::receive;
use super::store::{Inherited, LIFE, NOTIFY, Notice, PEER, SERVER, SUPERVISOR, read_notice};
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

/// The program that this process executes, whatever is at its path now: only an upgrade executes another one, after it has proved
/// itself.
const THIS: &str = "/proc/self/exe";

/// The pipe over which a program proves that it can take over.
const ANSWER: &str = "ANSW";

/// The answer of a program that can: with the version of all that server and supervisor pass to and tell each other.
const PROOF: &str = "vmmfd serve: supervision 1, catalogue readable\n";

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
    /// To be the supervisor in place of an older build of it, whose server is to end for a newer one.
    Upgraded(i32),
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
            other => {
                let of = |word| other.strip_prefix(word).and_then(|pid| pid.parse().ok());
                of("another:").map(Self::Another).or(of("upgraded:").map(Self::Upgraded)).unwrap_or(Self::First)
            }
        }
    }

    fn text(self) -> OsString {
        match self {
            Self::First => OsString::new(),
            Self::Server => "server".into(),
            Self::Check => "check".into(),
            Self::Upgraded(pid) => format!("upgraded:{pid}").into(),
            Self::Another(pid) => format!("another:{pid}").into(),
        }
    }
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

    /// `file` executed in place of this program.
    fn program(
        &self,
        file: &Path,
        role: Role,
        more: &[(&str, OsString)],
        fds: &[(&str, BorrowedFd<'_>)],
    ) -> io::Result<sys::Program> {
        let mut variables = vec![(ROLE, role.text()), (PROGRAM, self.program.clone().into_os_string())];
        variables.extend(more.iter().cloned());
        sys::Program::new(file, self.arguments.iter().map(OsString::as_os_str), &variables, fds)
    }
}

/// The supervisor, as its server sees it. Dropping this leaves it running: it keeps everything for the next server.
#[derive(Debug)]
pub(super) struct SupervisorProcess {
    pidfd: OwnedFd,
    /// Its pid, if this process started it.
    child: Option<Pid>,
}

impl SupervisorProcess {
    /// The supervisor that started this process.
    pub(super) fn of_parent(pidfd: OwnedFd) -> Self {
        Self { pidfd, child: None }
    }

    /// A child of this process.
    fn of_child(pid: i32) -> io::Result<Self> {
        match pidfd_of(pid) {
            Ok(pidfd) => Ok(Self { pidfd, child: Some(Pid::from_raw(pid)) }),
            Err(error) => {
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
                let _ = waitpid(Pid::from_raw(pid), None);
                Err(error)
            }
        }
    }

    /// Kills it, also if it is stopped. Does not block.
    pub(super) fn kill(self) {
        // Fails if it has ended.
        let _ = pidfd_send_signal(&self.pidfd, PidfdSignal::KILL);
        if let Some(pid) = self.child {
            // Its end may take as long as a device needs. Without this thread it stays a zombie.
            let _ = thread::Builder::new().name("reaper".to_owned()).spawn(move || waitpid(pid, None));
        }
    }
}

/// A supervisor that a server has started.
pub(super) struct Another {
    pub(super) process: SupervisorProcess,
    /// The server's end of the sockets between them.
    pub(super) socket: UnixDatagram,
    /// Ends with it.
    pub(super) life: OwnedFd,
}

/// Starts another supervisor for this process, which is a server.
///
/// # Errors
/// Those of socketpair(2), pipe(2), pidfd_open(2), fork(2) and execve(2).
pub(super) fn start_another() -> io::Result<Another> {
    let (notify, peer) = pair()?;
    let (reader, writer) = pipe()?;
    let pid = process::id().cast_signed();
    let server = pidfd_of(pid)?;
    let socket = peer.try_clone()?;
    let fds = [(NOTIFY, notify.as_fd()), (PEER, peer.as_fd()), (LIFE, writer.as_fd()), (SERVER, server.as_fd())];
    let program = Image::of_this_process()?.program(Path::new(THIS), Role::Another(pid), &[], &fds)?;
    Ok(Another { process: SupervisorProcess::of_child(program.spawn()?)?, socket, life: reader })
}

/// The two ends of the protocol: the supervisor's and the server's. No other process can get at them.
fn pair() -> io::Result<(UnixDatagram, UnixDatagram)> {
    let (ours, theirs) = UnixDatagram::pair()?;
    ours.set_nonblocking(true)?;
    Ok((ours, theirs))
}

fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC)?)
}

/// A server that runs.
#[derive(Debug)]
struct Server {
    pid: i32,
    pidfd: OwnedFd,
    /// Ends with this process.
    life: OwnedFd,
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
    /// The two ends of the protocol: each server is passed the other one.
    notify: UnixDatagram,
    peer: UnixDatagram,
    kept: KeptHere,
    server: Option<Server>,
    /// Whether some server of this or an earlier supervisor has served.
    served: bool,
    /// Whether the server that runs has said that it serves, and that it ends because it was asked to.
    ready: bool,
    stopping: bool,
    /// Whether the server that runs is to end for one of this build.
    outdated: bool,
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
        let image = Image::of_this_process().map_err(failed)?;
        let passed = if role == Role::First { Vec::new() } else { sys::take_passed().map_err(failed)? };
        let (mut kept, mut notify, mut peer, mut life, mut pidfd) = (KeptHere::default(), None, None, None, None);
        for (name, fd) in passed {
            match name.as_str() {
                NOTIFY => notify = Some(UnixDatagram::from(fd)),
                PEER => peer = Some(UnixDatagram::from(fd)),
                LIFE => life = Some(fd),
                SERVER => pidfd = Some(fd),
                _ => kept.keep(name, fd),
            }
        }
        if role == Role::First {
            // Another broker may serve this path.
            Listener::check_free(socket)?;
        }
        let (notify, peer) = match (notify, peer) {
            (Some(notify), Some(peer)) => (notify, peer),
            _ => pair().map_err(failed)?,
        };
        let server = match (role, life, pidfd) {
            (Role::Another(pid) | Role::Upgraded(pid), Some(life), Some(pidfd)) => Some(Server { pid, pidfd, life }),
            _ => None,
        };
        let socket = socket.to_owned();
        let (served, ready, outdated) = (role != Role::First, server.is_some(), matches!(role, Role::Upgraded(_)));
        let (stopping, failures) = (false, 0);
        Ok(Self { image, socket, notify, peer, kept, server, served, ready, stopping, outdated, failures })
    }

    /// Supervises until it is asked to end (SIGTERM, SIGINT) or the server ends of itself. Returns the code that the process is to
    /// exit with. Blocks.
    ///
    /// # Errors
    /// [`Error::System`].
    pub(crate) fn run(mut self) -> Result<i32> {
        match self.supervise() {
            Ok(code) => Ok(self.finish(code)),
            Err(error) => {
                self.finish(0);
                Err(error)
            }
        }
    }

    fn supervise(&mut self) -> Result<i32> {
        let signals = SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP]);
        let failed = |errno: Errno| Error::system("wait for signals", errno);
        signals.thread_block().map_err(failed)?;
        let signals = SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK).map_err(failed)?;
        if std::mem::take(&mut self.outdated) {
            self.end_server(Signal::SIGHUP);
            (self.ready, self.stopping) = (false, false);
        }
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
                    Ok(signal) => {
                        return Ok(match self.end_server(Signal::SIGTERM) {
                            Some(End::Code(code)) => code,
                            Some(_) => 128 + signal as i32,
                            None => 0,
                        });
                    }
                    Err(_) => {}
                }
            }
            let Some(end) = self.server_end() else { continue };
            // What it sent before it died.
            self.read_notices();
            let ready = std::mem::take(&mut self.ready);
            match end {
                End::Code(code) if !self.served || self.stopping || code == 0 => return Ok(code),
                _ if self.stopping => return Ok(0),
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
        let supervisor = pidfd_of(process::id().cast_signed())?;
        let mut fds = vec![(LIFE, reader.as_fd()), (PEER, self.peer.as_fd()), (SUPERVISOR, supervisor.as_fd())];
        fds.extend(self.kept.all());
        let pid = self.image.program(Path::new(THIS), Role::Server, &Self::variables(), &fds)?.spawn()?;
        let SupervisorProcess { pidfd, .. } = SupervisorProcess::of_child(pid)?;
        (self.ready, self.stopping) = (false, false);
        self.server = Some(Server { pid, pidfd, life: writer });
        Ok(())
    }

    fn variables() -> [(&'static str, OsString); 1] {
        let most = getrlimit(Resource::RLIMIT_NOFILE).map_or(1024, |(soft, _)| soft).saturating_sub(OWN);
        [("FDSTORE", most.to_string().into())]
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
                Notice::Barrier => {
                    for fd in fds {
                        // Fails if the server has ended.
                        let _ = nix::unistd::write(&fd, &[1]);
                    }
                }
                Notice::Other(text) => self.heard(&text),
            }
        }
    }

    fn heard(&mut self, text: &str) {
        if text.lines().any(|line| line == "READY=1") {
            if let Some(server) = self.server.as_ref().filter(|_| self.served && !self.ready) {
                complain(&format!("the server runs again, as pid {}", server.pid));
            }
            (self.ready, self.served, self.failures) = (true, true, 0);
            Self::tell_systemd("READY=1");
        }
        if text.lines().any(|line| line == "STOPPING=1") {
            self.stopping = true;
        }
    }

    /// Passes on to systemd what it waits for, where it started this process with `Type=notify` and no store.
    pub(crate) fn tell_systemd(text: &str) {
        let Some(path) = std::env::var_os("NOTIFY_SOCKET") else { return };
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

    /// Asks the server to end, and waits for it.
    fn end_server(&mut self, signal: Signal) -> Option<End> {
        let server = self.server.as_ref()?;
        let pid = Pid::from_raw(server.pid);
        let _ = kill(pid, signal);
        let (deadline, mut killed) = (Instant::now() + STOP, false);
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
            if left.is_zero() && !std::mem::replace(&mut killed, true) {
                complain("the server does not end: it is killed");
                let _ = kill(pid, Signal::SIGKILL);
            }
            let _ =
                poll(&mut fds, PollTimeout::try_from(left.max(Duration::from_millis(20))).unwrap_or(PollTimeout::MAX));
        }
    }

    /// Closes everything, and removes the socket's file.
    fn finish(self, code: i32) -> i32 {
        let Self { socket, kept, .. } = self;
        drop(kept);
        let removed =
            Cancel::new().and_then(|cancel| Listener::remove_unserved(&socket, Duration::from_millis(200), &cancel));
        if let Err(error) = removed {
            tracing::debug!(%error, "the socket's file stays");
        }
        code
    }

    /// Goes on with the program that is at this one's path now: it is executed in place of this one, with all that is kept and the
    /// server that runs, which it then ends for one of its own. If that program can't, this one and its server go on.
    fn upgrade(&mut self) -> Result<()> {
        let path = self.image.program.display().to_string();
        let opened = self.open_program().map_err(|error| format!("{path} can't be opened: {error}"));
        let file = match opened.and_then(|file| self.check(&executable(&file)).map(|()| file)) {
            Ok(file) => file,
            Err(why) => {
                complain(&format!("no upgrade: {why}; the server goes on"));
                return Ok(());
            }
        };
        let role = Role::Upgraded(self.server.as_ref().map_or(0, |server| server.pid));
        let mut fds = vec![(NOTIFY, self.notify.as_fd()), (PEER, self.peer.as_fd())];
        if let Some(server) = &self.server {
            fds.extend([(LIFE, server.life.as_fd()), (SERVER, server.pidfd.as_fd())]);
        }
        fds.extend(self.kept.all());
        let program = self.image.program(&executable(&file), role, &[], &fds);
        let program = program.map_err(|error| Error::system("upgrade", error))?;
        sys::flush_stderr();
        // Everything here is passed on. If the program can't be executed this build is, which is as if nothing had been asked.
        let error = program.execute(OsStr::new(THIS));
        Err(Error::system(format!("execute {}", self.image.program.display()), error))
    }

    /// The program at this one's path: the same file is checked and then executed, even if another one replaces it meanwhile. Its
    /// number is above those that the next program is passed.
    fn open_program(&self) -> io::Result<OwnedFd> {
        let file = rustix::fs::open(&self.image.program, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        let above = self.kept.all().count() + usize::try_from(OWN).unwrap_or(usize::MAX);
        Ok(rustix::io::fcntl_dupfd_cloexec(&file, i32::try_from(above).unwrap_or(i32::MAX))?)
    }

    /// Has a program prove that it can take over.
    fn check(&mut self, file: &Path) -> std::result::Result<(), String> {
        let path = self.image.program.display().to_string();
        let (answer, writer) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC | nix::fcntl::OFlag::O_NONBLOCK)
            .map_err(|errno| errno.to_string())?;
        let mut fds: Vec<_> = self.kept.all().filter(|(name, _)| name.starts_with("CAT")).collect();
        fds.push((ANSWER, writer.as_fd()));
        let program = self.image.program(file, Role::Check, &Self::variables(), &fds);
        let pid =
            program.and_then(sys::Program::spawn).map_err(|error| format!("{path} can't be executed: {error}"))?;
        let pidfd = pidfd_of(pid).map_err(|error| error.to_string())?;
        let deadline = Instant::now() + STOP;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let mut fds =
                [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN), PollFd::new(self.notify.as_fd(), PollFlags::POLLIN)];
            let ready = poll(&mut fds, PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX));
            if ready == Ok(0) {
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
            let ended = fds[0].any().unwrap_or(false);
            // Puts go on meanwhile.
            self.read_notices();
            if ended || ready == Ok(0) {
                break;
            }
        }
        match waitpid(Pid::from_raw(pid), None) {
            Ok(WaitStatus::Exited(_, 0)) => {}
            Ok(WaitStatus::Exited(_, code)) => {
                return Err(format!("{path} can't go on with what is kept (exit code {code})"));
            }
            _ => return Err(format!("{path} did not say whether it can go on with what is kept")),
        }
        let mut text = [0; 256];
        let length = nix::unistd::read(&answer, &mut text).unwrap_or(0);
        match String::from_utf8_lossy(&text[..length]) {
            text if text == PROOF => Ok(()),
            text => Err(format!("{path} answers {text:?} in place of {PROOF:?}: it is no vmmfd that can take over")),
        }
    }
}

/// The path at which an open file can be executed.
fn executable(file: &OwnedFd) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

/// Says whether a server of this build could go on with what is passed to this process.
///
/// # Errors
/// Why not.
pub(crate) fn check() -> Result<()> {
    let passed = sys::take_passed().map_err(|error| Error::system("take the descriptors that were passed", error))?;
    let Inherited { catalogues, others, .. } = Inherited::of(passed);
    super::server::check_catalogues(catalogues)?;
    // An older supervisor looks at the exit code alone.
    match others.into_iter().find(|(name, _)| name == ANSWER) {
        Some((_, answer)) => {
            let written = nix::unistd::write(&answer, PROOF.as_bytes());
            written.map(drop).map_err(|errno| Error::system("answer the supervisor", errno))
        }
        None => Ok(()),
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
    line.push('\n');
    // Where that is closed nothing is to be seen.
    let _ = sys::Stderr.write_all(line.as_bytes());
}
