//! The output in the pages matches the output of the commands, except for parts that differ between runs and devices.
//!
//! GPU output is pasted into the pages: these tests compare its steps and words with the output of the host backend.

use std::{collections::BTreeSet, os::unix::process::CommandExt};

use serde_json::Value;

use super::Page;
use crate::running::{Ended, Meeting, On};

/// The units of figures, which depend on the size of the figure.
const UNITS: [&str; 10] = ["ns", "us", "ms", "s", "B", "bytes", "KiB", "MiB", "GiB", "TiB"];

/// A line without the parts that differ between runs and devices.
fn masked(line: &str) -> String {
    let words = line.split_whitespace().filter(|word| !UNITS.contains(&word.trim_matches(['(', ')', ','])));
    words
        .map(|word| if word.contains(|c: char| c.is_ascii_digit() || c == '/') { "#" } else { word })
        .collect::<Vec<_>>()
        .join(" ")
}

#[test]
fn figures_are_masked_with_their_units() {
    assert_eq!(masked("map  at 0x7f00, read-write (89 us)"), masked("map  at 0x1, read-write (1.5 ms)"));
    assert_ne!(masked("map  at 0x7f00, read-write (89 us)"), masked("map  at 0x7f00, read-only (89 us)"));
}

/// The steps of an output, sorted because two sides work in parallel, without the steps that name the backend and the device.
fn steps<'a>(lines: impl Iterator<Item = &'a str>) -> Vec<String> {
    let own_words =
        |line: &&str| !matches!(line.split_whitespace().next(), Some("producer" | "consumer" | "driver" | "device"));
    let mut steps: Vec<String> = lines.filter(own_words).map(masked).collect();
    steps.sort();
    steps
}

/// Runs both commands as typed without a path. The producer waits until it has announced that.
fn run_as_typed(options: &[&str]) -> [Ended; 2] {
    let meeting = Meeting::new(On::Host);
    let run = |name: &str| {
        let mut run = meeting.bare(if name == "producer" { "producer" } else { "consumer" });
        run.command.arg0(name).args(options).env("XDG_RUNTIME_DIR", meeting.folder());
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
fn doctors_report_names_real_probes() {
    let page = Page::read("docs/diagnose.md");
    let report = page.block("doctor");
    let rows = report.iter().filter_map(|line| line.strip_prefix("  ✓ ").or_else(|| line.strip_prefix("  – ")));
    let shown: Vec<&str> = rows.filter_map(|row| row.split_whitespace().next()).collect();
    assert!(shown.len() >= 4, "{shown:?}");
    for name in shown {
        assert!(vmmfd_cli::doctor::PROBES.iter().any(|probe| probe.name == name), "no probe {name}");
    }
}
