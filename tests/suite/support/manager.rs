//! A stand-in for systemd: a service with a store of descriptors, as systemd.exec(5), sd_notify(3) and sd_pid_notify_with_fds(3) say
//! and as its source does where they say nothing.
//!
//! - A descriptor of an open file that is in the store already is closed, and the name with it (`service_add_fd_store`, `same_fd`).
//! - One name is for all descriptors of a datagram. Without a name it is `stored`.
//! - What comes beyond `FileDescriptorStoreMax` is closed, and nothing says so.
//! - A descriptor that hangs up or fails leaves the store, unless it came with `FDPOLL=0`.
//! - A barrier's descriptor is closed once all before it was processed, whatever became of that.
//! - At the start `LISTEN_FDS`, `LISTEN_FDNAMES` (one string of the environment, so at most 128 KiB) and `LISTEN_PID`, the pid of the
//!   process that reads them; nothing of these where the store is empty.
//! - When the main process has ended, what it sent is read first, and then it is started again, with no pause (`RestartSec=0`,
//!   `StartLimitIntervalSec=0`).

#![allow(unsafe_code, reason = "descriptors are passed to a child, and kcmp")]

use std::{
    cmp::Ordering,
    ffi::OsString,
    io::{self, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
        unix::{net::UnixDatagram, process::CommandExt},
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Arc, Condvar, Mutex, MutexGuard},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use nix::{
    fcntl::{FcntlArg, fcntl},
    libc,
    sys::{
        prctl,
        signal::{Signal, kill},
        socket::{setsockopt, sockopt},
    },
    unistd::{Pid, pipe},
};
use rustix::{
    event::{PollFd, PollFlags, poll},
    net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags},
    process::{PidfdFlags, pidfd_open},
};
use tempfile::TempDir;

/// The first descriptor that is passed (`SD_LISTEN_FDS_START`).
const FIRST: RawFd = 3;

/// After how long a wait fails its test.
const PATIENCE: Duration = Duration::from_secs(600);

/// What the service is.
#[derive(Debug, Clone)]
pub(crate) struct Unit {
    /// `ExecStart`.
    pub(crate) command: Vec<OsString>,
    /// `Environment`.
    pub(crate) environment: Vec<(String, OsString)>,
    /// `FileDescriptorStoreMax`.
    pub(crate) store_max: usize,
    /// Whether it is started again when its main process has ended: `Restart=always`.
    pub(crate) restart: bool,
}

/// A descriptor that is kept.
#[derive(Debug)]
struct Stored {
    name: String,
    fd: OwnedFd,
    /// Whether it leaves when it hangs up.
    polled: bool,
}

#[derive(Debug, Default)]
struct State {
    store: Vec<Stored>,
    unit: Option<Unit>,
    /// The main process.
    main: Option<Pid>,
    starts: usize,
    /// Whether messages stay in the queue.
    paused: bool,
    stopping: bool,
    /// What was said, and what became of it.
    log: Vec<String>,
    /// The pids of all that were started.
    pids: Vec<Pid>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// The service manager. Its service is killed with it.
#[derive(Debug)]
pub(crate) struct Manager {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    wake: OwnedFd,
    folder: TempDir,
}

impl Manager {
    /// Starts a service. `NOTIFY_SOCKET` is in a folder of this manager.
    pub(crate) fn start(unit: Unit) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        setsockopt(&socket, sockopt::PassCred, &true).unwrap();
        let (sleeper, wake) = pipe().unwrap();
        let shared = Arc::new(Shared::default());
        shared.lock().unit = Some(unit);
        let manager = Arc::clone(&shared);
        // It starts the children: they are asked to end with this thread.
        let thread = thread::spawn(move || Runner { shared: manager, socket, path, sleeper }.run());
        Self { shared, thread: Some(thread), wake, folder }
    }

