//! `bench`: measures handoffs between two real processes, and the broker.

use std::{cell::RefCell, path::PathBuf, time::Duration};

use clap::{Args, ValueEnum, builder::PossibleValue};
use vmmfd::{channel::Cancel, driver::Backend, error::Error, memory::Selector};

use vmmfd_cli::{
    check::files::Target,
    cli::{
        BACKEND, Exit, Output, Progress, Tool, ToolOutput, json_line, parse_size, parse_target, parse_timeout,
        print_lines, raise_file_limit,
    },
    exit_codes,
    schema::{Named, document},
};

use crate::{self as bench, Bench, BenchReport};

/// Measures handoffs between processes, and the driver's own calls
#[derive(Debug, Args)]
#[command(after_help = exit_codes!("measured", "nothing could be measured: the report says why"; 2 3 5 130))]
pub struct BenchOptions {
    /// What to measure
    #[arg(value_name = "BENCH", default_value = "all")]
    bench: BenchArg,

    /// Sizes, separated by commas [default: 2MiB,64MiB,1GiB,8GiB, and for broker 2MiB,1GiB,8GiB,64GiB; on the host backend 2MiB,64MiB, and 1GiB for verify and stages]
    #[arg(long, value_name = "SIZE,...", value_delimiter = ',', value_parser = parse_size, help_heading = "Buffer")]
    size: Vec<u64>,

    /// Samples of each measurement; fewer of slow ones
    #[arg(long, value_name = "N", default_value = "200", value_parser = clap::value_parser!(u32).range(1..=1_000_000),
        help_heading = "Buffer")]
    count: u32,

    /// Where the memory is: host measures no GPU. VMMFD_BACKEND is ignored, and there is no fallback
    #[arg(long, value_name = "BACKEND", value_parser = BACKEND, default_value = "cuda", help_heading = "Sharing")]
    backend: Backend,

    /// Device to measure; a UUID may be abbreviated
    #[arg(long, value_name = "ORDINAL|UUID", default_value = "0", help_heading = "Sharing")]
    device: Selector,

    /// Numbers of concurrent consumers, separated by commas
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1",
        value_parser = clap::value_parser!(u16).range(1..=256), help_heading = "Meeting")]
    consumers: Vec<u16>,

    /// Clients that get an object of the broker at once
    #[arg(long, value_name = "N", default_value = "64", value_parser = clap::value_parser!(u16).range(1..=1024),
        help_heading = "Meeting")]
    clients: u16,

    /// How long one step may take
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = parse_timeout, help_heading = "Meeting")]
    timeout: Duration,

    /// Draw the distributions into an SVG file
    #[arg(long, value_name = "FILE", value_parser = parse_target, help_heading = "Output")]
    svg: Option<PathBuf>,

    #[command(flatten)]
    output: Output,
}

/// All benches, or one.
#[derive(Debug, Clone, Copy)]
enum BenchArg {
    All,
    One(Bench),
}

impl ValueEnum for BenchArg {
    fn value_variants<'a>() -> &'a [Self] {
        const ALL: [BenchArg; 7] = [
            BenchArg::One(Bench::Handoff),
            BenchArg::One(Bench::Repeat),
            BenchArg::One(Bench::Verify),
            BenchArg::One(Bench::Stages),
            BenchArg::One(Bench::Startup),
            BenchArg::One(Bench::Broker),
            BenchArg::All,
        ];
        &ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(match self {
            Self::All => PossibleValue::new("all").help("all of these"),
            Self::One(bench) => PossibleValue::new(bench.as_str()).help(match bench {
                Bench::Handoff => "memory that the consumer does not hold",
                Bench::Repeat => "memory that the consumer holds already",
                Bench::Verify => "filling and verifying, by the GPU and by the CPUs",
                Bench::Stages => "each driver call",
                Bench::Startup => "from exec to ready, and a whole round trip",
                Bench::Broker => "objects of a broker, beside a handoff; many clients and objects",
            }),
        })
    }
}

impl Tool for BenchOptions {
    const NAME: &'static str = "bench";
    const REPORTS: &'static [Named] = &[("bench", document::<BenchReport>)];

    fn output(&self) -> &Output {
        &self.output
    }

    fn run(&self, cancel: &Cancel, progress: &Progress) -> anyhow::Result<ToolOutput> {
        // This process has sockets and descriptors for each consumer.
        raise_file_limit();
        // Created before the measurements, which would be lost if the file cannot be written.
        let mut svg = self.svg.as_deref().map(|path| Target::create(path, true)).transpose()?;
        let plan = bench::BenchPlan {
            benches: match self.bench {
                BenchArg::All => Bench::ALL.to_vec(),
                BenchArg::One(bench) => vec![bench],
            },
            backend: self.backend,
            device: self.device,
            sizes: self.size.clone(),
            count: self.count as usize,
            consumers: self.consumers.iter().map(|&consumers| consumers.into()).collect(),
            clients: self.clients.into(),
            timeout: self.timeout,
        };
        progress.step("starting", 0, plan.benches.len());
        let observer = |step: bench::Progress<'_>| progress.step(step.what, step.done, step.all);
        let failed = RefCell::new(None);
        let print = |text: &str| {
            if !self.output.json
                && let Err(error) = progress.suspend(|| print_lines(text))
            {
                failed.replace(Some(error));
            }
        };
        let report = bench::run(&plan, cancel, &observer, &print)?;
        if let Some(error) = failed.take() {
            return Err(Error::system("write to standard output", error).into());
        }
        if let Some(mut svg) = svg.take() {
            svg.write(bench::picture::draw(&report)?.as_bytes())?;
            svg.finish()?;
        }
        let text = if self.output.json { json_line(&report) } else { bench::text::end(&report) };
        Ok(ToolOutput { text, exit: if report.series.is_empty() { Exit::Mismatch } else { Exit::Verified } })
    }
}
