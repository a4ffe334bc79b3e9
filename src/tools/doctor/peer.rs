//! Processes of the doctor's own: workers that run probes, and the other process of a probe that takes two.

use std::{
    fs,
    io::{self, Read, Write},
    mem,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{self, Child, ChildStdin, Command, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::Duration,
};

use nix::{
    sys::signal::{Signal, killpg},
    unistd::{Pid, getpgrp},
};
use serde::{Deserialize, Serialize};
use tracing_subscriber::filter::LevelFilter;

use super::{
    Environment, Finding, Status,
    control::{Control, Say},
    probes::{Bench, End, Probe, follow},
    report::Seen,
    runner::FOLDER,
};
use crate::{
    channel::{Cancel, Listener, Trust},
    driver::{Backend, Choice, cuda::exit_at_once, open},
    error::{Error, PeerError, Result},
    memory::{Device, Selector},
};

/// This program, also where it was replaced since it was started.
pub(super) const PROGRAM: &str = "/proc/self/exe";

/// The hidden subcommand that the program must hand to [`run_errand`].
pub const ERRAND: &str = "errand";

/// What a child is to do.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Errand {
    pub(super) backend: Backend,
    pub(super) folder: PathBuf,
    pub(super) timeout_ms: u64,
    pub(super) task: Task,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Task {
    /// Probes, in this order: each prints its finding as a line of JSON.
    Probes { device: Option<i32>, owner: Option<i32>, names: Vec<String> },
    /// The other end of probes that take two.
    Peer { control: PathBuf, socket: PathBuf },
}

impl Errand {
    /// The process that does it: it ends when its standard input does.
    pub(super) fn command(&self) -> Result<Command> {
        let text = serde_json::to_string(self).map_err(|error| Error::system("describe a child's task", error))?;
        let mut command = Command::new(PROGRAM);
        command.arg0("vmmfd").arg(ERRAND).arg(text).stdin(Stdio::piped());
        Ok(command)
    }

    fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout_ms)
    }

    fn device(&self, ordinal: i32) -> Result<Device> {
        let driver = open(Choice::Only(self.backend))?.driver;
        Device::find(&driver, Selector::Ordinal(u32::try_from(ordinal).unwrap_or(u32::MAX)))
    }
}

/// Does what the parent asks for, as a process of its own, and never returns.
pub fn run_errand(text: &str) -> ! {
    let code = match serde_json::from_str::<Errand>(text) {
        Ok(errand) => {
            end_with_parent(&errand.folder);
            match errand.run() {
                Ok(()) => 0,
                Err(error) => {
                    // Nobody may be reading any more.
                    let _ = writeln!(io::stderr(), "{}", error.in_full());
                    1
                }
            }
        }
        Err(_) => 2,
    };
    // A driver's own exit handlers have nothing to add, and may hang.
    exit_at_once(code)
}

/// Ends this process, and what it started, as soon as its parent is gone: it holds the other end of standard input.
fn end_with_parent(folder: &Path) {
    let folder = folder.to_owned();
    let watch = move || {
        let mut bytes = [0; 64];
        while !matches!(io::stdin().read(&mut bytes), Ok(0) | Err(_)) {}
        if getpgrp() == Pid::this() {
            // A worker: the doctor itself is gone, who would have removed it.
            if folder.file_name().is_some_and(|name| name.to_string_lossy().starts_with(FOLDER)) {
                let _ = fs::remove_dir_all(&folder);
            }
            let _ = killpg(Pid::this(), Signal::SIGKILL);
        }
        exit_at_once(1)
    };
    if thread::Builder::new().name("parent".to_owned()).spawn(watch).is_err() {
        exit_at_once(1);
    }
}

impl Errand {
    fn run(&self) -> Result<()> {
        match &self.task {
            Task::Probes { device, owner, names } => self.probe(*device, *owner, names),
            Task::Peer { control, socket } => {
                let cancel = Cancel::new()?;
                let trust = Trust::default();
                let mut control = Control::connect(control, self.timeout(), &trust, &cancel)?;
                let driver = match open(Choice::Only(self.backend)) {
                    Ok(opened) => opened.driver,
                    Err(error) => return control.send(&Say::Lent { error: Some(Seen::of(&error)) }),
                };
                control.greet(self.backend, &Environment::default())?;
                let end = End { driver, socket: socket.clone(), trust, timeout: self.timeout() };
                match follow(&end, &mut control, &mut |_| {}) {
                    // How the other end leaves is its own affair.
                    Ok(()) | Err(Error::Peer(PeerError::Gone { .. })) => Ok(()),
                    Err(error) => Err(error),
                }
            }
        }
    }

    fn probe(&self, device: Option<i32>, owner: Option<i32>, names: &[String]) -> Result<()> {
        let mut probes = names.iter().filter_map(|name| Probe::named(name));
        let Some(ordinal) = device else {
            return probes.try_for_each(|probe| match probe.run_machine(self.backend) {
                Some(finding) => tell(&finding),
                None => Ok(()),
            });
        };
        let opened = self.device(ordinal).and_then(|device| {
            let owner = owner.map(|owner| Device::find(device.driver(), Selector::Ordinal(owner.unsigned_abs())));
            Ok((device, owner.transpose()?))
        });
        let (device, owner) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                let seen = Seen::of(&error);
                return probes.try_for_each(|probe| tell(&probe.cut_short(None, seen.clone())));
            }
        };
        let log = Log::start();
        let mut bench = Bench { device, folder: self.folder.clone(), timeout: self.timeout(), peer: None };
        for probe in probes {
            let Some(mut finding) = probe.run_device(&mut bench, owner.as_ref()) else { continue };
            let logged = log.take();
            if finding.status == Status::Ok && !logged.is_empty() && !probe.alone {
                // What a destructor meets it can only log.
                finding.status = Status::Failed;
                finding.meaning = "It works, but what it took can't be given back.".to_owned();
                let kind = "teardown".to_owned();
                finding.error = Some(Seen { call: None, code: None, name: None, kind, message: logged });
            }
            tell(&finding)?;
            // A context that has failed fails everything after it: a fresh process goes on.
            if finding.status == Status::Failed && bench.device.verbs().synchronize(bench.device.ordinal()).is_err() {
                break;
            }
        }
        Ok(())
    }
}