    /// `NOTIFY_SOCKET`.
    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join("notify")
    }

    fn wake(&self) {
        nix::unistd::write(&self.wake, b"w").unwrap();
    }

    /// Waits until the state is so, and returns what of it.
    #[track_caller]
    fn wait<T>(&self, what: &str, mut look: impl FnMut(&mut State) -> Option<T>) -> T {
        let begun = Instant::now();
        let mut state = self.shared.lock();
        loop {
            if let Some(found) = look(&mut state) {
                return found;
            }
            assert!(begun.elapsed() < PATIENCE, "{what}; the manager's log: {:#?}", state.log);
            state = self.shared.changed.wait_timeout(state, Duration::from_millis(50)).unwrap().0;
        }
    }

    /// The main process, as soon as there is one after so many starts.
    #[track_caller]
    pub(crate) fn main(&self, starts: usize) -> Pid {
        self.wait("the service does not start", |state| state.main.filter(|_| state.starts >= starts))
    }

    /// How often it was started.
    pub(crate) fn starts(&self) -> usize {
        self.shared.lock().starts
    }

    /// Kills the main process, and waits until the next one runs.
    #[track_caller]
    pub(crate) fn kill_main(&self) -> Pid {
        let starts = self.starts();
        kill(self.main(starts), Signal::SIGKILL).unwrap();
        self.main(starts + 1)
    }

    /// Waits until the main process has ended, and is not started again.
    #[track_caller]
    pub(crate) fn wait_for_end(&self) {
        self.wait("the service does not end", |state| state.main.is_none().then_some(()));
    }

    /// The names in the store, sorted.
    pub(crate) fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.shared.lock().store.iter().map(|stored| stored.name.clone()).collect();
        names.sort();
        names
    }

    /// Leaves what comes in the queue, or reads it again.
    pub(crate) fn pause(&self, paused: bool) {
        self.shared.lock().paused = paused;
        self.wake();
    }

    /// Whether the service is started again from now on.
    pub(crate) fn restart(&self, restart: bool) {
        let mut state = self.shared.lock();
        state.unit.as_mut().unwrap().restart = restart;
        drop(state);
        self.wake();
    }

    /// Puts a descriptor into the store itself, behind the service's back.
    pub(crate) fn put_in(&self, name: &str, fd: OwnedFd) {
        self.shared.lock().store.push(Stored { name: name.to_owned(), fd, polled: false });
    }

    /// What was said so far, and what became of it.
    pub(crate) fn log(&self) -> Vec<String> {
        self.shared.lock().log.clone()
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        self.shared.lock().stopping = true;
        self.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The manager's thread.
struct Runner {
    shared: Arc<Shared>,
    socket: UnixDatagram,
    path: PathBuf,
    sleeper: OwnedFd,
}

impl Runner {
    fn run(self) {
        let mut child: Option<(Child, OwnedFd)> = None;
        loop {
            let state = self.shared.lock();
            if state.stopping {
                break;
            }
            let (paused, restart) = (state.paused, state.unit.as_ref().is_some_and(|unit| unit.restart));
            let first = state.starts == 0;
            drop(state);
            if child.is_none() && (first || restart) {
                child = Some(self.start());
            }
            let ended = self.wait(paused, child.as_ref().map(|(_, end)| end.as_fd()));
            let mut state = self.shared.lock();
            // A pause applies from the moment that `pause` returns, also if it came during the wait.
            if state.paused {
                continue;
            }
            self.read_all(&mut state);
            if ended && let Some((mut gone, _)) = child.take() {
                // One that traces it may have taken its status.
                let _ = gone.wait();
                // What it sent before counts.
                self.read_all(&mut state);
                state.log.push("ended".to_owned());
                state.main = None;
            }
            self.shared.changed.notify_all();
        }
        if let Some((mut child, _)) = child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Waits until there is something to do. Returns whether the main process has ended.
    fn wait(&self, paused: bool, end: Option<BorrowedFd<'_>>) -> bool {
        let polled: Vec<(String, OwnedFd)> = {
            let state = self.shared.lock();
            let polled = state.store.iter().filter(|stored| stored.polled);
            polled.map(|stored| (stored.name.clone(), stored.fd.try_clone().unwrap())).collect()
        };
        let nothing = PollFlags::empty();
        let mut fds = vec![PollFd::new(&self.sleeper, PollFlags::IN)];
        fds.push(PollFd::new(&self.socket, if paused { nothing } else { PollFlags::IN }));
        fds.extend(polled.iter().map(|(_, fd)| PollFd::new(fd, nothing)));
        let last = fds.len();
        // Busy, it sees neither what was sent nor who has ended: and then both, in this order.
        if let Some(end) = end.as_ref().filter(|_| !paused) {
            fds.push(PollFd::new(end, PollFlags::IN));
        }
        let _ = poll(&mut fds, None);
        if fds[0].revents().contains(PollFlags::IN) {
            let _ = nix::unistd::read(&self.sleeper, &mut [0; 64]);
        }
        let ended = fds.len() > last && fds[last].revents().contains(PollFlags::IN);
        let hung: Vec<usize> = (2..last).filter(|&at| !fds[at].revents().is_empty()).map(|at| at - 2).collect();
        let mut state = self.shared.lock();
        for (name, fd) in hung.into_iter().map(|at| &polled[at]) {
            state.store.retain(|stored| stored.name != *name || !same(stored.fd.as_fd(), fd.as_fd()));
            state.log.push(format!("hung up {name}"));
            self.shared.changed.notify_all();
        }
        ended
    }

    fn read_all(&self, state: &mut State) {
        loop {
            let mut text = [0; 8192];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253), ScmCredentials(1))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
            let received = rustix::net::recvmsg(&self.socket, &mut [IoSliceMut::new(&mut text)], &mut ancillary, flags);
            let Ok(received) = received else { return };
            let rights = ancillary.drain().filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(fds) => Some(fds),
                _ => None,
            });
            let fds: Vec<OwnedFd> = rights.flatten().collect();
            let text = String::from_utf8_lossy(&text[..received.bytes]).into_owned();
            state.message(&text, fds);
        }
    }

    /// Starts the main process, with all that is stored.
    fn start(&self) -> (Child, OwnedFd) {
        let mut state = self.shared.lock();
        let unit = state.unit.clone().expect("a unit");
        let count = state.store.len();
        // Above those that they become: none is overwritten before its turn.
        let room = FIRST + RawFd::try_from(count).unwrap();
        let above = |stored: &Stored| fcntl(&stored.fd, FcntlArg::F_DUPFD_CLOEXEC(room)).unwrap();
        let passed: Vec<RawFd> = state.store.iter().map(above).collect();
        let names: Vec<&str> = state.store.iter().map(|stored| stored.name.as_str()).collect();
        let mut command = Command::new("/bin/sh");
        // The shell becomes the service: its pid is the one that reads them.
        let pid = if count > 0 { "export LISTEN_PID=$$; " } else { "" };
        command.arg("-c").arg(format!("{pid}exec \"$0\" \"$@\"")).args(&unit.command);
        command.env("NOTIFY_SOCKET", &self.path).env("FDSTORE", unit.store_max.to_string());
        for name in ["LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PID"] {
            command.env_remove(name);
        }
        if count > 0 {
            command.env("LISTEN_FDS", count.to_string()).env("LISTEN_FDNAMES", names.join(":"));
        }
        command.envs(unit.environment.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let in_child = passed.clone();
        let become_passed = move || {
            prctl::set_pdeathsig(Signal::SIGKILL)?;
            for (to, &from) in (FIRST..).zip(&in_child) {
                // SAFETY: both are numbers of this child alone; dup2(2) may be called after fork(2).
                if unsafe { libc::dup2(from, to) } == -1 {
                    return Err(io::Error::last_os_error());
                }
            }
            Ok(())
        };
        // SAFETY: it makes system calls only.
        unsafe { command.pre_exec(become_passed) };
        let child = command.spawn();
        for fd in passed {
            // SAFETY: it was made above and is this function's alone.
            drop(unsafe { <OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(fd) });
        }
        let child = child.unwrap();
        let pid = Pid::from_raw(child.id().cast_signed());
        let end = pidfd_open(rustix::process::Pid::from_child(&child), PidfdFlags::empty()).unwrap();
        state.starts += 1;
        state.main = Some(pid);
        state.pids.push(pid);
        state.log.push(format!("started with {count}"));
        self.shared.changed.notify_all();
        (child, end)
    }
}

