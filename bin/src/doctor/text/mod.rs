//! A report as text. It may be from another machine, so control characters in it are removed.

use std::fmt::Write;

use serde_json::Value;
use vmmfd::{driver::Backend, internals::clean};

use super::{DoctorReport, Environment, ErrorDetails, Finding, Status};
use crate::units;

/// The widest column of names: a report from another machine may have a name of any length.
const MAX_COLUMN: usize = 24;

/// How many characters of a name are printed.
const MAX_NAME: usize = 200;

/// How many characters of one text are printed.
const MAX_TEXT: usize = 500;

/// How many characters of several texts beside one label are printed, such as all nodes or all figures.
const MAX_ITEM: usize = 4000;

/// The least characters of text in a line, however narrow the terminal.
const MIN_TEXT: usize = 24;

/// How a report is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Style {
    /// Whether in colour. The caller decides: for a terminal, and not with `NO_COLOR`.
    pub color: bool,
    /// The width at which lines are folded, in characters; `None` for no limit.
    pub width: Option<usize>,
}

/// The whole report. Its last line is the verdict, and is never folded.
pub fn render(report: &DoctorReport, style: Style) -> String {
    let mut page = Page { text: String::new(), style };
    let (tool, made) = (short(&report.tool, MAX_NAME), short(&report.made, MAX_NAME));
    let what = match report.backend {
        Backend::Cuda => "backend cuda: the NVIDIA driver",
        Backend::Host => "backend host: ordinary memory, NO GPU IS BEING TESTED",
    };
    page.heading(&format!("{tool} doctor, {made}, {what}"));
    page.environment("environment", &report.environment);
    if let Some(peer) = &report.peer {
        page.environment("environment of the other end", peer);
    }

    let pairs = report.pairs.iter().flat_map(|pair| &pair.findings);
    let devices = report.devices.iter().flat_map(|device| &device.findings);
    let names = report.machine.iter().chain(devices).chain(pairs).map(|finding| finding.probe.as_str());
    let column = column(names);
    if !report.machine.is_empty() {
        page.section("machine");
        page.findings(&report.machine, column);
    }
    for device in &report.devices {
        let (name, uuid) = (short(&device.name, MAX_NAME), device.uuid.prefixed(report.backend));
        page.section(&format!("device {}: {name} {uuid}", device.ordinal));
        page.findings(&device.findings, column);
    }
    for pair in &report.pairs {
        page.section(&format!("device {} with the memory of device {}", pair.device, pair.owner));
        page.findings(&pair.findings, column);
    }

    page.line("");
    if !report.required.is_empty() {
        page.item("", "required for the verdict:", 0, &report.required.join(", "));
    }
    let color = if report.exit_code == 0 { Color::Green } else { Color::Red };
    let verdict = page.painted(&short(&report.verdict, MAX_ITEM), color);
    page.line(&verdict);
    page.text
}

#[derive(Debug, Clone, Copy)]
enum Color {
    Bold,
    Dim,
    Red,
    Green,
    Yellow,
}

struct Page {
    text: String,
    style: Style,
}

impl Page {
    fn line(&mut self, line: &str) {
        self.text += line;
        self.text.push('\n');
    }

    fn painted(&self, text: &str, color: Color) -> String {
        if !self.style.color || text.is_empty() {
            return text.to_owned();
        }
        let code = match color {
            Color::Bold => 1,
            Color::Dim => 2,
            Color::Red => 31,
            Color::Green => 32,
            Color::Yellow => 33,
        };
        format!("\x1b[{code}m{text}\x1b[0m")
    }

    fn heading(&mut self, text: &str) {
        let text = self.painted(text, Color::Bold);
        self.line(&text);
    }

    fn section(&mut self, title: &str) {
        self.line("");
        self.heading(title);
    }

    fn environment(&mut self, title: &str, environment: &Environment) {
        self.section(title);
        let lines = environment.lines();
        let column = column(lines.iter().map(|(label, _)| *label));
        for (label, text) in lines {
            self.item("  ", label, column, &text);
        }
    }

    fn findings(&mut self, findings: &[Finding], column: usize) {
        for finding in findings {
            let (symbol, color) = match finding.status {
                Status::Ok => ("✓", Color::Green),
                Status::Failed => ("✗", Color::Red),
                Status::Unsupported => ("–", Color::Yellow),
                Status::Skipped => ("·", Color::Dim),
            };
            let lead = format!("  {} ", self.painted(symbol, color));
            let figures = figures(finding);
            let meaning = short(&finding.meaning, MAX_TEXT);
            let text = match figures.is_empty() {
                true => meaning,
                false => format!("{meaning} ({})", figures.join(", ")),
            };
            // The label and the column decide how far the text is indented.
            self.item(&lead, &short(&finding.probe, MAX_COLUMN), column, &text);
            if finding.status == Status::Ok {
                continue;
            }
            let error = finding.error.as_ref().map(|ErrorDetails { message, .. }| message);
            let why = [("error", error), ("cause", finding.cause.as_ref()), ("remedy", finding.remedy.as_ref())];
            let indent = " ".repeat(column + 6);
            for (label, text) in why {
                if let Some(text) = text {
                    self.item(&indent, label, "remedy".len(), text);
                }
            }
        }
    }

