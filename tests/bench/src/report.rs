//! The report of a run, as data.

use schemars::JsonSchema;
use serde::Serialize;
use vmmfd::driver::Backend;
use vmmfd_cli::schema;

use super::{plan::Bench, stats::Summary};

/// The measurements of a run.
#[derive(Debug, Serialize, JsonSchema)]
pub struct BenchReport {
    pub schema: u32,
    /// The program that made it.
    pub tool: String,
    /// When it was made: RFC 3339, in UTC, to the second.
    pub made: String,
    /// The backend.
    #[schemars(with = "schema::Backend")]
    pub backend: Backend,
    /// The machine.
    pub machine: Machine,
    /// The samples of each measurement, as planned.
    pub count: usize,
    /// The samples before those, which do not count.
    pub warm_up: usize,
    /// The measurements.
    pub series: Vec<Series>,
    /// What the measurements come to: rates, differences, what a process uses.
    pub figures: Vec<Figure>,
    /// What was not measured, and why.
    pub left_out: Vec<String>,
}

/// The machine of a run.
#[derive(Debug, Clone, Default, Serialize, JsonSchema)]
pub struct Machine {
    /// The kernel's release.
    pub kernel: String,
    /// The CPUs that this process may use.
    pub cpus: usize,
    /// The device's name.
    pub device: String,
    /// Its identity.
    pub uuid: String,
    /// The version of NVIDIA's kernel module, if it is loaded.
    pub module: Option<String>,
    /// The newest CUDA that the driver supports, as 1000 * major + 10 * minor; 0 on the host backend.
    pub cuda: i32,
}

/// The samples of one measurement at one size.
#[derive(Debug, Clone, Serialize, JsonSchema)]
pub struct Series {
    /// Its bench.
    pub bench: Bench,
    /// Its name.
    pub name: String,
    /// The size in bytes; 0 if it has none.
    pub size: u64,
    /// The statistics of the samples.
    #[serde(flatten)]
    pub summary: Summary,
    /// Its median, divided by that of the floor of the same bench and size.
    pub ratio: Option<f64>,
    /// Bytes per second, if it moves bytes.
    pub rate: Option<f64>,
    /// The samples, in microseconds.
    #[serde(skip)]
    pub samples: Vec<f64>,
}

/// A number that is no distribution.
#[derive(Debug, Clone, Serialize, JsonSchema)]
pub struct Figure {
    /// Its bench.
    pub bench: Bench,
    /// Its name.
    pub name: String,
    /// The size in bytes of what it is about; 0 if that has none.
    pub size: u64,
    /// The number.
    pub value: f64,
    /// Its unit.
    pub unit: &'static str,
    /// What it is to be at most.
    pub at_most: Option<f64>,
    /// What it is to be at least.
    pub at_least: Option<f64>,
}
