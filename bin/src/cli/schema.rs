//! `schema`: the JSON Schemas of the commands' reports.

use clap::builder::PossibleValuesParser;
use serde_json::Value;
use vmmfd::wire;

use super::{
    broker::{
        ExporterOptions, GetOptions, LsOptions, PutOptions, RecallOptions, RmOptions, ServeOptions, StatOptions,
        StatusOptions, WatchOptions, WhoOptions,
    },
    devices::DevicesOptions,
    doctor::DoctorOptions,
    laboratory::BENCH,
    pages::{CompletionsOptions, ManOptions, Pages},
    report::{CommandReport, Failure},
    stream::{PubOptions, SubOptions},
    suspend::{ResumeOptions, SuspendOptions},
};
use crate::cli::prelude::*;

/// Prints the JSON Schema of a --json output, or of a protocol
///
/// `failure` is the object of a failed command, except produce and consume. `watch` is a line of its output. `protocol` and `broker` have the
/// body of each message in `$defs`.
#[derive(Debug, Args)]
#[command(after_help = exit_codes!("printed"; 2 5))]
pub(super) struct SchemaOptions {
    /// Report [default: list the names]
    #[arg(value_name = "NAME", value_parser = PossibleValuesParser::new(names()), hide_possible_values = true)]
    name: Option<String>,
}

/// The reports of `vmmfd`.
fn reports() -> Vec<Named> {
    const SHARED: &[Named] = &[
        ("produce", document::<CommandReport>),
        ("consume", document::<CommandReport>),
        ("failure", document::<Stamped<Failure>>),
        ("protocol", wire::Message::schema),
        ("broker", wire::broker::Message::schema),
    ];
    [
        SHARED,
        PubOptions::REPORTS,
        SubOptions::REPORTS,
        ServeOptions::REPORTS,
        StatusOptions::REPORTS,
        PutOptions::REPORTS,
        GetOptions::REPORTS,
        LsOptions::REPORTS,
        StatOptions::REPORTS,
        RmOptions::REPORTS,
        RecallOptions::REPORTS,
        WhoOptions::REPORTS,
        WatchOptions::REPORTS,
        ExporterOptions::REPORTS,
        DoctorOptions::REPORTS,
        DevicesOptions::REPORTS,
        SuspendOptions::REPORTS,
        ResumeOptions::REPORTS,
        Pages::<CompletionsOptions>::REPORTS,
        Pages::<ManOptions>::REPORTS,
        Schemas::REPORTS,
    ]
    .concat()
}

/// The names of all reports in alphabetical order. `vmmfd-bench` prints the report of `bench`.
fn names() -> Vec<&'static str> {
    let mut names: Vec<&str> = reports().iter().map(|(name, _)| *name).chain([BENCH]).collect();
    names.sort_unstable();
    names
}

/// The report of `schema`.
#[derive(Debug, Serialize, JsonSchema)]
struct SchemaReport {
    /// The names of all reports.
    names: Vec<&'static str>,
    /// The JSON Schema of the named report.
    document: Option<Value>,
}

/// The command with the reports of its program.
pub(super) struct Schemas {
    options: SchemaOptions,
    reports: Vec<Named>,
}

impl Schemas {
    /// The command for a program with these reports.
    pub(super) fn of(options: SchemaOptions, reports: &[Named]) -> Self {
        Self { options, reports: reports.to_vec() }
    }
}

impl SchemaOptions {
    /// Whether `vmmfd-bench` prints the report.
    pub(super) fn is_of_laboratory(&self) -> bool {
        self.name.as_deref() == Some(BENCH)
    }
}

impl From<SchemaOptions> for Schemas {
    fn from(options: SchemaOptions) -> Self {
        Self { options, reports: reports() }
    }
}

impl Tool for Schemas {
    const NAME: &'static str = "schema";

    const REPORTS: &'static [Named] = &[("schema", document::<Stamped<SchemaReport>>)];

    fn run(&self, Running { output, .. }: Running<'_>) -> anyhow::Result<ToolOutput> {
        let derive = |name: &String| match self.reports.iter().find(|(known, _)| known == name) {
            Some((_, document)) => Ok(document()),
            None => Err(Error::Misuse { problem: format!("this program has no report `{name}`") }),
        };
        let document = self.options.name.as_ref().map(derive).transpose()?;
        let text = |report: &SchemaReport, _| match &report.document {
            Some(document) => format!("{document:#}\n"),
            None => report.names.iter().map(|name| format!("{name}\n")).collect(),
        };
        Ok(ToolOutput::of(output, Exit::Verified, SchemaReport { names: names(), document }, text))
    }
}
