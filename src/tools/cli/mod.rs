//! What the commands share: options, the shape of a run, exit codes.
//!
//! The commands are parts of this package and not of its interface: nothing here is kept stable for other programs.

mod bar;
mod console;
mod describe;
mod options;
mod report;

use std::{
    io::{self, Write},
    mem,
    os::fd::AsFd,
    process::ExitCode,
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use clap::{Parser, error::ErrorKind as UsageKind};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        resource::{Resource, getrlimit, setrlimit},
        signal::{SigSet, Signal},
        signalfd::{SfdFlags, SignalFd},
    },
};
use serde::Serialize;

pub use self::{
    bar::bar,
    console::Console,
    options::{Common, Extent, parse_elements, parse_range, parse_salt, parse_size, parse_timeout, sharing},
};
use crate::{
    channel::Cancel,
    driver::{Driver, cuda::exit_at_once},
    error::{Error, ErrorKind},
    session::handoff::{ServeReport, Served},
    tools::error::{hint, kind_of},
};

/// How a command ends, as its exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// Everything was verified; or a service without end was stopped by a signal and nothing had failed.
    Verified,
    /// The data did not verify, on either side.
    Mismatch,
    /// The command line is wrong.
    Usage,
    /// Not supported on this system.
    Unsupported,
    /// The peer failed.
    Peer,
    /// The driver or the system failed.
    System,
    /// A signal ended it.
    Signal(i32),
}

/// The exit codes, for `--help`.
pub const EXIT_CODES: &str = "\
Exit codes:
  0    verified
  1    the data did not verify, on either side
  2    bad usage
  3    not supported here: no driver, no such device, no virtual memory management or export as a descriptor
  4    the peer failed: absent, gone, timed out, refused, mismatched, or broke the protocol
  5    the driver or the system failed: out of memory, unsafe folder, live socket
  130  interrupted (SIGINT); 143 terminated (SIGTERM)";

impl Exit {
    /// The code.
    pub fn code(self) -> u8 {
        match self {
            Self::Verified => 0,
            Self::Mismatch => 1,
            Self::Usage => 2,
            Self::Unsupported => 3,
            Self::Peer => 4,
            Self::System => 5,
            Self::Signal(signal) => 128 + u8::try_from(signal).unwrap_or(0),
        }
    }

    /// How a command ends that fails with an error.
    pub fn of(error: &Error) -> Self {
        match (kind_of(error), error) {
            (_, Error::Interrupted { signal: signal @ 1.. }) => Self::Signal(*signal),
            (ErrorKind::Usage, _) => Self::Usage,
            (ErrorKind::Unsupported, _) => Self::Unsupported,
            (ErrorKind::Peer, _) => Self::Peer,
            (ErrorKind::System | ErrorKind::Interrupted, _) => Self::System,
        }
    }

    /// How a producer ends, of the service's own end and its consumers': the first of 1, 5, 4 that occurred; on a signal
    /// 0 if the service had no other end and nothing had failed.
    ///
    /// # Errors
    /// The error that decides, where one does.
    pub fn of_service(report: ServeReport, endless: bool) -> Result<Self, Error> {
        let ServeReport { served, error, .. } = report;
        let result = error.map_or(Ok(()), Err);
        if served.iter().any(Served::mismatched) {
            // A mismatch outweighs every error but a signal.
            return match result {
                Err(error @ Error::Interrupted { .. }) => Err(error),
                _ => Ok(Self::Mismatch),
            };
        }
        let failures: Vec<Error> = served.into_iter().filter_map(|served| served.error).collect();
        match result {
            Err(Error::Interrupted { .. }) if endless && failures.is_empty() => Ok(Self::Verified),
            Err(error @ Error::Interrupted { .. }) => Err(error),
            result => {
                let all = result.err().into_iter().chain(failures);
                all.min_by_key(|error| kind_of(error) == ErrorKind::Peer).map_or(Ok(Self::Verified), Err)
            }
        }
    }
}

/// One of the commands.
pub trait Command: Parser {
    /// Its role in the session, for its output.
    const ROLE: &'static str;

    /// The options that all commands have.
    fn common(&self) -> &Common;

    /// Runs it. Its steps are printed on the console as they happen.
    ///
    /// # Errors
    /// Every error; the console prints it.
    fn run(&self, console: &Console, cancel: &Cancel) -> anyhow::Result<Exit>;
}

/// Runs a command: the whole of its `main`.
pub fn main<C: Command>() -> ExitCode {
    // Before any thread starts, so that every thread leaves the signals to the one that waits for them.
    let signals = SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM]);
    // A write that exceeds the limit of file sizes then fails with an error.
    let masked = signals.thread_block().and_then(|()| SigSet::from(Signal::SIGXFSZ).thread_block());
    let command = match C::try_parse() {
        Ok(command) => command,
        Err(error) => return usage::<C>(&error),
    };
    let console = Arc::new(Console::new(C::ROLE, command.common()));
    let result =
        masked.map_err(|errno| Error::system("block signals", errno)).and_then(|()| Cancel::new()).and_then(|cancel| {
            raise_file_limit();
            let last = Arc::clone(&console);
            watch(signals, &cancel, move |signal| {
                last.finish(Err(Error::Interrupted { signal }));
            })?;
            command.run(&console, &cancel).map_err(library_error)
        });
    ExitCode::from(console.finish(result).code())
}

