//! The log on standard error: plain text, text with priorities for the journal, or JSON.

use std::{
    env,
    io::{self, IsTerminal, Write},
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

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum LogFormat {
    /// Plain lines
    #[default]
    Text,
    /// One JSON object per line
    Json,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Style {
    Text,
    /// Text with a coloured level.
    Coloured,
    Journal,
    Json,
}

static STYLE: OnceLock<Style> = OnceLock::new();

/// Priorities of syslog(3).
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

/// Writes log events of this level to standard error.
pub(super) fn start(format: LogFormat, level: LevelFilter) {
    let style = match format {
        LogFormat::Json => Style::Json,
        LogFormat::Text if is_journal() => Style::Journal,
        LogFormat::Text if AutoStream::choice(&io::stderr()) != ColorChoice::Never => Style::Coloured,
        LogFormat::Text => Style::Text,
    };
    // The first call decides the style of the process.
    let style = *STYLE.get_or_init(|| style);
    // By default, failed writes are reported with `eprintln!`, which panics if standard error is closed.
    let log = fmt().with_max_level(level).log_internal_errors(false);
    // Fails only if the process already has a subscriber.
    let _ = match style {
        Style::Text | Style::Coloured => {
            let log = log.with_writer(Text(style)).with_ansi(false);
            // Who reads along needs no time, and the lines are shorter.
            if io::stderr().is_terminal() { log.without_time().with_target(false).try_init() } else { log.try_init() }
        }
        // The journal records time and level itself.
        Style::Journal => log.with_writer(Text(style)).with_ansi(false).without_time().with_level(false).try_init(),
        Style::Json => log.with_writer(|| Stderr).json().flatten_event(true).try_init(),
    };
}

/// Formats a line that is not a log event, like `error: ...`, for standard error.
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

/// Whether standard error is connected to the journal. See `JOURNAL_STREAM` in systemd.exec(5).
fn is_journal() -> bool {
    let Some((device, inode)) = env::var("JOURNAL_STREAM").ok().and_then(|named| {
        let (device, inode) = named.split_once(':')?;
        Some((device.parse::<u64>().ok()?, inode.parse::<u64>().ok()?))
    }) else {
        return false;
    };
    fstat(io::stderr()).is_ok_and(|file| (file.st_dev, file.st_ino) == (device, inode))
}

/// Writes events in a style of text. Colours their levels itself: the colours of tracing-subscriber need another package.
#[derive(Debug)]
struct Text(Style);

struct Event(Style, tracing::Level);

impl MakeWriter<'_> for Text {
    type Writer = Event;

    fn make_writer(&self) -> Event {
        Event(self.0, tracing::Level::INFO)
    }

    fn make_writer_for(&self, event: &tracing::Metadata<'_>) -> Event {
        Event(self.0, *event.level())
    }
}

impl Write for Event {
    /// Writes one line.
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        let Self(style, level) = self;
        let mut line = String::from_utf8_lossy(text).into_owned();
        match style {
            // See sd-daemon(3).
            Style::Journal => line = format!("<{}>{line}", Priority::from(&*level) as u8),
            Style::Coloured => {
                let colour = match *level {
                    tracing::Level::ERROR => AnsiColor::Red,
                    tracing::Level::WARN => AnsiColor::Yellow,
                    tracing::Level::INFO => AnsiColor::Green,
                    tracing::Level::DEBUG => AnsiColor::Blue,
                    tracing::Level::TRACE => AnsiColor::Magenta,
                };
                let style = Color::from(colour).on_default();
                // The time before the level has no letters except `T` and `Z`.
                line = line.replacen(level.as_str(), &format!("{style}{level}{style:#}"), 1);
            }
            _ => {}
        }
        Stderr.write_all(line.as_bytes())?;
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
