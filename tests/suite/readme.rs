//! The README says what is so: its output is what the commands print, its tables are those of the source.

use std::collections::BTreeSet;

use serde_json::Value;
use vmmfd::tools::doctor::rules::{RULES, Rule};

use crate::running::{Meeting, On};

const README: &str = include_str!("../../README.md");

/// The lines of the code block that follows a mark.
fn block(mark: &str) -> Vec<&'static str> {
    let (_, after) = README.split_once(&format!("<!-- {mark} -->\n```")).unwrap_or_else(|| panic!("no {mark}"));
    let (_, body) = after.split_once('\n').unwrap();
    let (body, _) = body.split_once("```").unwrap();
    body.lines().collect()
}

/// A line with everything masked that differs from run to run and from device to device.
fn masked(line: &str) -> String {
    line.split_whitespace()
        .map(|word| if word.contains(|c: char| c.is_ascii_digit() || c == '/') { "#" } else { word })
        .collect::<Vec<_>>()
        .join(" ")
}

/// The steps of an output, less the two that name the backend and the device; in any order, for two sides work at once.
fn steps<'a>(lines: impl Iterator<Item = &'a str>) -> Vec<String> {
    let own_words = |line: &&str| !matches!(line.split_whitespace().nth(1), Some("driver" | "device"));
    let mut steps: Vec<String> = lines.filter(own_words).map(masked).collect();
    steps.sort();
    steps
}

#[test]
fn the_terminals_show_what_the_commands_print() {
    let meeting = Meeting::new(On::Host);
    let producer = meeting.producer(&[]).start();
    let consumer = meeting.consumer(&[]).end();
    for (name, ended) in [("producer", producer.end()), ("consumer", consumer)] {
        ended.code(0);
        let shown = block(&format!("terminal: {name}"));
        assert_eq!(shown[0], format!("$ {name}"));
        assert_eq!(steps(shown[1..].iter().copied()), steps(ended.stdout.lines()), "{name}");
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
fn the_json_shown_has_the_fields_that_the_commands_print() {
    let meeting = Meeting::new(On::Host);
    let producer = meeting.producer(&["--json"]).start();
    let consumer = meeting.consumer(&["--json"]).end();
    for (name, ended) in [("producer", producer.end()), ("consumer", consumer)] {
        let shown: Value = serde_json::from_str(&block(&format!("json: {name}")).join("\n")).unwrap();
        let (mut want, mut got) = (BTreeSet::new(), BTreeSet::new());
        shape("", &ended.json(), &mut want);
        shape("", &shown, &mut got);
        assert_eq!(got, want, "{name}");
    }
}

#[test]
fn the_exit_codes_are_those_of_help() {
    assert_eq!(block("exit codes").join("\n"), vmmfd::tools::cli::EXIT_CODES);
}

#[test]
fn troubleshooting_has_the_rules_of_the_doctor() {
    let row = |rule: &Rule| format!("| {} | {} | {} |\n", rule.symptom, rule.cause, rule.remedy);
    let rows: String = RULES.iter().map(row).collect();
    let want = format!("| Seen | Cause | What to do |\n|---|---|---|\n{rows}");
    let (_, table) = README.split_once("<!-- rules -->\n").unwrap();
    let (table, _) = table.split_once("<!-- end of rules -->").unwrap();
    // As text, and not by `assert_eq`, so that it can be pasted.
    assert!(table == want, "between the marks of the README belongs:\n{want}");
}

#[test]
fn troubleshooting_knows_the_words_of_the_errors() {
    let sources = [
        include_str!("../../src/error/mod.rs"),
        include_str!("../../src/error/device.rs"),
        include_str!("../../src/error/load.rs"),
        include_str!("../../src/error/memory.rs"),
        include_str!("../../src/error/peer.rs"),
        include_str!("../../src/error/protocol.rs"),
        include_str!("../../src/error/socket.rs"),
        include_str!("../../src/error/code.rs"),
        include_str!("../../src/error/device.rs"),
        include_str!("../../src/error/load.rs"),
        include_str!("../../src/error/memory.rs"),
        include_str!("../../src/error/peer.rs"),
        include_str!("../../src/error/socket.rs"),
        include_str!("../../src/session/handoff/consumer.rs"),
        include_str!("../../src/session/acceptor.rs"),
        include_str!("../../src/session/handoff/connection.rs"),
        include_str!("../../src/memory/imported.rs"),
        include_str!("../../src/tools/check/files.rs"),
        include_str!("../../src/tools/cli/console.rs"),
    ];
    let (_, section) = README.split_once("### What the commands say").unwrap();
    let (section, _) = section.split_once("\n## ").unwrap();
    let phrases: Vec<&str> = section.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next()).collect();
    assert!(phrases.len() > 10);
    for phrase in phrases {
        let words = phrase.strip_prefix("CUDA_ERROR_").unwrap_or(phrase);
        assert!(sources.iter().any(|source| source.contains(words)), "no error says `{phrase}`");
    }
}

#[test]
fn the_versions_are_those_of_the_manifest() {
    let manifest = include_str!("../../Cargo.toml");
    let rust = manifest.lines().find_map(|line| line.strip_prefix("rust-version = ")).unwrap().trim_matches('"');
    assert!(README.contains(&format!("Rust {rust} or newer")));
    let tools = manifest.split_once("tools = [").unwrap().1.split_once(']').unwrap().0;
    let bindings = tools.split_once("cudarc/cuda-").unwrap().1.split_once('"').unwrap().0.parse::<u32>().unwrap();
    let version = format!("bindings of CUDA {}.{}", bindings / 1000, bindings % 1000 / 10);
    assert!(README.contains(&version), "{version}");
}

#[test]
fn the_doctors_report_has_every_probe() {
    let report = block("doctor");
    let shown: Vec<&str> = report
        .iter()
        .filter_map(|line| line.strip_prefix("  ").filter(|rest| !rest.starts_with(' ')))
        .filter_map(|line| line.split_whitespace().nth(1).filter(|_| !line.starts_with(|c: char| c.is_ascii())))
        .collect();
    let expected: Vec<&str> =
        vmmfd::tools::doctor::PROBES.iter().map(|probe| probe.name).filter(|name| *name != "peer").collect();
    assert_eq!(shown, expected);
}
