//! How a command runs: signals, the end of its output, its exit.

use std::{
    mem,
    os::fd::AsFd,
    process::ExitCode,
    sync::{Arc, Mutex, PoisonError, mpsc},
    thread,
    time::Duration,
};

use clap::error::ErrorKind as UsageKind;
use nix::{
    libc::SIGHUP,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        resource::{Resource, getrlimit, setrlimit},
        signal::{SigSet, Signal},
        signalfd::{SfdFlags, SignalFd},
    },
};
use vmmfd::{
    channel::{Cancel, CancelReason},
    driver::Driver,
    error::{Error, ErrorKind},
    internals::exit_at_once,
};

use super::{
    Console, Exit,
    output::{Output, Progress, json_line, print_now},
    report::{CommandReport, ErrorSummary, Failure},
};
use crate::schema::Named;

/// A command that hands memory over: its steps are printed as they happen.
pub trait Session {
    /// Its role, for its output; and its name as a program of its own.
    const ROLE: &'static str;

    /// The options about its output.
    fn output(&self) -> &Output;

    /// Runs it. Its steps are printed on the console as they happen.
    ///
    /// # Errors
    /// Every error; the console prints it.
    fn run(&self, console: &Console, cancel: &Cancel) -> anyhow::Result<Exit>;
}

/// Runs a session, and returns how its process exits.
pub(super) fn run_session<S: Session>(session: S) -> ExitCode {
    session.output().start_log();
    let console = Arc::new(Console::new(S::ROLE, session.output()));
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

/// A command that prints something at its end, and only then.
pub trait Tool {
    /// Its name, for its JSON.
    const NAME: &'static str;

    /// The reports that it prints with `--json`.
    const REPORTS: &'static [Named] = &[];

    /// The options about its output.
    fn output(&self) -> &Output;

    /// Runs it, and returns what it prints.
    ///
    /// # Errors
    /// Every error; it is printed on standard error, and with `--json` as an object.
    fn run(&self, cancel: &Cancel, progress: &Progress) -> anyhow::Result<ToolOutput>;

    /// The request that SIGHUP makes, if it does not end this tool like the other signals.
    fn restart(&self) -> Option<&Cancel> {
        None
    }

    /// How long it may run after a signal.
    fn grace(&self) -> Duration {
        GRACE
    }
}

/// What a tool prints, and how it exits.
pub struct ToolOutput {
    pub text: String,
    pub exit: Exit,
}

/// The end of a tool's output: printed once, by the tool's thread or by the one that waits for signals.
struct Ending {
    name: &'static str,
    json: bool,
    progress: Progress,
    /// Whether it is printed. Held while it is printed, so that a second caller waits.
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
            Err(error) => {
                let (summary, exit) = (ErrorSummary::of(&error), Exit::of(&error));
                summary.complain();
                if self.json { print(&json_line(&Failure::new(Some(self.name), summary)), exit) } else { exit }
            }
        }
    }
}

/// Runs a tool, and returns how its process exits.
pub(super) fn run_tool<T: Tool>(tool: T) -> ExitCode {
    let output = tool.output();
    output.start_log();
    let (progress, json) = (output.progress(), output.json);
    let ending = Arc::new(Ending { name: T::NAME, json, progress, finished: Mutex::new(false) });
    let last = Arc::clone(&ending);
    let interrupted = move |signal| {
        last.finish(Err(Error::Interrupted { reason: CancelReason::Signal(signal) }));
    };
    let result = watched(interrupted, tool.restart(), tool.grace(), |cancel| tool.run(cancel, &ending.progress));
    ExitCode::from(ending.finish(result).code())
}

/// Prints the error that a tool failed with before it was run, and returns how its process exits.
pub(super) fn fail<T: Tool>(error: &Error, json: bool) -> ExitCode {
    let (summary, exit) = (ErrorSummary::of(error), Exit::of(error));
    summary.complain();
    let exit = if json { print(&json_line(&Failure::new(Some(T::NAME), summary)), exit) } else { exit };
    ExitCode::from(exit.code())
}

/// Prints the text at the end. A success that could not be printed is a failure; a broken pipe is not an error.
fn print(text: &str, exit: Exit) -> Exit {
    match print_now(text) {
        Ok(()) => exit,
        Err(error) => exit.unwritten(&error),
    }
}

/// Does a command's work under the watch of the signals. `interrupted` prints its end, if a signal comes and the work does not end in
/// time.
fn watched<T>(
    interrupted: impl FnOnce(i32) + Send + 'static,
    restart: Option<&Cancel>,
    grace: Duration,
    work: impl FnOnce(&Cancel) -> anyhow::Result<T>,
) -> Result<T, Error> {
    let signals = block_signals()?;
    let cancel = Cancel::new()?;
    watch(signals, &cancel, restart.cloned(), grace, interrupted)?;
    work(&cancel).map_err(library_error)
}

