//! From `exec` to ready: the commands, beside a program that only starts the driver.

use std::{
    io::{self, BufRead, BufReader, Read},
    os::{fd::AsFd, unix::process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use nix::{
    poll::PollFlags,
    sys::{
        signal::{Signal, kill},
        wait::{Id, WaitPidFlag, waitid},
    },
    unistd::Pid,
};

use super::{
    Bench, FOLDER, Run,
    process::{Process, Task, beside, fault, overdue, starter},
    stats::{Samples, us},
};
use crate::{
    error::{Error, Result},
    tools::temporary::temporary_folder,
};

/// The most samples: each takes the driver a third of a second.
const MOST: usize = 20;

pub(super) fn measure(run: &mut Run<'_>) -> Result<()> {
    let folder = temporary_folder(FOLDER)?;
    let commands = ["producer", "consumer"].map(|name| beside(name, None));
    let demo = beside("demo", Some("../../scripts/demo"));
    for (found, name) in [(&commands[0], "producer"), (&commands[1], "consumer"), (&demo, "demo")] {
        if found.is_none() {
            run.leave_out(format!("startup of {name}: it is not beside this program"));
        }
    }
    // What it is measured on, and whether it is there at all.
    drop(run.start(Task::Single, &[])?);
    let leader = Process::leader(&run.errand(Task::Lead), run.cancel, &[])?;
    let starter = Starter { run, folder: folder.path(), leader: &leader };
    let (count, warm_up) = (run.plan.count.min(MOST), 1);
    let mut samples: [Samples; 6] = Default::default();
    for round in 0..warm_up + count {
        run.tick("starting the driver, and the commands", round, warm_up + count)?;
        let mut took = vec![
            starter.bare_ready()?,
            starter.command_ready("the producer", commands[0].as_deref(), "listen")?,
            starter.command_ready("the consumer", commands[1].as_deref(), "device")?,
        ];
        took.extend([starter.bare_whole(1)?, starter.bare_whole(2)?, starter.whole(demo.as_deref())?]);
        if round >= warm_up {
            for (samples, took) in samples.iter_mut().zip(took) {
                samples.0.extend(took.map(us));
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
    run: &'a Run<'a>,
    folder: &'a Path,
    /// Who takes them along if this process is killed, and keeps them from a terminal's signals.
    leader: &'a Process,
}

impl Starter<'_> {
    fn start(&self, name: &'static str, command: &mut Command) -> Result<Running> {
        // Where the demo has its files: what is killed can't put them away.
        command.env("TMPDIR", self.folder).process_group(self.leader.pid().as_raw());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().map_err(|error| Error::system(format!("start {name}"), error))?;
        Ok(Running { name, child })
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.run.step()
    }

    fn ready(&self, name: &'static str, command: &mut Command, word: &str) -> Result<(Running, Duration)> {
        let begun = Instant::now();
        let mut running = self.start(name, command)?;
        self.says(&mut running, word)?;
        Ok((running, begun.elapsed()))
    }

    fn bare_ready(&self) -> Result<Option<Duration>> {
        let (bare, took) = self.ready("a bare start", &mut starter(&self.run.errand(Task::Start))?, "ready")?;
        self.ends(bare)?;
        Ok(Some(took))
    }

    fn command_ready(&self, name: &'static str, command: Option<&Path>, word: &str) -> Result<Option<Duration>> {
        let Some(command) = command else { return Ok(None) };
        let mut command = Command::new(command);
        command.arg("--socket").arg(self.folder.join("ready.sock"));
        let (running, took) = self.ready(name, command.args(self.options()), word)?;
        // It may have ended by itself.
        let _ = kill(Pid::from_raw(running.child.id().cast_signed()), Signal::SIGTERM);
        self.status(running)?;
        Ok(Some(took))
    }

    fn bare_whole(&self, number: usize) -> Result<Option<Duration>> {
        let begun = Instant::now();
        let start = |_| self.start("a bare start", &mut starter(&self.run.errand(Task::Start))?);
        let started: Vec<Running> = (0..number).map(start).collect::<Result<_>>()?;
        let mut last = begun;
        for bare in started {
            last = last.max(self.ends(bare)?);
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
        self.ends(demo).map(|ended| Some(ended - begun))
    }

    fn options(&self) -> [String; 4] {
        let backend = self.run.plan.backend.to_string();
        ["--backend".to_owned(), backend, "--device".to_owned(), self.run.plan.device.to_string()]
    }

    /// Waits for a line of its output that has a word in it.
    fn says(&self, running: &mut Running, word: &str) -> Result<()> {
        let Some(stdout) = running.child.stdout.take() else { return Ok(()) };
        let (mut stdout, deadline) = (BufReader::new(stdout), self.deadline());
        let mut line = String::new();
        while !line.contains(word) {
            line.clear();
            let there = !stdout.buffer().is_empty()
                || self.run.cancel.wait(stdout.get_ref().as_fd(), PollFlags::POLLIN, deadline)?;
            if !there {
                return Err(self.silent(running, "become ready"));
            }
            // What it says comes line by line.
            let read = stdout.read_line(&mut line).map_err(|error| Error::system("read a process's output", error))?;
            if read == 0 {
                let status = running.child.wait().map_err(|error| Error::system("wait for a process", error))?;
                return Err(self.failed(running, status, " before it was ready"));
            }
        }
        // It may say more.
        running.child.stdout = Some(stdout.into_inner());
        Ok(())
    }

    /// Waits for an end that is as it should be, and returns when that was.
    fn ends(&self, running: Running) -> Result<Instant> {
        let (mut running, status, ended) = self.status(running)?;
        if status.success() { Ok(ended) } else { Err(self.failed(&mut running, status, "")) }
    }

    /// Waits for the end, and returns when that was: to the moment, so another thread sleeps until then.
    fn status(&self, mut running: Running) -> Result<(Running, ExitStatus, Instant)> {
        let failed = |error: io::Error| Error::system("wait for a process", error);
        let (pid, deadline) = (Pid::from_raw(running.child.id().cast_signed()), self.deadline());
        let (sender, receiver) = mpsc::channel();
        let wait = move || {
            // What it ended with is looked at by who owns it, who may have gone.
            let _ = waitid(Id::Pid(pid), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT);
            let _ = sender.send(Instant::now());
        };
        thread::Builder::new().name("waits".to_owned()).spawn(wait).map_err(failed)?;
        loop {
            if let Ok(ended) = receiver.recv_timeout(Duration::from_millis(20)) {
                let status = running.child.wait().map_err(failed)?;
                return Ok((running, status, ended));
            }
            self.run.cancel.check()?;
            if Instant::now() > deadline {
                return Err(self.silent(&running, "end"));
            }
        }
    }

    fn silent(&self, running: &Running, what: &str) -> Error {
        overdue(running.name, &format!("not {what}"), self.run.step())
    }

    /// How it ended, and the first line of what it complains of.
    fn failed(&self, running: &mut Running, status: ExitStatus, when: &str) -> Error {
        let mut bytes = [0; 4096];
        let soon = Instant::now() + Duration::from_millis(100);
        let complaint = running.child.stderr.take().and_then(|mut stderr| {
            self.run.cancel.wait(stderr.as_fd(), PollFlags::POLLIN, soon).ok().filter(|there| *there)?;
            let length = stderr.read(&mut bytes).ok()?;
            let text = String::from_utf8_lossy(&bytes[..length]);
            text.lines().next().map(|line| format!(": {}", line.trim_start_matches("error: ")))
        });
        let message = format!("ended with {status}{when}{}", complaint.unwrap_or_default());
        fault(running.name, message)
    }
}

/// A child that is killed if it does not end by itself.
struct Running {
    name: &'static str,
    child: Child,
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
