//! A program that embeds the broker and names its keeper by path: `examples/embedded_broker.rs`.

#![allow(unsafe_code, reason = "a child asks to be traced")]

use std::{
    fs,
    io::{BufRead, BufReader},
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use nix::{
    libc,
    sys::{
        ptrace::{self, Options},
        signal::{Signal, kill},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::Pid,
};
use tempfile::TempDir;
use vmmfd::{
    broker::{Client, Get, Put, PutPart},
    memory::Region,
    session::Config,
};

use crate::{
    broker::{filled, until},
    examples,
    running::binary,
    support::{
        Subject,
        served::{copied, is_alive, with_argument},
        session::spawn_alone,
    },
};

/// The time limit of each wait.
const PATIENCE: Duration = Duration::from_secs(120);

/// Copies of the embedding program and of `vmmfd`, and the processes that run them.
struct Place {
    folder: TempDir,
    socket: PathBuf,
    program: PathBuf,
    vmmfd: PathBuf,
}

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let socket = at("broker.sock");
        let program = at("program");
        let vmmfd = at("vmmfd");
        copied(&examples::folder().join("embedded_broker"), &program);
        copied(&binary("vmmfd"), &vmmfd);
        Self { folder, socket, program, vmmfd }
    }

    fn command(&self, keeper: &Path) -> Command {
        let mut command = Command::new(&self.program);
        command.arg(&self.socket).arg(keeper).stdin(Stdio::piped()).stdout(Stdio::piped());
        command
    }

    /// Starts the program and waits until it serves. Afterwards its file can't be executed again.
    fn start(&self) -> Child {
        self.allow_execution(true);
        let mut child = spawn_alone(&mut self.command(&self.vmmfd));
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert!(line.starts_with("embedded_broker: listens on "), "{line:?}");
        self.allow_execution(false);
        child
    }

    fn allow_execution(&self, allowed: bool) {
        fs::set_permissions(&self.program, fs::Permissions::from_mode(if allowed { 0o700 } else { 0o600 })).unwrap();
    }

    /// Runs a program that must fail, and returns its error.
    fn fail(&self, keeper: &Path) -> String {
        self.allow_execution(true);
        let Output { status, stderr, .. } = self.command(keeper).output().unwrap();
        let stderr = String::from_utf8(stderr).unwrap();
        assert_eq!(status.code(), Some(1), "{stderr}");
        stderr
    }

    fn keeper_folder(&self) -> PathBuf {
        self.folder.path().join("broker.sock.keeper")
    }

    /// The running keepers.
    fn keepers(&self) -> Vec<Pid> {
        with_argument(&self.keeper_folder().join("keeper.sock"))
    }

    /// The only running keeper.
    #[track_caller]
    fn keeper(&self) -> Pid {
        let keepers = self.keepers();
        assert_eq!(keepers.len(), 1, "{keepers:?}");
        assert_eq!(fs::read_link(format!("/proc/{}/exe", keepers[0])).unwrap(), self.vmmfd);
        keepers[0]
    }

    fn client(&self) -> Client {
        Client::connect(&self.socket, &Config::default().timeout(PATIENCE)).unwrap()
    }

    fn put(&self, subject: &Subject, name: &str, value: u8) {
        let memory = filled(&subject.driver, 4 << 20, Some(2 << 20), value);
        self.client().put(&Put::new(name).part(PutPart::of("all", &memory).unwrap())).unwrap();
    }

    /// The last byte of an object.
    fn value(&self, subject: &Subject, name: &str) -> u8 {
        let object = self.client().get(&Get::new(name)).unwrap().open(&subject.driver, None).unwrap();
        let mut byte = [0];
        object.part("all").unwrap().memory().unwrap().copy_out((4 << 20) - 1, &mut byte).unwrap();
        byte[0]
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        for pid in with_argument(&self.socket).into_iter().chain(self.keepers()) {
            let _ = kill(pid, Signal::SIGKILL);
        }
    }
}

