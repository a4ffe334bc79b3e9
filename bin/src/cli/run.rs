//! Runs a command: signals, final output, exit code.

use std::{
    io::{self, Write},
    mem,
    os::fd::AsFd,
    process::ExitCode,
    sync::{Arc, Mutex, PoisonError, mpsc},
    thread,
};

use clap::error::ErrorKind as UsageKind;
use nix::{
    libc::{SIGCHLD, SIGHUP},
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        resource::{Resource, getrlimit, setrlimit},
        signal::{SigSet, Signal},
        signalfd::{SfdFlags, SignalFd},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
};
use vmmfd::{
    channel::CancelReason,
    driver::Driver,
    error::ErrorKind,
    internals::{exit_at_once, stderr},
};

use super::{
    Console,
    output::{Output, Progress, is_coloured, json_line, print_now},
    report::{CommandReport, Failure},
};
use crate::cli::prelude::*;

/// A command that hands memory over and prints each step.
pub trait Session {
    /// The role in its output, and its name as a separate program.
    const ROLE: &'static str;

    /// Runs the command. Prints its steps on the console.
    ///
    /// # Errors
    /// Any failure; the console prints it.
    fn run(&self, console: &Console, cancel: &Cancel) -> anyhow::Result<Exit>;
}

/// Runs a session and returns the exit code of the process.
pub(super) fn run_session<S: Session>(session: S, output: &Output) -> ExitCode {
    output.start_log();
    let console = Arc::new(Console::new(S::ROLE, output));
    let last = Arc::clone(&console);
    let interrupted = move |signal| {
        last.finish(Err(Error::Interrupted { reason: CancelReason::Signal(signal) }));
    };
    let result = watched(interrupted, None, GRACE, |cancel| {
        raise_file_limit();
        session.run(&console, cancel)
    });
    ExitCode::from(console.finish(result).code())
}

/// A command that prints its output when it has finished.
pub trait Tool {
    const NAME: &'static str;

    /// The reports of `--json`.
    const REPORTS: &'static [Named] = &[];

    /// Runs the command and returns its output.
    ///
    /// # Errors
    /// Any failure; the caller prints it on standard error, and with `--json` as an object.
    fn run(&self, running: Running<'_>) -> anyhow::Result<ToolOutput>;

    /// Cancelled by SIGHUP, if it does not stop this tool like the other signals.
    fn on_hangup(&self) -> Option<&Cancel> {
        None
    }

    /// The time that it may run after a signal.
    fn grace(&self) -> Duration {
        GRACE
    }
}

/// What every tool has.
#[derive(Debug, Clone, Copy)]
pub struct Running<'a> {
    pub output: &'a Output,
    pub cancel: &'a Cancel,
    pub progress: &'a Progress,
}

/// The output of a tool, and its exit.
pub struct ToolOutput {
    pub text: String,
    pub exit: Exit,
}

impl ToolOutput {
    /// The report of a command as JSON, or its text, which may be longer with `-v`.
    pub(super) fn of<R: Serialize>(
        output: &Output,
        exit: Exit,
        report: R,
        text: impl FnOnce(&R, bool) -> String,
    ) -> Self {
        let text = if output.json { json_line(&Stamped::of(report)) } else { text(&report, output.verbose > 0) };
        Self { text, exit }
    }
}

/// The final output of a tool: printed once, by the thread of the tool or of the signals.
struct Ending {
    name: &'static str,
    json: bool,
    progress: Progress,
    /// Whether it is printed. Locked while it is printed, so that a second caller waits.
    finished: Mutex<bool>,
}

impl Ending {
    fn finish(&self, result: Result<ToolOutput, Error>) -> Exit {
        self.progress.close();
        let mut finished = self.finished.lock().unwrap_or_else(PoisonError::into_inner);
        let already = mem::replace(&mut *finished, true);
        match result {
            Ok(ToolOutput { exit, .. }) if already => exit,
            Err(error) if already => Exit::of(&error),
            Ok(ToolOutput { text, exit }) => print(&text, exit),
            Err(error) => fail(self.name, &error, self.json),
        }
    }
}

