//! The examples in `--help` and in the man pages.

use clap::Command;

const EXAMPLES: [(&str, &str); 22] = [
    (
        "vmmfd",
        "vmmfd doctor
vmmfd produce &
vmmfd consume
vmmfd serve &
vmmfd put models/tiny --from weights.bin --digest
vmmfd get models/tiny --to copy.bin",
    ),
    (
        "vmmfd produce",
        "vmmfd produce --size 1.5GiB --consumers 8
vmmfd produce --from weights.bin --chunk 64MiB
vmmfd produce --dtype bf16 --shape 1024x768",
    ),
    (
        "vmmfd consume",
        "vmmfd consume --timeout 2m
vmmfd consume --range 1GiB:4MiB --to part.bin",
    ),
    (
        "vmmfd serve",
        "vmmfd serve --allow-uid 1000
vmmfd serve --socket /run/vmmfd/broker.sock --quota bytes=64GiB,objects=100
vmmfd serve --socket /run/vmmfd/broker.sock --check",
    ),
    (
        "vmmfd keeper",
        "vmmfd keeper --socket /run/vmmfd-keeper/keeper.sock
vmmfd keeper --socket /run/vmmfd-keeper/keeper.sock --reload",
    ),
    (
        "vmmfd status",
        "vmmfd status
vmmfd status --socket /run/vmmfd/broker.sock --json",
    ),
    (
        "vmmfd put",
        "vmmfd put models/tiny --from weights.bin --digest --meta '{\"engine\": \"x\"}'
vmmfd put models/llama --safetensors /models/llama
vmmfd put models/tiny --from newer.bin --replace --keep 1",
    ),
    (
        "vmmfd get",
        "vmmfd get models/tiny --to copy.bin
vmmfd get models/tiny --wait 2m --expect '{\"engine\": \"x\"}'
vmmfd get models/llama --array lm_head.weight --to head.bin",
    ),
    (
        "vmmfd ls",
        "vmmfd ls
vmmfd ls -l models/",
    ),
    (
        "vmmfd stat",
        "vmmfd stat models/tiny
vmmfd stat models/tiny --version 1",
    ),
    (
        "vmmfd rm",
        "vmmfd rm models/tiny
vmmfd rm --prefix models/old/ --dry-run
vmmfd rm --prefix models/old/ --confirm 6e1e545acec5",
    ),
    (
        "vmmfd who",
        "vmmfd who
vmmfd who models/tiny",
    ),
    (
        "vmmfd watch",
        "vmmfd watch models/
vmmfd watch --json",
    ),
    ("vmmfd exporter", "vmmfd exporter --listen 0.0.0.0:9464"),
    (
        "vmmfd doctor",
        "vmmfd doctor
vmmfd doctor --device 0 --only round-trip
vmmfd doctor --json > report.json
vmmfd doctor --show report.json",
    ),
    ("vmmfd doctor serve", "vmmfd doctor serve --socket /srv/shared/doctor.sock --allow-uid 1001"),
    ("vmmfd doctor join", "vmmfd doctor join --socket /srv/shared/doctor.sock --allow-uid 1000"),
    (
        "vmmfd devices",
        "vmmfd devices
vmmfd devices --backend host",
    ),
    (
        "vmmfd bench",
        "vmmfd bench handoff --size 64MiB,1GiB
vmmfd bench broker --count 50 --json",
    ),
    (
        "vmmfd completions",
        "vmmfd completions bash > vmmfd.bash
vmmfd completions zsh --of producer > _producer",
    ),
    ("vmmfd man", "vmmfd man man1"),
    (
        "vmmfd schema",
        "vmmfd schema
vmmfd schema status",
    ),
];

fn of(path: &str) -> Option<&'static str> {
    EXAMPLES.iter().find(|(of, _)| *of == path).map(|(_, examples)| *examples)
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
