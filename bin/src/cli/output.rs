//! Output of the commands: its options, notices, and progress on a terminal.

use std::{
    env,
    ffi::OsString,
    io::{self, IsTerminal, Write},
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc},
    thread,
    time::Instant,
};

use anstream::{AutoStream, ColorChoice, stream::RawStream};
use clap::{ArgAction, ValueEnum};
use tracing_subscriber::filter::LevelFilter;
use vmmfd::internals::{
    clean, for_users, is_unsafe_on_terminals,
    stderr::{Stderr, flush_stderr},
};

use super::log::{self, LogFormat};
use crate::{
    cli::prelude::*,
    units::{about, time},
};

// No doc comment: clap would take it as the purpose of the command.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Output")]
pub struct Output {
    /// Print only one JSON object on stdout, also on failure and bad usage
    #[arg(long)]
    pub json: bool,

    /// Log to stderr; repeat for more
    #[arg(short, long, action = ArgAction::Count, conflicts_with = "quiet")]
    pub verbose: u8,

    /// Format of the log: text, or json with one object per line. In the journal, lines of text have a priority and no time
    #[arg(long, value_name = "FORMAT", default_value = "text", hide_possible_values = true)]
    log_format: LogFormat,

    /// Print only results and errors
    #[arg(short, long)]
    pub quiet: bool,

    /// Print this help; -h is shorter
    #[arg(short, long, action = ArgAction::Help)]
    help: Option<bool>,
}

impl Output {
    /// Starts the log on standard error, at the level of `-v` and `-q`.
    pub(super) fn start_log(&self) {
        self.start_log_at(LevelFilter::WARN);
    }

    /// As [`Output::start_log`], with a service's default level, INFO.
    pub(super) fn start_service_log(&self) {
        self.start_log_at(LevelFilter::INFO);
    }

    fn start_log_at(&self, default: LevelFilter) {
        let level = match (self.quiet, self.verbose) {
            (true, _) => LevelFilter::ERROR,
            (false, 0) => default,
            (false, 1) => LevelFilter::DEBUG,
            (false, _) => LevelFilter::TRACE,
        };
        log::start(self.log_format, level);
    }

    /// The options of the log, for another process of this program.
    pub(super) fn arguments(&self) -> Vec<OsString> {
        let verbosity = if self.quiet { vec!["--quiet"] } else { vec!["-v"; self.verbose.into()] };
        let format = self.log_format.to_possible_value().map(|format| format!("--log-format={}", format.get_name()));
        verbosity.into_iter().map(OsString::from).chain(format.map(OsString::from)).collect()
    }

    /// Starts the log of a broker's process. On a terminal, warnings suffice beside the line `listening`.
    pub(super) fn start_broker_log(&self) {
        match io::stderr().is_terminal() {
            true => self.start_log(),
            false => self.start_service_log(),
        }
    }

    /// Prints a line for processes that wait until clients can connect: on standard error with `--json`, else on standard output.
    pub(super) fn announce(&self, mut line: String) -> io::Result<()> {
        if self.json {
            complain(&line);
            return Ok(());
        }
        clean(&mut line);
        print_now(&(line + "\n"))
    }

    /// Prints a notice on standard error, unless `--quiet` or `--json` is given.
    pub(super) fn notice(&self, text: &str) {
        if !self.quiet && !self.json {
            complain(&format!("notice: {text}"));
        }
    }

    /// Prints a notice if the driver is the host backend although the user did not choose it. Returns the reason.
    pub(super) fn notice_fallback(&self, reason: Option<&Error>) -> Option<String> {
        let reason = fallback_reason(reason?);
        self.notice("no GPU found, using host memory (`vmmfd doctor` shows why)");
        Some(reason)
    }

    /// Prints `text` as a notice after [`WAIT_NOTICE`], unless the returned [`Wait`] is dropped before.
    pub(super) fn notice_wait(&self, text: String) -> Wait {
        let output = self.clone();
        Wait::before(move || output.notice(&text))
    }