impl State {
    /// One datagram, with its descriptors.
    fn message(&mut self, text: &str, fds: Vec<OwnedFd>) {
        let lines: Vec<&str> = text.lines().collect();
        if lines.contains(&"BARRIER=1") {
            // It stands alone, with one descriptor: else it is ignored.
            let valid = lines.len() == 1 && fds.len() == 1;
            self.log.push(if valid { "barrier" } else { "no barrier" }.to_owned());
            return;
        }
        let name = lines.iter().find_map(|line| line.strip_prefix("FDNAME="));
        // fdname_is_valid()
        let valid =
            |name: &&str| name.len() <= 255 && name.bytes().all(|byte| (32..127).contains(&byte) && byte != b':');
        let name = name.filter(valid);
        if lines.contains(&"FDSTOREREMOVE=1") {
            let Some(name) = name else { return self.log.push("remove without a name".to_owned()) };
            let before = self.store.len();
            self.store.retain(|stored| stored.name != name);
            self.log.push(format!("removed {name}: {}", before - self.store.len()));
        } else if lines.contains(&"FDSTORE=1") {
            let polled = !lines.contains(&"FDPOLL=0");
            let most = self.unit.as_ref().map_or(0, |unit| unit.store_max);
            let name = name.unwrap_or("stored").to_owned();
            for fd in fds {
                let line = if self.store.len() >= most {
                    format!("no room for {name}")
                } else if self.store.iter().any(|stored| same(stored.fd.as_fd(), fd.as_fd())) {
                    format!("{name} is stored already")
                } else {
                    self.store.push(Stored { name: name.clone(), fd, polled });
                    format!("stored {name}")
                };
                self.log.push(line);
            }
        } else {
            self.log.extend(lines.into_iter().map(str::to_owned));
        }
    }
}

/// Whether two descriptors are of one open file. See kcmp(2).
fn same(some: BorrowedFd<'_>, other: BorrowedFd<'_>) -> bool {
    const FILE: libc::c_int = 0;
    let pid = std::process::id();
    // SAFETY: it compares two descriptors that are borrowed, and touches no memory.
    let order = unsafe { libc::syscall(libc::SYS_kcmp, pid, pid, FILE, some.as_raw_fd(), other.as_raw_fd()) };
    assert_ne!(order, -1, "kcmp: {}", io::Error::last_os_error());
    order.cmp(&0) == Ordering::Equal
}

/// Sends the manager a message, as its service would.
pub(crate) fn notify(socket: &Path, text: &str, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    use sendfd::SendWithFd;
    let sender = UnixDatagram::unbound()?;
    sender.connect(socket)?;
    let fds: Vec<RawFd> = fds.iter().map(|fd| fd.as_raw_fd()).collect();
    if fds.is_empty() { sender.send(text.as_bytes()) } else { sender.send_with_fd(text.as_bytes(), &fds) }.map(drop)
}