/// The errors that are logged in this process.
#[derive(Debug, Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn start() -> Self {
        let log = Self::default();
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(LevelFilter::ERROR)
            .without_time()
            .with_ansi(false)
            .with_target(false)
            .with_level(false)
            .with_writer(move || writer.clone());
        // There is none yet: a process of this kind does nothing else.
        let _ = subscriber.try_init();
        log
    }

    /// The first line since the last time.
    fn take(&self) -> String {
        let bytes = mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        String::from_utf8_lossy(&bytes).lines().next().unwrap_or_default().to_owned()
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// One line, at once.
fn tell(finding: &Finding) -> Result<()> {
    let line = serde_json::to_string(finding).map_err(|error| Error::system("write a finding", error))?;
    let mut stdout = io::stdout().lock();
    let written = writeln!(stdout, "{line}").and_then(|()| stdout.flush());
    written.map_err(|error| Error::system("write a finding", error))
}

/// The other process of a probe. Dropping it kills it.
#[derive(Debug)]
pub(super) struct Peer {
    child: Child,
    /// As long as this is open, it lives.
    _stdin: Option<ChildStdin>,
    control: Control,
    socket: PathBuf,
}

impl Peer {
    /// Starts one, and waits until its driver is ready.
    pub(super) fn start(bench: &Bench) -> Result<Self> {
        static NUMBERS: AtomicU32 = AtomicU32::new(0);
        let name = format!("{}-{}", process::id(), NUMBERS.fetch_add(1, Ordering::Relaxed));
        let (control, socket) = (bench.folder.join(format!("c{name}")), bench.folder.join(format!("m{name}")));
        let cancel = Cancel::new()?;
        let patience = bench.patience();
        let listener = Listener::bind(&control, false, patience, &cancel)?;
        let backend = bench.device.backend();
        let timeout_ms = u64::try_from(patience.as_millis()).unwrap_or(u64::MAX);
        let task = Task::Peer { control: control.clone(), socket: socket.clone() };
        let errand = Errand { backend, folder: bench.folder.clone(), timeout_ms, task };
        let child = errand.command()?.stdout(Stdio::null()).stderr(Stdio::inherit()).spawn();
        let mut child = Fresh(Some(child.map_err(|error| Error::system("start another process", error))?));
        let mut living = || match child.0.as_mut().map(Child::try_wait) {
            Some(Ok(Some(_))) => Err(Error::Peer(PeerError::Gone { purpose: "for another process to start" })),
            _ => Ok(()),
        };
        let mut control = Control::accept(&listener, patience, &Trust::default(), &cancel, &mut living)?;
        control.greet(backend, &Environment::default())?;
        let child = child.0.take().ok_or(Error::Peer(PeerError::Gone { purpose: "for another process to start" }))?;
        Ok(Self { child, _stdin: None, control, socket }.keep())
    }

    fn keep(mut self) -> Self {
        self._stdin = self.child.stdin.take();
        self
    }

    pub(super) fn control(&mut self) -> &mut Control {
        &mut self.control
    }

    /// Where memory is handed over.
    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Kills it, and waits until it is gone.
    pub(super) fn kill(&mut self) {
        end(&mut self.child);
    }
}

/// A child that is killed if nobody takes it.
struct Fresh(Option<Child>);

impl Drop for Fresh {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            end(child);
        }
    }
}

fn end(child: &mut Child) {
    // It may have ended by itself.
    let _ = child.kill();
    let _ = child.wait();
    sweep(Path::new("/dev/shm"), child.id());
}

/// Removes what a process that was killed left in shared memory. The driver keeps a file there for each process, whose name has
/// the process's number in hexadecimal (`cuda.shm.0.29f.1`), and removes it when the process ends by itself.
pub(super) fn sweep(folder: &Path, pid: u32) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    let number = format!("{pid:x}");
    for entry in entries.flatten() {
        let name = entry.file_name();
        let mut parts = name.to_str().unwrap_or_default().split('.');
        let driver = [parts.next(), parts.next()] == [Some("cuda"), Some("shm")];
        if driver && parts.nth(1) == Some(&number) {
            // Another user's is not this one's to remove, and can't be.
            let _ = fs::remove_file(entry.path());
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.kill();
        // One that is killed while it lends leaves its socket.
        let _ = fs::remove_file(&self.socket);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_killed_process_left_in_shared_memory_goes_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let own = ["cuda.shm.0.29f.1", "cuda.shm.3e8.29f.12"];
        let others = ["cuda.shm.0.29.1", "cuda.shm.29f.1.1", "cuda.shm.0.29f0.1", "other.shm.0.29f.1", "cuda.shm.0"];
        for name in own.iter().chain(&others) {
            fs::write(folder.path().join(name), "").unwrap();
        }
        sweep(folder.path(), 0x29f);
        let there = |name: &&&str| folder.path().join(name).exists();
        assert_eq!((own.iter().filter(there).count(), others.iter().filter(there).count()), (0, others.len()));
        sweep(&folder.path().join("none"), 1);
    }
}
