//! The examples in `--help` and in the man pages.

use clap::Command;

/// The examples of a command, from its section of `examples.txt`.
fn of(path: &str) -> Option<&'static str> {
    let mut sections = include_str!("examples.txt").split("# ").filter_map(|section| section.split_once('\n'));
    sections.find(|(name, _)| *name == path).map(|(_, examples)| examples.trim_end())
}

/// Adds the examples of `path` and of its subcommands to their `--help`, above the exit codes. The command shows them under `name`.
pub(super) fn add(command: Command, path: &str, name: &str) -> Command {
    let names: Vec<String> = command.get_subcommands().map(|sub| sub.get_name().to_owned()).collect();
    let command = names.into_iter().fold(command, |command, sub| {
        let path = format!("{path} {sub}");
        command.mut_subcommand(sub, |sub| add(sub, &path, &path))
    });
    let Some(examples) = of(path) else { return command };
    let codes = command.get_after_help().map(|codes| format!("\n\n{codes}")).unwrap_or_default();
    let examples = examples.replace(path, name).replace('\n', "\n  ");
    let text = format!("Examples:\n  {examples}{codes}");
    // The overview of the commands shows its examples also in short.
    if path == "vmmfd" { command.after_help(text) } else { command.after_long_help(text) }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// The words of a line, without its redirection. A quoted word may have spaces.
    fn words(line: &str) -> Vec<String> {
        let line = line.split(['>', '&']).next().unwrap_or_default();
        let parts = line.split('\'').enumerate();
        let words = parts.flat_map(|(at, part)| match at % 2 {
            0 => part.split_whitespace().map(str::to_owned).collect(),
            _ => vec![part.to_owned()],
        });
        words.collect()
    }

    #[track_caller]
    fn check(path: &str, command: &Command, root: &Command) {
        if command.is_hide_set() || command.get_name() == "help" {
            return;
        }
        let examples = of(path).unwrap_or_else(|| panic!("{path} has no examples"));
        for line in examples.lines() {
            let parsed = root.clone().try_get_matches_from(words(line));
            assert!(line.starts_with("vmmfd ") && parsed.is_ok(), "{line}: {:?}", parsed.err());
        }
        for sub in command.get_subcommands() {
            check(&format!("{path} {}", sub.get_name()), sub, root);
        }
    }

    pub(in super::super) fn check_all(root: &Command) {
        check("vmmfd", root, root);
    }
}
