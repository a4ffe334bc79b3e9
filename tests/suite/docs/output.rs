//! The output in the pages matches the output of the commands, except for parts that differ between runs and devices.
//!
//! GPU output is pasted into the pages: these tests compare its steps and words with the output of the host backend.

use super::Page;
use crate::{running::hide_driver, support::prelude::*};

/// The units of figures, which depend on the size of the figure.
const UNITS: [&str; 11] = ["ns", "us", "ms", "s", "min", "B", "bytes", "KiB", "MiB", "GiB", "TiB"];

/// A line without the parts that differ between runs and devices.
fn masked(line: &str) -> String {
    let words = line.split_whitespace().filter(|word| !UNITS.contains(&word.trim_matches(['(', ')', ','])));
    let mask = |word: &str| {
        let differs = word.contains(|c: char| c.is_ascii_digit() || c == '/');
        match word.split_once('=') {
            Some((field, _)) if differs => format!("{field}=#"),
            _ if differs => "#".to_owned(),
            _ => word.to_owned(),
        }
    };
    words.map(mask).collect::<Vec<_>>().join(" ")
}

/// The steps of an output, sorted because two sides work in parallel.
fn steps<'a>(lines: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut steps: Vec<String> = lines.map(masked).collect();
    steps.sort();
    steps
}

/// Runs both commands as typed without a path, on a machine without a driver. The producer waits until it has announced that.
fn run_as_typed(options: &[&str]) -> [Ended; 2] {
    let meeting = Meeting::new(On::Host);
    let folder = meeting.folder();
    hide_driver(folder);
    let run = |name: &str| {
        let mut run = meeting.bare(if name == "producer" { "producer" } else { "consumer" });
        run.command.arg0(name).args(options).env("XDG_RUNTIME_DIR", folder).env("LD_LIBRARY_PATH", folder);
        run
    };
    let mut producer = run("producer").start();
    producer.until("waiting");
    let consumer = run("consumer").end();
    [producer.end(), consumer]
}

#[test]
fn shown_output_is_printed_output() {
    let page = Page::read("docs/commands.md");
    for options in [&[][..], &["-v"]] {
        for (name, ended) in ["producer", "consumer"].into_iter().zip(run_as_typed(options)) {
            ended.code(0);
            let typed = [&[name], options].concat().join(" ");
            let shown = page.block(&format!("terminal: {typed}"));
            assert_eq!(shown[0], format!("$ {typed}"));
            // On a terminal, the calls of the driver are between the steps.
            let shown = shown[1..].iter().copied().filter(|line| !line.starts_with("DEBUG "));
            assert_eq!(steps(shown), steps(ended.stdout.lines()), "{name}");
        }
    }
}

/// The lines of the README's two terminals, which are side by side: a row that starts with a space continues the line above it.
fn terminals(rows: &[&str]) -> [Vec<String>; 2] {
    let mut lines = [Vec::<String>::new(), Vec::new()];
    for row in rows {
        let (left, right) = row.split_once('│').unwrap_or((row, ""));
        // After the line between the terminals there is one more space.
        for (lines, cell) in lines.iter_mut().zip([left, right.strip_prefix(' ').unwrap_or(right)]) {
            match cell.starts_with(' ') {
                _ if cell.trim().is_empty() => {}
                true => *lines.last_mut().unwrap() += cell,
                false => lines.push(cell.to_owned()),
            }
        }
    }
    lines
}

#[test]
fn readme_terminals_are_printed() {
    let page = Page::read("README.md");
    let shown = terminals(&page.block("terminals"));
    for ((name, ended), shown) in ["producer", "consumer"].into_iter().zip(run_as_typed(&[])).zip(shown) {
        ended.code(0);
        assert_eq!(shown[0].trim(), format!("$ {name}"));
        assert_eq!(steps(shown[1..].iter().map(String::as_str)), steps(ended.stdout.lines()), "{name}");
    }
}

/// Every path to a value of an object, with the value's type.
fn shape(at: &str, value: &Value, into: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) => fields.iter().for_each(|(name, value)| shape(&format!("{at}.{name}"), value, into)),
        Value::Array(items) => items.iter().for_each(|value| shape(&format!("{at}[]"), value, into)),
        Value::Null => drop(into.insert(format!("{at}: null"))),
        Value::Bool(_) => drop(into.insert(format!("{at}: bool"))),
        Value::Number(_) => drop(into.insert(format!("{at}: number"))),
        Value::String(_) => drop(into.insert(format!("{at}: string"))),
    }
}

#[test]
fn shown_json_has_printed_fields() {
    let meeting = Meeting::new(On::Host);
    let producer = meeting.producer(&["--json"]).start();
    let consumer = meeting.consumer(&["--json"]).end();
    let page = Page::read("docs/commands.md");
    for (name, ended) in [("producer", producer.end()), ("consumer", consumer)] {
        let shown: Value = serde_json::from_str(&page.block(&format!("json: {name}")).join("\n")).unwrap();
        let (mut want, mut got) = (BTreeSet::new(), BTreeSet::new());
        shape("", &ended.json(), &mut want);
        shape("", &shown, &mut got);
        assert_eq!(got, want, "{name}");
    }
}

#[test]
fn journal_sample_is_logged() {
    let subject = Subject::host();
    let served = Served::start(Keeper::Apart, &subject);
    let client = Client::connect(&served.path, &Config::default()).unwrap();
    let memory = filled(&subject.driver, 6 << 20, None, 1);
    client.put(&Put::new("models/a").part(PutPart::of("all", &memory).unwrap())).unwrap();
    served.kill_server();
    // The last line of the next server's start.
    until(|| served.log().contains(" restarts=1"));
    // A line starts with its time and its level, or in the journal with its time and its process.
    let event = |line: &str| masked(line).split_once(' ').unwrap().1.split_once(' ').unwrap().1.to_owned();
    let logged: Vec<String> = served.log().lines().map(event).collect();
    let page = Page::read("docs/deploy.md");
    let shown = page.block("journal");
    assert!(shown.len() >= 3, "{shown:?}");
    for line in shown {
        assert!(logged.contains(&event(line)), "no process logs `{line}`: {logged:#?}");
    }
}
