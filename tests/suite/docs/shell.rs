//! Shell lines in a page.

use super::{root, source};
use crate::running::understood;

/// Third-party programs and shell builtins: only the file arguments of these lines are checked.
const OTHERS: [&str; 16] = [
    ".",
    "./viewer",
    "cc",
    "docker",
    "groupadd",
    "install",
    "kubectl",
    "ls",
    "nvidia-smi",
    "pip",
    "podman",
    "python3",
    "scp",
    "ssh",
    "systemctl",
    "vllm",
];

/// Checks that a line's program exists and takes these options, and that the repository files in the line exist.
pub(super) fn check(line: &str) -> Result<(), String> {
    let line = line.split_once(" #").map_or(line, |(line, _)| line).trim();
    if line.starts_with('#') || line.is_empty() {
        return Ok(());
    }
    line.split("&&").try_for_each(|command| check_command(command.trim()))
}

fn check_command(command: &str) -> Result<(), String> {
    let mut words: Vec<String> = split(command);
    words.retain(|word| word != "&");
    if let Some(at) = words.iter().position(|word| word == ">" || word == "2>") {
        words.truncate(at);
    }
    while words.first().is_some_and(|word| is_setting(word)) {
        words.remove(0);
    }
    let Some((program, arguments)) = words.split_first() else { return Ok(()) };
    if let Some(missing) = words.iter().find(|word| in_repository(word) && !root().join(word.as_str()).exists()) {
        return Err(format!("`{command}` names {missing}, which is not there"));
    }
    match program.as_str() {
        "producer" | "consumer" | "vmmfd" => {
            understood(program, arguments);
            Ok(())
        }
        "make" => arguments.iter().filter(|word| !is_setting(word)).try_for_each(|target| {
            let found = source("Makefile").lines().any(|line| line.starts_with(&format!("{target}:")));
            found.then_some(()).ok_or_else(|| format!("the Makefile has no target {target}"))
        }),
        "cargo" => cargo(arguments),
        program if in_repository(program) || OTHERS.contains(&program) => Ok(()),
        program => Err(format!("`{program}` is no program that this test knows")),
    }
}

fn cargo(arguments: &[String]) -> Result<(), String> {
    let manifest = ["Cargo.toml", "bin/Cargo.toml", "tests/bench/Cargo.toml"].map(source).concat();
    let mut words = arguments.iter().take_while(|word| *word != "--");
    while let Some(word) = words.next() {
        let mut named = || words.next().ok_or_else(|| format!("{word} names nothing"));
        let found = match word.as_str() {
            "--example" => root().join(format!("examples/{}.rs", named()?)).exists(),
            "--bin" | "--test" | "--bench" => manifest.contains(&format!("name = \"{}\"", named()?)),
            "--features" => manifest.contains(&format!("\n{} = [", named()?)),
            "--path" => ["bin", "tests/bench"].contains(&named()?.as_str()),
            "--manifest-path" => named()?.starts_with("../"),
            "-p" => manifest.contains(&format!("name = \"{}\"", named()?)),
            word => {
                let mut known = "run test bench doc install build vmmfd --open --locked --quiet --workspace".split(' ');
                known.any(|known| known == word)
            }
        };
        if !found {
            return Err(format!("cargo {arguments:?}: {word}"));
        }
    }
    Ok(())
}

/// Whether a word is `NAME=value`.
fn is_setting(word: &str) -> bool {
    word.split_once('=').is_some_and(|(name, _)| name.chars().all(|c| c.is_ascii_uppercase() || c == '_'))
}

/// Whether a path is below a top-level folder.
fn in_repository(word: &str) -> bool {
    ["scripts/", "docs/", "examples/", "tests/", "src/", "bin/"].iter().any(|folder| word.starts_with(folder))
}

/// Splits a line at spaces outside quotes.
fn split(command: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut quoted = None;
    let mut word = String::new();
    for c in command.chars() {
        match (quoted, c) {
            (None, '"' | '\'') => quoted = Some(c),
            (Some(quote), c) if c == quote => quoted = None,
            (None, ' ') => words.push(std::mem::take(&mut word)),
            (_, c) => word.push(c),
        }
    }
    words.push(word);
    words.retain(|word| !word.is_empty());
    words
}
