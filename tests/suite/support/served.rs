//! `vmmfd serve` with its keeper, for tests that kill them. A small init restarts the server. The keeper is the server's own or a service of
//! the init too.

use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tempfile::TempDir;
use vmmfd::wire::broker::Message;

use super::{Kind, Subject, manager::Manager, open_files, parent_of, pause};
use crate::{
    broker::until,
    broker_process::{Raw, is_memory},
    running::binary,
};

/// The time limit of a wait.
const PATIENCE: Duration = Duration::from_secs(60);

/// The process that holds the descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keeper {
    /// Plain `vmmfd serve` starts it.
    Own,
    /// The init starts it.
    Apart,
}

/// A broker that tests can kill and restart.
pub(crate) struct Served {
    pub(crate) path: PathBuf,
    folder: TempDir,
    /// A separate folder: a test may delete the other folder.
    log_folder: TempDir,
    /// Where the keeper listens.
    pub(crate) keeper_path: PathBuf,
    /// Runs the server.
    pub(crate) manager: Manager,
    /// Runs the keeper, unless the server starts it.
    keeper: Option<Manager>,
}

impl Served {
    pub(crate) fn start(keeper: Keeper, subject: &Subject) -> Self {
        Self::with(keeper, subject, &binary("vmmfd"), &[])
    }

    /// Like [`Self::start`], with another program and more options.
    pub(crate) fn with(keeper: Keeper, subject: &Subject, program: &Path, options: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let log_folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("broker.sock");
        let open_log = || {
            let log = log_folder.path().join("log");
            fs::OpenOptions::new().create(true).append(true).open(log).unwrap()
        };
        let mut command: Vec<OsString> = vec![program.into(), "serve".into(), "--socket".into(), path.clone().into()];
        command.extend(options.iter().map(Into::into));
        if subject.kind == Kind::Fake {
            command.push("--emulated".into());
        }
        let (keeper_path, keeper) = match keeper {
            Keeper::Own => (folder.path().join("broker.sock.keeper"), None),
            Keeper::Apart => {
                let keeper_path = log_folder.path().join("keeper").join("keeper.sock");
                command.extend(["--keeper".into(), keeper_path.clone().into()]);
                let keeper = [program.into(), "keeper".into(), "--socket".into(), keeper_path.clone().into()];
                let keeper = stoppable(keeper.into(), &folder.path().join(STOP_KEEPER));
                (keeper_path, Some(Manager::start(keeper, open_log())))
            }
        };
        let manager = Manager::start(stoppable(command, &folder.path().join(STOP_SERVER)), open_log());
        let served = Self { path, folder, log_folder, keeper_path, manager, keeper };
        served.greeted();
        served
    }

    /// The init of a separate keeper.
    #[track_caller]
    pub(crate) fn keeper_manager(&self) -> &Manager {
        self.keeper.as_ref().unwrap()
    }

    /// While this file exists, a server started by the init stops before exec.
    pub(crate) fn stop_flag(&self) -> PathBuf {
        self.folder.path().join(STOP_SERVER)
    }

    /// While this file exists, a keeper started by the init stops before exec.
    pub(crate) fn keeper_stop_flag(&self) -> PathBuf {
        self.folder.path().join(STOP_KEEPER)
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

    /// The processes of the keeper: itself, its twin, and during an upgrade its successor.
    pub(crate) fn keepers(&self) -> Vec<Pid> {
        with_argument(&self.keeper_path).into_iter().filter(|&pid| is_alive(pid) && !is_server(pid)).collect()
    }

    /// Returns the current keeper.
    #[track_caller]
    pub(crate) fn keeper(&self) -> Pid {
        let begun = Instant::now();
        loop {
            let keepers = self.keepers();
            let first: Vec<Pid> = keepers
                .iter()
                .copied()
                .filter(|&pid| parent_of(pid).is_some_and(|of| !keepers.contains(&of)))
                .collect();
            if let [keeper] = first[..] {
                return keeper;
            }
            assert!(begun.elapsed() < PATIENCE, "no single keeper: {first:?} {}", self.log());
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
    pub(crate) fn kill_keeper(&self) {
        let old = self.keeper();
        let count = stored(old);
        kill(old, Signal::SIGKILL).unwrap();
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

    /// Kills the server and the keeper at once, and waits until the socket refuses connections. [`Manager::start_again`] starts a server.
    #[track_caller]
    pub(crate) fn kill_both(&self) {
        let keeper = self.keeper();
        // A stopped keeper forks no twin.
        kill(keeper, Signal::SIGSTOP).unwrap();
        self.manager.stop(Signal::SIGKILL);
        kill(keeper, Signal::SIGKILL).unwrap();
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

    /// Stops the server with SIGTERM, and waits until the keeper that it started has exited too. Returns the exit code.
    #[track_caller]
    pub(crate) fn stop(&self) -> Option<i32> {
        let code = self.manager.stop(Signal::SIGTERM);
        if self.keeper.is_none() {
            until(|| self.keepers().is_empty());
        }
        code
    }

    /// Counts the memory descriptors of the server and of its keeper. The two counts must match.
    pub(crate) fn kept(&self, server: Pid) -> (usize, usize) {
        (stored(server), stored(self.keeper()))
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.manager.end();
        if let Some(keeper) = &mut self.keeper {
            keeper.end();
        }
        // A twin continues when its keeper is killed.
        let begun = Instant::now();
        let is_left = || !self.keepers().is_empty() || with_argument(&self.path).into_iter().any(is_alive);
        while is_left() && begun.elapsed() < PATIENCE {
            for pid in self.keepers() {
                // Fails if it has exited.
                let _ = kill(pid, Signal::SIGKILL);
            }
            pause(begun);
        }
        if thread::panicking() {
            eprintln!("{}", self.log());
        }
        let left = with_argument(&self.path);
        assert!(left.is_empty() || thread::panicking(), "{left:?} outlive their test");
    }
}

/// While these files exist, a process that the init starts stops before exec.
const STOP_SERVER: &str = "stop";
const STOP_KEEPER: &str = "stop-keeper";

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

/// Whether a process is `vmmfd serve`.
fn is_server(pid: Pid) -> bool {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    line.split(|&byte| byte == 0).any(|argument| argument == b"serve")
}

/// Counts the descriptors of memory in a process.
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
