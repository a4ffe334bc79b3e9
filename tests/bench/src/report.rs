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
    /// The program that created the report.
    pub tool: String,
    /// The time of the report: RFC 3339, in UTC, to the second.
    pub made: String,
    /// The backend.
    #[schemars(with = "schema::Backend")]
    pub backend: Backend,
    /// The machine.
    pub machine: Machine,
    /// The planned samples of each measurement.
    pub count: usize,
    /// The warm-up samples before these, which do not count.
    pub warm_up: usize,
    /// The measurements.
    pub series: Vec<Series>,
    /// Derived values: rates, differences, and the resources of a process.
    pub figures: Vec<Figure>,
    /// The omitted measurements, with reasons.
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
    /// The device's UUID.
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
    /// The median, divided by the floor's median in the same bench at the same size.
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
    /// The size in bytes; 0 if the figure has none.
    pub size: u64,
    /// The number.
    pub value: f64,
    /// Its unit.
    pub unit: &'static str,
    /// The upper limit of the value.
    pub at_most: Option<f64>,
    /// The lower limit of the value.
    pub at_least: Option<f64>,
}