fn end_by(mut child: Child, signal: Signal) {
    kill(Pid::from_raw(child.id().cast_signed()), signal).unwrap();
    child.wait().unwrap();
}

/// Stops a program with an orderly shutdown.
#[track_caller]
fn stop(child: Child) {
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && String::from_utf8_lossy(&output.stdout).contains("ends with"), "{output:?}");
}

#[test]
fn embedded_objects_survive_kills() {
    let (subject, place) = (Subject::host(), Place::new());
    let mut program = place.start();
    let first = place.keeper();
    for value in 1..4 {
        place.put(&subject, &format!("object-{value}"), value);
        end_by(program, Signal::SIGKILL);
        assert!(is_alive(first));
        program = place.start();
        for earlier in 1..=value {
            assert_eq!(place.value(&subject, &format!("object-{earlier}")), earlier);
        }
    }
    assert_eq!(place.keeper(), first);
    // A killed keeper is replaced by the same program.
    kill(first, Signal::SIGKILL).unwrap();
    place.put(&subject, "object-4", 4);
    // The signal may end the keeper after the put.
    until(|| matches!(place.keepers()[..], [keeper] if keeper != first));
    let second = place.keeper();
    // An orderly shutdown keeps the objects too.
    stop(program);
    program = place.start();
    assert_eq!(place.keeper(), second);
    (1..5).for_each(|value| assert_eq!(place.value(&subject, &format!("object-{value}")), value));
    end_by(program, Signal::SIGKILL);
}

#[test]
fn unused_keeper_ends_with_its_program() {
    let (subject, place) = (Subject::host(), Place::new());
    for _ in 0..2 {
        let program = place.start();
        place.put(&subject, "object", 1);
        stop(program);
        let keeper = place.keeper();
        let program = place.start();
        assert_eq!((place.keeper(), place.value(&subject, "object")), (keeper, 1));
        place.client().delete("object").unwrap();
        stop(program);
        until(|| place.keepers().is_empty());
        assert!(!place.keeper_folder().exists() && !place.socket.exists());
    }
}

#[test]
fn keeper_outlives_closed_output() {
    let (subject, place) = (Subject::host(), Place::new());
    let program = place.start();
    place.put(&subject, "object", 1);
    kill(Pid::from_raw(program.id().cast_signed()), Signal::SIGKILL).unwrap();
    // The keeper does not hold the program's standard output open.
    program.wait_with_output().unwrap();
    place.keeper();
}

#[test]
fn unusable_keeper_programs_are_refused() {
    let place = Place::new();
    let missing = place.folder.path().join("missing");
    let said = place.fail(&missing);
    assert!(
        said.contains(&format!("start the keeper {}", missing.display())) && said.contains("No such file"),
        "{said}"
    );
    let said = place.fail(Path::new("/bin/true"));
    assert!(said.contains("start the keeper /bin/true") && said.contains("it died before"), "{said}");
    let said = place.fail(&place.program);
    assert!(said.contains("it is this program itself: give the path of the `vmmfd` program"), "{said}");
    // If the server fails to start, its keeper exits.
    fs::write(&place.socket, "no socket").unwrap();
    place.fail(&place.vmmfd);
    until(|| place.keepers().is_empty());
}

#[test]
fn second_program_leaves_the_keeper() {
    let (subject, place) = (Subject::host(), Place::new());
    let program = place.start();
    place.put(&subject, "object", 1);
    let keeper = place.keeper();
    let said = place.fail(&place.vmmfd);
    assert!(said.contains(&format!("it already serves pid {}", program.id())), "{said}");
    assert_eq!((place.keeper(), place.value(&subject, "object")), (keeper, 1));
    end_by(program, Signal::SIGKILL);
}

