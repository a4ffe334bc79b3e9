//! Output of the commands: its options, notices, and progress on a terminal.

use std::{
    env,
    ffi::OsString,
    io::{self, IsTerminal, Write},
    mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc},
    thread,
    time::Instant,
};

use anstream::{AutoStream, ColorChoice, stream::RawStream};
use clap::{ArgAction, ValueEnum};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle, TermLike};
use tracing_subscriber::filter::LevelFilter;
use vmmfd::internals::{
    clean, for_users, is_unsafe_on_terminals,
    stderr::{Stderr, flush_stderr},
};

use super::log::{self, LogFormat};
use crate::{cli::prelude::*, units::about};

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

/// The width of the terminal.
fn width() -> usize {
    rustix::termios::tcgetwinsize(io::stderr()).map_or(80, |size| usize::from(size.ws_col))
}

/// A shorter transfer shows no bar.
const BAR_DELAY: Duration = Duration::from_millis(300);

/// Transfers and allocations from this size on show their progress at once.
const LARGE: u64 = 256 << 20;

/// How often a spinner is drawn.
const TICK: Duration = Duration::from_millis(120);

/// A line on a terminal with the progress of long work. The line disappears after the work.
#[derive(Debug, Clone)]
pub struct Progress(Option<Arc<Mutex<Line>>>);

#[derive(Debug, Default)]
struct Line {
    /// The start of the current work.
    begun: Option<Instant>,
    bar: Option<ProgressBar>,
    /// Set by the last output of the command: nothing is drawn afterwards.
    closed: bool,
}

impl Progress {
    fn new(shown: bool) -> Self {
        Self(shown.then(Arc::default))
    }

    /// Shows the number of bytes transferred. Removes the bar after the last one.
    pub(super) fn bytes(&self, done: u64, all: u64) {
        let Some(mut line) = self.line() else { return };
        if done >= all {
            return line.clear();
        }
        let template = || match width() {
            ..40 => "{percent}%".to_owned(),
            40..60 => "{bar:5} {bytes}/{total_bytes} {eta}".to_owned(),
            wide => format!("{{bar:{}}} {{bytes}}/{{total_bytes}} {{bytes_per_sec}} {{eta}}", (wide - 50).clamp(5, 40)),
        };
        let delay = if all < LARGE { BAR_DELAY } else { Duration::ZERO };
        if let Some(bar) = line.bar(template, delay) {
            bar.set_length(all);
            bar.set_position(done);
        }
    }

    /// Shows that memory is being allocated, until [`Progress::allocated`].
    pub(super) fn allocating(&self, size: u64) {
        let Some(mut line) = self.line().filter(|_| size >= LARGE) else { return };
        if let Some(bar) = line.bar(|| "{spinner} {msg}".to_owned(), Duration::ZERO) {
            spin(bar, &format!("allocating {}", about(size)));
        }
    }

    pub(super) fn allocated(&self) {
        if let Some(mut line) = self.line() {
            line.clear();
        }
    }

    /// Shows the current step and the number of finished steps.
    pub fn step(&self, what: &str, done: usize, all: usize) {
        let Some(mut line) = self.line() else { return };
        if let Some(bar) = line.bar(|| "{spinner} {pos}/{len} {msg}".to_owned(), Duration::ZERO) {
            bar.set_length(all as u64);
            bar.set_position(done as u64);
            spin(bar, what);
        }
    }

    /// Shows the state of endless work.
    pub(super) fn status(&self, what: impl FnOnce() -> String) {
        let Some(mut line) = self.line() else { return };
        if let Some(bar) = line.bar(|| "{spinner} {msg}".to_owned(), Duration::ZERO) {
            bar.set_message(what());
            bar.tick();
        }
    }

    /// Runs `print` while the line is hidden.
    pub fn suspend<T>(&self, print: impl FnOnce() -> T) -> T {
        let line = self.line();
        match line.as_ref().and_then(|line| line.bar.as_ref()) {
            Some(bar) => bar.suspend(|| {
                flush_stderr();
                print()
            }),
            None => print(),
        }
    }

    /// Removes the line for good.
    pub(super) fn close(&self) {
        if let Some(mut line) = self.line() {
            line.clear();
            line.closed = true;
        }
    }

    fn line(&self) -> Option<MutexGuard<'_, Line>> {
        self.0.as_ref().map(|line| line.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn spin(bar: &ProgressBar, what: &str) {
    bar.set_message(what.chars().take(width().saturating_sub(16)).collect::<String>());
    bar.enable_steady_tick(TICK);
}

impl Line {
    /// The bar, once the work has taken `delay`.
    fn bar(&mut self, template: impl FnOnce() -> String, delay: Duration) -> Option<&ProgressBar> {
        if self.closed {
            return None;
        }
        let begun = *self.begun.get_or_insert_with(Instant::now);
        if self.bar.is_none() && begun.elapsed() >= delay {
            let style = ProgressStyle::with_template(&template()).unwrap_or_else(|_| ProgressStyle::default_bar());
            let bar = ProgressBar::with_draw_target(
                Some(1),
                ProgressDrawTarget::term_like_with_hz(Box::new(Row::default()), 20),
            );
            self.bar = Some(bar.with_elapsed(begun.elapsed()).with_style(style));
        }
        self.bar.as_ref()
    }

    fn clear(&mut self) {
        self.begun = None;
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
            // Another thread writes the row's removal. A line of standard output must not come first.
            flush_stderr();
        }
    }
}

/// The row of a bar, which indicatif fills with spaces. It is shorter than the terminal's row: the echo of Ctrl-C, `^C`, must not start
/// another row, because only the bar's row is cleared.
#[derive(Debug, Default)]
struct Row(Mutex<String>);

impl Row {
    fn add(&self, text: &str) -> io::Result<()> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push_str(text);
        Ok(())
    }

    fn move_cursor(&self, cells: usize, direction: char) -> io::Result<()> {
        if cells > 0 { self.add(&format!("\x1b[{cells}{direction}")) } else { Ok(()) }
    }
}

impl TermLike for Row {
    fn width(&self) -> u16 {
        u16::try_from(width().saturating_sub(4)).unwrap_or(u16::MAX)
    }

    fn move_cursor_up(&self, cells: usize) -> io::Result<()> {
        self.move_cursor(cells, 'A')
    }

    fn move_cursor_down(&self, cells: usize) -> io::Result<()> {
        self.move_cursor(cells, 'B')
    }

    fn move_cursor_right(&self, cells: usize) -> io::Result<()> {
        self.move_cursor(cells, 'C')
    }

    fn move_cursor_left(&self, cells: usize) -> io::Result<()> {
        self.move_cursor(cells, 'D')
    }

    fn write_line(&self, text: &str) -> io::Result<()> {
        self.add(text)?;
        self.add("\r\n")
    }

    fn write_str(&self, text: &str) -> io::Result<()> {
        self.add(text)
    }

    fn clear_line(&self) -> io::Result<()> {
        self.add("\r\x1b[2K")
    }

    fn flush(&self) -> io::Result<()> {
        let text = mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        Stderr.write_all(text.as_bytes())
    }
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
