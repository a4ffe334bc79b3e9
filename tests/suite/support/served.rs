//! `vmmfd serve` with its keeper, for tests that kill them. The keeper is the server's own or a separate `vmmfd keeper` service.

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

use super::{Kind, Subject, manager::Manager, open_files, pause, session::Session, stepper::children};
use crate::{
    broker::until,
    broker_process::{Raw, is_memory},
    running::binary,
};

/// The time limit of a wait.
const PATIENCE: Duration = Duration::from_secs(600);

/// The process that holds the descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keeper {
    /// The keeper of plain `vmmfd serve`.
    Own,
    /// `vmmfd keeper`: a minimal init restarts the keeper and the server.
    Apart,
}

/// A broker that tests can kill and restart.
pub(crate) struct Served {
    pub(crate) path: PathBuf,
    folder: TempDir,
    /// A separate folder: a test may delete the other folder.
    log_folder: TempDir,
    command: Vec<OsString>,
    first: Option<Session>,
    /// Runs the server.
    pub(crate) manager: Option<Manager>,
    pub(crate) keeper: Option<Manager>,
}

impl Served {
    pub(crate) fn start(keeper: Keeper, subject: &Subject) -> Self {
        Self::with(keeper, subject, &binary("vmmfd"), &[])
    }

    /// Like [`Self::start`], with another program and more options.
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
            Self { path, folder, log_folder, command: command.clone(), first: None, manager: None, keeper: None };
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

    /// The socket of a separate keeper.
    pub(crate) fn keeper_path(&self) -> PathBuf {
        self.log_folder.path().join("keeper").join("keeper.sock")
    }

    fn open_log(&self) -> fs::File {
        fs::OpenOptions::new().create(true).append(true).open(self.log_folder.path().join("log")).unwrap()
    }

    /// While this file exists, a server started by the init stops before exec.
    pub(crate) fn stop_flag(&self) -> PathBuf {
        self.folder.path().join("stop")
    }

    /// While this file exists, a keeper started by the init stops before exec.
    pub(crate) fn keeper_stop_flag(&self) -> PathBuf {
        self.folder.path().join("stop-keeper")
    }

    /// Starts a keeper. None may be running.
    pub(crate) fn start_again(&mut self) {
        let mut child = Command::new(&self.command[0]);
        child.args(&self.command[1..]).stdin(Stdio::null()).stdout(Stdio::null());
        for name in ["NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PID"] {
            child.env_remove(name);
        }
        child.stderr(fs::File::create(self.log_folder.path().join("log")).unwrap());
        self.first = Some(Session::start(&mut child).unwrap());
    }

