//! `vmmfd serve` with its keeper, to be killed: one that it starts, or `vmmfd keeper` as a service of its own.

use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tempfile::TempDir;
use vmmfd::wire::broker::Message;

use super::{Kind, Subject, manager::Manager, open_files, session::Session, stepper::children};
use crate::{
    broker_process::{Raw, is_memory},
    running::binary,
};

/// After how long a wait fails its test.
const PATIENCE: Duration = Duration::from_secs(600);

/// Which process holds the descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keeper {
    /// The one that plain `vmmfd serve` is.
    Own,
    /// `vmmfd keeper`: a stand-in for an init restarts it and the server.
    Apart,
}

/// A broker that may die.
pub(crate) struct Served {
    pub(crate) path: PathBuf,
    folder: TempDir,
    /// Of its own: a test may remove the other one.
    log_folder: TempDir,
    command: Vec<OsString>,
    supervisor: Option<Session>,
    /// Of the server, and of the keeper.
    pub(crate) manager: Option<Manager>,
    pub(crate) keeper: Option<Manager>,
}

impl Served {
    pub(crate) fn start(keeper: Keeper, subject: &Subject) -> Self {
        Self::with(keeper, subject, &binary("vmmfd"), &[])
    }

    /// The same, of another program and with these options.
    pub(crate) fn with(keeper: Keeper, subject: &Subject, program: &Path, options: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("broker.sock");
        let mut command: Vec<OsString> = vec![program.into(), "serve".into(), "--socket".into(), path.clone().into()];
        command.extend(options.iter().map(Into::into));
        if subject.kind == Kind::Fake {
            command.push("--emulated".into());
        }
        let log_folder = tempfile::tempdir().unwrap();
        let mut served =
            Self { path, folder, log_folder, command: command.clone(), supervisor: None, manager: None, keeper: None };
        match keeper {
            Keeper::Own => served.start_again(),
            Keeper::Apart => {
                let keeper = ["keeper".into(), "--socket".into(), served.keeper_path().into()];
                let keeper = [OsString::from(program)].into_iter().chain(keeper).collect();
                served.keeper = Some(Manager::start(stoppable(keeper, &served.keeper_stop_flag()), served.open_log()));
                command.extend(["--keeper".into(), served.keeper_path().into()]);
                served.manager = Some(Manager::start(stoppable(command, &served.stop_flag()), served.open_log()));
            }
        }
        served.greeted();
        served
    }

    /// Where a keeper apart listens.
    pub(crate) fn keeper_path(&self) -> PathBuf {
        self.log_folder.path().join("keeper").join("keeper.sock")
    }

    fn open_log(&self) -> fs::File {
        fs::OpenOptions::new().create(true).append(true).open(self.log_folder.path().join("log")).unwrap()
    }

    /// While this file is there, a server of the init stops before it executes its program.
    pub(crate) fn stop_flag(&self) -> PathBuf {
        self.folder.path().join("stop")
    }

    /// The same for a keeper of the init.
    pub(crate) fn keeper_stop_flag(&self) -> PathBuf {
        self.folder.path().join("stop-keeper")
    }

    /// Starts a supervisor, where there is none.
    pub(crate) fn start_again(&mut self) {
        let mut child = Command::new(&self.command[0]);
        child.args(&self.command[1..]).stdin(Stdio::null()).stdout(Stdio::null());
        for name in ["NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PID"] {
            child.env_remove(name);
        }
        child.stderr(fs::File::create(self.log_folder.path().join("log")).unwrap());
        self.supervisor = Some(Session::start(&mut child).unwrap());
    }