    /// Progress on standard error, if it is a terminal, without `--quiet` and `--json`.
    pub(super) fn progress(&self) -> Progress {
        let dumb = env::var_os("TERM").is_some_and(|term| term == "dumb");
        Progress::new(!self.quiet && !self.json && !dumb && io::stderr().is_terminal())
    }
}

/// Logs why the driver is the host backend although the user did not choose it, and returns the reason.
pub(super) fn fallback_reason(error: &Error) -> String {
    let reason = error.in_full();
    tracing::debug!(%reason, "no GPU: host memory is used");
    reason
}

/// Whether to colour a stream: if it is a terminal, unless `NO_COLOR`, `CLICOLOR`, `CLICOLOR_FORCE` or `TERM=dumb` decides.
pub(super) fn is_coloured(stream: &impl RawStream) -> bool {
    AutoStream::choice(stream) != ColorChoice::Never
}

/// Writes to standard output at once. A broken pipe is not an error.
pub fn print_now(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error),
        _ => Ok(()),
    }
}

/// A report as one line of JSON. serde_json escapes only the control characters of ASCII, but others and marks that reorder text act on
/// terminals too. All of them are in strings. The whitespace of texts that are carried unparsed is dropped.
pub fn json_line(report: &impl Serialize) -> String {
    match for_users(|| serde_json::to_string(report)) {
        Ok(text) => {
            let mut line = String::with_capacity(text.len() + 1);
            for c in text.chars() {
                match c {
                    '\n' | '\r' | '\t' => {}
                    c if is_unsafe_on_terminals(c) => line.push_str(&format!("\\u{:04x}", u32::from(c))),
                    c => line.push(c),
                }
            }
            line + "\n"
        }
        Err(error) => format!("{{\"schema\":1,\"error\":{{\"kind\":\"system\",\"message\":\"{error}\"}}}}\n"),
    }
}

/// Writes a line to standard error. Failures are ignored.
pub(super) fn complain(line: &str) {
    let mut line = line.to_owned();
    // Paths may contain escape sequences.
    clean(&mut line);
    let _ = Stderr.write_all(log::line(&line).as_bytes());
}

