//! The generated parts of the pages: the options of the commands, and the rules of the doctor.

use vmmfd_cli::{
    cli::EXIT_CODES,
    doctor::rules::{Rule, rules},
};

use super::{Page, root, source};
use crate::support::prelude::*;

#[test]
fn diagnose_page_has_doctor_rules() {
    let row = |Rule { name, symptom, cause, remedy, .. }| {
        format!("| <a id=\"{name}\"></a>`{name}` | {symptom} | {cause} | {remedy} |\n")
    };
    let rows: String = rules().map(row).collect();
    let want = format!("| Rule | Error or symptom | Cause | What to do |\n|---|---|---|---|\n{rows}");
    Page::has_generated("docs/diagnose.md", "rules", &want);
}

#[test]
fn commands_page_has_exit_codes() {
    let want = format!("```text\n{EXIT_CODES}\n```\n");
    Page::has_generated("docs/commands.md", "exit codes", &want);
}

#[test]
fn schema_files_match_the_wire() {
    for (path, document) in [
        ("docs/protocol-schema.json", Message::schema()),
        ("docs/broker-schema.json", vmmfd::wire::broker::Message::schema()),
    ] {
        let want = serde_json::to_string_pretty(&document).unwrap() + "\n";
        if env::var_os("UPDATE_DOCS").is_some() {
            fs::write(root().join(path), want).unwrap();
        } else {
            assert!(
                source(path) == want,
                "{path} is out of date: UPDATE_DOCS=1 cargo test --workspace --test suite -- docs"
            );
        }
    }
}

/// The output of `COMMAND -h`.
fn help(command: &str) -> String {
    let mut words = command.split(' ');
    let meeting = Meeting::host();
    let program = words.next().unwrap();
    assert_eq!(program, "vmmfd");
    let mut run = meeting.bare("vmmfd");
    run.command.env_remove("COLUMNS").args(words).arg("-h");
    let ended = run.end();
    ended.code(0);
    ended.stdout
}

/// The subcommands in a help text.
fn subcommands(help: &str) -> Vec<String> {
    let list = help.split("\nOptions:\n").next().unwrap_or_default();
    list.lines()
        .filter_map(|line| line.strip_prefix("  "))
        .filter(|line| line.starts_with(|first: char| first.is_ascii_lowercase()))
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| *name != "help")
        .map(str::to_owned)
        .collect()
}

/// The options in a help text, without the options that every command has.
fn options(help: &str) -> Vec<&str> {
    let of_all = ["--json", "--log-format <FORMAT>", "-v, --verbose...", "-q, --quiet", "-h, --help", "-V, --version"];
    help.lines()
        .filter_map(|line| line.strip_prefix("      ").or_else(|| line.strip_prefix("  ")))
        .filter(|line| line.starts_with('-') && !of_all.iter().any(|option| line.starts_with(option)))
        .map(|line| if line.get(2..6) == Some(", --") { &line[4..] } else { line })
        .filter_map(|line| line.split([' ', '.', '[']).next())
        .collect()
}

#[test]
fn commands_page_lists_every_option() {
    let mut page = "| Command | Purpose | Options |\n|---|---|---|\n".to_owned();
    let mut queue = vec!["vmmfd".to_owned()];
    while let Some(command) = queue.pop() {
        let text = help(&command);
        let nested = subcommands(&text);
        if command != "vmmfd" {
            let purpose = text.split("\n\n").next().unwrap().replace('\n', " ");
            let options: Vec<String> = options(&text).iter().map(|option| format!("`{option}`")).collect();
            page += &format!("| `{command}` | {purpose} | {} |\n", options.join(" "));
        }
        queue.extend(nested.iter().rev().map(|name| format!("{command} {name}")));
    }
    assert!(page.contains("| `vmmfd doctor` |") && page.contains("`--safetensors`"), "{page}");
    Page::has_generated("docs/commands.md", "commands", &page);
}
