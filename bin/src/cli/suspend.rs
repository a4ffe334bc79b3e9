//! `suspend` and `resume`: the driver moves a program's GPU memory into host memory, and back.

use std::{
    collections::{BTreeMap, VecDeque},
    fs, thread,
    time::{Duration, Instant},
};

use clap::Args;
use schemars::JsonSchema;
use serde::Serialize;
use vmmfd::{
    driver::{Backend, Choice, Driver, code, open},
    error::{Error, Result},
    internals::{Checkpoints, ProcessState, Ties},
};

use super::{Exit, Running, Tool, ToolOutput, exit::exit_codes, leave_open, parse_timeout, report::Stamped};
use crate::{
    error::ToolError,
    schema::{Named, document},
    verbs::HasVerbs,
};

/// Takes all GPU memory from a program, until `resume`
///
/// The driver moves the GPU memory of the process, and of all its children that use CUDA, into their host memory. Their calls of CUDA wait.
/// It needs driver 570 and the rights to trace the processes.
///
/// The driver can't restore a process that has mapped another process's memory: park its leases first. The command refuses such a process,
/// and without --own-copies also a process with memory that it created to share. It sees memory of this library only: libraries
/// that share memory between processes themselves, such as NCCL, must be set up without that.
#[derive(Debug, Args)]
#[command(after_help = exit_codes!("suspended", "the memory of a process can't be restored later: nothing was changed"; 2 3 5 130))]
pub(super) struct SuspendOptions {
    /// Process, with its children
    #[arg(value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pid: u32,

    /// Suspend a program that has memory which it created to share: this becomes a copy, which it can use but not share any more
    #[arg(long, help_heading = "Processes")]
    own_copies: bool,

    /// Longest time to wait for calls of CUDA in progress
    #[arg(long, value_name = "TIME", value_parser = parse_timeout, default_value = "10s", help_heading = "Processes")]
    timeout: Duration,
}

/// Gives a suspended program its GPU memory back
#[derive(Debug, Args)]
#[command(after_help = exit_codes!("resumed"; 2 3 5 130))]
pub(super) struct ResumeOptions {
    /// Process, with its children
    #[arg(value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pid: u32,
}

#[derive(Debug, Serialize, JsonSchema)]
struct SuspendReport {
    /// The processes that use CUDA.
    processes: Vec<ProcessLine>,
    /// The time of all steps together.
    seconds: f64,
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

    fn run(&self, Running { output, progress, .. }: Running<'_>) -> anyhow::Result<ToolOutput> {
        let driver = cuda()?;
        let group = Group::of(driver.verbs().checkpoints()?, self.pid)?;
        progress.close();
        let began = Instant::now();
        group.suspend(self.timeout, self.own_copies)?;
        Ok(ToolOutput::of(output, Exit::Verified, group.report(ProcessState::Running, began), |report, _| {
            rendered(report, "suspended")
        }))
    }
}

impl Tool for ResumeOptions {
    const NAME: &'static str = "resume";

    const REPORTS: &'static [Named] = &[("resume", document::<Stamped<SuspendReport>>)];

