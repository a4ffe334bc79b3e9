//! The report as text. Control characters are removed: the report may come from another machine.

use serde_json::Value;
use vmmfd::internals::clean;

use super::DoctorReport;
use crate::{doctor::prelude::*, units};

/// The widest column of names. Names in a report from another machine may be longer.
const MAX_COLUMN: usize = 24;

/// The longest text beside a label, and the longest title, in characters.
const MAX_TEXT: usize = 4000;

/// Renders the report. The last line is the verdict. The caller decides on colour.
pub fn render(report: &DoctorReport, color: bool) -> String {
    let mut page = Page { text: String::new(), color };
    let what = match report.backend {
        Backend::Cuda => "backend cuda: the NVIDIA driver",
        Backend::Host => "backend host: ordinary memory, NO GPU IS BEING TESTED",
    };
    page.heading(&format!("{} doctor, {}, {what}", report.tool, report.made));
    page.environment(&report.environment);
    let column = column(report.findings().map(|finding| finding.probe.as_str()));
    if !report.machine.is_empty() {
        page.findings("machine", &report.machine, column);
    }
    for device in &report.devices {
        let title = format!("device {}: {}", device.ordinal, units::device(&device.name, &device.uuid, false));
        page.findings(&title, &device.findings, column);
    }
    for pair in &report.pairs {
        let title = format!("device {} with the memory of device {}", pair.device, pair.owner);
        page.findings(&title, &pair.findings, column);
    }
    page.line("");
    if !report.required.is_empty() {
        page.item("", "required for the verdict:", 0, &report.required.join(", "));
    }
    let color = if report.exit_code == 0 { GREEN } else { RED };
    let verdict = page.colored(&truncated(&report.verdict, MAX_TEXT), color);
    page.line(&verdict);
    page.text
}

/// Codes of ANSI escape sequences.
const BOLD: u8 = 1;
const DIM: u8 = 2;
const RED: u8 = 31;
const GREEN: u8 = 32;
const YELLOW: u8 = 33;

struct Page {
    text: String,
    color: bool,
}

impl Page {
    fn line(&mut self, line: &str) {
        self.text += line;
        self.text.push('\n');
    }

