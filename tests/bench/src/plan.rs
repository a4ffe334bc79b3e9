//! The plan of a run, and its progress.

use std::{str::FromStr, time::Duration};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use vmmfd::{driver::Backend, error::Result, memory::Selector};

/// A bench.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Bench {
    /// Handoffs of memory that the consumer does not hold, by each method.
    Handoff,
    /// Handoffs of memory that the consumer holds.
    Repeat,
    /// Filling and verifying, by the GPU and by the host.
    Verify,
    /// Each driver call.
    Stages,
    /// From `exec` to ready, and a whole round trip.
    Startup,
    /// Objects of the broker, compared with a handoff.
    Broker,
}

impl Bench {
    /// All benches.
    pub const ALL: [Self; 6] = [Self::Handoff, Self::Repeat, Self::Verify, Self::Stages, Self::Startup, Self::Broker];

    /// Returns the name of the bench.
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

/// The benches, the device, and the number of samples.
#[derive(Debug, Clone)]
pub struct BenchPlan {
    /// The benches.
    pub benches: Vec<Bench>,
    /// The backend.
    pub backend: Backend,
    /// The device.
    pub device: Selector,
    /// The sizes in bytes, rounded up to the granularity. If empty, each bench uses its defaults.
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

/// The progress of a run.
#[derive(Debug, Clone, Copy)]
pub struct Progress<'a> {
    /// The current measurement.
    pub what: &'a str,
    /// The samples measured so far.
    pub done: usize,
    /// The number of planned samples.
    pub all: usize,
}

/// Receives the progress of a run.
pub type Observer<'a> = &'a dyn Fn(Progress<'_>);

/// Prints the parts of the report's text as soon as they are measured.
pub type Printer<'a> = &'a dyn Fn(&str);