    /// Returns the stderr of the keeper and its servers.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.log_folder.path().join("log")).unwrap_or_default()
    }

    /// Connects and exchanges hellos, as soon as a server accepts. Returns the connection and the server's pid.
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

    /// Returns the current server.
    #[track_caller]
    pub(crate) fn server(&self) -> Pid {
        self.greeted().1
    }

    /// Returns the current keeper.
    #[track_caller]
    pub(crate) fn keeper(&self) -> Pid {
        if let Some(keeper) = &self.keeper {
            return keeper.main(1);
        }
        let first = self.first.as_ref().map(|child| Pid::from_raw(child.id().cast_signed())).unwrap();
        if is_alive(first) {
            return first;
        }
        let begun = Instant::now();
        loop {
            // A keeper started by the server is a child of the server. A keeper that started the server is its parent.
            let server = self.server();
            if let Some(pid) =
                children(server).into_iter().find(|&pid| is_alive(pid)).or_else(|| parent_that_serves(server))
            {
                return pid;
            }
            assert!(begun.elapsed() < PATIENCE, "no keeper: {}", self.log());
            pause(begun);
        }
    }

    /// Kills the server and waits for the next one. Returns its pid and the time until its hello.
    #[track_caller]
    pub(crate) fn kill_server(&self) -> (Pid, Duration) {
        let old = self.server();
        let begun = Instant::now();
        kill(old, Signal::SIGKILL).unwrap();
        self.wait_for_another(old, begun)
    }

    /// Waits for a server other than `old`.
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

    /// Kills the keeper. Waits until the server's next keeper holds the same number of descriptors. The server keeps running.
    #[track_caller]
    pub(crate) fn kill_keeper(&mut self) {
        let old = self.keeper();
        let count = stored(old);
        kill(old, Signal::SIGKILL).unwrap();
        self.reap();
        let begun = Instant::now();
        loop {
            let new = self.keeper();
            if new != old && stored(new) >= count {
                return;
            }
            let counts = (count, stored(new));
            assert!(begun.elapsed() < PATIENCE, "{counts:?} descriptors of memory are stored anew: {}", self.log());
            pause(begun);
        }
    }

    /// Kills the server and the keeper at once, and waits until the socket refuses connections.
    #[track_caller]
    pub(crate) fn kill_both(&mut self) {
        let (server, keeper) = (self.server(), self.keeper());
        // A stopped keeper starts no server.
        kill(keeper, Signal::SIGSTOP).unwrap();
        kill(server, Signal::SIGKILL).unwrap();
        kill(keeper, Signal::SIGKILL).unwrap();
        self.reap();
        // A process's threads exit one by one, and its descriptors close with the last thread.
        until(|| Raw::dial(&self.path).is_err());
    }

    /// Waits until the log has this text so many times. Another thread writes the log.
    #[track_caller]
    pub(crate) fn wait_for_log(&self, text: &str, times: usize) {
        let begun = Instant::now();
        while self.log().matches(text).count() < times {
            assert!(begun.elapsed() < PATIENCE, "no {text:?} in: {}", self.log());
            pause(begun);
        }
    }

    /// Reaps the first keeper if it has exited.
    pub(crate) fn reap(&mut self) {
        if let Some(child) = &mut self.first {
            let pid = Pid::from_raw(child.id().cast_signed());
            if !is_alive(pid) {
                let _ = child.wait();
            }
        }
    }

    /// Stops the keeper with SIGTERM and waits for the exit. Returns the exit code of the first keeper, none for a later one.
    #[track_caller]
    pub(crate) fn stop(&mut self) -> Option<i32> {
        let keeper = self.keeper();
        kill(keeper, Signal::SIGTERM).unwrap();
        let begun = Instant::now();
        while is_alive(keeper) {
            assert!(begun.elapsed() < PATIENCE, "the keeper does not end: {}", self.log());
            pause(begun);
        }
        let child = self.first.as_mut().filter(|child| child.id().cast_signed() == keeper.as_raw());
        child.and_then(|child| child.wait().unwrap().code())
    }

    /// Counts the memory descriptors of the server and of its keeper. The two counts must match.
    pub(crate) fn kept(&self, server: Pid) -> (usize, usize) {
        (stored(server), stored(self.keeper()))
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.manager = None;
        self.keeper = None;
        self.first = None;
        if thread::panicking() {
            eprintln!("{}", self.log());
        }
        let left = with_argument(&self.path);
        assert!(left.is_empty() || thread::panicking(), "{left:?} outlive their test");
    }
}

/// Wraps a command in a shell that stops before exec while the file exists.
fn stoppable(command: Vec<OsString>, flag: &Path) -> Vec<OsString> {
    let stop = format!("[ ! -e {} ] || kill -STOP $$; exec \"$0\" \"$@\"", flag.display());
    ["/bin/sh".into(), "-c".into(), stop.into()].into_iter().chain(command).collect()
}

/// Lists the processes with this path on their command line.
pub(crate) fn with_argument(path: &Path) -> Vec<Pid> {
    let wanted = path.as_os_str().as_encoded_bytes();
    let pids = fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    let serves = |pid: &i32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.split(|&byte| byte == 0).any(|argument| argument == wanted)
    };
    pids.filter(serves).map(Pid::from_raw).collect()
}

/// Reports whether a process is stopped.
pub(crate) fn is_stopped(pid: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with(['T', 't']))
}

/// Reports whether a process is running. A zombie is not.
pub(crate) fn is_alive(pid: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(['Z', 'X']))
}

/// Returns the parent of a process, if the parent is `vmmfd serve`.
fn parent_that_serves(pid: Pid) -> Option<Pid> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let parent = stat.rsplit(") ").next()?.split_whitespace().nth(1)?.parse().ok()?;
    let line = fs::read(format!("/proc/{parent}/cmdline")).ok()?;
    line.split(|&byte| byte == 0).any(|argument| argument == b"serve").then(|| Pid::from_raw(parent))
}

/// Counts the memory and catalogue descriptors of a process. The history of crashes does not count: the first crash adds a descriptor to it.
pub(crate) fn stored(pid: Pid) -> usize {
    let files = open_files(pid).unwrap_or_default();
    files.iter().filter(|file| is_memory(&file.link.to_string_lossy())).count()
}

/// Replaces the program at `to` with a copy.
pub(crate) fn copied(from: &Path, to: &Path) {
    let beside = to.with_extension("new");
    // Copy in another process: a concurrently forked child of another test could keep the copy open for writing (ETXTBSY).
    assert!(Command::new("cp").arg(from).arg(&beside).status().unwrap().success());
    fs::rename(beside, to).unwrap();
}
