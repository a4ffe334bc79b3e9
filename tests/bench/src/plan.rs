//! What to measure, and how far a run is.

use std::{str::FromStr, time::Duration};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use vmmfd::{driver::Backend, error::Result, memory::Selector};

/// Something to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Bench {
    /// Memory that the consumer does not hold, by each method.
    Handoff,
    /// Memory that the consumer holds.
    Repeat,
    /// Filling and verifying, by the GPU and by the host.
    Verify,
    /// Each driver call.
    Stages,
    /// From `exec` to ready, and the whole round trip.
    Startup,
    /// Objects of the broker, beside a handoff.
    Broker,
}

impl Bench {
    /// All of them.
    pub const ALL: [Self; 6] = [Self::Handoff, Self::Repeat, Self::Verify, Self::Stages, Self::Startup, Self::Broker];

    /// Its name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Handoff => "handoff",
            Self::Repeat => "repeat",
            Self::Verify => "verify",
            Self::Stages => "stages",
            Self::Startup => "startup",
            Self::Broker => "broker",
        }
    }
}

impl FromStr for Bench {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = Self::ALL.into_iter().find(|bench| bench.as_str() == text);
        known.ok_or_else(|| {
            format!("no bench is called `{text}`: write handoff, repeat, verify, stages, startup, broker or all")
        })
    }
}

/// What to measure, where, and how often.
#[derive(Debug, Clone)]
pub struct BenchPlan {
    /// The benches.
    pub benches: Vec<Bench>,
    /// The backend.
    pub backend: Backend,
    /// The device.
    pub device: Selector,
    /// The sizes in bytes, rounded up to the granularity; the defaults of each bench if it is empty.
    pub sizes: Vec<u64>,
    /// The samples of each measurement; fewer of slow ones.
    pub count: usize,
    /// The numbers of concurrent consumers.
    pub consumers: Vec<usize>,
    /// The number of clients that get an object of the broker at once.
    pub clients: usize,
    /// How long one step may take.
    pub timeout: Duration,
}

/// How far a run is.
#[derive(Debug, Clone, Copy)]
pub struct Progress<'a> {
    /// The current measurement.
    pub what: &'a str,
    /// Its samples so far.
    pub done: usize,
    /// All of its samples.
    pub all: usize,
}

/// Receives the progress of a run.
pub type Observer<'a> = &'a dyn Fn(Progress<'_>);

/// Prints the parts of the report's text as soon as they are measured.
pub type Printer<'a> = &'a dyn Fn(&str);