    /// A label, padded to its column, and a text beside it, folded at the width.
    fn item(&mut self, lead: &str, label: &str, column: usize, text: &str) {
        let mut line = format!("{lead}{label:<column$}");
        let indent = visible(&line) + 2;
        let room = self.style.width.map_or(usize::MAX, |width| width.saturating_sub(indent).max(MIN_TEXT));
        for (number, part) in folded(&short(text, MAX_ITEM), room).iter().enumerate() {
            if number == 0 {
                line += "  ";
                line += part;
            } else {
                let _ = write!(line, "\n{:indent$}{part}", "");
            }
        }
        let line = line.trim_end().to_owned();
        self.line(&line);
    }
}

/// A text on one line, without control characters and runs of blanks.
fn plain(text: &str) -> String {
    let mut text = text.to_owned();
    clean(&mut text);
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The same, of at most so many characters.
fn short(text: &str, most: usize) -> String {
    let mut text = plain(text);
    // The last character marks the cut.
    if let Some((cut, _)) = text.char_indices().nth(most.saturating_sub(1))
        && text[cut..].chars().nth(1).is_some()
    {
        text.truncate(cut);
        text.truncate(text.trim_end().len());
        text.push('…');
    }
    text
}

/// The width of the column that these fit in.
fn column<'a>(names: impl Iterator<Item = &'a str>) -> usize {
    names.map(|name| short(name, MAX_COLUMN).chars().count()).max().unwrap_or(0)
}

/// How many characters of a line are visible: not those of colour codes.
fn visible(line: &str) -> usize {
    line.split('\x1b')
        .enumerate()
        .map(|(number, part)| match part.split_once('m') {
            Some((_, shown)) if number > 0 => shown.chars().count(),
            _ => part.chars().count(),
        })
        .sum()
}

/// The words of a text on lines of at most `room` characters. A longer word has a line of its own.
fn folded(text: &str, room: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    let mut used = 0;
    for word in text.split(' ').filter(|word| !word.is_empty()) {
        let length = word.chars().count();
        match lines.last_mut() {
            Some(line) if used + 1 + length <= room => {
                line.push(' ');
                line.push_str(word);
                used += 1 + length;
            }
            _ => {
                lines.push(word.to_owned());
                used = length;
            }
        }
    }
    lines
}

/// The figures with their units, and the time of the probe. Lists and objects are only in the JSON.
fn figures(finding: &Finding) -> Vec<String> {
    let mut texts: Vec<String> = finding.figures.iter().filter_map(|(name, value)| figure(name, value)).collect();
    texts.extend(finding.us.map(|us| format!("in {}", units::micros(us))));
    texts
}

/// A figure; the end of its name is its unit.
fn figure(name: &str, value: &Value) -> Option<String> {
    let units = [("us", "us"), ("gb_per_s", "GB/s"), ("gb_s", "GB/s"), ("bytes", "bytes"), ("percent", "%")];
    let (name, unit) = units
        .iter()
        .find_map(|(end, unit)| {
            let rest = name.strip_suffix(end)?;
            // `status` ends with `us`, which is not its unit.
            (rest.is_empty() || rest.ends_with('_')).then_some((rest.trim_end_matches('_'), Some(*unit)))
        })
        .unwrap_or((name, None));
    let value = match (value, unit) {
        (Value::Number(number), Some("bytes")) => match number.as_u64() {
            Some(bytes) => units::about(bytes),
            None => format!("{number} bytes"),
        },
        (Value::Number(number), Some("us")) if number.is_u64() => units::micros(number.as_u64().unwrap_or_default()),
        (Value::Number(number), unit) => {
            let number = match number.as_f64() {
                Some(float) if !number.is_u64() && !number.is_i64() => decimal(float),
                _ => number.to_string(),
            };
            unit.map_or_else(|| number.clone(), |unit| format!("{number} {unit}"))
        }
        (Value::Bool(true), _) => "yes".to_owned(),
        (Value::Bool(false), _) => "no".to_owned(),
        (Value::String(text), _) => short(text, MAX_TEXT),
        (Value::Null | Value::Array(_) | Value::Object(_), _) => return None,
    };
    Some(plain(&format!("{} {value}", short(&name.replace('_', " "), MAX_NAME))))
}

/// With one decimal, or none from 100 on.
fn decimal(number: f64) -> String {
    if number.abs() >= 100.0 { format!("{number:.0}") } else { format!("{number:.1}") }
}

#[cfg(test)]
mod tests;
