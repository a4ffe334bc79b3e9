//! The result of a probe.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use serde_json::Value;
use vmmfd::error::{Error, Result};

use super::{ErrorDetails, Status};

/// The outcome, or an error that the probe's table entry classifies.
pub(super) type ProbeResult = std::result::Result<ProbeOutcome, ProbeFailure>;

#[derive(Debug)]
pub(super) struct ProbeOutcome {
    pub(super) status: Status,
    pub(super) figures: BTreeMap<String, Value>,
    pub(super) meaning: String,
    pub(super) error: Option<ErrorDetails>,
}

impl ProbeOutcome {
    pub(super) fn new(status: Status, meaning: impl Into<String>) -> Self {
        Self { status, figures: BTreeMap::new(), meaning: meaning.into(), error: None }
    }

    pub(super) fn ok(meaning: impl Into<String>) -> Self {
        Self::new(Status::Ok, meaning)
    }

    pub(super) fn failed(meaning: impl Into<String>) -> Self {
        Self::new(Status::Failed, meaning)
    }

    /// Adds a measured value.
    pub(super) fn figure(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.figures.insert(name.to_owned(), value.into());
        self
    }

    pub(super) fn with_error(mut self, error: ErrorDetails) -> Self {
        self.error = Some(error);
        self
    }

    /// The error to report to the peer; `None` if the outcome is `ok`.
    pub(super) fn into_error(self) -> Option<ErrorDetails> {
        let Self { status, meaning, error, .. } = self;
        (status != Status::Ok).then(|| error.unwrap_or_else(|| ErrorDetails::new("mismatch", meaning)))
    }
}

#[derive(Debug)]
pub(super) struct ProbeFailure {
    /// Boxed to keep the result type small.
    pub(super) error: Box<ErrorDetails>,
    pub(super) figures: BTreeMap<String, Value>,
}

impl ProbeFailure {
    /// Adds a measured value.
    pub(super) fn figure(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.figures.insert(name.to_owned(), value.into());
        self
    }
}

impl From<ErrorDetails> for ProbeFailure {
    fn from(error: ErrorDetails) -> Self {
        Self { error: Box::new(error), figures: BTreeMap::new() }
    }
}

impl From<Error> for ProbeFailure {
    fn from(error: Error) -> Self {
        ErrorDetails::of(&error).into()
    }
}

pub(super) fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// Runs a step and returns its duration in microseconds.
pub(super) fn timed<T>(step: impl FnOnce() -> Result<T>) -> Result<(T, u64)> {
    let started = Instant::now();
    let result = step()?;
    Ok((result, micros(started.elapsed())))
}
