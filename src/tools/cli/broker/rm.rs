//! `rm`: takes names away.

use clap::Args;
use serde::Serialize;

use super::{MeetBroker, SCHEMA};
use crate::{
    channel::Cancel,
    error::Error,
    tools::{
        cli::{
            Exit, Output, Tool, ToolOutput,
            exit::exit_codes,
            output::{Progress, json_line},
            report::ErrorSummary,
        },
        stamp,
    },
};

/// Takes names away
///
/// Readers keep what they hold; the broker gives the memory back when the last lease of it ends. Of several names each is tried, and
/// the exit code is that of the first that failed.
#[derive(Debug, Args)]
#[command(after_help = exit_codes!("deleted", "a name has no object"))]
pub(in super::super) struct RmOptions {
    /// Names of the objects
    #[arg(value_name = "NAME", required = true)]
    names: Vec<String>,

    #[command(flatten)]
    meet: MeetBroker,

    #[command(flatten)]
    output: Output,
}

#[derive(Debug, Serialize)]
struct RmReport {
    schema: u32,
    tool: String,
    deleted: Vec<String>,
    failed: Vec<Failed>,
    /// The error that the command exits with.
    error: Option<ErrorSummary>,
}

#[derive(Debug, Serialize)]
struct Failed {
    name: String,
    error: ErrorSummary,
}

impl Tool for RmOptions {
    const NAME: &'static str = "rm";

    fn output(&self) -> &Output {
        &self.output
    }

    fn run(&self, cancel: &Cancel, _progress: &Progress) -> anyhow::Result<ToolOutput> {
        let client = self.meet.connect(cancel)?;
        let (mut deleted, mut failed, mut first) = (Vec::new(), Vec::new(), None::<Error>);
        for name in &self.names {
            match client.delete(name) {
                Ok(()) => deleted.push(name.clone()),
                Err(error) => {
                    let summary = ErrorSummary::of(&error);
                    summary.complain();
                    failed.push(Failed { name: name.clone(), error: summary });
                    // After any other error the connection can't be used, and the names behind it are not tried.
                    let goes_on = matches!(error, Error::Broker(_));
                    first.get_or_insert(error);
                    if !goes_on {
                        break;
                    }
                }
            }
        }
        let exit = first.as_ref().map_or(Exit::Verified, Exit::of);
        let error = first.as_ref().map(ErrorSummary::of);
        let text = match (self.output.json, self.output.quiet) {
            (true, _) => json_line(&RmReport { schema: SCHEMA, tool: stamp::tool(), deleted, failed, error }),
            (false, true) => String::new(),
            (false, false) => deleted.iter().map(|name| format!("deleted  {name}\n")).collect(),
        };
        Ok(ToolOutput { text, exit })
    }
}