/// Runs a tool and returns the exit code of the process.
pub(super) fn run_tool<T: Tool>(tool: T, output: &Output) -> ExitCode {
    output.start_log();
    let progress = output.progress();
    let json = output.json;
    let ending = Arc::new(Ending { name: T::NAME, json, progress, finished: Mutex::new(false) });
    let last = Arc::clone(&ending);
    let interrupted = move |signal| {
        last.finish(Err(Error::Interrupted { reason: CancelReason::Signal(signal) }));
    };
    let result = watched(interrupted, tool.on_hangup(), tool.grace(), |cancel| {
        tool.run(Running { output, cancel, progress: &ending.progress })
    });
    ExitCode::from(ending.finish(result).code())
}

/// Runs a service, which a stalled reader of standard error must not block.
pub(super) fn run_service(
    name: &'static str,
    output: &Output,
    work: impl FnOnce() -> Result<ExitCode, Error>,
) -> ExitCode {
    let unblocked = stderr::never_block_on_stderr().map_err(|error| Error::system("start a thread", error));
    let code = unblocked.and_then(|()| work());
    let code = code.unwrap_or_else(|error| ExitCode::from(fail(name, &error, output.json).code()));
    stderr::flush_stderr();
    code
}

/// Prints the error of a command.
pub(super) fn fail(name: &'static str, error: &Error, json: bool) -> Exit {
    let exit = Exit::of(error);
    let summary = ErrorSummary::complained(error);
    if json { print(&failure(Some(name), summary), exit) } else { exit }
}

/// The JSON object of a failed command.
fn failure(command: Option<&'static str>, error: ErrorSummary) -> String {
    json_line(&Stamped::of(Failure { command, error }))
}

/// Prints the final text. A success that could not be printed is a failure.
fn print(text: &str, exit: Exit) -> Exit {
    match print_now(text) {
        Ok(()) => exit,
        Err(error) => exit.unwritten(&error),
    }
}

/// Runs `work` and cancels it on a signal. If it does not stop in time, `interrupted` prints the final output.
fn watched<T>(
    interrupted: impl FnOnce(i32) + Send + 'static,
    hangup: Option<&Cancel>,
    grace: Duration,
    work: impl FnOnce(&Cancel) -> anyhow::Result<T>,
) -> Result<T, Error> {
    let mut signals = block_signals()?;
    // A service that is process 1 of a container is the parent of all orphans.
    if hangup.is_some() && std::process::id() == 1 {
        signals.add(Signal::SIGCHLD);
        signals.thread_block().map_err(|errno| Error::system("block signals", errno))?;
    }
    let cancel = Cancel::new()?;
    watch(signals, &cancel, hangup.cloned(), grace, interrupted)?;
    work(&cancel).map_err(library_error)
}

/// Blocks the signals that stop a command, and returns them. Call it before any thread starts: only the signal thread then receives them.
fn block_signals() -> Result<SigSet, Error> {
    let signals = SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP]);
    // With SIGXFSZ blocked, a write that exceeds the file size limit fails with an error.
    let masked = signals.thread_block().and_then(|()| SigSet::from(Signal::SIGXFSZ).thread_block());
    masked.map(|()| signals).map_err(|errno| Error::system("block signals", errno))
}

/// Extracts the library's error. Wraps any other error in [`Error::Caller`], with the chain of its causes.
fn library_error(error: anyhow::Error) -> Error {
    error.downcast().unwrap_or_else(|other| Error::Caller(other.into()))
}

/// Leaves a driver open until the process exits. The kernel frees its resources 20 to 40 ms faster than driver calls.
pub(super) fn leave_open(driver: &Driver) {
    mem::forget(driver.clone());
}

/// Raises the soft limit of open files to the hard limit: each chunk of a buffer has a descriptor. Logs a failure.
pub fn raise_file_limit() {
    if let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE)
        && soft < hard
        && let Err(errno) = setrlimit(Resource::RLIMIT_NOFILE, hard, hard)
    {
        tracing::warn!(%errno, soft, hard, "cannot raise the limit of open files");
    }
}

/// The time that a command may run after a signal. The process then exits.
pub(super) const GRACE: Duration = Duration::from_secs(2);

/// The time that it may run after a second signal.
const MOMENT: Duration = Duration::from_millis(200);

/// The time limit of the final output after a signal.
const LAST_OUTPUT: Duration = Duration::from_millis(500);

