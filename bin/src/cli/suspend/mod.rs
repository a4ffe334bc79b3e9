//! `suspend` and `resume`: the driver moves a program's GPU memory into host memory, and back.

mod engine;
mod ranks;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    env, fs,
    path::Path,
    sync::Mutex,
    thread,
    time::Instant,
};

use vmmfd::{
    bindings::lock,
    broker::Client,
    channel::{BrokerPath, Config},
    driver::{Choice, Driver, code, open},
    internals::{Checkpoints, ProcessState, TieCounts, command_of, units::count},
};

use self::engine::{Engine, EngineOptions};
use super::{leave_open, parse_timeout};
use crate::{cli::prelude::*, error::ToolError, verbs::HasVerbs};

/// Takes all GPU memory from a program, until `resume`
///
/// The driver moves the GPU memory of the process, and of all its children that use CUDA, into their host memory. Their calls of CUDA wait.
/// It needs driver 570 and the rights to trace the processes.
///
/// With --http, the engine of `vllm serve` sleeps first. If the suspend then fails, it wakes again.
///
/// The driver can't restore a process that has mapped another process's memory: park its leases first. The command refuses such a process,
/// and without --own-copies also a process with memory that it created to share. It also refuses ranks of one program that have a
/// communicator of NCCL, or whose engine publishes that they have mapped each other's memory; it can't see what other libraries have mapped.
///
/// If the command is killed halfway, `vmmfd resume` lets the program continue.
#[derive(Debug, Args)]
#[command(after_help = exit_codes!("suspended", "the memory of a process can't be restored later: nothing was changed"; 2 3 4 5 130))]
pub(super) struct SuspendOptions {
    /// Process, with its children
    #[arg(value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pid: u32,

    /// Suspend a program that has memory which it created to share: this becomes a copy, which it can use but not share any more
    #[arg(long, help_heading = "Processes")]
    own_copies: bool,

    /// Suspend ranks with a communicator of NCCL, although the command can't see whether they have mapped each other's memory: if they have,
    /// the program is lost
    #[arg(long, help_heading = "Processes")]
    ranks_apart: bool,

    /// Longest time to wait for calls of CUDA in progress
    #[arg(long, value_name = "TIME", value_parser = parse_timeout, default_value = "10s", help_heading = "Processes")]
    timeout: Duration,

    #[command(flatten)]
    engine: EngineOptions,

    /// How deeply the engine of --http sleeps: vLLM's level 1 or 2
    #[arg(long, value_name = "LEVEL", value_parser = clap::value_parser!(u8).range(1..=2), default_value = "1", requires = "http", help_heading = "Engine")]
    level: u8,
}

/// Gives a suspended program its GPU memory back
///
/// With --http, the engine of `vllm serve` then wakes.
#[derive(Debug, Args)]
#[command(after_help = exit_codes!("resumed"; 2 3 4 5 130))]
pub(super) struct ResumeOptions {
    /// Process, with its children
    #[arg(value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pid: u32,

    #[command(flatten)]
    engine: EngineOptions,
}

#[derive(Debug, Serialize, JsonSchema)]
struct SuspendReport {
    /// The processes that use CUDA.
    processes: Vec<ProcessLine>,
    /// The time of all steps together.
    seconds: f64,
    /// The part of it in which the server of `--http` let its engine sleep or wake.
    engine_seconds: Option<f64>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct ProcessLine {
    pid: u32,
    command: String,
    /// Whether it was suspended or resumed now; false if it already was.
    changed: bool,
}

impl Tool for SuspendOptions {
    const NAME: &'static str = "suspend";

    const REPORTS: &'static [Named] = &[("suspend", document::<Stamped<SuspendReport>>)];

    fn run(&self, Running { output, progress, cancel }: Running<'_>) -> anyhow::Result<ToolOutput> {
        let driver = cuda()?;
        let group = Group::of(driver.verbs().checkpoints()?, self.pid)?;
        progress.close();
        let began = Instant::now();
        let engine = self.engine.engine(cancel);
        let engine_seconds = group.suspend(self, engine, cancel)?;
        let report = group.report(|before| before == ProcessState::Running, began, engine_seconds);
        Ok(ToolOutput::of(output, Exit::Verified, report, |report, _| rendered(report, "suspended")))
    }

