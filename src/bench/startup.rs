//! From `exec` to ready: the commands, beside a program that only starts the driver.

use std::{
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use std::os::fd::AsFd;

use super::{
    Bench, Run,
    process::{Task, beside, starter},
    stats::Samples,
};
use crate::error::{Error, Result};

/// The most samples: each takes the driver a third of a second.
const MOST: usize = 20;

/// How long one may take to start.
const PATIENCE: Duration = Duration::from_secs(60);

pub(super) fn measure(run: &mut Run<'_>) -> Result<()> {
    let folder = tempfile::Builder::new().prefix("vmmfd-bench.").tempdir_in("/tmp");
    let folder = folder.map_err(|error| Error::system("make a folder in /tmp", error))?;
    let commands = ["producer", "consumer"].map(|name| beside(name, None));
    let demo = beside("demo", Some("../../scripts/demo"));
    for (found, name) in [(&commands[0], "producer"), (&commands[1], "consumer"), (&demo, "demo")] {
        if found.is_none() {
            run.leave_out(format!("startup of {name}: it is not beside this program"));
        }
    }
    let (count, warm_up) = (run.plan.count.min(MOST), 1);
    let mut samples: [Samples; 6] = Default::default();
    for round in 0..warm_up + count {
        run.tick("starting the driver, and the commands", round, warm_up + count)?;
        let mut took = vec![
            bare_ready(run)?,
            command_ready(run, commands[0].as_deref(), folder.path(), "listen")?,
            command_ready(run, commands[1].as_deref(), folder.path(), "device")?,
        ];
        took.extend([bare_whole(run, 1)?, bare_whole(run, 2)?, whole(run, demo.as_deref())?]);
        if round >= warm_up {
            for (samples, took) in samples.iter_mut().zip(took) {
                samples.0.extend(took.map(|took| took.as_secs_f64() * 1e6));
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

/// A child that is killed if it does not end by itself.
struct Running(Child);

impl Running {
    fn start(command: &mut Command) -> Result<Self> {
        command.spawn().map(Self).map_err(|error| Error::system("start another process", error))
    }

    /// Waits for a line of its output that has a word in it.
    fn says(&mut self, word: &str) -> Result<()> {
        let purpose = "for another process to start";
        let stdout = self.0.stdout.take().ok_or(Error::PeerGone { purpose })?;
        let mut stdout = BufReader::new(stdout);
        let deadline = Instant::now() + PATIENCE;
        let mut line = String::new();
        while !line.contains(word) {
            line.clear();
            if stdout.buffer().is_empty() {
                let left = deadline.saturating_duration_since(Instant::now());
                let mut fds = [PollFd::new(stdout.get_ref().as_fd(), PollFlags::POLLIN)];
                let left = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
                if poll(&mut fds, left).map_err(|errno| Error::system("poll", errno))? == 0 {
                    return Err(Error::Timeout { purpose, waited: PATIENCE });
                }
            }
            // What it says comes line by line.
            let read = stdout.read_line(&mut line).map_err(|error| Error::system("read a process's output", error))?;
            if read == 0 {
                return Err(Error::PeerGone { purpose });
            }
        }
        // It may say more.
        self.0.stdout = Some(stdout.into_inner());
        Ok(())
    }

    fn ends(&mut self) -> Result<()> {
        self.0.wait().map(drop).map_err(|error| Error::system("wait for a process", error))
    }

    /// Tells it to stop, and waits until it has.
    fn stop(&mut self) -> Result<()> {
        // It may have ended by itself.
        let _ = kill(Pid::from_raw(self.0.id().cast_signed()), Signal::SIGTERM);
        self.ends()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn bare_ready(run: &Run<'_>) -> Result<Option<Duration>> {
    let begun = Instant::now();
    let mut bare = Running::start(starter(&run.errand(Task::Start))?.stdout(Stdio::piped()))?;
    bare.says("ready")?;
    let took = begun.elapsed();
    bare.ends()?;
    Ok(Some(took))
}

fn command_ready(run: &Run<'_>, command: Option<&Path>, folder: &Path, word: &str) -> Result<Option<Duration>> {
    let Some(command) = command else { return Ok(None) };
    let socket = folder.join("ready.sock");
    let mut command = Command::new(command);
    command.arg("--socket").arg(socket).args(["--backend", run.plan.backend.as_str()]);
    command.args(["--device", &run.plan.device.to_string()]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let begun = Instant::now();
    let mut command = Running::start(&mut command)?;
    command.says(word)?;
    let took = begun.elapsed();
    command.stop()?;
    Ok(Some(took))
}

fn bare_whole(run: &Run<'_>, number: usize) -> Result<Option<Duration>> {
    let begun = Instant::now();
    let started: Vec<Running> = (0..number)
        .map(|_| Running::start(starter(&run.errand(Task::Start))?.stdout(Stdio::null())))
        .collect::<Result<_>>()?;
    for mut bare in started {
        bare.ends()?;
    }
    Ok(Some(begun.elapsed()))
}

fn whole(run: &Run<'_>, demo: Option<&Path>) -> Result<Option<Duration>> {
    let Some((demo, folder)) = demo.zip(beside("producer", None).and_then(|path| path.parent().map(PathBuf::from)))
    else {
        return Ok(None);
    };
    let mut command = Command::new(demo);
    command.arg(folder).args(["-q", "--backend", run.plan.backend.as_str()]);
    command.args(["--device", &run.plan.device.to_string()]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::inherit());
    let begun = Instant::now();
    let mut command = Running::start(&mut command)?;
    let status = command.0.wait().map_err(|error| Error::system("wait for a process", error))?;
    let took = begun.elapsed();
    match status.code() {
        Some(0) => Ok(Some(took)),
        _ => Err(Error::system("run the demo", std::io::Error::other(format!("it ended with {status}")))),
    }
}
