//! The bench `startup`: from `exec` to ready, for the commands and for a program that only starts the driver.

use std::{
    io::{BufRead, BufReader},
    os::fd::AsFd,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use nix::poll::PollFlags;
use vmmfd::{
    error::{Error, Result},
    internals::wait,
};

use super::{
    plan::Bench,
    process::{BenchProcess, beside},
    run::{BenchRun, FOLDER},
    stats::{Samples, us},
    task::Role,
};
use vmmfd_cli::{
    child::{self, Group, OnParentDeath, Process, ProcessEnd, StderrTail, failure, overdue},
    temporary::temporary_folder,
};

/// The maximum number of samples: the driver takes a third of a second for each.
const MOST: usize = 20;

pub(super) fn measure(run: &mut BenchRun<'_>) -> Result<()> {
    let folder = temporary_folder(FOLDER)?;
    let commands = ["producer", "consumer"].map(|name| beside(name, None));
    let demo = beside("demo", Some("../../scripts/demo"));
    for (found, name) in [(&commands[0], "producer"), (&commands[1], "consumer"), (&demo, "demo")] {
        if found.is_none() {
            run.leave_out(format!("startup of {name}: it is not beside this program"));
        }
    }
    // The process reports the device, and fails if there is no device.
    drop(run.start(Role::Single, &[])?);
    let leader = BenchProcess::leader(&run.task(Role::GroupLeader), run.cancel, &[])?;
    let starter = Starter { run, folder: folder.path(), leader: &leader };
    let (count, warm_up) = (run.plan.count.min(MOST), 1);
    let mut samples: [Samples; 6] = Default::default();
    for round in 0..warm_up + count {
        run.tick("starting the driver, and the commands", round, warm_up + count)?;
        let mut times = vec![
            starter.bare_ready()?,
            starter.command_ready("the producer", commands[0].as_deref(), "shared")?,
            starter.command_ready("the consumer", commands[1].as_deref(), "consumer")?,
        ];
        times.extend([starter.bare_whole(1)?, starter.bare_whole(2)?, starter.whole(demo.as_deref())?]);
        if round >= warm_up {
            for (samples, time) in samples.iter_mut().zip(times) {
                samples.0.extend(time.map(us));
            }
        }
    }
    let names = [
        "bare start, to ready",
        "producer, to ready",
        "consumer, to ready",
        "bare start, to its end",
        "two bare starts at once, to their end",
        "demo, to its end",
    ];
    let measured = names.into_iter().map(str::to_owned).zip(samples).collect();
    run.add(Bench::Startup, 0, measured, "");
    Ok(())
}

/// Starts programs and waits for them.
struct Starter<'a> {
    run: &'a BenchRun<'a>,
    folder: &'a Path,
    /// Kills the programs if this process is killed, and shields them from the terminal's signals.
    leader: &'a BenchProcess,
}

impl Starter<'_> {
    fn start(&self, name: &'static str, command: &mut Command) -> Result<Process> {
        // The demo creates files in TMPDIR and cannot delete them if it is killed.
        command.env("TMPDIR", self.folder);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Process::spawn(name, command, Group::Of(self.leader.pid()))
    }

    fn bare_start(&self) -> Result<Process> {
        let task = self.run.task(Role::BareStart);
        self.start(task.role.name(), &mut child::command(OnParentDeath::Killed, &task)?)
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.run.step()
    }

    fn bare_ready(&self) -> Result<Option<Duration>> {
        let begun = Instant::now();
        let mut process = self.bare_start()?;
        self.wait_for_line(&mut process, "ready")?;
        let time = begun.elapsed();
        self.wait_for_success(process)?;
        Ok(Some(time))
    }

    fn command_ready(&self, name: &'static str, command: Option<&Path>, word: &str) -> Result<Option<Duration>> {
        let Some(command) = command else { return Ok(None) };
        let mut command = Command::new(command);
        command.arg("--socket").arg(self.folder.join("ready.sock"));
        let begun = Instant::now();
        let mut process = self.start(name, command.args(self.options()))?;
        self.wait_for_line(&mut process, word)?;
        let time = begun.elapsed();
        process.terminate();
        self.wait_for_end(&process)?;
        Ok(Some(time))
    }

    fn bare_whole(&self, number: usize) -> Result<Option<Duration>> {
        let begun = Instant::now();
        let started: Vec<Process> = (0..number).map(|_| self.bare_start()).collect::<Result<_>>()?;
        let mut last = begun;
        for process in started {
            last = last.max(self.wait_for_success(process)?);
        }
        Ok(Some(last - begun))
    }

    fn whole(&self, demo: Option<&Path>) -> Result<Option<Duration>> {
        let Some((demo, folder)) = demo.zip(beside("producer", None).and_then(|path| path.parent().map(PathBuf::from)))
        else {
            return Ok(None);
        };
        let mut command = Command::new(demo);
        let begun = Instant::now();
        let demo = self.start("the demo", command.arg(folder).arg("-q").args(self.options()))?;
        self.wait_for_success(demo).map(|ended| Some(ended - begun))
    }

    fn options(&self) -> [String; 4] {
        let backend = self.run.plan.backend.to_string();
        ["--backend".to_owned(), backend, "--device".to_owned(), self.run.plan.device.to_string()]
    }

    /// Waits for a line of output that contains `word`. Later output is not read.
    fn wait_for_line(&self, process: &mut Process, word: &str) -> Result<()> {
        let Some(stdout) = process.take_stdout() else { return Ok(()) };
        let (mut stdout, deadline) = (BufReader::new(stdout), self.deadline());
        let mut line = String::new();
        while !line.contains(word) {
            line.clear();
            let there = !stdout.buffer().is_empty()
                || wait(self.run.cancel, stdout.get_ref().as_fd(), PollFlags::POLLIN, deadline)?;
            if !there {
                return Err(self.overdue(process, "did not become ready"));
            }
            // The output is line-buffered, so this read does not block in the middle of a line.
            let read = stdout.read_line(&mut line).map_err(|error| Error::system("read a process's output", error))?;
            if read == 0 {
                let (end, _) = self.wait_for_end(process)?;
                return Err(failed(process, end, " before it was ready"));
            }
        }
        process.keep_stdout(stdout.into_inner());
        Ok(())
    }

    /// Waits until the process has exited with code 0, and returns the time.
    fn wait_for_success(&self, mut process: Process) -> Result<Instant> {
        let (end, at) = self.wait_for_end(&process)?;
        if end.is_success() { Ok(at) } else { Err(failed(&mut process, end, "")) }
    }

    fn wait_for_end(&self, process: &Process) -> Result<(ProcessEnd, Instant)> {
        let ended = process.wait(self.deadline(), self.run.cancel)?;
        ended.ok_or_else(|| self.overdue(process, "did not end"))
    }

    fn overdue(&self, process: &Process, what: &str) -> Error {
        overdue(process.name(), what, self.run.step())
    }
}

/// The error for a failed process, with the first line of its standard error.
fn failed(process: &mut Process, end: ProcessEnd, when: &str) -> Error {
    let stderr = process.take_stderr().and_then(|stderr| StderrTail::read(stderr).ok());
    let line = stderr.and_then(|stderr| stderr.first_line());
    let line = line.map(|line| format!(": {}", line.trim_start_matches("error: "))).unwrap_or_default();
    failure(process.name(), format!("{end}{when}{line}"))
}