    fn grace(&self) -> Duration {
        self.engine.grace()
    }
}

impl Tool for ResumeOptions {
    const NAME: &'static str = "resume";

    const REPORTS: &'static [Named] = &[("resume", document::<Stamped<SuspendReport>>)];

    fn run(&self, Running { output, progress, cancel }: Running<'_>) -> anyhow::Result<ToolOutput> {
        let driver = cuda()?;
        let group = Group::of(driver.verbs().checkpoints()?, self.pid)?;
        progress.close();
        let began = Instant::now();
        group.resume()?;
        let awake_after = Instant::now();
        let woken = self.engine.engine(cancel).map(Engine::wake).transpose()?;
        let engine_seconds = woken.map(|()| awake_after.elapsed().as_secs_f64());
        let report = group.report(|before| before != ProcessState::Running, began, engine_seconds);
        Ok(ToolOutput::of(output, Exit::Verified, report, |report, _| rendered(report, "resumed")))
    }
}

fn cuda() -> Result<Driver> {
    let driver = open(Choice::Only(Backend::Cuda))?.driver;
    leave_open(&driver);
    Ok(driver)
}

fn rendered(report: &SuspendReport, done: &str) -> String {
    let mut text = String::new();
    for ProcessLine { pid, command, changed } in &report.processes {
        text += &format!("{pid:<9} {}  {command}\n", if *changed { done } else { "unchanged" });
    }
    let engine = report.engine_seconds.map(|seconds| format!(", of it {seconds:.2} s in the engine"));
    text + &format!("{done} in {:.2} s{}\n", report.seconds, engine.unwrap_or_default())
}

/// A process that uses CUDA.
#[derive(Debug)]
struct Process {
    pid: u32,
    command: String,
    /// Its state before the command.
    state: ProcessState,
}

/// A process and its descendants, as far as they use CUDA.
struct Group<'a> {
    driver: &'a dyn Checkpoints,
    processes: Vec<Process>,
}

impl<'a> Group<'a> {
    /// # Errors
    /// If none uses CUDA, or the driver does not report the state of one.
    fn of(driver: &'a dyn Checkpoints, pid: u32) -> Result<Self> {
        if !exists(pid) {
            return Err(failed(pid, "", "does not exist"));
        }
        let mut processes = Vec::new();
        // A program may suspend itself by this command, its child.
        for pid in family(pid).into_iter().filter(|&pid| pid != std::process::id()) {
            match driver.state(pid) {
                Ok(state) => processes.push(Process { pid, command: command(pid), state }),
                Err(Error::Driver { code: code::NOT_INITIALIZED, .. }) => {}
                Err(_) if !exists(pid) => {}
                Err(error @ Error::Load(_)) => return Err(error),
                Err(error) => {
                    return Err(failed(pid, &command(pid), &format!("can't be suspended: {error}")));
                }
            }
        }
        if processes.is_empty() {
            let problem = "does not use CUDA, nor does a child of it: there is no GPU memory to take";
            return Err(failed(pid, &command(pid), problem));
        }
        Ok(Self { driver, processes })
    }

    fn report(
        &self,
        changed: impl Fn(ProcessState) -> bool,
        began: Instant,
        engine_seconds: Option<f64>,
    ) -> SuspendReport {
        let processes = self.processes.iter().map(|process| ProcessLine {
            pid: process.pid,
            command: process.command.clone(),
            changed: changed(process.state),
        });
        SuspendReport { processes: processes.collect(), seconds: began.elapsed().as_secs_f64(), engine_seconds }
    }

