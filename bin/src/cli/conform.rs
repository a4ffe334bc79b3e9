//! `conform`: tests an implementation against the rules of the protocol.

use std::{fmt::Write, path::PathBuf, time::Duration};

use clap::{Args, ValueEnum, builder::PossibleValue};
use schemars::JsonSchema;
use serde::Serialize;
use vmmfd::channel::{Cancel, Trust, socket_path};

use super::{
    Exit, Output, Tool, ToolOutput,
    exit::exit_codes,
    options::{parse_timeout, parse_uid},
    output::{Progress, json_line},
};
use crate::{
    conform::{self, CaseReport, ConformPlan, ConformReport, Role},
    schema::{Named, VERSION, document},
};

/// Tests an implementation of the protocol, as its peer
///
/// Reports the rules of docs/protocol.md or, for a broker, of docs/broker-protocol.md that it breaks. The memory is on the host backend: no GPU is needed or tested. As a producer or a publisher, this command listens, and each connection
/// is one case: restart the peer until this command exits. As a consumer, a subscriber or a client, it connects once per case: let the
/// peer serve any number of connections. Most cases break a rule on purpose, and the peer must detect it.
#[derive(Debug, Args)]
#[command(after_help = exit_codes!("no rule was broken", "a rule was broken"; 2 4 5 130))]
pub(super) struct ConformOptions {
    /// Unix socket: the role decides whether this command connects or listens
    #[arg(value_name = "SOCKET", required_unless_present = "list")]
    socket: Option<PathBuf>,

    /// Names of the cases to run, separated by commas [default: all]
    #[arg(long, value_name = "CASE,...", value_delimiter = ',', help_heading = "Probes")]
    only: Vec<String>,

    /// List the cases with their rules, and run none
    #[arg(long, conflicts_with = "only", help_heading = "Probes")]
    list: bool,

    /// Role of this command
    #[arg(long = "as", value_name = "ROLE", help_heading = "Meeting")]
    role: Role,

    /// Other user that the peer may run as, besides this user and root; repeatable
    #[arg(long = "allow-uid", value_name = "UID", value_parser = parse_uid, help_heading = "Meeting")]
    allow_uids: Vec<u32>,

    /// Longest wait for the peer to listen, or for its next connection
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = parse_timeout, help_heading = "Meeting")]
    wait: Duration,

    /// Longest silence of the peer, as sent in `hello`
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = parse_timeout, help_heading = "Meeting")]
    timeout: Duration,

    #[command(flatten)]
    output: Output,
}

/// The report of `--list`.
#[derive(Debug, Serialize, JsonSchema)]
struct ListReport {
    schema: u32,
    cases: Vec<ListedCase>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct ListedCase {
    name: String,
    /// The rules of the protocol that it tests.
    rules: Vec<&'static str>,
}

impl ValueEnum for Role {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::Consumer, Self::Producer, Self::Subscriber, Self::Publisher, Self::Client]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(self.as_str()).help(match self {
            Self::Consumer => "connects to a producer of buffers",
            Self::Producer => "listens for consumers of buffers",
            Self::Subscriber => "connects to a publisher of streams",
            Self::Publisher => "listens for subscribers to a stream",
            Self::Client => "connects to a broker, and leaves nothing in it",
        }))
    }
}

impl Tool for ConformOptions {
    const NAME: &'static str = "conform";

    const REPORTS: &'static [Named] =
        &[("conform", document::<ConformReport>), ("conform-list", document::<ListReport>)];

    fn output(&self) -> &Output {
        &self.output
    }

    fn run(&self, cancel: &Cancel, progress: &Progress) -> anyhow::Result<ToolOutput> {
        let cases = conform::cases(self.role);
        if self.list {
            let text = if self.output.json {
                let cases = cases.into_iter().map(|(name, rules)| ListedCase { name, rules });
                json_line(&ListReport { schema: VERSION, cases: cases.collect() })
            } else {
                let mut text = String::new();
                for (name, rules) in cases {
                    writeln!(text, "{name:<44}  {}", rules.join(" "))?;
                }
                text
            };
            return Ok(ToolOutput { text, exit: Exit::Verified });
        }
        let plan = ConformPlan {
            socket: socket_path(self.socket.as_deref())?,
            role: self.role,
            only: self.only.clone(),
            trust: Trust { uids: self.allow_uids.clone() },
            wait: self.wait,
            timeout: self.timeout,
        };
        let all = if self.only.is_empty() { cases.len() } else { self.only.len() };
        let done = std::cell::Cell::new(0);
        progress.step("waiting for the peer", 0, all);
        let report = conform::run(&plan, cancel, &|case: &CaseReport| {
            tracing::info!(name = case.name, outcome = ?case.outcome, "case finished");
            done.set(done.get() + 1);
            progress.step(&case.name, done.get(), all);
        })?;
        let exit = match report.exit_code() {
            0 => Exit::Verified,
            1 => Exit::Mismatch,
            _ => Exit::Peer,
        };
        let text = if self.output.json { json_line(&report) } else { conform::render(&report) };
        Ok(ToolOutput { text, exit })
    }
}
