//! `vmmfd`: diagnosis and measurement. `vmmfd doctor` reports whether this machine can share GPU memory, `vmmfd bench` measures it.

use std::{
    io::{self, IsTerminal},
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use clap::{Parser, Subcommand};
use vmmfd::{
    channel::{Cancel, Trust},
    driver::Backend,
    error::{DeviceError, Error, LoadError, ParseError, SocketError},
    memory::Selector,
    tools::error::ToolError,
    tools::{
        self,
        bench::{self, Bench},
        check::files::Target,
        cli::{self, Tool, parse_size, parse_timeout},
        conform::{CONFORM_CODES, ConformOptions},
        doctor::{
            self, DoctorPlan, DoctorReport, Meeting, MeetingRole, PROBES,
            text::{self, Style},
        },
    },
};

/// Diagnoses and measures sharing GPU memory between processes.
#[derive(Debug, Parser)]
#[command(name = "vmmfd", version)]
struct Options {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Tests whether this machine can share GPU memory between processes, and reports why if it can't
    #[command(after_help = DOCTOR_CODES, args_conflicts_with_subcommands = true)]
    Doctor(DoctorOptions),
    /// Measures handoffs between two real processes, compared with the driver's own calls
    #[command(after_help = BENCH_CODES)]
    Bench(BenchOptions),
    /// Plays either role of the protocol against any implementation, and reports which rules of its page were broken
    #[command(after_help = CONFORM_CODES)]
    Conform(ConformOptions),
    /// A child process of the doctor or the bench
    #[command(name = tools::child::SUBCOMMAND, hide = true)]
    Child { task: String },
}

const DOCTOR_CODES: &str = "\
Exit codes:
  0    VMM fd sharing works on every selected device
  1    a required probe failed; also: a driver that is installed fails to start, or has no virtual memory management
  2    bad usage
  3    no driver library or no device: nothing here to test
  130  interrupted (SIGINT); 143 terminated (SIGTERM)";

const BENCH_CODES: &str = "\
Exit codes:
  0    measured
  1    a measurement failed, or there was not enough memory for any
  2    bad usage
  3    no driver library or no device: nothing here to measure
  130  interrupted (SIGINT); 143 terminated (SIGTERM)";

#[derive(Debug, clap::Args)]
struct BenchOptions {
    /// What to measure: `handoff` (memory that the consumer does not hold), `repeat` (memory that it holds), `verify` (filling and
    /// verifying), `stages` (each driver call), `startup` (from exec to ready), or `all`
    #[arg(value_name = "BENCH", default_value = "all", value_parser = parse_bench)]
    bench: BenchArg,

    /// Sizes, separated by commas [default: 2MiB,64MiB,1GiB,8GiB; on the host backend 2MiB,64MiB, and 1GiB for verify and stages]
    #[arg(long, value_name = "SIZE,...", value_delimiter = ',', value_parser = parse_size)]
    size: Vec<u64>,

    /// Samples of each measurement; fewer of slow ones
    #[arg(long, value_name = "N", default_value = "200", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    count: u32,

    /// Numbers of concurrent consumers, separated by commas
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1",
        value_parser = clap::value_parser!(u16).range(1..=256))]
    consumers: Vec<u16>,

    /// Device to measure, by ordinal or UUID
    #[arg(long, value_name = "ORDINAL|UUID", default_value = "0")]
    device: Selector,

    /// Backend: `cuda`, or `host` for ordinary memory, which measures no GPU. VMMFD_BACKEND is ignored, and there is no fallback
    #[arg(long, value_name = "cuda|host", default_value = "cuda", value_parser = parse_backend)]
    backend: Backend,

    /// How long one step may take
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = parse_timeout)]
    timeout: Duration,

    /// Print one JSON object
    #[arg(long)]
    json: bool,

    /// Draw the distributions into an SVG file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// The file of the picture. Every error of it is bad usage.
fn picture(path: &Path) -> Result<Target, Error> {
    Target::create(path, true).map_err(|error| match error {
        Error::System { source, .. } => {
            let problem = match source.kind() {
                io::ErrorKind::NotFound => "is in a folder that does not exist".to_owned(),
                kind => format!("can't be written: {kind}"),
            };
            Error::from(ToolError::File { path: path.to_owned(), problem })
        }
        error => error,
    })
}

