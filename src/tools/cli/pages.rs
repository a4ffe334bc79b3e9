//! `completions` and `man`: what shells and man know of the commands, written from their parsers.

use std::{io, path::PathBuf};

use clap::{Args, Command};
use clap_complete::Shell;

use super::{
    Exit, Output, Tool, ToolOutput,
    exit::exit_codes,
    output::{Progress, json_line},
    root,
};
use crate::{channel::Cancel, error::Error};

/// Prints completions of the options for a shell
#[derive(Debug, Args)]
#[command(after_help = exit_codes!("printed"))]
pub(super) struct CompletionsOptions {
    /// Shell
    #[arg(value_name = "SHELL")]
    shell: Shell,

    /// Command to complete
    #[arg(long, value_name = "COMMAND", default_value = "vmmfd", value_parser = ["vmmfd", "producer", "consumer"],
        help_heading = "Output")]
    of: String,

    #[command(flatten)]
    output: Output,
}

/// Writes man pages of all commands into a folder
#[derive(Debug, Args)]
#[command(after_help = exit_codes!("written"))]
pub(super) struct ManOptions {
    /// Folder to write them to; it is created if it does not exist
    #[arg(value_name = "DIR")]
    folder: PathBuf,

    #[command(flatten)]
    output: Output,
}

fn named(name: &str) -> Command {
    match name {
        "producer" => super::standalone::<super::Produce>(),
        "consumer" => super::standalone::<super::Consume>(),
        _ => root::command(),
    }
}

impl Tool for CompletionsOptions {
    const NAME: &'static str = "completions";

    fn output(&self) -> &Output {
        &self.output
    }

    fn run(&self, _cancel: &Cancel, _progress: &Progress) -> anyhow::Result<ToolOutput> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut named(&self.of), self.of.as_str(), &mut script);
        let script = String::from_utf8(script)?;
        let json = || serde_json::json!({"schema": 1, "shell": self.shell.to_string(), "script": script});
        Ok(ToolOutput { text: if self.output.json { json_line(&json()) } else { script }, exit: Exit::Verified })
    }
}

impl Tool for ManOptions {
    const NAME: &'static str = "man";

    fn output(&self) -> &Output {
        &self.output
    }

    fn run(&self, _cancel: &Cancel, _progress: &Progress) -> anyhow::Result<ToolOutput> {
        let failed = |error: io::Error| Error::system(format!("write man pages into {}", self.folder.display()), error);
        std::fs::create_dir_all(&self.folder).map_err(failed)?;
        let mut pages = Vec::new();
        for name in ["vmmfd", "producer", "consumer"] {
            let mut command = named(name);
            command.build();
            write(&command, &self.folder, &mut pages).map_err(failed)?;
        }
        let text = match (self.output.json, self.output.quiet) {
            (true, _) => json_line(&serde_json::json!({"schema": 1, "pages": pages})),
            (false, true) => String::new(),
            (false, false) => pages.iter().map(|page| format!("{}\n", page.display())).collect(),
        };
        Ok(ToolOutput { text, exit: Exit::Verified })
    }
}

/// Writes the page of a command, and those of its subcommands.
fn write(command: &Command, folder: &std::path::Path, pages: &mut Vec<PathBuf>) -> io::Result<()> {
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set() && sub.get_name() != "help") {
        write(sub, folder, pages)?;
    }
    pages.push(clap_mangen::Man::new(command.clone()).generate_to(folder)?);
    Ok(())
}