/// Starts a thread that cancels the work on the first SIGINT, SIGTERM or SIGHUP; SIGHUP cancels `hangup` instead, if given. A second
/// signal or the end of the grace period exits the process: a driver call may never return.
fn watch(
    signals: SigSet,
    cancel: &Cancel,
    hangup: Option<Cancel>,
    grace: Duration,
    last_output: impl FnOnce(i32) + Send + 'static,
) -> Result<(), Error> {
    let waiting = SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC);
    let waiting = waiting.map_err(|errno| Error::system("wait for signals", errno))?;
    let cancel = cancel.clone();
    let watching = move || {
        let signal = loop {
            let Ok(Some(received)) = waiting.read_signal() else { return };
            match (received.ssi_signo as i32, &hangup) {
                (SIGHUP, Some(hangup)) => hangup.cancel(CancelReason::Signal(SIGHUP)),
                (SIGCHLD, _) => {
                    while waitpid(None, Some(WaitPidFlag::WNOHANG)).is_ok_and(|end| end != WaitStatus::StillAlive) {}
                }
                (signal, _) => break signal,
            }
        };
        cancel.cancel(CancelReason::Signal(signal));
        let mut fds = [PollFd::new(waiting.as_fd(), PollFlags::POLLIN)];
        let grace = PollTimeout::try_from(grace).unwrap_or(PollTimeout::MAX);
        if poll(&mut fds, grace) != Ok(0) {
            // Both signals may arrive at once: leave time to remove files.
            let moment = PollTimeout::try_from(MOMENT).unwrap_or(PollTimeout::ZERO);
            let _ = poll(&mut [], moment);
        }
        // In another thread: a write blocks if the reader has stopped.
        let (sender, receiver) = mpsc::channel();
        let print = move || {
            last_output(signal);
            // Fails if the receiver has timed out.
            let _ = sender.send(());
        };
        if thread::Builder::new().spawn(print).is_ok() {
            let _ = receiver.recv_timeout(LAST_OUTPUT);
        }
        exit_at_once(Exit::Signal(signal).code().into());
    };
    let spawned = thread::Builder::new().name("signals".to_owned()).spawn(watching);
    spawned.map(drop).map_err(|error| Error::system("start a thread", error))
}

/// Prints help, or the error of bad usage, with `--json` as the object of the command.
pub(super) fn usage(error: &clap::Error, command: Option<&'static str>) -> ExitCode {
    let helps = matches!(error.kind(), UsageKind::DisplayHelp | UsageKind::DisplayVersion);
    let wants_json = std::env::args_os().skip(1).take_while(|arg| arg != "--").any(|arg| arg == "--json");
    if helps || !wants_json {
        if helps {
            // A closed standard output is not an error.
            let _ = error.print();
            return ExitCode::SUCCESS;
        }
        let text = error.render();
        let text = if is_coloured(&io::stderr()) { text.ansi().to_string() } else { text.to_string() };
        let _ = io::stderr().write_all(text.as_bytes());
        return ExitCode::from(Exit::Usage.code());
    }
    let hint = Some(match command {
        Some(name @ ("producer" | "consumer")) => format!("see {name} --help"),
        Some(name) => format!("see vmmfd {name} --help"),
        None => "see vmmfd --help".to_owned(),
    });
    let summary = ErrorSummary { kind: ErrorKind::Usage.as_str(), message: one_line(error), hint };
    let role = match command {
        Some("producer" | "produce") => Some("producer"),
        Some("consumer" | "consume") => Some("consumer"),
        _ => None,
    };
    let text = match role {
        Some(role) => json_line(&CommandReport { error: Some(summary), ..CommandReport::new(role) }),
        None => failure(command, summary),
    };
    ExitCode::from(print(&text, Exit::Usage).code())
}

/// The error of bad usage in one line, with possible values and tip.
pub(super) fn one_line(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let lines =
        text.lines().map(str::trim).take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more"));
    let lines: Vec<&str> = lines.filter(|line| !line.is_empty()).collect();
    lines.join(" ").trim_start_matches("error: ").replace(" tip: ", "; tip: ")
}

#[cfg(test)]
mod tests {
    use std::io;

    use anyhow::Context;

    use super::*;

    #[test]
    fn library_errors_keep_their_class() {
        let library = library_error(Error::Interrupted { reason: CancelReason::Signal(2) }.into());
        assert!(matches!(library, Error::Interrupted { reason: CancelReason::Signal(2) }), "{library:?}");
        let other = Err::<(), _>(io::Error::other("the disk is full")).context("the report can't be written");
        let other = library_error(other.unwrap_err());
        assert_eq!(other.in_full(), "the report can't be written: the disk is full");
        assert_eq!(Exit::of(&other), Exit::System);
    }
}
