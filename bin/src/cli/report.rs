//! The JSON objects of `produce`, `consume` and of failures.

use std::borrow::Cow;

use vmmfd::{
    array::ArrayDescriptor,
    memory::Description,
    session::{Verdict, handoff::Served},
    wire,
};

use super::output::complain;
use crate::{
    check::{
        Figures,
        pattern::{Engine, Mismatch},
    },
    cli::prelude::*,
    error::{hint, kind_of},
    schema::{self, VERSION},
    stamp,
};

/// The JSON object of a command, with its version and its program.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "{T}")]
pub(super) struct Stamped<T> {
    schema: u32,
    tool: String,
    #[serde(flatten)]
    report: T,
}

impl<T> Stamped<T> {
    pub(super) fn of(report: T) -> Self {
        Self { schema: VERSION, tool: stamp::tool(), report }
    }
}

/// The JSON object of `produce` and `consume`.
#[derive(Debug, Default, Serialize, JsonSchema)]
pub(super) struct CommandReport {
    pub(super) schema: u32,
    #[schemars(extend("enum" = ["producer", "consumer"]))]
    pub(super) role: &'static str,
    pub(super) backend: Option<Backend>,
    /// The reason why it is the host backend, if the user did not choose it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) fallback: Option<String>,
    pub(super) device: Option<UsedDevice>,
    pub(super) size: Option<u64>,
    pub(super) mapped_size: Option<u64>,
    pub(super) granularity: Option<u64>,
    #[schemars(with = "Option<wire::Mechanism>")]
    pub(super) mechanism: Option<String>,
    #[schemars(with = "Option<wire::Placement>")]
    pub(super) location: Option<String>,
    pub(super) segments: Option<u64>,
    pub(super) array: Option<ArrayDescriptor>,
    pub(super) verified: Option<bool>,
    pub(super) mismatches: u64,
    pub(super) first_mismatch: Option<Mismatch>,
    pub(super) digest: Option<String>,
    pub(super) steps: Vec<Step>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) consumers: Option<Vec<ConsumerReport>>,
    pub(super) error: Option<ErrorSummary>,
}

impl CommandReport {
    pub(super) fn new(role: &'static str) -> Self {
        Self { schema: VERSION, role, consumers: (role == "producer").then(Vec::new), ..Self::default() }
    }
}

impl CommandReport {
    /// Adds a verdict.
    pub(super) fn found(&mut self, verdict: &Verdict) {
        // A later success does not replace the first mismatch of several consumers.
        if self.verified != Some(false) {
            let Figures { mismatches, first_mismatch, digest, .. } = Figures::of(verdict);
            self.verified = Some(verdict.verified);
            self.mismatches = mismatches;
            self.first_mismatch = first_mismatch;
            self.digest = digest.or(self.digest.take());
        }
    }

    pub(super) fn memory(&mut self, description: &Description) {
        self.mechanism = Some(description.mechanism().to_string());
        self.location = Some(description.placement().to_string());
        self.size = Some(description.size);
        self.mapped_size = Some(description.mapped_size);
        self.segments = Some(description.segments());
    }
}

#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct UsedDevice {
    pub(super) name: String,
    pub(super) uuid: String,
    pub(super) ordinal: i32,
}

#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct Step {
    pub(super) name: &'static str,
    pub(super) us: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) by: Option<Engine>,
}

/// The result of a consumer.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct ConsumerReport {
    pub(super) pid: i32,
    pub(super) uid: u32,
    #[schemars(extend("enum" = ["verified", "mismatch", "failed"]))]
    pub(super) outcome: &'static str,
    pub(super) error: Option<String>,
}

#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct ErrorSummary {
    #[schemars(with = "schema::Kind")]
    pub(super) kind: &'static str,
    pub(super) message: String,
    pub(super) hint: Option<String>,
}

impl ErrorSummary {
    pub(super) fn of(error: &Error) -> Self {
        Self { kind: kind_of(error).as_str(), message: error.in_full(), hint: hint(error).map(Cow::into_owned) }
    }

    /// The summary of an error, which is printed on standard error.
    pub(super) fn complained(error: &Error) -> Self {
        let summary = Self::of(error);
        summary.complain();
        summary
    }

    /// Prints the error on standard error.
    pub(super) fn complain(&self) {
        complain(&format!("error: {}", self.message));
        if let Some(hint) = &self.hint {
            complain(&format!("  hint: {hint}"));
        }
    }
}

impl From<&Served> for ConsumerReport {
    fn from(served: &Served) -> Self {
        let outcome = match &served.error {
            _ if served.mismatched() => "mismatch",
            None => "verified",
            Some(_) => "failed",
        };
        let error = served.error.as_ref().map(Error::in_full);
        Self { pid: served.peer.pid, uid: served.peer.uid, outcome, error }
    }
}

/// The JSON object of a failed command without a report.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct Failure {
    pub(super) command: Option<&'static str>,
    pub(super) error: ErrorSummary,
}
