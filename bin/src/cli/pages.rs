//! `completions` and `man`: shell completions and man pages, generated from the parsers.

use std::io;

use clap::Command;
use clap_complete::Shell;

use crate::cli::prelude::*;

/// Prints completions for a shell
///
/// They complete commands and options, and in bash, zsh and fish the names of objects.
#[derive(Debug, Args)]
#[command(after_help = exit_codes!("printed"; 2 5))]
pub(super) struct CompletionsOptions {
    /// Shell
    #[arg(value_name = "SHELL")]
    shell: Shell,

    /// Command to complete
    #[arg(long, value_name = "COMMAND", default_value = "vmmfd", value_parser = ["vmmfd", "producer", "consumer"],
        help_heading = "Output")]
    of: String,
}

/// Writes man pages of all commands into a folder
#[derive(Debug, Args)]
#[command(after_help = exit_codes!("written"; 2 5))]
pub(super) struct ManOptions {
    /// Folder for the pages; created if absent
    #[arg(value_name = "DIR")]
    folder: PathBuf,
}

#[derive(Debug, Serialize, JsonSchema)]
struct CompletionsReport {
    shell: String,
    script: String,
}

#[derive(Debug, Serialize, JsonSchema)]
struct ManReport {
    pages: Vec<String>,
}

/// `completions` or `man`. The caller passes the parsers, since they depend on these options too.
pub(super) struct Pages<O> {
    pub(super) options: O,
    pub(super) parser: fn(&str) -> Command,
}

impl Tool for Pages<CompletionsOptions> {
    const NAME: &'static str = "completions";

    const REPORTS: &'static [Named] = &[("completions", document::<Stamped<CompletionsReport>>)];

    fn run(&self, Running { output, .. }: Running<'_>) -> anyhow::Result<ToolOutput> {
        let mut script = Vec::new();
        let CompletionsOptions { shell, of } = &self.options;
        clap_complete::generate(*shell, &mut (self.parser)(of), of.as_str(), &mut script);
        let mut script = String::from_utf8(script)?;
        if of == "vmmfd" {
            complete_objects(*shell, &mut script);
        }
        let report = CompletionsReport { shell: shell.to_string(), script };
        Ok(ToolOutput::of(output, Exit::Verified, report, |report, _| report.script.clone()))
    }
}

/// The commands that take names of objects.
const TAKES_OBJECTS: [&str; 7] = ["get", "ls", "put", "rm", "stat", "watch", "who"];

/// Lists the objects with a prefix. Fails after 200 ms if no broker listens.
const LIST: &str = "vmmfd ls --quiet --timeout 200ms --";

/// Adds completion of object names to a script for bash, zsh or fish. Leaves other scripts unchanged.
fn complete_objects(shell: Shell, script: &mut String) {
    match shell {
        Shell::Bash => {
            *script += &format!(
                r#"
_vmmfd_objects() {{
    _vmmfd "$@"
    [[ $2 == -* || $3 == --* ]] && return
    case "${{COMP_WORDS[1]}}" in
        {}) mapfile -t COMPREPLY < <({LIST} "$2" 2>/dev/null) ;;
    esac
}}
complete -F _vmmfd_objects -o nosort -o bashdefault -o default vmmfd
"#,
                TAKES_OBJECTS.join("|")
            );
        }
        Shell::Zsh => {
            let lines = script.lines().map(|line| {
                let takes =
                    ["':name -- ", "'::prefix -- ", "'*::names -- "].iter().any(|start| line.starts_with(start));
                if takes { line.replace(":_default'", ":_vmmfd_objects'") } else { line.to_owned() }
            });
            let script_of_options = lines.collect::<Vec<_>>().join("\n");
            let objects = format!(r#"_vmmfd_objects() {{ compadd -- ${{(f)"$({LIST} "$PREFIX" 2>/dev/null)"}} }}"#);
            *script = script_of_options.replacen("\n_vmmfd() {", &format!("\n{objects}\n\n_vmmfd() {{"), 1) + "\n";
        }
        Shell::Fish => {
            for command in TAKES_OBJECTS {
                *script += &format!(
                    "complete -c vmmfd -n \"__fish_vmmfd_using_subcommand {command}\" -f -a \"({LIST} (commandline -ct) 2>/dev/null)\"\n"
                );
            }
        }
        _ => {}
    }
}

impl Tool for Pages<ManOptions> {
    const NAME: &'static str = "man";

    const REPORTS: &'static [Named] = &[("man", document::<Stamped<ManReport>>)];

    fn run(&self, Running { output, .. }: Running<'_>) -> anyhow::Result<ToolOutput> {
        let ManOptions { folder } = &self.options;
        let failed = |error: io::Error| Error::system(format!("write man pages into {}", folder.display()), error);
        std::fs::create_dir_all(folder).map_err(failed)?;
        let mut pages = Vec::new();
        for name in ["vmmfd", "producer", "consumer"] {
            let mut command = (self.parser)(name);
            command.build();
            write(&command, folder, &mut pages).map_err(failed)?;
        }
        let report = ManReport { pages: pages.iter().map(|page| page.display().to_string()).collect() };
        Ok(ToolOutput::of(output, Exit::Verified, report, |ManReport { pages }, _| {
            pages.iter().filter(|_| !output.quiet).map(|page| format!("{page}\n")).collect()
        }))
    }
}

/// Writes the pages of a command and of its subcommands.
fn write(command: &Command, folder: &std::path::Path, pages: &mut Vec<PathBuf>) -> io::Result<()> {
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set() && sub.get_name() != "help") {
        write(sub, folder, pages)?;
    }
    pages.push(clap_mangen::Man::new(command.clone()).generate_to(folder)?);
    Ok(())
}