    /// What the supervisor and its servers have written on stderr.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.log_folder.path().join("log")).unwrap_or_default()
    }

    /// A connection over which hellos were exchanged, as soon as there can be one; and the server's pid.
    #[track_caller]
    pub(crate) fn greeted(&self) -> (Raw, Pid) {
        let begun = Instant::now();
        loop {
            let greeted = Raw::dial(&self.path).and_then(|raw| {
                raw.send(&Raw::hello(), &[])?;
                match raw.receive()? {
                    Some((Message::Hello(hello), _)) => Ok((raw, Pid::from_raw(hello.pid.cast_signed()))),
                    other => Err(std::io::Error::other(format!("{other:?}"))),
                }
            });
            match greeted {
                Ok(greeted) => return greeted,
                Err(error) => assert!(begun.elapsed() < PATIENCE, "it does not serve: {error}\n{}", self.log()),
            }
            thread::sleep(Duration::from_micros(500));
        }
    }

    /// The server that serves now.
    #[track_caller]
    pub(crate) fn server(&self) -> Pid {
        self.greeted().1
    }

    /// The supervisor that lives now.
    #[track_caller]
    pub(crate) fn supervisor(&self) -> Pid {
        if let Some(keeper) = &self.keeper {
            return keeper.main(1);
        }
        let first = self.supervisor.as_ref().map(|child| Pid::from_raw(child.id().cast_signed())).unwrap();
        if is_alive(first) {
            return first;
        }
        let begun = Instant::now();
        loop {
            // The one that the server started has the server for a parent; one that this one's server was started by is its parent.
            let server = self.server();
            if let Some(pid) =
                children(server).into_iter().find(|&pid| is_alive(pid)).or_else(|| parent_that_serves(server))
            {
                return pid;
            }
            assert!(begun.elapsed() < PATIENCE, "no supervisor: {}", self.log());
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Kills the server, and waits until another serves. Returns that one, and how long it took until its hello came.
    #[track_caller]
    pub(crate) fn kill_server(&self) -> (Pid, Duration) {
        let old = self.server();
        let begun = Instant::now();
        kill(old, Signal::SIGKILL).unwrap();
        self.wait_for_another(old, begun)
    }

    /// Waits until another server than this serves.
    #[track_caller]
    pub(crate) fn wait_for_another(&self, old: Pid, begun: Instant) -> (Pid, Duration) {
        loop {
            let new = self.server();
            if new != old {
                return (new, begun.elapsed());
            }
            assert!(begun.elapsed() < PATIENCE, "no other server than {old}: {}", self.log());
        }
    }

    /// Kills the supervisor, and waits until the server's next one keeps as much. The server goes on.
    #[track_caller]
    pub(crate) fn kill_supervisor(&mut self) {
        let old = self.supervisor();
        let count = stored(old);
        kill(old, Signal::SIGKILL).unwrap();
        self.reap();
        let begun = Instant::now();
        loop {
            let new = self.supervisor();
            if new != old && stored(new) >= count {
                return;
            }
            let counts = (count, stored(new));
            assert!(begun.elapsed() < PATIENCE, "{counts:?} descriptors of memory are stored anew: {}", self.log());
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Takes the end of the first supervisor from the kernel, if it has ended.
    pub(crate) fn reap(&mut self) {
        if let Some(child) = &mut self.supervisor {
            let pid = Pid::from_raw(child.id().cast_signed());
            if !is_alive(pid) {
                let _ = child.wait();
            }
        }
    }

    /// Asks the supervisor to end, and waits until it has. Returns its exit code, if it is the first one.
    #[track_caller]
    pub(crate) fn stop(&mut self) -> Option<i32> {
        let supervisor = self.supervisor();
        kill(supervisor, Signal::SIGTERM).unwrap();
        let begun = Instant::now();
        while is_alive(supervisor) {
            assert!(begun.elapsed() < PATIENCE, "the supervisor does not end: {}", self.log());
            thread::sleep(Duration::from_millis(1));
        }
        let child = self.supervisor.as_mut().filter(|child| child.id().cast_signed() == supervisor.as_raw());
        child.and_then(|child| child.wait().unwrap().code())
    }

    /// How many descriptors of memory the server and its keeper have: each as many as the other.
    pub(crate) fn kept(&self, server: Pid) -> (usize, usize) {
        (stored(server), stored(self.supervisor()))
    }

    /// What the server has resident, in KiB.
    pub(crate) fn resident(&self, pid: Pid) -> u64 {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().strip_suffix(" kB").unwrap().parse().unwrap()
    }
}

impl Drop for Served {
    /// Ends all of them.
    fn drop(&mut self) {
        (self.manager, self.keeper, self.supervisor) = (None, None, None);
        if thread::panicking() {
            eprintln!("{}", self.log());
        }
        let left = with_argument(&self.path);
        assert!(left.is_empty() || thread::panicking(), "{left:?} outlive their test");
    }
}

/// A command that stops before it executes its program, while a file is there.
fn stoppable(command: Vec<OsString>, flag: &Path) -> Vec<OsString> {
    let stop = format!("[ ! -e {} ] || kill -STOP $$; exec \"$0\" \"$@\"", flag.display());
    ["/bin/sh".into(), "-c".into(), stop.into()].into_iter().chain(command).collect()
}

/// The processes that have this path on their command lines.
pub(crate) fn with_argument(path: &Path) -> Vec<Pid> {
    let wanted = path.as_os_str().as_encoded_bytes();
    let pids = fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    let serves = |pid: &i32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.split(|&byte| byte == 0).any(|argument| argument == wanted)
    };
    pids.filter(serves).map(Pid::from_raw).collect()
}

/// Whether a process has been stopped.
pub(crate) fn is_stopped(pid: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with(['T', 't']))
}

/// Whether a process runs: a zombie does not.
pub(crate) fn is_alive(pid: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(['Z', 'X']))
}

/// The parent of a process, if it is a `vmmfd` too.
fn parent_that_serves(pid: Pid) -> Option<Pid> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let parent = stat.rsplit(") ").next()?.split_whitespace().nth(1)?.parse().ok()?;
    let line = fs::read(format!("/proc/{parent}/cmdline")).ok()?;
    line.split(|&byte| byte == 0).any(|argument| argument == b"serve").then(|| Pid::from_raw(parent))
}

/// How many descriptors of memory and catalogues a process has. The history of crashes, which has one more after the first, does not count.
pub(crate) fn stored(pid: Pid) -> usize {
    let files = open_files(pid).unwrap_or_default();
    files.iter().filter(|file| is_memory(&file.link.to_string_lossy())).count()
}

/// A copy of the program in a folder, to be replaced.
pub(crate) fn copied(from: &Path, to: &Path) {
    let beside = to.with_extension("new");
    // By a process of its own: no child that another test forks meanwhile holds the copy open for writing (ETXTBSY).
    assert!(Command::new("cp").arg(from).arg(&beside).status().unwrap().success());
    fs::rename(beside, to).unwrap();
}
