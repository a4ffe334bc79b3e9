//! Suggests a command or an option for an unknown word: by meaning, then by spelling.

use std::ffi::OsString;

use clap::{
    Command,
    error::{ContextKind, ContextValue, ErrorKind},
};

/// The commands of each group.
pub(super) type Groups = [(&'static str, &'static [&'static str]); 4];

/// Other names of commands.
pub(super) const COMMANDS: &[(&str, &[&str])] = &[
    ("produce", &["producer", "send", "share"]),
    ("consume", &["consumer", "receive", "take"]),
    ("pub", &["publish", "publisher"]),
    ("sub", &["subscribe", "subscriber"]),
    ("put", &["add", "create", "load", "store", "upload"]),
    ("get", &["cat", "download", "fetch", "pull", "read"]),
    ("ls", &["list"]),
    ("stat", &["describe", "info", "inspect", "show"]),
    ("rm", &["del", "delete", "drop", "remove", "unlink"]),
    ("who", &["holders", "leases", "ps", "users"]),
    ("watch", &["events", "follow", "monitor", "tail"]),
    ("serve", &["broker", "daemon", "run", "server", "start"]),
    ("exporter", &["metrics", "prometheus"]),
    ("doctor", &["check", "diagnose", "smoke", "test"]),
    ("devices", &["gpus"]),
    ("bench", &["benchmark", "measure"]),
    ("help", &["usage"]),
];

/// Other names of options. The first row whose option the command has applies.
pub(super) const OPTIONS: &[(&str, &[&str])] = &[
    ("--count 1", &["--once"]),
    ("--consumers 1", &["--once"]),
    ("--consumers 0", &["--endless", "--forever", "--loop"]),
    ("--count", &["--iterations", "--repeat", "--runs", "--times", "-n"]),
    ("--consumers", &["--clients", "--count", "--readers", "-n"]),
    ("--from", &["--file", "--in", "--input", "--source", "-f", "-i"]),
    ("--to", &["--dest", "--file", "--out", "--output", "--save", "-o"]),
    ("--size", &["--bytes", "--length", "-s"]),
    ("--replace", &["--force", "--overwrite", "--update"]),
    ("--force", &["--overwrite", "--replace", "-f"]),
    ("--prefix", &["--all", "--recursive", "-R", "-r"]),
    ("--long", &["--all", "--details", "-a"]),
    ("--safetensors", &["--model", "--weights"]),
    ("--digest", &["--checksum", "--hash", "--verify"]),
    ("--ttl", &["--expire", "--lifetime"]),
    ("--dtype", &["--type"]),
    ("--seed", &["--salt"]),
    ("--device", &["--gpu", "-d", "-g"]),
    ("--backend host", &["--cpu", "--fake", "--host", "--no-gpu"]),
    ("--backend cuda", &["--cuda"]),
    ("--socket", &["--address", "--broker", "--path"]),
    ("--allow-uid", &["--trust", "--uid", "--user"]),
    ("--quiet", &["--silent"]),
    ("--verbose", &["--debug", "--trace"]),
];

/// Adds a suggestion to the error of an unknown command or option, in place of clap's. `parser` is the program's; `all` has every command, in
/// `groups`.
pub(super) fn improve(
    mut error: clap::Error,
    mut parser: Command,
    arguments: &[OsString],
    (all, groups): (&Command, Groups),
) -> clap::Error {
    parser.build();
    let unknown = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(word)) => word.clone(),
        _ => String::new(),
    };
    let is_unknown = |word: &str| word == unknown || unknown.starts_with('-') && word.starts_with(&unknown);
    let words = arguments.iter().skip(1).filter_map(|word| word.to_str());
    let program = parser.get_name().to_owned();
    let mut command = &mut parser;
    let mut path = Vec::new();
    for word in words.take_while(|word| !is_unknown(word)) {
        if command.find_subcommand(word).is_some() {
            command = command.find_subcommand_mut(word).expect("just found");
            path.push(word);
        }
    }
    if let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidSubcommand) {
        if let Some(name) = command_like(word, command) {
            error.insert(ContextKind::SuggestedSubcommand, ContextValue::Strings(vec![name]));
        }
    } else if error.kind() == ErrorKind::UnknownArgument {
        let tip = own_option(&unknown, command).map(|option| format!("use '{option}'"));
        let tip = tip.or_else(|| match (&*program, path.first()) {
            ("vmmfd", None) => {
                let known = command.get_subcommands().any(|sub| has(sub, &unknown));
                known.then(|| format!("write '{unknown}' after the command"))
            }
            (program, top) => of_another(&unknown, top.map_or(program, |top| top), all, groups),
        });
        error.remove(ContextKind::SuggestedArg);
        if let Some(tip) = tip {
            error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
        }
        error.insert(ContextKind::Usage, ContextValue::StyledStr(command.render_usage()));
    }
    error
}