    fn run(&self, Running { output, progress, .. }: Running<'_>) -> anyhow::Result<ToolOutput> {
        let driver = cuda()?;
        let group = Group::of(driver.verbs().checkpoints()?, self.pid)?;
        progress.close();
        let began = Instant::now();
        group.resume()?;
        Ok(ToolOutput::of(output, Exit::Verified, group.report(ProcessState::Checkpointed, began), |report, _| {
            rendered(report, "resumed")
        }))
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
    text + &format!("{done} in {:.2} s\n", report.seconds)
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
    /// If none uses CUDA.
    fn of(driver: &'a dyn Checkpoints, pid: u32) -> Result<Self> {
        let mut processes = Vec::new();
        let mut first = None;
        // A program may suspend itself by this command, its child.
        for pid in family(pid).into_iter().filter(|&pid| pid != std::process::id()) {
            match driver.state(pid) {
                Ok(state) => processes.push(Process { pid, command: command(pid), state }),
                Err(error @ Error::Load(_)) => return Err(error),
                Err(error) => drop(first.get_or_insert(error)),
            }
        }
        if processes.is_empty() {
            return Err(match (first, command(pid)) {
                (_, command) if command.is_empty() => failed(pid, "", "does not exist"),
                (Some(Error::Driver { code: code::NOT_INITIALIZED, .. }) | None, command) => {
                    failed(pid, &command, "does not use CUDA, nor does a child of it: there is no GPU memory to take")
                }
                (Some(error), command) => failed(pid, &command, &format!("has no state: {error}")),
            });
        }
        Ok(Self { driver, processes })
    }

    fn report(&self, before: ProcessState, began: Instant) -> SuspendReport {
        let processes = self.processes.iter().map(|process| ProcessLine {
            pid: process.pid,
            command: process.command.clone(),
            changed: process.state == before,
        });
        SuspendReport { processes: processes.collect(), seconds: began.elapsed().as_secs_f64() }
    }

    /// Suspends all processes or none.
    fn suspend(&self, timeout: Duration, own_copies: bool) -> Result<()> {
        let running: Vec<&Process> =
            self.processes.iter().filter(|process| process.state == ProcessState::Running).collect();
        if let Some(other) =
            self.processes.iter().find(|process| [ProcessState::Locked, ProcessState::Failed].contains(&process.state))
        {
            let problem = if other.state == ProcessState::Failed {
                "was lost by an earlier restore"
            } else {
                "is locked by another program"
            };
            return Err(failed(other.pid, &other.command, problem));
        }
        check_ties(&running, own_copies)?;
        let locked = self.each(&running, |pid| self.driver.lock(pid, timeout));
        // No call of CUDA is in progress any more: the numbers are final.
        let locked = locked.and_then(|()| check_ties(&running, own_copies));
        let suspended = locked.and_then(|()| {
            self.each(&running, |pid| {
                self.driver.checkpoint(pid)?;
                // Before it can run again.
                Ties::announce_checkpoint(pid).map_err(|error| Error::system("write to the process's memfd", error))
            })
        });
        if suspended.is_err() {
            // Undo what was done, whatever it was.
            let _ = self.wake(&running);
        }
        suspended
    }

    fn resume(&self) -> Result<()> {
        if let Some(lost) = self.processes.iter().find(|process| process.state == ProcessState::Failed) {
            return Err(failed(lost.pid, &lost.command, "was lost by an earlier restore: end it"));
        }
        self.wake(&self.processes.iter().collect::<Vec<_>>())
    }

    /// Lets processes run again, whatever their states.
    fn wake(&self, processes: &[&Process]) -> Result<()> {
        self.each(processes, |pid| match self.driver.state(pid)? {
            ProcessState::Checkpointed => self.driver.restore(pid),
            _ => Ok(()),
        })?;
        self.each(processes, |pid| match self.driver.state(pid)? {
            ProcessState::Locked => self.driver.unlock(pid),
            _ => Ok(()),
        })
    }

    /// Runs a step for all processes at once. Returns the first error, after the last has ended.
    fn each(&self, processes: &[&Process], step: impl Fn(u32) -> Result<()> + Sync) -> Result<()> {
        thread::scope(|scope| {
            let started: Vec<_> =
                processes.iter().map(|process| (process, scope.spawn(|| step(process.pid)))).collect();
            let mut first = Ok(());
            for (process, thread) in started {
                let done = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                let done = done.map_err(|error| failed(process.pid, &process.command, &format!("failed: {error}")));
                first = first.and(done);
            }
            first
        })
    }
}

/// Refuses processes whose memory can't be restored as it is.
fn check_ties(processes: &[&Process], own_copies: bool) -> Result<()> {
    for Process { pid, command, .. } in processes {
        let ties = Ties::of(*pid)
            .map_err(|error| failed(*pid, command, &format!("can't be inspected: /proc/{pid}: {error}")))?;
        if ties.imported > 0 || ties.own > 0 && !own_copies {
            return Err(ToolError::Tied { pid: *pid, command: command.clone(), ties }.into());
        }
    }
    Ok(())
}

fn failed(pid: u32, command: &str, message: &str) -> Error {
    let process = if command.is_empty() { format!("process {pid}") } else { format!("process {pid} ({command})") };
    ToolError::Child { process, message: message.to_owned(), hint: None }.into()
}

/// The name of a process's program; empty if it does not exist.
fn command(pid: u32) -> String {
    fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim_end().to_owned()
}

/// A process and its descendants, by proc_pid_stat(5).
fn family(pid: u32) -> Vec<u32> {
    let mut children: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(child) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let stat = fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
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
