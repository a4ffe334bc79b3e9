//! `vmmfd serve` in its own process, so that tests can kill it and count its descriptors and memory. A small init restarts the server. The
//! keeper is the server's own, a service of the init too, or absent.

use std::{ffi::OsString, fmt::Display};

use super::{Kind, Subject, manager::Manager, open_files, parent_of, pause};
use crate::support::prelude::*;

/// The time limit of a wait.
const PATIENCE: Duration = Duration::from_secs(60);

/// The process that holds the descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keeper {
    /// Plain `vmmfd serve` starts it.
    Own,
    /// The init starts it.
    Apart,
    /// The server runs alone.
    None,
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
        Self::under("exec", keeper, subject, program, options)
    }

    /// A server without a keeper.
    pub(crate) fn alone(options: &[&str]) -> Self {
        Self::with(Keeper::None, &Subject::host(), &binary("vmmfd"), options)
    }

    /// A server without a keeper that runs as another user, who may execute a copy of the program. Needs root.
    pub(crate) fn as_user(uid: u32, more: &str, options: &[&str]) -> Self {
        let place = tempfile::tempdir().unwrap();
        fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let program = place.path().join("vmmfd");
        copied(&binary("vmmfd"), &program);
        let shell = format!("{more} exec setpriv --reuid={uid} --regid={uid} --clear-groups");
        // The program runs already.
        Self::under(&shell, Keeper::None, &Subject::host(), &program, options)
    }

    /// Like [`Self::with`], with the words of the shell before the program.
    pub(crate) fn under(shell: &str, keeper: Keeper, subject: &Subject, program: &Path, options: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
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
            Keeper::None => {
                command.push("--no-keeper".into());
                (folder.path().join("none"), None)
            }
            Keeper::Apart => {
                let keeper_path = log_folder.path().join("keeper").join("keeper.sock");
                command.extend(["--keeper".into(), keeper_path.clone().into()]);
                let keeper = [program.into(), "keeper".into(), "--socket".into(), keeper_path.clone().into()];
                (keeper_path, Some(Manager::start(keeper.into(), open_log())))
            }
        };
        let manager = Manager::start(stoppable(command, &folder.path().join(STOP_SERVER), shell), open_log());
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

    /// Returns the stderr of the keeper and its servers.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.log_folder.path().join("log")).unwrap_or_default()
    }

    /// Connects and exchanges hellos, as soon as a server accepts. Returns the connection and the server's pid.
    #[track_caller]
    pub(crate) fn greeted(&self) -> (Raw, Pid) {
        let begun = Instant::now();
        loop {
            match Raw::greeted(&self.path) {
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

    /// The server's process, without a connection to it.
    pub(crate) fn pid(&self) -> Pid {
        self.manager.main(1)
    }

    /// A client that trusts the server's user.
    pub(crate) fn client(&self) -> Client {
        connect(&self.path).unwrap()
    }

    /// Runs `body` while the server is stopped.
    pub(crate) fn while_stopped<T>(&self, body: impl FnOnce() -> T) -> T {
        kill(self.pid(), Signal::SIGSTOP).unwrap();
        until(|| is_stopped(self.pid()));
        let result = body();
        kill(self.pid(), Signal::SIGCONT).unwrap();
        result
    }

    /// Waits until the broker has `others` connections besides this client's.
    #[track_caller]
    pub(crate) fn wait_for_others(&self, client: &Client, others: u64) {
        until(|| connections(client) == others + 1);
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
            let first = without_twins(&self.keepers());
            if let [keeper] = first[..] {
                return keeper;
            }
            assert!(begun.elapsed() < PATIENCE, "no single keeper: {first:?} {}", self.log());
            pause(begun);
        }
    }

    /// The server and the keeper, once both hold the same, at least `least` descriptors of memory, and no other process is left: the kill of
    /// one then loses nothing.
    pub(crate) fn settled(&self, least: usize) -> [Pid; 2] {
        until(|| {
            let keepers = self.keepers();
            keepers.len() == 1 && stored(keepers[0]) >= least && stored(self.server()) == stored(keepers[0])
        });
        [self.server(), self.keeper()]
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

/// While this file exists, a server that the init starts stops before exec.
const STOP_SERVER: &str = "stop";

/// Wraps a command in a shell that stops before exec while the file exists.
fn stoppable(command: Vec<OsString>, flag: &Path, shell: &str) -> Vec<OsString> {
    let stop = format!("[ ! -e {} ] || kill -STOP $$; {shell} \"$0\" \"$@\"", flag.display());
    ["/bin/sh".into(), "-c".into(), stop.into()].into_iter().chain(command).collect()
}

/// Connects to a broker of any user.
pub(crate) fn connect(path: &Path) -> vmmfd::Result<Client> {
    let uids = fs::metadata(path).map(|socket| socket.uid()).into_iter().collect();
    Client::connect(path, &Config::default().trust(Trust { uids }))
}

/// The connections of all users, until their leases have ended and they are closed.
pub(crate) fn connections(client: &Client) -> u64 {
    // The prefix matches no name: the list of leases may be very long.
    client.who("no name begins so").unwrap().totals.iter().map(|user| user.connections).sum()
}

/// The CPU time of a process in ns.
pub(crate) fn processor_time(pid: impl Display) -> u64 {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let times = tasks.filter_map(|task| fs::read_to_string(task.unwrap().path().join("schedstat")).ok());
    times.map(|times| times.split(' ').next().unwrap().parse::<u64>().unwrap()).sum()
}

/// A number in `/proc/PID/status`; memory is in KiB.
#[track_caller]
pub(crate) fn status(pid: Pid, field: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    line.trim_start_matches(':').trim().trim_end_matches(" kB").parse().unwrap()
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

/// The processes whose parent is none of them: keepers without their twins.
pub(crate) fn without_twins(pids: &[Pid]) -> Vec<Pid> {
    let is_first = |pid: &Pid| parent_of(*pid).is_some_and(|parent| !pids.contains(&parent));
    pids.iter().copied().filter(is_first).collect()
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

/// Counts the descriptors of a process with one of these names.
pub(crate) fn count_files(pid: Pid, names: &[&str]) -> usize {
    let files = open_files(pid).unwrap_or_default();
    files.iter().filter(|file| names.iter().any(|name| file.link.to_string_lossy().starts_with(name))).count()
}

/// Counts the descriptors of memory in a process.
pub(crate) fn stored(pid: Pid) -> usize {
    count_files(pid, &["/memfd:", "/dev/nvidia"])
}

/// Replaces the program at `to` with a copy.
pub(crate) fn copied(from: &Path, to: &Path) {
    let beside = to.with_extension("new");
    // Copy in another process: a concurrently forked child of another test could keep the copy open for writing (ETXTBSY).
    assert!(Command::new("cp").arg(from).arg(&beside).status().unwrap().success());
    fs::rename(beside, to).unwrap();
}
