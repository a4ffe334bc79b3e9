//! The report: rows of numbers, as text and as JSON.

use std::fs;

use clap::ValueEnum;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use vmmfd_cli::cli::{Column, Table};

use crate::prelude::*;

/// A row is noisy if the medians of its fifths differ by more than this part of its median.
const NOISY: f64 = 0.2;

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
    /// Publications to many subscribers at a fixed rate, and the publisher's CPU time
    Stream,
    /// All of these
    All,
}

impl Group {
    pub(crate) fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }
}

/// The measurements of a run.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Report {
    pub(crate) schema: u32,
    /// The program that created the report.
    pub(crate) tool: String,
    /// The time of the report: RFC 3339, in UTC, to the second.
    pub(crate) made: String,
    pub(crate) backend: Backend,
    pub(crate) machine: Machine,
    pub(crate) rows: Vec<Row>,
    /// The omitted rows, with reasons.
    pub(crate) left_out: Vec<String>,
}

/// The machine of a run.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub(crate) struct Machine {
    /// The kernel's release.
    pub(crate) kernel: String,
    /// The CPUs that this process may use.
    pub(crate) cpus: usize,
    /// The device's name.
    pub(crate) device: String,
    /// The device's UUID.
    pub(crate) uuid: String,
    /// The version of NVIDIA's kernel module, if it is loaded.
    pub(crate) module: Option<String>,
    /// The newest CUDA that the driver supports, as 1000 * major + 10 * minor; 0 on the host backend.
    pub(crate) cuda: i32,
}

impl Machine {
    pub(crate) fn of(device: &Device) -> Result<Self> {
        let text = |path: &str| fs::read_to_string(path).ok().map(|text| text.trim().to_owned());
        Ok(Self {
            kernel: text("/proc/sys/kernel/osrelease").unwrap_or_default(),
            cpus: thread::available_parallelism().map_or(0, usize::from),
            device: device.name().to_owned(),
            uuid: device.prefixed_uuid(),
            module: text("/sys/module/nvidia/version"),
            cuda: device.driver().version()?,
        })
    }
}

/// What rows have in common.
#[derive(Debug, Clone, Copy, Serialize, JsonSchema)]
pub(crate) struct About {
    /// The size in bytes; 0 if it has none.
    pub(crate) size: u64,
    /// The number of segments of this memory.
    pub(crate) segments: u64,
    /// The number of consumers at once.
    pub(crate) consumers: u16,
    /// The unit of the numbers.
    pub(crate) unit: &'static str,
}

impl About {
    pub(crate) fn size(size: u64) -> Self {
        Self { size, segments: 1, consumers: 1, unit: "us" }
    }
}

/// A measured or derived number.
#[derive(Debug, Clone, Serialize, JsonSchema)]
pub(crate) struct Row {
    pub(crate) group: Group,
    pub(crate) name: String,
    #[serde(flatten)]
    pub(crate) about: About,
    /// The number of samples; 0 of a derived number, which is the median.
    pub(crate) count: usize,
    pub(crate) min: Option<f64>,
    pub(crate) median: f64,
    pub(crate) p99: Option<f64>,
    /// The median, divided by the floor's.
    pub(crate) ratio: Option<f64>,
    /// Whether the medians of the run's fifths differ by over 20 %. Needs at least 20 samples.
    pub(crate) noisy: bool,
}

impl Row {
    /// A derived number.
    pub(crate) fn derived(group: Group, name: String, median: f64, about: About) -> Self {
        Self { group, name, about, count: 0, min: None, median, p99: None, ratio: None, noisy: false }
    }

    /// Sets the statistics of at least one sample.
    pub(crate) fn with_samples(self, samples: &[f64]) -> Self {
        let all = sorted(samples);
        let median = quantile(&all, 0.5);
        let fifth = samples.len() / 5;
        let medians = samples.chunks_exact(fifth.max(1)).take(5).map(|part| quantile(&sorted(part), 0.5));
        let (low, high) = medians.fold((f64::MAX, f64::MIN), |(low, high), median| (low.min(median), high.max(median)));
        let noisy = fifth >= 4 && high - low > NOISY * median;
        let [min, p99] = [0.0, 0.99].map(|part| Some(quantile(&all, part)));
        Self { count: all.len(), min, median, p99, noisy, ..self }
    }

    /// A derived number as text.
    pub(crate) fn line(&self) -> String {
        format!("{:62}{:>9} {}\n", self.name, digits(self.median), self.about.unit)
    }
}

fn sorted(samples: &[f64]) -> Vec<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

