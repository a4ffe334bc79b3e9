//! The program `vmmfd`, and the programs that are one command.

use std::{ffi::OsString, process::ExitCode};

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use vmmfd::Result;

use super::{
    Consume, Output, Produce, Session,
    broker::{
        ExporterOptions, GetOptions, KeeperOptions, LsOptions, PutOptions, RecallOptions, RmOptions, ServeOptions,
        StatOptions, StatusOptions, WatchOptions, WhoOptions, read_options_file,
    },
    devices::DevicesOptions,
    doctor::DoctorOptions,
    examples,
    laboratory::{self, BENCH},
    pages::{CompletionsOptions, ManOptions, Pages},
    run::{Tool, one_line, run_session, run_tool, usage},
    schema::{SchemaOptions, Schemas},
    stream::{PubOptions, SubOptions},
    suspend::{ResumeOptions, SuspendOptions},
};
use crate::{child, cli::EXIT_CODES, doctor};

/// Hands GPU memory between processes, keeps it under names, tests the machine
#[derive(Debug, Parser)]
#[command(
    name = "vmmfd",
    version,
    subcommand_required = true,
    arg_required_else_help = true,
    disable_help_subcommand = true
)]
struct Options {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    #[command(after_help = EXIT_CODES)]
    Produce(Box<Produce>),
    #[command(after_help = EXIT_CODES)]
    Consume(Box<Consume>),
    Pub(Box<PubOptions>),
    Sub(Box<SubOptions>),
    Serve(ServeOptions),
    Status(StatusOptions),
    Put(Box<PutOptions>),
    Get(Box<GetOptions>),
    Ls(LsOptions),
    Stat(StatOptions),
    Rm(RmOptions),
    Recall(RecallOptions),
    Who(WhoOptions),
    Watch(WatchOptions),
    Doctor(DoctorOptions),
    Devices(DevicesOptions),
    /// Measures handoffs between processes, and the driver's own calls
    #[command(disable_help_flag = true)]
    Bench {
        /// Options of vmmfd-bench: see --help
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "OPTIONS")]
        options: Vec<OsString>,
    },
    Suspend(SuspendOptions),
    Resume(ResumeOptions),
    Keeper(KeeperOptions),
    Exporter(ExporterOptions),
    Completions(CompletionsOptions),
    Man(ManOptions),
    Schema(SchemaOptions),
    /// Prints the help of a command
    Help {
        /// Command, such as `put`
        #[arg(value_name = "COMMAND")]
        command: Vec<OsString>,
    },
    /// Child process of the doctor
    #[command(name = child::SUBCOMMAND, hide = true)]
    Child {
        task: String,
    },
}

/// The commands in the groups of `--help`.
const GROUPS: [(&str, &[&str]); 4] = [
    ("Try", &["produce", "consume", PubOptions::NAME, SubOptions::NAME]),
    (
        "Broker",
        &[
            ServeOptions::NAME,
            StatusOptions::NAME,
            PutOptions::NAME,
            GetOptions::NAME,
            LsOptions::NAME,
            StatOptions::NAME,
            RmOptions::NAME,
            RecallOptions::NAME,
            WhoOptions::NAME,
            WatchOptions::NAME,
        ],
    ),
    ("Diagnose", &[DoctorOptions::NAME, DevicesOptions::NAME, BENCH]),
    (
        "Advanced",
        &[
            SuspendOptions::NAME,
            ResumeOptions::NAME,
            KeeperOptions::NAME,
            ExporterOptions::NAME,
            Pages::<CompletionsOptions>::NAME,
            Pages::<ManOptions>::NAME,
            Schemas::NAME,
            "help",
        ],
    ),
];

fn names() -> impl Iterator<Item = &'static str> {
    GROUPS.iter().flat_map(|(_, names)| *names).copied()
}

/// The parser of a program.
fn parser(name: &str) -> clap::Command {
    match name {
        Produce::ROLE => examples::add(standalone::<Produce>(Produce::ROLE), "vmmfd produce", name),
        Consume::ROLE => examples::add(standalone::<Consume>(Consume::ROLE), "vmmfd consume", name),
        _ => examples::add(grouped(with_output(Options::command())), "vmmfd", "vmmfd").max_term_width(COLUMNS),
    }
}

