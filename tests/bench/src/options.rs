//! The options of `bench`, and its groups of rows.

use std::time::Duration;

use clap::{Args, ValueEnum};
use schemars::JsonSchema;
use serde::Serialize;
use vmmfd::{channel::Cancel, driver::Backend, error::Result, memory::Selector};
use vmmfd_cli::{
    cli::{BACKEND, Exit, Output, Progress, Tool, ToolOutput, json_line, parse_size, parse_timeout, raise_file_limit},
    exit_codes,
    schema::{Named, document},
};

use crate::{broker, calls, handoff, report::Report, run::Run, startup};

/// Measures handoffs between processes, and the driver's own calls
#[derive(Debug, Args)]
#[command(after_help = exit_codes!("measured", "nothing could be measured: the report says why"; 2 3 5 130))]
pub(crate) struct BenchOptions {
    /// What to measure
    #[arg(value_name = "GROUP", default_value = "all")]
    pub(crate) group: Group,

    /// Sizes, separated by commas [default: 2MiB,64MiB,1GiB,8GiB, and for broker 2MiB,1GiB,8GiB,64GiB; on the host backend 2MiB,64MiB]
    #[arg(long, value_name = "SIZE,...", value_delimiter = ',', value_parser = parse_size, help_heading = "Buffer")]
    pub(crate) size: Vec<u64>,

    /// Samples of each row; fewer of slow ones
    #[arg(long, value_name = "N", default_value = "200", value_parser = clap::value_parser!(u32).range(1..=1_000_000),
        help_heading = "Buffer")]
    pub(crate) count: u32,

    /// Where the memory is: host measures no GPU. VMMFD_BACKEND is ignored, and there is no fallback
    #[arg(long, value_name = "BACKEND", value_parser = BACKEND, default_value = "cuda", help_heading = "Sharing")]
    pub(crate) backend: Backend,

    /// Device to measure; a UUID may be abbreviated
    #[arg(long, value_name = "ORDINAL|UUID", default_value = "0", help_heading = "Sharing")]
    pub(crate) device: Selector,

    /// Numbers of concurrent consumers of a handoff, separated by commas
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1",
        value_parser = clap::value_parser!(u16).range(1..=256), help_heading = "Meeting")]
    pub(crate) consumers: Vec<u16>,

    /// Clients that get an object of the broker at once
    #[arg(long, value_name = "N", default_value = "64", value_parser = clap::value_parser!(u16).range(1..=1024),
        help_heading = "Meeting")]
    pub(crate) clients: u16,

    /// How long another process may take for one step
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = parse_timeout, help_heading = "Meeting")]
    pub(crate) timeout: Duration,

    /// Let the broker accept host memory as GPU memory: for tests with the emulated driver
    #[arg(long, hide = true, help_heading = "Meeting")]
    pub(crate) emulated: bool,

    #[command(flatten)]
    output: Output,
}

/// A group of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Group {
    /// From exec to ready, and a whole round trip
    Startup,
    /// Memory that the consumer does not hold
    Handoff,
    /// Memory that the consumer holds already
    Repeat,
    /// Filling and verifying, by the GPU and by the CPUs
    Verify,
    /// Each driver call
    Stages,
    /// Copies of shared memory, beside memcpy
    Copies,
    /// Objects of a broker, beside a handoff; many clients and objects
    Broker,
    /// All of these
    All,
}

impl Group {
    pub(crate) fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }
}

type Measure = fn(&mut Run<'_>) -> Result<()>;

/// The groups in the order of a run. `startup` is first: this process has not started the driver then.
const GROUPS: [(Group, Measure); 7] = [
    (Group::Startup, startup::measure),
    (Group::Handoff, handoff::measure),
    (Group::Repeat, handoff::measure_again),
    (Group::Verify, calls::verify),
    (Group::Stages, calls::stages),
    (Group::Copies, calls::copies),
    (Group::Broker, broker::measure),
];

impl Tool for BenchOptions {
    const NAME: &'static str = "bench";
    const REPORTS: &'static [Named] = &[("bench", document::<Report>)];

    fn output(&self) -> &Output {
        &self.output
    }

    fn run(&self, cancel: &Cancel, progress: &Progress) -> anyhow::Result<ToolOutput> {
        // This process has sockets and descriptors for each consumer.
        raise_file_limit();
        let mut run = Run::start(self, cancel, progress, !self.output.json)?;
        for (group, measure) in GROUPS {
            if self.group == group || self.group == Group::All {
                run.group = group;
                measure(&mut run)?;
            }
        }
        let report = run.report;
        let text = if self.output.json { json_line(&report) } else { report.end() };
        Ok(ToolOutput { text, exit: if report.rows.is_empty() { Exit::Mismatch } else { Exit::Verified } })
    }
}