    /// Suspends all processes or none. An engine sleeps before, and wakes after a failure. Returns the seconds in which it fell asleep.
    fn suspend(&self, options: &SuspendOptions, engine: Option<Engine<'_>>, cancel: &Cancel) -> Result<Option<f64>> {
        for Process { pid, command, state } in &self.processes {
            match state {
                ProcessState::Failed => return Err(failed(*pid, command, LOST)),
                ProcessState::Locked => return Err(locked(*pid, command)),
                ProcessState::Running | ProcessState::Checkpointed => {}
            }
        }
        let running: Vec<&Process> =
            self.processes.iter().filter(|process| process.state == ProcessState::Running).collect();
        ranks::check(&running, options.ranks_apart)?;
        let Some(engine) = engine.filter(|_| !running.is_empty()) else {
            return self.checkpoint(&running, options, cancel).map(|()| None);
        };
        let began = Instant::now();
        let was_awake = engine.sleep(options.level)?;
        let seconds = began.elapsed().as_secs_f64();
        self.checkpoint(&running, options, cancel).map(|()| Some(seconds)).map_err(|error| {
            let is_running = |process: &&Process| matches!(self.driver.state(process.pid), Ok(ProcessState::Running));
            match was_awake && running.iter().all(is_running) {
                true => engine.wake_after(error),
                false => error,
            }
        })
    }

    /// Suspends these processes or none.
    fn checkpoint(&self, running: &[&Process], options: &SuspendOptions, cancel: &Cancel) -> Result<()> {
        let SuspendOptions { timeout, own_copies, .. } = *options;
        check_ties(running, own_copies)?;
        // After a failure, this command unlocks only processes that it has locked itself.
        let ours = Mutex::new(Vec::new());
        let suspended = self
            .each(running, |process| {
                self.driver.lock(process.pid, timeout)?;
                lock(&ours).push(process.pid);
                Ok(())
            })
            .and_then(|()| {
                // No call of CUDA is in progress any more: the numbers are final.
                check_ties(running, own_copies)?;
                ranks::check(running, options.ranks_apart)?;
                let now = Self::of(self.driver, options.pid)?;
                match now.processes.iter().find(|of| self.processes.iter().all(|known| known.pid != of.pid)) {
                    Some(new) => Err(failed(new.pid, &new.command, "has begun to use CUDA meanwhile: try again")),
                    None => cancel.check(),
                }
            })
            .and_then(|()| {
                self.each(running, |process| {
                    // Before it can run again.
                    let announced = TieCounts::announce_checkpoint(process.pid);
                    announced.map_err(|error| Error::system("write to the process's memfd", error))?;
                    self.driver.checkpoint(process.pid)
                })
            });
        suspended.map_err(|error| {
            let ours = lock(&ours);
            let undo: Vec<&Process> = running.iter().copied().filter(|process| ours.contains(&process.pid)).collect();
            // Of two errors, a process that is not as before is worse.
            self.wake(&undo).err().unwrap_or(error)
        })
    }

    fn resume(&self) -> Result<()> {
        if let Some(lost) = self.processes.iter().find(|process| process.state == ProcessState::Failed) {
            return Err(failed(lost.pid, &lost.command, LOST));
        }
        self.wake(&self.processes.iter().collect::<Vec<_>>())
    }

    /// Lets processes run again, whatever their states. Tries it for each, also after a failure.
    fn wake(&self, processes: &[&Process]) -> Result<()> {
        let restored = self.each(processes, |process| match self.driver.state(process.pid)? {
            ProcessState::Checkpointed => self.driver.restore(process.pid),
            _ => Ok(()),
        });
        let unlocked = self.each(processes, |process| match self.driver.state(process.pid)? {
            ProcessState::Locked => self.driver.unlock(process.pid),
            _ => Ok(()),
        });
        let done = restored.and(unlocked);
        let is_held = |process: &&&Process| {
            matches!(self.driver.state(process.pid), Ok(ProcessState::Locked | ProcessState::Checkpointed))
        };
        let Some(Process { pid, command, .. }) = processes.iter().find(is_held) else { return done };
        let reason = done.err().map_or_else(String::new, |error| format!(": {error}"));
        Err(with_hint(*pid, command, &format!("is still suspended{reason}"), resume_hint(*pid)))
    }

    /// Runs a step for all processes at once. Returns the first error, once all steps have finished. Ignores the errors of processes that have
    /// exited.
    fn each(&self, processes: &[&Process], step: impl Fn(&Process) -> Result<()> + Sync) -> Result<()> {
        thread::scope(|scope| {
            let started: Vec<_> = processes.iter().map(|process| (process, scope.spawn(|| step(process)))).collect();
            let mut first = Ok(());
            for (process, thread) in started {
                let done = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                first = first.and(done.or_else(|error| match exists(process.pid) {
                    true => Err(failed(process.pid, &process.command, &format!("failed: {error}"))),
                    false => Ok(()),
                }));
            }
            first
        })
    }
}