fn command_like(word: &str, of: &Command) -> Option<String> {
    let names = || of.get_subcommands().filter(|sub| !sub.is_hide_set()).map(Command::get_name);
    let synonym = COMMANDS.iter().find(|(name, words)| words.contains(&word) && names().any(|known| known == *name));
    synonym.map(|(name, _)| *name).or_else(|| nearest(word, names())).map(str::to_owned)
}

/// The option of a command that a word means.
fn own_option(word: &str, command: &Command) -> Option<String> {
    if !word.starts_with('-') {
        let file = ["--from", "--to"].into_iter().find(|option| has(command, option))?;
        return Some(format!("{file} {word}"));
    }
    let options = command.get_arguments().filter(|option| !option.is_hide_set()).filter_map(clap::Arg::get_long);
    let similar = || Some(format!("--{}", nearest(word.strip_prefix("--")?, options)?));
    meant(word).find(|option| has(command, option)).map(str::to_owned).or_else(similar)
}

/// The tip that another command has the option, first of the same group. `producer` and `consumer` are also programs.
fn of_another(word: &str, of: &str, all: &Command, mut groups: Groups) -> Option<String> {
    let (top, program) = match of {
        "producer" => ("produce", Some("consumer")),
        "consumer" => ("consume", Some("producer")),
        command => (command, None),
    };
    let are_peers = groups[0].1.contains(&top);
    groups.sort_by_key(|(_, names)| !names.contains(&top));
    let mut names = groups.iter().flat_map(|(_, names)| *names);
    names.find_map(|name| {
        let command = all.find_subcommand(name)?;
        // An option of the same meaning helps only between peers.
        let meant = meant(word).filter(|_| are_peers);
        let option = std::iter::once(word).chain(meant).find(|option| has(command, option))?;
        let shown = program.filter(|program| program.starts_with(name)).map_or(format!("vmmfd {name}"), str::to_owned);
        Some(format!("'{option}' is an option of '{shown}'"))
    })
}

/// The options that a word means in some command.
fn meant(word: &str) -> impl Iterator<Item = &str> {
    OPTIONS.iter().filter(move |(_, words)| words.contains(&word)).map(|(option, _)| *option)
}

/// Whether a command has an option, which may be followed by its value.
pub(super) fn has(command: &Command, option: &str) -> bool {
    let long = option.split(' ').next().and_then(|option| option.strip_prefix("--"));
    long.is_some() && command.get_arguments().any(|known| known.get_long() == long && !known.is_hide_set())
}

/// The known word that is nearest to a misspelt or abbreviated one.
fn nearest<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let rate = |known: &'a str| {
        let part = known.len().min(word.len()) >= 4 && (known.starts_with(word) || word.starts_with(known));
        let edits = strsim::osa_distance(word, known);
        (part || edits <= if known.len().min(word.len()) < 6 { 1 } else { 2 }).then_some((edits, !part, known))
    };
    known.filter_map(rate).min_by_key(|(edits, whole, _)| (*edits, *whole)).map(|(_, _, known)| known)
}
