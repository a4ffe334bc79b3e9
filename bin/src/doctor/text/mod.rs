//! The report as text. Control characters are removed: the report may come from another machine.

use serde_json::Value;
use vmmfd::{driver::Backend, internals::clean};

use super::{DoctorReport, Environment, ErrorDetails, Finding, Status};
use crate::units;

/// The widest column of names. Names in a report from another machine may be longer.
const MAX_COLUMN: usize = 24;

/// The longest printed name, in characters.
const MAX_NAME: usize = 200;

/// The longest printed text, in characters.
const MAX_TEXT: usize = 500;

/// The longest printed list beside a label, such as all nodes or all figures, in characters.
const MAX_ITEM: usize = 4000;

/// Renders the report. The last line is the verdict. The caller decides on colour, and wraps the lines.
pub fn render(report: &DoctorReport, color: bool) -> String {
    let mut page = Page { text: String::new(), color };
    let (tool, made) = (truncated(&report.tool, MAX_NAME), truncated(&report.made, MAX_NAME));
    let what = match report.backend {
        Backend::Cuda => "backend cuda: the NVIDIA driver",
        Backend::Host => "backend host: ordinary memory, NO GPU IS BEING TESTED",
    };
    page.heading(&format!("{tool} doctor, {made}, {what}"));
    page.environment("environment", &report.environment);
    if let Some(peer) = &report.peer {
        page.environment("environment of the peer", peer);
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
        let (name, uuid) = (truncated(&device.name, MAX_NAME), device.uuid.prefixed(report.backend));
        page.section(&format!("device {}: {}", device.ordinal, units::device(&name, &uuid, false)));
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
    let verdict = page.colored(&truncated(&report.verdict, MAX_ITEM), color);
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
    color: bool,
}

impl Page {
    fn line(&mut self, line: &str) {
        self.text += line;
        self.text.push('\n');
    }

    fn colored(&self, text: &str, color: Color) -> String {
        if !self.color || text.is_empty() {
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
        let text = self.colored(text, Color::Bold);
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
            let lead = format!("  {} ", self.colored(symbol, color));
            let figures = figures(finding);
            let meaning = truncated(&finding.meaning, MAX_TEXT);
            let text = match figures.is_empty() {
                true => meaning,
                false => format!("{meaning} ({})", figures.join(", ")),
            };
            self.item(&lead, &truncated(&finding.probe, MAX_COLUMN), column, &text);
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

    /// Adds a label, padded to its column, and the text beside it.
    fn item(&mut self, lead: &str, label: &str, column: usize, text: &str) {
        let line = format!("{lead}{label:<column$}  {}", truncated(text, MAX_ITEM));
        self.line(line.trim_end());
    }
}

/// The text on one line, without control characters and repeated blanks.
fn plain(text: &str) -> String {
    let mut text = text.to_owned();
    clean(&mut text);
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// As [`plain`], truncated to `most` characters.
fn truncated(text: &str, most: usize) -> String {
    let mut text = plain(text);
    // The last character marks the truncation.
    if let Some((cut, _)) = text.char_indices().nth(most.saturating_sub(1))
        && text[cut..].chars().nth(1).is_some()
    {
        text.truncate(cut);
        text.truncate(text.trim_end().len());
        text.push('…');
    }
    text
}

/// The column width for these names.
fn column<'a>(names: impl Iterator<Item = &'a str>) -> usize {
    names.map(|name| truncated(name, MAX_COLUMN).chars().count()).max().unwrap_or(0)
}

/// The figures with units, and the duration. Lists and objects appear only in the JSON.
fn figures(finding: &Finding) -> Vec<String> {
    let mut texts: Vec<String> = finding.figures.iter().filter_map(|(name, value)| figure(name, value)).collect();
    texts.extend(finding.us.map(|us| format!("in {}", units::micros(us))));
    texts
}

/// A figure. The suffix of its name is its unit.
fn figure(name: &str, value: &Value) -> Option<String> {
    let units = [("us", "us"), ("gb_per_s", "GB/s"), ("gb_s", "GB/s"), ("bytes", "bytes"), ("percent", "%")];
    let (name, unit) = units
        .iter()
        .find_map(|(end, unit)| {
            let rest = name.strip_suffix(end)?;
            // Not the `us` of `status`.
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
                Some(float) if !number.is_u64() && !number.is_i64() => rounded(float),
                _ => number.to_string(),
            };
            unit.map_or_else(|| number.clone(), |unit| format!("{number} {unit}"))
        }
        (Value::Bool(true), _) => "yes".to_owned(),
        (Value::Bool(false), _) => "no".to_owned(),
        (Value::String(text), _) => truncated(text, MAX_TEXT),
        (Value::Null | Value::Array(_) | Value::Object(_), _) => return None,
    };
    Some(plain(&format!("{} {value}", truncated(&name.replace('_', " "), MAX_NAME))))
}

/// One decimal below 100, none above.
fn rounded(number: f64) -> String {
    if number.abs() >= 100.0 { format!("{number:.0}") } else { format!("{number:.1}") }
}

#[cfg(test)]
mod tests;