/// Adds the options of the output to each command. They have `--help` too.
fn with_output(command: clap::Command) -> clap::Command {
    if [BENCH, "help", child::SUBCOMMAND].contains(&command.get_name()) {
        return command;
    }
    let command = command.mut_subcommands(with_output);
    if command.get_name() == "vmmfd" { command } else { Output::augment_args(command).disable_help_flag(true) }
}

/// The options of the output of a command, or of its subcommand; their defaults if it has none.
fn output_of(matches: &clap::ArgMatches) -> Result<Output, clap::Error> {
    match matches.subcommand() {
        Some((_, matches)) => output_of(matches),
        None if matches.try_contains_id("json").unwrap_or(false) => Output::from_arg_matches(matches),
        None => Ok(Output::default()),
    }
}

/// The widest help.
const COLUMNS: usize = 80;

/// Lists the commands in groups: clap has one list.
fn grouped(command: clap::Command) -> clap::Command {
    let header = command.get_styles().get_header();
    let literal = command.get_styles().get_literal();
    let mut list = String::new();
    for (group, names) in GROUPS {
        list += &format!("{header}{group}:{header:#}\n");
        for name in names {
            let about = command.find_subcommand(name).and_then(clap::Command::get_about).cloned().unwrap_or_default();
            list += &format!("  {literal}{name:<11}{literal:#}  {about}\n");
        }
        list.push('\n');
    }
    let template = format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{list}{header}Options:{header:#}\n{{options}}{{after-help}}"
    );
    command.help_template(template)
}

/// The parser of a command as a separate program.
fn standalone<A: Args>(name: &'static str) -> clap::Command {
    let command = clap::Command::new(name)
        .version(env!("CARGO_PKG_VERSION"))
        .after_help(EXIT_CODES)
        .disable_help_flag(true)
        .disable_version_flag(true)
        .max_term_width(COLUMNS);
    let version = clap::Arg::new("version").short('V').long("version").action(clap::ArgAction::Version);
    Output::augment_args(A::augment_args(command)).arg(version.help("Print the version").help_heading("Output"))
}

/// Parses a command line of `vmmfd`.
fn parse_from(arguments: impl IntoIterator<Item = OsString>) -> Result<(Options, Output), clap::Error> {
    let matches = without_empty_variables(parser("vmmfd")).try_get_matches_from(arguments)?;
    let options = Options::from_arg_matches(&matches)?;
    Ok((options, output_of(&matches)?))
}

/// Makes an empty environment variable count as unset.
fn without_empty_variables(command: clap::Command) -> clap::Command {
    let is_empty = |arg: &clap::Arg| arg.get_env().and_then(std::env::var_os).is_some_and(|value| value.is_empty());
    let command = command.mut_args(|arg| if is_empty(&arg) { arg.env(None::<&str>) } else { arg });
    command.mut_subcommands(without_empty_variables)
}

/// Parses the command line and, for `serve`, its options file. `help` becomes `--help` of its command.
fn parse() -> Result<(Options, Output), clap::Error> {
    let (options, output) = parse_from(std::env::args_os())?;
    if let Command::Help { command } = options.command {
        let name = std::iter::once("vmmfd".into());
        return parse_from(name.chain(command).chain(["--help".into()]));
    }
    let Command::Serve(ServeOptions { options_file: Some(path), .. }) = &options.command else {
        return Ok((options, output));
    };
    let wrong = |problem: String| clap::Error::raw(clap::error::ErrorKind::ValueValidation, problem + "\n");
    read_options_file(path).map_err(wrong).and_then(|words| {
        let all = std::env::args_os().chain(words.into_iter().map(Into::into));
        parse_from(all).map_err(|error| match error.kind() {
            clap::error::ErrorKind::DisplayHelp | clap::error::ErrorKind::DisplayVersion => error,
            _ => wrong(format!("{}: {}", path.display(), one_line(&error))),
        })
    })
}