/// Blocks the signals that end a command, before any thread starts, so that every thread leaves them to the one that waits for
/// them. Returns those.
fn block_signals() -> Result<SigSet, Error> {
    let signals = SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP]);
    // A write that exceeds the limit of file sizes then fails with an error.
    let masked = signals.thread_block().and_then(|()| SigSet::from(Signal::SIGXFSZ).thread_block());
    masked.map(|()| signals).map_err(|errno| Error::system("block signals", errno))
}

/// The library's error that a command failed with; any other as [`Error::Caller`], with the chain of its causes.
fn library_error(error: anyhow::Error) -> Error {
    error.downcast().unwrap_or_else(|other| Error::Caller(other.into()))
}

/// Leaves a driver open until the process ends: the kernel then frees what it holds, 20 to 40 ms faster than driver calls do.
pub(super) fn leave_open(driver: &Driver) {
    mem::forget(driver.clone());
}

/// Raises the soft limit of open files to the hard one: a buffer of many chunks has a descriptor for each. If that fails, the limit
/// stays, and a call that exceeds it reports that.
pub fn raise_file_limit() {
    if let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE)
        && soft < hard
        && let Err(errno) = setrlimit(Resource::RLIMIT_NOFILE, hard, hard)
    {
        tracing::warn!(%errno, soft, hard, "cannot raise the limit of open files");
    }
}

/// How long a command may run after a signal. Then it exits, and the kernel frees what it holds.
pub(super) const GRACE: Duration = Duration::from_secs(2);

/// How long it may run after a second signal.
const MOMENT: Duration = Duration::from_millis(200);

/// How long the last output may take then.
const LAST_OUTPUT: Duration = Duration::from_millis(500);

/// Turns the first SIGINT, SIGTERM or SIGHUP into a request to stop, but SIGHUP into `restart` where there is one. A second one ends the process, and so does the end of the grace period:
/// a call of the driver may not return.
fn watch(
    signals: SigSet,
    cancel: &Cancel,
    restart: Option<Cancel>,
    grace: Duration,
    last_output: impl FnOnce(i32) + Send + 'static,
) -> Result<(), Error> {
    let waiting = SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC);
    let waiting = waiting.map_err(|errno| Error::system("wait for signals", errno))?;
    let cancel = cancel.clone();
    let watching = move || {
        let signal = loop {
            let Ok(Some(received)) = waiting.read_signal() else { return };
            match (received.ssi_signo as i32, &restart) {
                (SIGHUP, Some(restart)) => restart.cancel(CancelReason::Signal(SIGHUP)),
                (signal, _) => break signal,
            }
        };
        cancel.cancel(CancelReason::Signal(signal));
        let mut fds = [PollFd::new(waiting.as_fd(), PollFlags::POLLIN)];
        let grace = PollTimeout::try_from(grace).unwrap_or(PollTimeout::MAX);
        if poll(&mut fds, grace) != Ok(0) {
            // Both signals may have been sent at once: files that are being removed get a moment.
            let moment = PollTimeout::try_from(MOMENT).unwrap_or(PollTimeout::ZERO);
            let _ = poll(&mut [], moment);
        }
        // In another thread: the reader of the output may have stopped, and the write then blocks.
        let (sender, receiver) = mpsc::channel();
        let print = move || {
            last_output(signal);
            // Fails if this took too long.
            let _ = sender.send(());
        };
        if thread::Builder::new().spawn(print).is_ok() {
            // Printed or not, the process ends.
            let _ = receiver.recv_timeout(LAST_OUTPUT);
        }
        exit_at_once(Exit::Signal(signal).code().into());
    };
    let spawned = thread::Builder::new().name("signals".to_owned()).spawn(watching);
    spawned.map(drop).map_err(|error| Error::system("start a thread", error))
}

/// Prints help, or the error of bad usage, with `--json` as the object of the command that was meant.
pub(super) fn usage(error: &clap::Error, command: Option<&'static str>) -> ExitCode {
    let helps = matches!(error.kind(), UsageKind::DisplayHelp | UsageKind::DisplayVersion);
    let wants_json = std::env::args_os().skip(1).take_while(|arg| arg != "--").any(|arg| arg == "--json");
    if helps || !wants_json {
        // A closed standard output is not an error.
        let _ = error.print();
        return ExitCode::from(if helps { 0 } else { Exit::Usage.code() });
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
        None => json_line(&Failure::new(command, summary)),
    };
    ExitCode::from(print(&text, Exit::Usage).code())
}

/// The error of bad usage in one line: what was wrong, what is possible, and the tip.
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
    fn an_error_of_the_library_keeps_its_class_and_any_other_its_causes() {
        let library = library_error(Error::Interrupted { reason: CancelReason::Signal(2) }.into());
        assert!(matches!(library, Error::Interrupted { reason: CancelReason::Signal(2) }), "{library:?}");
        let other = Err::<(), _>(io::Error::other("the disk is full")).context("the report can't be written");
        let other = library_error(other.unwrap_err());
        assert_eq!(other.in_full(), "the report can't be written: the disk is full");
        assert_eq!(Exit::of(&other), Exit::System);
    }
}