    fn colored(&self, text: &str, code: u8) -> String {
        if self.color && !text.is_empty() { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    fn heading(&mut self, text: &str) {
        let text = self.colored(&truncated(text, MAX_TEXT), BOLD);
        self.line(&text);
    }

    fn environment(&mut self, environment: &Environment) {
        self.line("");
        self.heading("environment");
        let lines = environment.lines();
        let column = column(lines.iter().map(|(label, _)| *label));
        for (label, text) in lines {
            self.item("  ", label, column, &text);
        }
    }

    fn findings(&mut self, title: &str, findings: &[Finding], column: usize) {
        self.line("");
        self.heading(title);
        for finding in findings {
            let (symbol, color) = match finding.status {
                Status::Ok => ("✓", GREEN),
                Status::Failed => ("✗", RED),
                Status::Unsupported => ("–", YELLOW),
                Status::Skipped => ("·", DIM),
            };
            let lead = format!("  {} ", self.colored(symbol, color));
            let figures = figures(finding);
            let text = match figures.is_empty() {
                true => finding.meaning.clone(),
                false => format!("{} ({})", finding.meaning, figures.join(", ")),
            };
            self.item(&lead, &truncated(&finding.probe, MAX_COLUMN), column, &text);
            if finding.status == Status::Ok {
                continue;
            }
            let error = finding.error.as_ref().map(|error| &error.message);
            let why = [("error", error), ("cause", finding.cause.as_ref()), ("remedy", finding.remedy.as_ref())];
            let indent = " ".repeat(column + 6);
            for (label, text) in why.into_iter().filter_map(|(label, text)| Some((label, text?))) {
                self.item(&indent, label, "remedy".len(), text);
            }
        }
    }

    /// Adds a label, padded to its column, and the text beside it.
    fn item(&mut self, lead: &str, label: &str, column: usize, text: &str) {
        let line = format!("{lead}{label:<column$}  {}", truncated(text, MAX_TEXT));
        self.line(line.trim_end());
    }
}

/// The text on one line, without control characters and repeated blanks, truncated to `most` characters.
fn truncated(text: &str, most: usize) -> String {
    let mut text = text.to_owned();
    clean(&mut text);
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match text.chars().count() > most {
        // The last character marks the truncation.
        true => text.chars().take(most - 1).collect::<String>().trim_end().to_owned() + "…",
        false => text,
    }
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
    // Not the `us` of `status`.
    let of = |unit: &str| name.strip_suffix(unit).filter(|rest| rest.is_empty() || rest.ends_with('_'));
    let (name, text) = match value {
        Value::Number(number) => {
            let text = number.as_f64().filter(|_| number.is_f64()).map_or_else(|| number.to_string(), rounded);
            match (of("us"), of("bytes"), of("gb_per_s"), number.as_u64()) {
                (Some(rest), _, _, Some(us)) => (rest, units::micros(us)),
                (Some(rest), _, _, None) => (rest, format!("{text} us")),
                (_, Some(rest), _, Some(bytes)) => (rest, units::about(bytes)),
                (_, Some(rest), _, None) => (rest, format!("{text} bytes")),
                (_, _, Some(rest), _) => (rest, format!("{text} GB/s")),
                _ => (name, text),
            }
        }
        Value::Bool(holds) => (name, if *holds { "yes" } else { "no" }.to_owned()),
        Value::String(text) => (name, text.clone()),
        Value::Null | Value::Array(_) | Value::Object(_) => return None,
    };
    Some(format!("{} {text}", name.trim_end_matches('_').replace('_', " ")).trim_start().to_owned())
}

/// One decimal below 100, none above.
fn rounded(number: f64) -> String {
    if number.abs() >= 100.0 { format!("{number:.0}") } else { format!("{number:.1}") }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A report with each kind of finding.
    fn report() -> DoctorReport {
        let finding =
            |probe: &str, status: &str, meaning: &str| json!({ "probe": probe, "status": status, "meaning": meaning });
        let mut driver = finding("driver", "ok", "The driver starts.");
        driver["us"] = json!(103_990);
        let mut export = finding("export", "ok", "Memory becomes a descriptor.");
        export["figures"] = json!({ "anchored_us": 14, "export_us": 565.5, "names": ["x"] });
        let mut fabric = finding("fabric", "failed", "Fabric handles can't be made.");
        let message = "cuMemCreate failed: CUDA_ERROR_NOT_PERMITTED (800)";
        fabric["error"] = json!({ "kind": "driver", "message": message });
        fabric["cause"] = json!("There is no IMEX channel.");
        fabric["remedy"] = json!("Make one, and give it to each container.");
        let mut peer = finding("peer", "ok", "It is mapped and read.");
        peer["figures"] = json!({ "gb_per_s": 395.0 });
        let findings = [
            export,
            fabric,
            finding("pool", "unsupported", "The device has no pools."),
            finding("event", "skipped", "The round trip failed."),
            finding("empty", "ok", ""),
        ];
        let uuid = "GPU-679ee1d3-1095-d5a4-3f1b-b0cc79e99f21";
        let report = json!({
            "schema": 1, "tool": "vmmfd 0.1.0", "made": "2026-11-21T16:00:00Z", "backend": "cuda",
            "environment": { "kernel": "Linux 6.18.0 x86_64" },
            "required": ["driver", "export"], "machine": [driver],
            "devices": [{ "ordinal": 0, "name": "NVIDIA H200", "uuid": uuid, "findings": findings }],
            "pairs": [{ "device": 0, "owner": 1, "findings": [peer] }],
            "verdict": "VMM fd sharing works on 0 of 1 GPUs", "exit_code": 1,
        });
        serde_json::from_value(report).unwrap()
    }

    const TEXT: &str = "\
vmmfd 0.1.0 doctor, 2026-11-21T16:00:00Z, backend cuda: the NVIDIA driver

environment
  kernel         Linux 6.18.0 x86_64
  module         none
  nodes          none
  IMEX channels  none
  /dev/shm       unknown

machine
  ✓ driver  The driver starts. (in 104 ms)

device 0: NVIDIA H200 GPU-679ee1d3
  ✓ export  Memory becomes a descriptor. (anchored 14 us, export 566 us)
  ✗ fabric  Fabric handles can't be made.
            error   cuMemCreate failed: CUDA_ERROR_NOT_PERMITTED (800)
            cause   There is no IMEX channel.
            remedy  Make one, and give it to each container.
  – pool    The device has no pools.
  · event   The round trip failed.
  ✓ empty

device 0 with the memory of device 1
  ✓ peer    It is mapped and read. (395 GB/s)

required for the verdict:  driver, export
VMM fd sharing works on 0 of 1 GPUs
";

    #[test]
    fn report_as_text() {
        assert_eq!(render(&report(), false), TEXT);
        let host = render(&DoctorReport { backend: Backend::Host, ..report() }, false);
        assert!(host.contains("backend host: ordinary memory, NO GPU IS BEING TESTED"), "{host}");
        // Colours keep the layout.
        let colored = render(&report(), true);
        let mut parts = colored.split('\x1b');
        let first = parts.next().unwrap().to_owned();
        assert_eq!(parts.fold(first, |text, part| text + part.split_once('m').unwrap().1), TEXT);
        for part in ["\x1b[32m✓", "\x1b[31m✗", "\x1b[33m–", "\x1b[31mVMM fd sharing works on 0 of 1 GPUs\x1b[0m\n"]
        {
            assert!(colored.contains(part), "{part:?} is not in {colored:?}");
        }
    }

    /// Appends text to every string of a value.
    fn append_to_strings(value: &mut Value, evil: &str) {
        match value {
            Value::String(text) => text.push_str(evil),
            Value::Array(items) => items.iter_mut().for_each(|item| append_to_strings(item, evil)),
            Value::Object(fields) => {
                let closed = ["backend", "status"];
                let open = fields.iter_mut().filter(|(name, _)| !closed.contains(&name.as_str()));
                open.for_each(|(_, value)| append_to_strings(value, evil));
            }
            _ => {}
        }
    }

    #[test]
    fn hostile_reports_are_cleaned_and_truncated() {
        let mut long = report();
        long.environment = serde_json::from_value(json!({
            "kernel": "k", "container": "c", "confidential": "c", "module": "m", "mps": "m", "visible_devices": "v",
            "library": { "path": "p", "file": "f" }, "library_path": "l", "uid": 1, "euid": 2, "user_namespace": true,
            "nodes": [{ "path": "p", "mode": "m", "uid": 1, "gid": 1, "usable": false }],
        }))
        .unwrap();
        let lines = render(&long, false).lines().count();
        let mut value = serde_json::to_value(&long).unwrap();
        append_to_strings(&mut value, &"\x1b[2J\r\n\t\u{202e}\u{9b}31m word".repeat(2_000));
        let mut evil: DoctorReport = serde_json::from_value(value).unwrap();
        evil.machine[0].figures.insert("x\n".repeat(7_000), "value".into());
        for color in [false, true] {
            let text = render(&evil, color);
            let unfit = |c: char| c.is_control() && !['\n', '\x1b'].contains(&c) || c == '\u{202e}';
            assert!(!text.contains(unfit) && (color || !text.contains('\x1b')), "{text:?}");
            assert_eq!(text.lines().count(), lines, "{text}");
            assert!(text.len() < 400_000, "{}", text.len());
        }
        let cut = ["", "abc", "äöüß", "abcde", "ab cde"].map(|text| truncated(text, 4));
        assert_eq!(cut, ["", "abc", "äöüß", "abc…", "ab…"]);
    }

    #[test]
    fn figures_have_units() {
        for (name, value, text) in [
            ("export_us", json!(14), "export 14 us"),
            ("us", json!(14), "14 us"),
            ("status", json!(3), "status 3"),
            ("free_before_bytes", json!(1_610_612_736_u64), "free before 1.5 GiB"),
            ("lost_bytes", json!(-5), "lost -5 bytes"),
            ("read_gb_per_s", json!(4280.7), "read 4281 GB/s"),
            ("dma_buf", json!(true), "dma buf yes"),
            ("inode", json!("a b"), "inode a b"),
        ] {
            assert_eq!(figure(name, &value).as_deref(), Some(text));
        }
        assert_eq!(figure("list", &json!([1])), None);
    }
}