/// The `main` of `vmmfd`.
pub fn main() -> ExitCode {
    match parse() {
        Ok((Options { command }, output)) => match command {
            Command::Produce(produce) => run_session(*produce, &output),
            Command::Consume(consume) => run_session(*consume, &output),
            Command::Pub(publish) => run_tool(*publish, &output),
            Command::Sub(subscribe) => run_tool(*subscribe, &output),
            Command::Serve(serve) => serve.start(&output),
            Command::Keeper(keeper) => keeper.start(&output),
            Command::Status(status) => run_tool(status, &output),
            Command::Put(put) => run_tool(*put, &output),
            Command::Get(get) => run_tool(*get, &output),
            Command::Ls(ls) => run_tool(ls, &output),
            Command::Stat(stat) => run_tool(stat, &output),
            Command::Rm(rm) => run_tool(rm, &output),
            Command::Recall(recall) => run_tool(recall, &output),
            Command::Who(who) => run_tool(who, &output),
            Command::Watch(watch) => run_tool(watch, &output),
            Command::Suspend(suspend) => run_tool(suspend, &output),
            Command::Resume(resume) => run_tool(resume, &output),
            Command::Exporter(exporter) => run_tool(exporter, &output),
            Command::Doctor(doctor) => run_tool(doctor, &output),
            Command::Devices(devices) => run_tool(devices, &output),
            Command::Bench { options } => laboratory::run(&options),
            Command::Completions(options) => run_tool(Pages { options, parser }, &output),
            Command::Man(options) => run_tool(Pages { options, parser }, &output),
            Command::Schema(options) if options.is_of_laboratory() => {
                laboratory::run(&std::env::args_os().skip(1).collect::<Vec<_>>())
            }
            Command::Schema(options) => run_tool(Schemas::from(options), &output),
            // `parse` replaces it by `--help` of the command.
            Command::Help { .. } => ExitCode::SUCCESS,
            Command::Child { task } => child::run(&task, doctor::run_task),
        },
        Err(error) => {
            let name = std::env::args_os().nth(1).and_then(|name| name.into_string().ok());
            usage(&error, names().find(|known| name.as_deref() == Some(known)))
        }
    }
}

/// The `main` of a command as a separate program.
pub fn main_of<S: Session + Args>() -> ExitCode {
    let matches = without_empty_variables(parser(S::ROLE)).try_get_matches();
    let parsed = matches.and_then(|matches| Ok((S::from_arg_matches(&matches)?, output_of(&matches)?)));
    match parsed {
        Ok((session, output)) => run_session(session, &output),
        Err(error) => usage(&error, Some(S::ROLE)),
    }
}

/// The `main` of a separate program that users run as a command of `vmmfd`.
pub fn main_of_tool<T: Tool + Args>(program: &'static str) -> ExitCode {
    if std::env::args_os().nth(1).is_some_and(|first| first == Schemas::NAME) {
        let parsed = standalone::<SchemaOptions>(Schemas::NAME).try_get_matches_from(std::env::args_os().skip(1));
        let parsed = parsed.and_then(|matches| Ok((SchemaOptions::from_arg_matches(&matches)?, output_of(&matches)?)));
        return match parsed {
            Ok((options, output)) => run_tool(Schemas::of(options, T::REPORTS), &output),
            Err(error) => usage(&error, Some(Schemas::NAME)),
        };
    }
    let path = format!("vmmfd {}", T::NAME);
    let parser = examples::add(standalone::<T>(program), &path, &path).bin_name(&path);
    let matches = without_empty_variables(parser).try_get_matches();
    let parsed = matches.and_then(|matches| Ok((T::from_arg_matches(&matches)?, output_of(&matches)?)));
    match parsed {
        Ok((tool, output)) => run_tool(tool, &output),
        Err(error) => usage(&error, Some(T::NAME)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_examples_that_parse() {
        examples::tests::check_all(&parser("vmmfd"));
    }

    #[test]
    fn every_command_is_known_by_name() {
        let parser = parser("vmmfd");
        let commands: Vec<&str> =
            parser.get_subcommands().filter(|sub| !sub.is_hide_set()).map(clap::Command::get_name).collect();
        assert_eq!(commands, names().collect::<Vec<_>>());
    }
}