/// The library's error that a command failed with; any other as [`Error::Caller`], with the chain of its causes.
fn library_error(error: anyhow::Error) -> Error {
    error.downcast().unwrap_or_else(|other| Error::Caller(other.into()))
}

/// A report as one line of JSON.
pub fn json_line(report: &impl Serialize) -> String {
    match serde_json::to_string(report) {
        Ok(text) => text + "\n",
        Err(error) => format!("{{\"error\":\"{error}\"}}\n"),
    }
}

/// A command that prints something at its end, and only then.
pub trait Tool {
    /// Runs it, and returns the text to print and the exit code.
    ///
    /// # Errors
    /// Every error; it is printed on standard error.
    fn run(&self, cancel: &Cancel) -> anyhow::Result<(String, u8)>;

    /// The exit code of an error other than a signal.
    fn code(&self, error: &Error) -> u8;
}

/// Runs a tool: the rest of its `main`. Only errors are printed on standard error.
pub fn main_of(tool: impl Tool) -> ExitCode {
    let signals = SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM]);
    let masked = signals.thread_block().map_err(|errno| Error::system("block signals", errno));
    let result = masked.and_then(|()| Cancel::new()).and_then(|cancel| {
        watch(signals, &cancel, |signal| complain(&Error::Interrupted { signal }))?;
        tool.run(&cancel).map_err(library_error)
    });
    let (text, code) = match result {
        Ok(done) => done,
        Err(error) => {
            complain(&error);
            let code = match &error {
                Error::Interrupted { .. } => Exit::of(&error).code(),
                error => tool.code(error),
            };
            return ExitCode::from(code);
        }
    };
    match io::stdout().write_all(text.as_bytes()).and_then(|()| io::stdout().flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            complain(&Error::system("write to standard output", error));
            ExitCode::from(if code == 0 { 1 } else { code })
        }
        _ => ExitCode::from(code),
    }
}

/// Prints an error on standard error. A closed one is not an error.
fn complain(error: &Error) {
    let _ = writeln!(io::stderr(), "error: {}", error.in_full());
    if let Some(hint) = hint(error) {
        let _ = writeln!(io::stderr(), "  hint: {hint}");
    }
}

/// Leaves a driver open until the process ends: the kernel then frees what it holds, 20 to 40 ms faster than driver calls do.
pub fn leave_open(driver: &Driver) {
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
const GRACE: Duration = Duration::from_secs(2);

/// How long it may run after a second signal.
const MOMENT: Duration = Duration::from_millis(200);

/// How long the last output may take then.
const LAST_OUTPUT: Duration = Duration::from_millis(500);

/// Turns the first SIGINT or SIGTERM into a request to stop. A second one ends the process, and so does the end of the grace period:
/// a call of the driver may not return.
fn watch(signals: SigSet, cancel: &Cancel, last_output: impl FnOnce(i32) + Send + 'static) -> Result<(), Error> {
    let waiting = SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC);
    let waiting = waiting.map_err(|errno| Error::system("wait for signals", errno))?;
    let cancel = cancel.clone();
    let watching = move || {
        let Ok(Some(first)) = waiting.read_signal() else { return };
        let signal = first.ssi_signo as i32;
        cancel.cancel(signal);
        let mut fds = [PollFd::new(waiting.as_fd(), PollFlags::POLLIN)];
        let grace = PollTimeout::try_from(GRACE).unwrap_or(PollTimeout::MAX);
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

/// Prints the help, or the error of bad usage.
fn usage<C: Command>(error: &clap::Error) -> ExitCode {
    let helps = matches!(error.kind(), UsageKind::DisplayHelp | UsageKind::DisplayVersion);
    let wants_json = std::env::args_os().skip(1).take_while(|arg| arg != "--").any(|arg| arg == "--json");
    if helps || !wants_json {
        // A closed standard output is not an error.
        let _ = error.print();
        return ExitCode::from(if helps { 0 } else { Exit::Usage.code() });
    }
    let text = error.render().to_string();
    let message = text.lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned();
    ExitCode::from(Console::usage(C::ROLE, message).code())
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    #[test]
    fn an_error_of_the_library_keeps_its_class_and_any_other_its_causes() {
        let library = library_error(Error::Interrupted { signal: 2 }.into());
        assert!(matches!(library, Error::Interrupted { signal: 2 }), "{library:?}");
        let other = Err::<(), _>(io::Error::other("the disk is full")).context("the report can't be written");
        let other = library_error(other.unwrap_err());
        assert_eq!(other.in_full(), "the report can't be written: the disk is full");
        assert_eq!(Exit::of(&other), Exit::System);
    }
}