/// The quantile of sorted samples, by nearest rank.
fn quantile(sorted: &[f64], part: f64) -> f64 {
    let rank = (part * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.max(1) - 1).copied().unwrap_or(f64::NAN)
}

impl Report {
    /// The machine.
    pub(crate) fn head(&self) -> String {
        let Machine { kernel, cpus, device, uuid, module, cuda } = &self.machine;
        let driver = match (self.backend, module) {
            (Backend::Host, _) => "host memory: no GPU is measured".to_owned(),
            (Backend::Cuda, None) => format!("CUDA {}.{}", cuda / 1000, cuda % 1000 / 10),
            (Backend::Cuda, Some(module)) => format!("driver {module}, CUDA {}.{}", cuda / 1000, cuda % 1000 / 10),
        };
        let Self { tool, made, .. } = self;
        format!("{tool} bench, {made}\n{device} {uuid}\n{driver}, Linux {kernel}, {cpus} CPUs\n")
    }

    /// The explanations below the tables.
    pub(crate) fn end(&self) -> String {
        let mut text = if self.rows.is_empty() { self.head() } else { String::new() };
        if self.rows.iter().any(|row| row.noisy) {
            text += "\n~ noisy: its fifths differ by over 20 %; run it again on an idle machine";
        }
        if self.rows.iter().any(|row| row.ratio.is_some()) {
            text += "\nratio: the median, divided by that of the first row";
        }
        text.extend(self.left_out.iter().map(|left_out| format!("\nleft out: {left_out}")));
        text + "\n"
    }
}

/// A table of rows that were measured in turns. At most 80 columns wide.
pub(crate) fn table(rows: &[Row]) -> String {
    let Some(Row { group, about: About { size, segments, consumers, unit }, .. }) = rows.first() else {
        return String::new();
    };
    let mut title = group.name();
    if *size > 0 {
        title += &format!(", {}", about(*size));
    }
    if *segments > 1 {
        title += &format!(" in {segments} segments");
    }
    if *consumers > 1 {
        title += &format!(", {consumers} at once");
    }
    // Tables of a run have the same columns if their names are short.
    let title = format!("{:37}", format!("{title} ({unit})"));
    let ratio = if rows.iter().any(|row| row.ratio.is_some()) { "ratio" } else { "" };
    let right = Column::right;
    let columns = [Column::left(&title), right("min"), right("median "), right("p99"), right("n"), right(ratio)];
    let cells = |row: &Row| {
        let [min, p99] = [row.min, row.p99].map(|number| number.map(digits).unwrap_or_default());
        let median = digits(row.median) + if row.noisy { "~" } else { " " };
        let ratio = row.ratio.map(|ratio| format!("{ratio:.2}")).unwrap_or_default();
        [row.name.clone(), min, median, p99, row.count.to_string(), ratio]
    };
    let table = Table::new(columns, rows.iter().map(cells));
    format!("\n{}", table.render(None))
}

/// Three significant digits.
fn digits(number: f64) -> String {
    match number.abs() {
        abs if abs < 10.0 => format!("{number:.2}"),
        abs if abs < 100.0 => format!("{number:.1}"),
        _ => format!("{number:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &str) -> Row {
        Row::derived(Group::Handoff, name.to_owned(), 2.346, About::size(2 << 20))
    }

    #[test]
    fn statistics_are_samples_by_rank() {
        let samples: Vec<f64> = (0..200).map(|at| f64::from(at * 37 % 200 + 1)).collect();
        let Row { count, min, median, p99, noisy, .. } = row("floor").with_samples(&samples);
        assert_eq!((count, min, median, p99, noisy), (200, Some(1.0), 100.0, Some(198.0), false));
        let drifting: Vec<f64> = (0..100).map(|at| 10.0 + f64::from(at) / 10.0).collect();
        assert!(row("floor").with_samples(&drifting).noisy);
        assert!(!row("floor").with_samples(&[1.0, 100.0, 1.0]).noisy, "too few samples");
    }

    #[test]
    fn text_fits_80_columns() {
        let measured = Row { ratio: Some(1.0), noisy: true, ..row("floor").with_samples(&[1_234_567.0; 2]) };
        let derived = row("get of host memory by 4 clients: broker's CPU in the program");
        let want = "
handoff, 2 MiB (us)                        min   median       p99  n  ratio
floor                                  1234567  1234567~  1234567  2   1.00
get of host memory by 4 clients: broker's CPU in the program       2.35 us
";
        assert_eq!(table(&[measured]) + &derived.line(), want);
        assert!(want.lines().all(|line| line.len() <= 80));
    }
}
