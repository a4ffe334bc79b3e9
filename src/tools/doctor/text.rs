//! A report for people. It may be another machine's: nothing in it reaches the terminal unless it is plain text.

use std::fmt::Write;

use serde_json::Value;

use super::{Environment, Finding, Report, Status, report::Seen};
use crate::{driver::Backend, wire::clean};

/// How wide a name may make its column: a report from outside could hold one of any length.
const MAX_COLUMN: usize = 24;

/// How much of a name from outside is printed.
const MAX_NAME: usize = 200;

/// How much of one text from outside is printed.
const MAX_TEXT: usize = 500;

/// How much text stands beside one label: some texts, as of all nodes or all figures.
const MAX_ITEM: usize = 4000;

/// How few characters of text a line holds, however narrow the terminal.
const MIN_TEXT: usize = 24;

/// How a report is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Style {
    /// Whether in colour: for a terminal, and not with `NO_COLOR`. The caller decides.
    pub color: bool,
    /// Where lines are folded, in characters; absent, they are not.
    pub width: Option<usize>,
}

/// The whole report. The first line says what it is of, and the last, which is never folded, is the verdict.
pub fn render(report: &Report, style: Style) -> String {
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
    let prefix = match report.backend {
        Backend::Cuda => "GPU",
        Backend::Host => "HOST",
    };
    for device in &report.devices {
        page.section(&format!("device {}: {} {prefix}-{}", device.ordinal, short(&device.name, MAX_NAME), device.uuid));
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
            // It decides how far all that follows is indented.
            self.item(&lead, &short(&finding.probe, MAX_COLUMN), column, &text);
            if finding.status == Status::Ok {
                continue;
            }
            let error = finding.error.as_ref().map(|Seen { message, .. }| message);
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

/// A text from outside on one line: no controls, no runs of blanks.
fn plain(text: &str) -> String {
    let mut text = text.to_owned();
    clean(&mut text);
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The same, cut to so many characters.
fn short(text: &str, most: usize) -> String {
    let mut text = plain(text);
    // The last place is for the mark.
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

/// How many characters of a line show: the codes of colour don't.
fn visible(line: &str) -> usize {
    line.split('\x1b')
        .enumerate()
        .map(|(number, part)| match part.split_once('m') {
            Some((_, shown)) if number > 0 => shown.chars().count(),
            _ => part.chars().count(),
        })
        .sum()
}

/// The words of a text on lines of at most `room` characters; a word that is longer has one of its own.
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

/// The figures with their units, and how long the probe took. Lists and objects are left to the JSON.
fn figures(finding: &Finding) -> Vec<String> {
    let mut told: Vec<String> = finding.figures.iter().filter_map(|(name, value)| figure(name, value)).collect();
    told.extend(finding.us.map(|us| format!("in {us} us")));
    told
}

/// A figure; the end of its name is its unit.
fn figure(name: &str, value: &Value) -> Option<String> {
    let units = [("us", "us"), ("gb_per_s", "GB/s"), ("gb_s", "GB/s"), ("bytes", "bytes"), ("percent", "%")];
    let (name, unit) = units
        .iter()
        .find_map(|(end, unit)| {
            let rest = name.strip_suffix(end)?;
            // `status` ends with `us` and is none.
            (rest.is_empty() || rest.ends_with('_')).then_some((rest.trim_end_matches('_'), Some(*unit)))
        })
        .unwrap_or((name, None));
    let value = match (value, unit) {
        (Value::Number(number), Some("bytes")) => match number.as_u64() {
            Some(bytes) => size(bytes),
            None => format!("{number} bytes"),
        },
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

/// As many places as are worth reading.
fn decimal(number: f64) -> String {
    if number.abs() >= 100.0 { format!("{number:.0}") } else { format!("{number:.1}") }
}

/// Bytes in the largest unit that leaves at least one, to a tenth: the JSON has them exactly.
fn size(bytes: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let scale = (1..=6).map(|n| 1_u64 << (10 * n)).zip(units);
    let Some((unit, name)) = scale.take_while(|(unit, _)| *unit <= bytes).last() else {
        return format!("{bytes} bytes");
    };
    // In 128 bits, where ten times any number of bytes fits.
    let tenths = u128::from(bytes) * 10 / u128::from(unit);
    match tenths % 10 {
        0 => format!("{} {name}", tenths / 10),
        tenth => format!("{}.{tenth} {name}", tenths / 10),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;

    use super::*;
    use crate::tools::doctor::report::{DeviceReport, PairReport, SCHEMA};

    fn finding(probe: &str, status: Status, meaning: &str) -> Finding {
        Finding {
            probe: probe.to_owned(),
            status,
            us: None,
            figures: BTreeMap::new(),
            error: None,
            meaning: meaning.to_owned(),
            cause: None,
            remedy: None,
            rule: None,
        }
    }

    fn with(mut finding: Finding, figures: Value) -> Finding {
        finding.figures = serde_json::from_value(figures).unwrap();
        finding
    }

    fn device(ordinal: i32, findings: Vec<Finding>) -> DeviceReport {
        let uuid = "679ee1d3-1095-d5a4-3f1b-b0cc79e99f21".parse().unwrap();
        DeviceReport { ordinal, name: "NVIDIA H200".to_owned(), uuid, findings }
    }

    fn working() -> Report {
        let environment = Environment {
            kernel: "Linux 6.18.0 x86_64".to_owned(),
            module: Some("580.159".to_owned()),
            ..Environment::default()
        };
        let mut driver = finding("driver", Status::Ok, "The driver starts.");
        driver.us = Some(103_990);
        let export = finding("export", Status::Ok, "Memory becomes a descriptor.");
        let copy = finding("memory", Status::Ok, "It is created, mapped and copied.");
        Report {
            schema: SCHEMA,
            tool: "vmmfd 0.1.0".to_owned(),
            made: "2026-11-21T16:00:00Z".to_owned(),
            backend: Backend::Cuda,
            environment,
            peer: None,
            required: vec!["driver".to_owned(), "export".to_owned()],
            machine: vec![driver],
            devices: vec![device(
                0,
                vec![
                    with(copy, json!({ "bytes": 2_097_152, "copy_gb_per_s": 55.25 })),
                    with(export, json!({ "anchored_us": 14, "export_us": 565.5, "names": ["x"] })),
                ],
            )],
            pairs: Vec::new(),
            verdict: "VMM fd sharing works on 1 of 1 GPUs".to_owned(),
            exit_code: 0,
        }
    }

    fn failing() -> Report {
        let mut report = working();
        let mut fabric = finding("fabric", Status::Failed, "Fabric handles can't be made.");
        fabric.error = Some(Seen {
            call: Some("cuMemCreate".to_owned()),
            code: Some(800),
            name: Some("CUDA_ERROR_NOT_PERMITTED".to_owned()),
            kind: "driver".to_owned(),
            message: "cuMemCreate failed: CUDA_ERROR_NOT_PERMITTED (800)".to_owned(),
        });
        fabric.cause = Some("There is no IMEX channel.".to_owned());
        fabric.remedy = Some("Make one, and give it to each container that is to share memory.".to_owned());
        let pool = finding("pool", Status::Unsupported, "The device has no pools.");
        let event = finding("event", Status::Skipped, "The round trip failed.");
        report.devices[0].findings = vec![fabric, pool, event];
        (report.verdict, report.exit_code) = ("VMM fd sharing works on 0 of 1 GPUs".to_owned(), 1);
        report
    }

    fn two() -> Report {
        let mut report = working();
        let memory = || vec![finding("memory", Status::Ok, "It works.")];
        report.devices = vec![device(0, memory()), device(1, memory())];
        let pair = |device, owner, gb: f64| {
            let peer = finding("peer", Status::Ok, "It is mapped and read.");
            PairReport { device, owner, findings: vec![with(peer, json!({ "gb_per_s": gb }))] }
        };
        report.pairs = vec![pair(0, 1, 395.0), pair(1, 0, 394.4)];
        report.peer = Some(Environment { kernel: "Linux 5.4.0 aarch64".to_owned(), ..Environment::default() });
        report
    }

    fn text(report: &Report) -> String {
        render(report, Style::default())
    }

    /// What follows the environment.
    fn body(text: &str) -> &str {
        text.split_once("\n\nmachine\n").unwrap().1
    }

    #[test]
    fn a_report_where_all_works() {
        let want = "\
vmmfd 0.1.0 doctor, 2026-11-21T16:00:00Z, backend cuda: the NVIDIA driver

environment
  kernel         Linux 6.18.0 x86_64
  module         580.159
  nodes          none
  IMEX channels  none
  /dev/shm       not looked at

machine
  ✓ driver  The driver starts. (in 103990 us)

device 0: NVIDIA H200 GPU-679ee1d3-1095-d5a4-3f1b-b0cc79e99f21
  ✓ memory  It is created, mapped and copied. (2 MiB, copy 55.2 GB/s)
  ✓ export  Memory becomes a descriptor. (anchored 14 us, export 566 us)

required for the verdict:  driver, export
VMM fd sharing works on 1 of 1 GPUs
";
        assert_eq!(text(&working()), want);
    }

    #[test]
    fn a_failure_is_followed_by_its_error_cause_and_remedy() {
        let want = "  ✓ driver  The driver starts. (in 103990 us)

device 0: NVIDIA H200 GPU-679ee1d3-1095-d5a4-3f1b-b0cc79e99f21
  ✗ fabric  Fabric handles can't be made.
            error   cuMemCreate failed: CUDA_ERROR_NOT_PERMITTED (800)
            cause   There is no IMEX channel.
            remedy  Make one, and give it to each container that is to share memory.
  – pool    The device has no pools.
  · event   The round trip failed.

required for the verdict:  driver, export
VMM fd sharing works on 0 of 1 GPUs
";
        assert_eq!(body(&text(&failing())), want);
    }

    #[test]
    fn two_devices_have_their_pairs_and_two_ends_their_environments() {
        let text = text(&two());
        assert!(text.contains("\n\nenvironment of the other end\n  kernel         Linux 5.4.0 aarch64\n"), "{text}");
        let (_, pairs) = text.split_once("\n\ndevice 0 with the memory of device 1\n").unwrap();
        let want = "  ✓ peer    It is mapped and read. (395 GB/s)

device 1 with the memory of device 0
  ✓ peer    It is mapped and read. (394 GB/s)

";
        assert!(pairs.starts_with(want), "{pairs}");
    }

    #[test]
    fn host_memory_never_passes_for_a_gpu() {
        let mut report = working();
        report.backend = Backend::Host;
        let text = text(&report);
        assert!(text.lines().next().unwrap().ends_with("backend host: ordinary memory, NO GPU IS BEING TESTED"));
        assert!(text.contains(" HOST-679ee1d3") && !text.contains("GPU-"));
    }

    #[test]
    fn long_lines_are_folded_beside_their_label() {
        let style = Style { color: false, width: Some(60) };
        let text = render(&failing(), style);
        let want = "            remedy  Make one, and give it to each container\n\
            \x20                   that is to share memory.\n";
        assert!(text.contains(want), "{text}");
        let mut folded = text.lines().filter(|line| line.starts_with(' '));
        assert!(folded.all(|line| line.chars().count() <= 60), "{text}");
        assert_eq!(text.lines().last(), Some("VMM fd sharing works on 0 of 1 GPUs"));
    }

    #[test]
    fn the_verdict_is_one_line_however_narrow() {
        let mut report = working();
        report.verdict = "a long verdict\nof two lines".to_owned();
        let text = render(&report, Style { color: false, width: Some(1) });
        assert!(text.ends_with("\na long verdict of two lines\n"), "{text}");
    }

    #[test]
    fn no_line_ends_in_a_blank() {
        let mut empty = working();
        empty.machine.push(finding("aliases", Status::Ok, ""));
        for report in [working(), failing(), two(), empty] {
            for width in [None, Some(1), Some(40), Some(120)] {
                let text = render(&report, Style { color: false, width });
                assert!(text.lines().all(|line| line.trim_end() == line), "{text:?}");
            }
        }
    }

    /// The text without the codes of colour.
    fn faded(text: &str) -> String {
        let mut parts = text.split('\x1b');
        let mut faded = parts.next().unwrap().to_owned();
        for part in parts {
            faded += part.split_once('m').unwrap().1;
        }
        faded
    }

    #[test]
    fn colour_is_there_only_if_asked_for_and_moves_nothing() {
        for report in [working(), failing(), two()] {
            for width in [None, Some(60)] {
                let bare = render(&report, Style { color: false, width });
                assert!(!bare.contains('\x1b'));
                let colored = render(&report, Style { color: true, width });
                assert!(colored.contains("\x1b[32m✓\x1b[0m driver"), "{colored:?}");
                assert_eq!(faded(&colored), bare);
            }
        }
        let failed = render(&failing(), Style { color: true, width: None });
        assert!(failed.contains("\x1b[31m✗\x1b[0m") && failed.contains("\x1b[33m–\x1b[0m"), "{failed:?}");
        assert!(failed.ends_with("\x1b[31mVMM fd sharing works on 0 of 1 GPUs\x1b[0m\n"));
    }

    /// Puts a text in place of every text of a value.
    fn everywhere(value: &mut Value, evil: &str) {
        match value {
            Value::String(text) => text.push_str(evil),
            Value::Array(items) => items.iter_mut().for_each(|item| everywhere(item, evil)),
            Value::Object(fields) => {
                let figures = fields.get_mut("figures").and_then(Value::as_object_mut);
                figures.into_iter().for_each(|figures| drop(figures.insert(format!("name{evil}"), json!("value"))));
                let closed = ["backend", "uuid", "status"];
                fields.iter_mut().filter(|(name, _)| !closed.contains(&name.as_str())).for_each(|(_, value)| {
                    everywhere(value, evil);
                });
            }
            _ => {}
        }
    }

    #[test]
    fn a_report_from_outside_does_not_speak_to_the_terminal() {
        let mut report = failing();
        report.environment = serde_json::from_value(json!({
            "kernel": "k", "container": "c", "confidential": "c", "module": "m", "mps": "m", "visible_devices": "v",
            "library": { "path": "p", "file": "f" }, "library_path": "l", "uid": 1, "euid": 2, "user_namespace": true,
            "nodes": [{ "path": "p", "mode": "m", "uid": 1, "gid": 1, "usable": false }],
            "imex_channels": [{ "path": "p", "mode": "m", "uid": 1, "gid": 1, "usable": true }],
        }))
        .unwrap();
        report.peer = Some(report.environment.clone());
        report.machine.push(with(finding("p", Status::Ok, "m"), json!({ "text": "t" })));
        let lines = text(&report).lines().count();
        let mut value = serde_json::to_value(&report).unwrap();
        everywhere(&mut value, "\x1b[2J\r\n\t\u{202e}\u{9b}31m");
        let evil: Report = serde_json::from_value(value).unwrap();
        let text = text(&evil);
        let unfit = |c: char| c.is_control() && c != '\n' || c == '\u{202e}';
        assert!(!text.contains(unfit), "{text:?}");
        assert_eq!(text.lines().count(), lines, "{text}");
    }

    #[test]
    fn a_name_of_any_length_pushes_no_other_aside() {
        let mut report = working();
        report.machine.push(finding(&"x".repeat(1000), Status::Ok, "It works."));
        let text = text(&report);
        assert!(text.contains(&format!("  ✓ {:<MAX_COLUMN$}  The driver starts.", "driver")), "{text}");
    }

    #[test]
    fn a_report_of_any_length_is_printed_in_few_characters() {
        let long = "x".repeat(70_000);
        let words = "word ".repeat(70_000);
        let mut report = failing();
        report.environment.kernel = words.clone();
        report.required = vec![long.clone(); 100];
        (report.tool, report.made, report.verdict) = (long.clone(), long.clone(), words.clone());
        let mut worst = with(finding(&long, Status::Failed, &words), json!({ long.clone(): words.clone() }));
        (worst.cause, worst.remedy) = (Some(words.clone()), Some(words.clone()));
        report.machine.push(worst);
        report.devices[0].name = words;
        for style in [Style::default(), Style { color: true, width: Some(1) }, Style { color: false, width: Some(80) }]
        {
            let text = render(&report, style);
            assert!(text.len() < 200_000, "{}", text.len());
            assert!(text.contains(&format!(" {}…  word", &long[..MAX_COLUMN - 1])), "{text}");
        }
    }

    #[test]
    fn what_is_cut_says_so_and_what_fits_is_not_cut() {
        assert_eq!(
            ["", "abc", "äöüß", "abcde", "ab cde"].map(|text| short(text, 4)),
            ["", "abc", "äöüß", "abc…", "ab…"]
        );
    }

    #[test]
    fn figures_are_told_with_their_units() {
        let told = |name: &str, value: Value| figure(name, &value);
        assert_eq!(told("export_us", json!(14)).unwrap(), "export 14 us");
        assert_eq!(told("us", json!(14)).unwrap(), "14 us");
        assert_eq!(told("status", json!(3)).unwrap(), "status 3");
        assert_eq!(told("free_before_bytes", json!(1_610_612_736_u64)).unwrap(), "free before 1.5 GiB");
        assert_eq!(told("lost_bytes", json!(-5)).unwrap(), "lost -5 bytes");
        assert_eq!(told("read_gb_per_s", json!(4280.7)).unwrap(), "read 4281 GB/s");
        assert_eq!(told("dma_buf", json!(true)).unwrap(), "dma buf yes");
        assert_eq!(told("inode", json!("a  b")).unwrap(), "inode a b");
        for silent in [json!(null), json!([1]), json!({ "a": 1 })] {
            assert_eq!(told("list", silent), None);
        }
    }

    #[test]
    fn sizes_have_the_largest_unit_that_fits() {
        let told = [0, 1023, 1024, 2 << 20, (1 << 30) - 1, 151_397_597_184, u64::MAX].map(size);
        assert_eq!(told, ["0 bytes", "1023 bytes", "1 KiB", "2 MiB", "1023.9 MiB", "141 GiB", "15.9 EiB"]);
    }

    #[test]
    fn a_report_read_back_prints_the_same() {
        for report in [working(), failing(), two()] {
            let back: Report = serde_json::from_str(&serde_json::to_string(&report).unwrap()).unwrap();
            assert_eq!(text(&back), text(&report));
        }
    }
}