/// All benches, or one.
#[derive(Debug, Clone)]
struct BenchArg(Vec<Bench>);

fn parse_bench(text: &str) -> Result<BenchArg, String> {
    match text {
        "all" => Ok(BenchArg(Bench::ALL.to_vec())),
        _ => text.parse().map(|bench| BenchArg(vec![bench])),
    }
}

impl Tool for BenchOptions {
    fn run(&self, cancel: &Cancel) -> anyhow::Result<(String, u8)> {
        // This process has sockets and descriptors for each consumer.
        cli::raise_file_limit();
        // Before the measurements, which would be lost if it can't be written.
        let mut svg = self.svg.as_deref().map(picture).transpose()?;
        let plan = bench::BenchPlan {
            benches: self.bench.0.clone(),
            backend: self.backend,
            device: self.device,
            sizes: self.size.clone(),
            count: self.count as usize,
            consumers: self.consumers.iter().map(|&consumers| consumers.into()).collect(),
            timeout: self.timeout,
        };
        let bar = cli::bar("{bar:40} {pos} of {len}: {msg}");
        let observer = |progress: bench::Progress<'_>| {
            bar.set_length(progress.all as u64);
            bar.set_position(progress.done as u64);
            bar.set_message(progress.what.to_owned());
        };
        let report = bench::run(&plan, cancel, &observer);
        bar.finish_and_clear();
        let report = report?;
        if let Some(mut svg) = svg.take() {
            svg.write(bench::picture::draw(&report)?.as_bytes())?;
            svg.finish()?;
        }
        let text = if self.json { cli::json_line(&report) } else { bench::text::render(&report) };
        Ok((text, u8::from(report.series.is_empty())))
    }

    fn code(&self, error: &Error) -> u8 {
        match error {
            Error::Device(DeviceError::NotFound { .. }) => 2,
            _ if ToolError::is_file(error) => 2,
            Error::Load(LoadError::NoLibrary { .. }) | Error::Load(LoadError::NoDevice) => 3,
            _ => 1,
        }
    }
}

#[derive(Debug, clap::Args)]
struct DoctorOptions {
    /// Backend: `cuda`, or `host` to try the command on ordinary memory, which tests no GPU. VMMFD_BACKEND is ignored, and there is
    /// no fallback
    #[arg(long, value_name = "cuda|host", default_value = "cuda", value_parser = parse_backend)]
    backend: Backend,

    /// Device to test, by ordinal or UUID
    #[arg(long, value_name = "all|ORDINAL|UUID", default_value = "all", value_parser = parse_device)]
    device: DeviceArg,

    /// Probes to run, by name, separated by commas [default: all]
    #[arg(long, value_name = "PROBE,...", value_delimiter = ',', value_parser = parse_probe)]
    only: Vec<String>,

    /// How long each probe may take
    #[arg(long, value_name = "DURATION", default_value = "20s", value_parser = parse_timeout)]
    timeout: Duration,

    /// Print the report as one JSON object
    #[arg(long)]
    json: bool,

    /// List the probes, one per line, and run none
    #[arg(long, conflicts_with_all = ["only", "show", "device", "json"])]
    list: bool,

    /// Print a report that was made with --json, on any machine, and run no probes
    #[arg(long, value_name = "FILE", conflicts_with_all = ["only", "device"])]
    show: Option<PathBuf>,

    #[command(subcommand)]
    end: Option<MeetCommand>,
}

/// The two ends of a meeting.
#[derive(Debug, Subcommand)]
enum MeetCommand {
    /// Waits for another doctor, in another container or namespace or as another user, and tests sharing with it
    #[command(after_help = DOCTOR_CODES)]
    Serve(MeetOptions),
    /// Connects to a doctor that serves; both print the same report
    #[command(after_help = DOCTOR_CODES)]
    Join(MeetOptions),
}

#[derive(Debug, clap::Args)]
struct MeetOptions {
    /// Unix socket to meet at, in a folder that both ends see: other sockets are created and removed under the same name
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,

    /// User that the other end may belong to, besides one's own and root; may be given several times. In a user namespace a
    /// user from outside shows as the overflow uid, 65534
    #[arg(long = "allow-uid", value_name = "UID")]
    allow_uids: Vec<u32>,

