//! What is written into the pages from the sources: the options of the commands, the rules of the doctor.

use std::collections::BTreeMap;

use vmmfd_cli::{
    cli::EXIT_CODES,
    doctor::rules::{RULES, Rule},
};

use super::{Page, root};
use crate::running::Meeting;

#[test]
fn troubleshooting_has_doctor_rules() {
    let row = |rule: &Rule| {
        let Rule { name, symptom, cause, remedy, .. } = rule;
        format!("| <a id=\"{name}\"></a>`{name}` | {symptom} | {cause} | {remedy} |\n")
    };
    let rows: String = RULES.iter().map(row).collect();
    let want = format!("| Rule | Error or symptom | Cause | What to do |\n|---|---|---|---|\n{rows}");
    Page::has_generated("docs/troubleshooting.md", "rules", &want);
}

#[test]
fn commands_page_has_exit_codes() {
    let want = format!("```text\n{EXIT_CODES}\n```\n");
    Page::has_generated("docs/commands.md", "exit codes", &want);
}

/// What a command prints with `-h`.
fn help(command: &str) -> String {
    let mut words = command.split(' ');
    let meeting = Meeting::host();
    let program = words.next().unwrap();
    let name = ["producer", "consumer", "vmmfd"].into_iter().find(|name| *name == program).unwrap();
    let mut run = meeting.bare(name);
    run.command.env_remove("COLUMNS").args(words).arg("-h");
    let ended = run.end();
    ended.code(0);
    ended.stdout
}

/// The subcommands that a help lists.
fn subcommands(help: &str) -> Vec<String> {
    let Some((_, list)) = help.split_once("\nCommands:\n") else { return Vec::new() };
    list.lines()
        .take_while(|line| line.starts_with("  "))
        .filter(|line| !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| *name != "help")
        .map(str::to_owned)
        .collect()
}

#[test]
fn the_commands_page_has_every_option() {
    let mut page = String::new();
    let mut shown = BTreeMap::<String, String>::new();
    let mut queue: Vec<String> = ["vmmfd", "consumer", "producer"].map(str::to_owned).to_vec();
    while let Some(command) = queue.pop() {
        let text = help(&command);
        queue.extend(subcommands(&text).iter().rev().map(|name| format!("{command} {name}")));
        // The codes have a section of their own, but for those that another command has.
        let text = text.replace(EXIT_CODES, "").trim_end().to_owned();
        let own = |line: &&str| !line.starts_with("Usage:") && !line.contains("--version");
        let without_name = text.lines().filter(own).collect::<Vec<_>>().join("\n");
        let body = match shown.get(&without_name) {
            Some(other) => format!("As [`{other}`](#{}).", other.replace(' ', "-")),
            None => format!("<!-- help: {command} -->\n```text\n{text}\n```"),
        };
        shown.entry(without_name).or_insert_with(|| command.clone());
        page += &format!("\n### {command}\n\n{body}\n");
    }
    let page: String = page.lines().map(|line| format!("{}\n", line.trim_end())).collect();
    assert!(page.contains("\n### vmmfd doctor serve\n"), "{page}");
    Page::has_generated("docs/commands.md", "help", &format!("{page}\n"));
}

#[test]
fn subcommands_are_read_from_a_help() {
    let help = "Usage: x\n\nCommands:\n  one    Does\n         more\n  two\n  help   Print\n\nOptions:\n  -h  x\n";
    assert_eq!(subcommands(help), ["one", "two"]);
    assert!(root().join("docs").is_dir());
}