const LOST: &str = "was lost by an earlier restore: end it";

fn locked(pid: u32, command: &str) -> Error {
    let problem = "is locked, by another program or by a `vmmfd suspend` that was killed";
    with_hint(pid, command, problem, resume_hint(pid))
}

fn resume_hint(pid: u32) -> Option<String> {
    Some(format!("`vmmfd resume {pid}` lets it continue"))
}

/// Refuses processes whose memory the driver can't restore.
fn check_ties(processes: &[&Process], own_copies: bool) -> Result<()> {
    for Process { pid, command, .. } in processes {
        let TieCounts { imported, own } = TieCounts::of(*pid)
            .map_err(|error| failed(*pid, command, &format!("can't be inspected: /proc/{pid}: {error}")))?;
        if imported == 0 && (own == 0 || own_copies) {
            continue;
        }
        let mut reasons = Vec::new();
        if imported > 0 {
            reasons.push(format!(
                "holds or has mapped {} of other processes{}",
                count(imported, "allocation"),
                leases_of(*pid)
            ));
        }
        if own > 0 {
            reasons.push(format!("has mapped {} of its own for others", count(own, "allocation")));
        }
        let (reason, remedy) = (reasons.join(", and "), UNTIE.to_owned());
        return Err(ToolError::Tied { pid: *pid, command: command.clone(), reason, remedy }.into());
    }
    Ok(())
}

const UNTIE: &str = "park or close its leases, and drop memory that it has put or served, then try again";

/// The leases of a process at this user's broker, in parentheses; empty if that broker has none, or does not answer.
fn leases_of(pid: u32) -> String {
    let names = || -> Result<BTreeSet<String>> {
        let socket = env::var_os("VMMFD_BROKER_SOCKET");
        let config = Config::default().timeout(Duration::from_secs(1));
        let held =
            Client::connect(BrokerPath::find(socket.as_deref().map(Path::new))?.path(), &config)?.who("")?.leases;
        let held = held.into_iter().filter(|lease| u32::try_from(lease.pid) == Ok(pid));
        Ok(held.map(|lease| format!("`{}` version {}", lease.name, lease.version)).collect())
    };
    let names: Vec<String> = names().unwrap_or_default().into_iter().collect();
    if names.is_empty() { String::new() } else { format!(" (its leases: {})", names.join(", ")) }
}

fn failed(pid: u32, command: &str, message: &str) -> Error {
    with_hint(pid, command, message, None)
}

fn with_hint(pid: u32, command: &str, message: &str, hint: Option<String>) -> Error {
    let process = if command.is_empty() { format!("process {pid}") } else { format!("process {pid} ({command})") };
    ToolError::Child { process, message: message.to_owned(), hint }.into()
}

/// Whether a process runs, which is not a thread of another one and not a zombie. See proc_pid_status(5).
fn exists(pid: u32) -> bool {
    let status = read(&format!("/proc/{pid}/status"));
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    field("Tgid:") == Some(&pid.to_string()) && !field("State:").is_some_and(|state| state.starts_with('Z'))
}

/// The name of a process's program; empty if it does not exist.
fn command(pid: u32) -> String {
    i32::try_from(pid).ok().and_then(command_of).unwrap_or_default()
}

/// A file's text. The kernel cuts names in the middle of a character.
fn read(path: &str) -> String {
    fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
}

/// A process and its descendants, by proc_pid_stat(5).
fn family(pid: u32) -> Vec<u32> {
    let mut children: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(child) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let stat = read(&format!("/proc/{child}/stat"));
        // The command in parentheses may itself contain parentheses.
        let parent = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(1)?.parse().ok());
        if let Some(parent) = parent {
            children.entry(parent).or_default().push(child);
        }
    }
    let mut family = Vec::new();
    let mut next = VecDeque::from([pid]);
    while let Some(pid) = next.pop_front() {
        family.push(pid);
        next.extend(children.remove(&pid).unwrap_or_default());
    }
    family
}