/// Runs a command with ptrace on it and its descendants, and returns the command line of each program that they execute. `body` runs
/// concurrently in this thread and must stop all of them.
fn executed(mut command: Command, body: impl FnOnce(Child)) -> Vec<Vec<String>> {
    let (sender, receiver) = mpsc::channel();
    let tracer = thread::spawn(move || {
        // SAFETY: the closure makes a single system call, which is async-signal-safe.
        unsafe { command.pre_exec(|| ptrace::traceme().map_err(Into::into)) };
        let child = command.spawn().unwrap();
        let first = Pid::from_raw(child.id().cast_signed());
        let mut sent = Some(child);
        let mut executed = Vec::new();
        let begun = Instant::now();
        loop {
            // `__WNOTHREAD`: other threads of this process have children too.
            let flags = WaitPidFlag::__WALL | WaitPidFlag::from_bits_retain(libc::__WNOTHREAD) | WaitPidFlag::WNOHANG;
            let (pid, signal) = match waitpid(None, Some(flags)) {
                Ok(WaitStatus::StillAlive) => {
                    assert!(begun.elapsed() < PATIENCE, "they do not end: {executed:?}");
                    thread::sleep(Duration::from_millis(1));
                    continue;
                }
                Ok(WaitStatus::Stopped(pid, Signal::SIGTRAP)) if sent.is_some() => {
                    assert_eq!(pid, first);
                    let options = Options::PTRACE_O_TRACEEXEC
                        | Options::PTRACE_O_TRACEFORK
                        | Options::PTRACE_O_TRACEVFORK
                        | Options::PTRACE_O_TRACECLONE
                        | Options::PTRACE_O_EXITKILL;
                    ptrace::setoptions(pid, options).unwrap();
                    executed.push(command_line(pid));
                    sender.send(sent.take().unwrap()).unwrap();
                    (pid, None)
                }
                Ok(WaitStatus::PtraceEvent(pid, _, libc::PTRACE_EVENT_EXEC)) => {
                    executed.push(command_line(pid));
                    (pid, None)
                }
                // A new process or thread stops once with SIGSTOP.
                Ok(WaitStatus::Stopped(pid, Signal::SIGSTOP)) => (pid, None),
                Ok(WaitStatus::Stopped(pid, signal)) => (pid, Some(signal)),
                Ok(WaitStatus::PtraceEvent(pid, ..)) => (pid, None),
                Ok(_) => continue,
                Err(_) => return executed,
            };
            // The call fails if the process was killed in the meantime.
            let _ = ptrace::cont(pid, signal);
        }
    });
    body(receiver.recv().unwrap());
    tracer.join().unwrap()
}

fn command_line(pid: Pid) -> Vec<String> {
    let executable = fs::read_link(format!("/proc/{pid}/exe")).unwrap().display().to_string();
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap();
    let arguments = line.split(|&byte| byte == 0).map(|argument| String::from_utf8_lossy(argument).into_owned());
    [executable].into_iter().chain(arguments.skip(1)).filter(|word| !word.is_empty()).collect()
}

#[test]
fn embedded_server_executes_only_its_keeper() {
    let (subject, place) = (Subject::host(), Place::new());
    let executed = executed(place.command(&place.vmmfd), |mut child| {
        let mut output = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(output.next().unwrap().unwrap().contains("listens on"));
        place.put(&subject, "object", 1);
        let keeper = place.keeper();
        kill(keeper, Signal::SIGKILL).unwrap();
        place.put(&subject, "other", 2);
        assert_ne!(place.keeper(), keeper);
        ["object", "other"].iter().for_each(|name| place.client().delete(name).unwrap());
        drop(child.stdin.take());
        assert_eq!(output.next().unwrap().unwrap(), "embedded_broker: ends with 0 objects");
    });
    let text = |path: &Path| path.display().to_string();
    let program = vec![text(&place.program), text(&place.socket), text(&place.vmmfd)];
    let socket = text(&place.keeper_folder().join("keeper.sock"));
    let keeper = vec![text(&place.vmmfd), "keeper".to_owned(), "--socket".to_owned(), socket];
    assert_eq!(executed, [program, keeper.clone(), keeper]);
}
