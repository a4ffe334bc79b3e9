//! The log on standard error: text for a person, text with priorities for the journal, or JSON.

use std::{
    env,
    io::{self, Write},
    sync::OnceLock,
};

use anstream::{AutoStream, ColorChoice};
use clap::{
    ValueEnum,
    builder::styling::{AnsiColor, Color},
};
use nix::sys::stat::fstat;
use serde_json::json;
use tracing_subscriber::{
    filter::LevelFilter,
    fmt::{MakeWriter, fmt},
};
use vmmfd::internals::stderr::Stderr;

use crate::stamp;

/// What `--log-format` names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum LogFormat {
    /// Lines for a person
    Text,
    /// One JSON object a line
    Json,
}

/// How the log of this process is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Style {
    Text,
    /// Text with a coloured level.
    Coloured,
    Journal,
    Json,
}

static STYLE: OnceLock<Style> = OnceLock::new();

/// The priorities of syslog(3) that are used.
#[derive(Debug, Clone, Copy)]
enum Priority {
    Error = 3,
    Warning = 4,
    Notice = 5,
    Info = 6,
    Debug = 7,
}

impl From<&tracing::Level> for Priority {
    fn from(level: &tracing::Level) -> Self {
        match *level {
            tracing::Level::ERROR => Self::Error,
            tracing::Level::WARN => Self::Warning,
            tracing::Level::INFO => Self::Info,
            _ => Self::Debug,
        }
    }
}

/// Sends the library's log of this level to standard error.
pub(super) fn start(format: LogFormat, level: LevelFilter) {
    let style = match format {
        LogFormat::Json => Style::Json,
        LogFormat::Text if is_journal() => Style::Journal,
        LogFormat::Text if AutoStream::choice(&io::stderr()) != ColorChoice::Never => Style::Coloured,
        LogFormat::Text => Style::Text,
    };
    // The log of a process is started once.
    let style = *STYLE.get_or_init(|| style);
    // A closed standard error is not an error; by default it is a panic.
    let log = fmt().with_max_level(level).log_internal_errors(false);
    // Fails only if the process has a subscriber already.
    let _ = match style {
        Style::Text => log.with_writer(|| Stderr).with_ansi(false).try_init(),
        Style::Coloured => log.with_writer(Coloured).with_ansi(false).try_init(),
        // The journal has the time and the level of each line.
        Style::Journal => log.with_writer(Journal).with_ansi(false).without_time().with_level(false).try_init(),
        Style::Json => log.with_writer(|| Stderr).json().flatten_event(true).try_init(),
    };
}

/// A line that is no event of the log, as it is written to standard error: `kind` is the word before its colon.
pub(super) fn line(text: &str) -> String {
    let kind = text.split_once(": ").map_or("", |(kind, _)| kind);
    match STYLE.get() {
        Some(Style::Journal) => {
            let priority = match kind {
                "error" => Priority::Error,
                "notice" => Priority::Notice,
                _ => Priority::Info,
            };
            format!("<{}>{text}\n", priority as u8)
        }
        Some(Style::Json) => {
            let level = if kind == "error" { "ERROR" } else { "INFO" };
            format!("{}\n", json!({"timestamp": stamp::now(), "level": level, "message": text}))
        }
        _ => format!("{text}\n"),
    }
}

/// Whether standard error is a stream of the journal. See `JOURNAL_STREAM` in systemd.exec(5).
fn is_journal() -> bool {
    let Some((device, inode)) = env::var("JOURNAL_STREAM").ok().and_then(|named| {
        let (device, inode) = named.split_once(':')?;
        Some((device.parse::<u64>().ok()?, inode.parse::<u64>().ok()?))
    }) else {
        return false;
    };
    fstat(io::stderr()).is_ok_and(|file| (file.st_dev, file.st_ino) == (device, inode))
}

/// Writes each event with its priority: see sd-daemon(3).
#[derive(Debug)]
struct Journal;

/// Writes one event.
struct Event(Priority);

impl MakeWriter<'_> for Journal {
    type Writer = Event;

    fn make_writer(&self) -> Event {
        Event(Priority::Info)
    }

    fn make_writer_for(&self, event: &tracing::Metadata<'_>) -> Event {
        Event(event.level().into())
    }
}

impl Write for Event {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        // One write: it is one line of the journal.
        let line = [format!("<{}>", self.0 as u8).as_bytes(), text].concat();
        Stderr.write_all(&line)?;
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Colours the level of each event. tracing-subscriber's own colours cost a package.
#[derive(Debug)]
struct Coloured;

struct ColouredEvent(tracing::Level);

impl MakeWriter<'_> for Coloured {
    type Writer = ColouredEvent;

    fn make_writer(&self) -> ColouredEvent {
        ColouredEvent(tracing::Level::INFO)
    }

    fn make_writer_for(&self, event: &tracing::Metadata<'_>) -> ColouredEvent {
        ColouredEvent(*event.level())
    }
}

impl Write for ColouredEvent {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        let colour = match self.0 {
            tracing::Level::ERROR => AnsiColor::Red,
            tracing::Level::WARN => AnsiColor::Yellow,
            tracing::Level::INFO => AnsiColor::Green,
            tracing::Level::DEBUG => AnsiColor::Blue,
            tracing::Level::TRACE => AnsiColor::Magenta,
        };
        let style = Color::from(colour).on_default();
        let level = self.0.as_str();
        // The level is the first word with letters of its own: the time before it has only `T` and `Z`.
        let line = String::from_utf8_lossy(text).replacen(level, &format!("{style}{level}{style:#}"), 1);
        Stderr.write_all(line.as_bytes())?;
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