    /// Backend: `cuda`, or `host` to try the command on ordinary memory, which tests no GPU
    #[arg(long, value_name = "cuda|host", default_value = "cuda", value_parser = parse_backend)]
    backend: Backend,

    /// How long to wait for the other end to appear
    #[arg(long, value_name = "DURATION", default_value = "2m", value_parser = parse_timeout)]
    wait: Duration,

    /// How long each step may take
    #[arg(long, value_name = "DURATION", default_value = "20s", value_parser = parse_timeout)]
    timeout: Duration,

    /// Print the report as one JSON object
    #[arg(long)]
    json: bool,
}

/// All devices, or one. clap would take a plain `Option` for an option that may be left out.
#[derive(Debug, Clone, Copy)]
struct DeviceArg(Option<Selector>);

fn parse_device(text: &str) -> Result<DeviceArg, ParseError> {
    match text {
        "all" => Ok(DeviceArg(None)),
        _ => text.parse().map(|selector| DeviceArg(Some(selector))),
    }
}

fn parse_backend(text: &str) -> Result<Backend, String> {
    match text {
        "cuda" => Ok(Backend::Cuda),
        "host" => Ok(Backend::Host),
        _ => Err(format!("there is no backend `{text}` to test: write cuda or host")),
    }
}

fn parse_probe(text: &str) -> Result<String, String> {
    match doctor::Probe::named(text) {
        Some(probe) => Ok(probe.name.to_owned()),
        None => Err(format!("no probe is called `{text}`: vmmfd doctor --list names them")),
    }
}

fn list() -> String {
    let line = |probe: &doctor::Probe| {
        let required = if probe.required { " (required)" } else { "" };
        format!("{:<16}  {}{required}\n", probe.name, probe.about)
    };
    PROBES.iter().map(line).collect()
}

impl Tool for DoctorOptions {
    fn run(&self, cancel: &Cancel) -> anyhow::Result<(String, u8)> {
        if self.list {
            return Ok((list(), 0));
        }
        if let Some(file) = &self.show {
            return Ok((rendered(&doctor::read(file)?, self.json), 0));
        }
        if let Some(end) = &self.end {
            let (role, meet) = match end {
                MeetCommand::Serve(meet) => (MeetingRole::Serve, meet),
                MeetCommand::Join(meet) => (MeetingRole::Join, meet),
            };
            let meeting = Meeting {
                role,
                backend: meet.backend,
                socket: meet.socket.clone(),
                trust: Trust { uids: meet.allow_uids.clone() },
                wait: meet.wait,
                timeout: meet.timeout,
            };
            let report = doctor::meet(&meeting, cancel)?;
            return Ok((rendered(&report, meet.json), report.exit_code));
        }
        let plan =
            DoctorPlan { backend: self.backend, device: self.device.0, only: self.only.clone(), timeout: self.timeout };
        let report = doctor::run(&plan, cancel)?;
        Ok((rendered(&report, self.json), report.exit_code))
    }

    fn code(&self, error: &Error) -> u8 {
        match error {
            Error::Device(DeviceError::NotFound { .. }) | Error::Socket(SocketError::Path { .. }) => 2,
            _ if ToolError::is_file(error) => 2,
            _ if self.show.is_some() => 2,
            _ => 1,
        }
    }
}

fn rendered(report: &DoctorReport, json: bool) -> String {
    if json {
        return cli::json_line(report);
    }
    let stdout = io::stdout();
    let color = stdout.is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let width = rustix::termios::tcgetwinsize(&stdout).ok().map(|size| usize::from(size.ws_col));
    text::render(report, Style { color, width: width.filter(|&width| width > 0) })
}

fn main() -> ExitCode {
    match Options::try_parse() {
        Ok(Options { command: Command::Child { task } }) => tools::run_child(&task),
        Ok(Options { command: Command::Doctor(doctor) }) => cli::main_of(doctor),
        Ok(Options { command: Command::Bench(benches) }) => cli::main_of(benches),
        Ok(Options { command: Command::Conform(conform) }) => cli::main_of(conform),
        Err(error) => {
            let code = if error.use_stderr() { 2 } else { 0 };
            // A closed standard output is not an error.
            let _ = error.print();
            ExitCode::from(code)
        }
    }
}
