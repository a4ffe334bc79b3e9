//! `vmmfd conform`: its options.

use std::{fmt::Write, path::PathBuf, time::Duration};

use super::{CaseReport, ConformPlan, Role, cases, render, run};
use crate::{
    channel::{Cancel, Trust},
    error::{Error, ErrorKind},
    tools::{
        cli::{Tool, json_line, parse_timeout},
        error::kind_of,
    },
};

/// The exit codes, for `--help`.
pub const CONFORM_CODES: &str = "\
Exit codes:
  0    every rule that was tried was kept
  1    a rule was broken
  2    bad usage
  4    nobody to meet, for some case
  5    the system failed
  130  interrupted (SIGINT); 143 terminated (SIGTERM)

The memory is of the backend `host`: no GPU is needed, and none is tested. As a producer or a publisher this side listens, and each
connection is one case: start the other end again and again until this command has ended. As a consumer or a subscriber it connects
for each case: let the other end serve any number of consumers. Most cases break a rule on purpose, which the other end must
notice.";

/// The options of `vmmfd conform`.
#[derive(Debug, clap::Args)]
pub struct ConformOptions {
    /// Unix socket to meet at: this side connects to it, or listens there, by its role
    #[arg(value_name = "SOCKET", required_unless_present = "list")]
    socket: Option<PathBuf>,

    /// What this side plays: consumer (against a producer), producer, publisher (of a stream), or subscriber
    #[arg(long = "as", value_name = "consumer|producer|publisher|subscriber")]
    role: Role,

    /// Cases to try, by name, separated by commas [default: all]
    #[arg(long, value_name = "CASE,...", value_delimiter = ',')]
    only: Vec<String>,

    /// List the cases with the rules that each is about, and try none
    #[arg(long, conflicts_with_all = ["only", "json"])]
    list: bool,

    /// How long the other end may be silent: what this side says in `hello`
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = parse_timeout)]
    timeout: Duration,

    /// How long to wait for the other end to listen, or for its next connection
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = parse_timeout)]
    wait: Duration,

    /// User that the other end may belong to, besides one's own and root; may be given several times
    #[arg(long = "allow-uid", value_name = "UID")]
    allow_uids: Vec<u32>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Tool for ConformOptions {
    fn run(&self, cancel: &Cancel) -> anyhow::Result<(String, u8)> {
        if self.list {
            let mut text = String::new();
            for (name, rules) in cases(self.role) {
                writeln!(text, "{name:<44}  {}", rules.join(" "))?;
            }
            return Ok((text, 0));
        }
        let plan = ConformPlan {
            socket: self.socket.clone().unwrap_or_default(),
            role: self.role,
            only: self.only.clone(),
            trust: Trust { uids: self.allow_uids.clone() },
            wait: self.wait,
            timeout: self.timeout,
        };
        let report = run(&plan, cancel, &|case: &CaseReport| {
            tracing::info!(name = case.name, outcome = ?case.outcome, "a case is through");
        })?;
        let text = if self.json { json_line(&report) } else { render(&report) };
        Ok((text, report.exit_code()))
    }

    fn code(&self, error: &Error) -> u8 {
        match kind_of(error) {
            ErrorKind::Usage => 2,
            ErrorKind::Peer => 4,
            _ => 5,
        }
    }
}