/// A wait of which the user hears if it is long.
#[derive(Debug)]
pub(super) struct Wait(#[expect(dead_code, reason = "the drop ends the wait")] mpsc::Sender<()>);

impl Wait {
    /// Calls `notice` after [`WAIT_NOTICE`], unless the wait is dropped before.
    pub(super) fn before(notice: impl FnOnce() + Send + 'static) -> Self {
        let (sender, receiver) = mpsc::channel::<()>();
        let waiting = move || {
            if receiver.recv_timeout(WAIT_NOTICE) == Err(mpsc::RecvTimeoutError::Timeout) {
                notice();
            }
        };
        // Without a thread there is no notice.
        let _ = thread::Builder::new().name("notice".to_owned()).spawn(waiting);
        Self(sender)
    }
}

/// The longest wait without a notice.
const WAIT_NOTICE: Duration = Duration::from_millis(500);

/// A shorter transfer shows no progress.
const DELAY: Duration = Duration::from_millis(300);

/// Transfers and allocations from this size on show their progress at once.
const LARGE: u64 = 256 << 20;

/// How often frequent progress is drawn.
const INTERVAL: Duration = Duration::from_millis(50);

/// A row on a terminal with the progress of long work. It disappears after the work.
#[derive(Debug, Clone)]
pub struct Progress(Option<Arc<Mutex<Row>>>);

#[derive(Debug, Default)]
struct Row {
    /// The start of the current work.
    begun: Option<Instant>,
    /// The text on the terminal, and since when it is there.
    drawn: Option<(String, Instant)>,
    /// Set by the last output of the command: nothing is drawn afterwards.
    closed: bool,
}

impl Progress {
    fn new(shown: bool) -> Self {
        Self(shown.then(Arc::default))
    }

    /// Shows the number of bytes transferred. Removes the row after the last one.
    pub(super) fn bytes(&self, done: u64, all: u64) {
        let Some(mut row) = self.row() else { return };
        if done >= all {
            return row.clear();
        }
        let elapsed = row.begun.get_or_insert_with(Instant::now).elapsed();
        if !row.is_due() || all < LARGE && elapsed < DELAY {
            return;
        }
        let rate = done as f64 / elapsed.as_secs_f64().max(1e-3);
        let left = Duration::try_from_secs_f64((all - done) as f64 / rate);
        let left = left.map_or_else(|_| String::new(), |left| format!("  {} left", time(left)));
        let percent = u128::from(done) * 100 / u128::from(all);
        row.draw(&format!("{percent}%  {} of {}  {}/s{left}", about(done), about(all), about(rate as u64)));
    }

    /// Shows that memory is being allocated, until [`Progress::allocated`].
    pub(super) fn allocating(&self, size: u64) {
        if let Some(mut row) = self.row().filter(|_| size >= LARGE) {
            row.draw(&format!("allocating {}", about(size)));
        }
    }

    pub(super) fn allocated(&self) {
        if let Some(mut row) = self.row() {
            row.clear();
        }
    }

    /// Shows the current step and the number of finished steps.
    pub fn step(&self, what: &str, done: usize, all: usize) {
        if let Some(mut row) = self.row() {
            row.draw(&format!("{done}/{all} {what}"));
        }
    }

    /// Shows the state of endless work.
    pub(super) fn status(&self, what: impl FnOnce() -> String) {
        if let Some(mut row) = self.row().filter(|row| row.is_due()) {
            row.draw(&what());
        }
    }

    /// Runs `print` while the row is hidden.
    pub fn suspend<T>(&self, print: impl FnOnce() -> T) -> T {
        let row = self.row();
        let Some((text, _)) = row.as_ref().and_then(|row| row.drawn.as_ref()) else { return print() };
        show("");
        // Another thread writes the row's removal. A line of standard output must not come first.
        flush_stderr();
        let printed = print();
        show(text);
        printed
    }

    /// Removes the row for good.
    pub(super) fn close(&self) {
        if let Some(mut row) = self.row() {
            row.clear();
            row.closed = true;
        }
    }

    fn row(&self) -> Option<MutexGuard<'_, Row>> {
        self.0.as_ref().map(|row| row.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Row {
    fn is_due(&self) -> bool {
        self.drawn.as_ref().is_none_or(|(_, drawn)| drawn.elapsed() >= INTERVAL)
    }

    fn draw(&mut self, text: &str) {
        if self.closed {
            return;
        }
        let columns = rustix::termios::tcgetwinsize(io::stderr()).map_or(80, |size| usize::from(size.ws_col));
        // The echo of Ctrl-C, `^C`, must not start another row, which nothing would remove.
        let mut text: String = text.chars().take(columns.saturating_sub(4)).collect();
        clean(&mut text);
        show(&text);
        self.drawn = Some((text, Instant::now()));
    }

    fn clear(&mut self) {
        self.begun = None;
        if self.drawn.take().is_some() {
            show("");
            // As in `Progress::suspend`.
            flush_stderr();
        }
    }
}

/// Replaces the row on the terminal. Failures are ignored.
fn show(text: &str) {
    let _ = Stderr.write_all(format!("\r\x1b[2K{text}").as_bytes());
}

#[cfg(test)]
mod tests {
    use serde_json::value::RawValue;

    use super::*;

    #[test]
    fn json_has_no_terminal_controls() {
        let text = "C1 \u{9B}31m, override \u{202E}, mark \u{200F}, é 漢\n";
        let line = json_line(&text);
        assert_eq!(line, "\"C1 \\u009b31m, override \\u202e, mark \\u200f, é 漢\\n\"\n");
        assert_eq!(serde_json::from_str::<String>(&line).unwrap(), text);
        let number = RawValue::from_string("[1.10e400,\r\n\t2]".to_owned()).unwrap();
        assert_eq!(json_line(&number), "[1.10e400,2]\n");
    }
}
