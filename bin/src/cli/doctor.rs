//! `doctor`: whether this machine can share GPU memory, and why not.

use std::{io, path::PathBuf, time::Duration};

use clap::{
    Args, Subcommand,
    builder::{PossibleValue, PossibleValuesParser},
};
use schemars::JsonSchema;
use serde::Serialize;
use vmmfd::{
    channel::{Cancel, Trust},
    driver::Backend,
    error::{Error, ParseError},
    memory::Selector,
};

use super::{
    Exit, Output, Tool, ToolOutput,
    exit::exit_codes,
    options::{parse_timeout, parse_uid},
    output::{Progress, is_coloured, json_line},
    values::BACKEND,
};
use crate::{
    doctor::{
        self, DoctorPlan, DoctorReport, Meeting, MeetingRole, PROBES, Probe,
        text::{self, Style},
    },
    schema::{Named, VERSION, document},
};

const CODES: &str = exit_codes!(
    "VMM fd sharing works on every selected device",
    "a required probe failed, or the installed driver does not start"; 2 3 4 5 130
);

/// Tests whether this machine can share GPU memory between processes, and reports why if it can't
#[derive(Debug, Args)]
#[command(after_help = CODES, args_conflicts_with_subcommands = true)]
pub(super) struct DoctorOptions {
    /// Probes to run, separated by commas [default: all but read-only-store]
    #[arg(long, value_name = "PROBE,...", value_delimiter = ',', value_parser = probe_names(), hide_possible_values = true,
        help_heading = "Probes")]
    only: Vec<String>,

    /// Run read-only-store too. It provokes a fault of the GPU, which the kernel's log records as Xid 31: where a fleet watches for
    /// those, it may take the node out of service
    #[arg(long, help_heading = "Probes")]
    faults: bool,

    /// How long each probe may take
    #[arg(long, value_name = "DURATION", default_value = "20s", value_parser = parse_timeout, help_heading = "Probes")]
    timeout: Duration,

    /// List the probes, one per line, and run none
    #[arg(long, conflicts_with_all = ["only", "faults", "show", "device"], help_heading = "Probes")]
    list: bool,

    /// Where the memory is: host tries the command itself and tests no GPU. VMMFD_BACKEND is ignored, and there is no fallback
    #[arg(long, value_name = "BACKEND", value_parser = BACKEND, default_value = "cuda", help_heading = "Sharing")]
    backend: Backend,

    /// Device to test; a UUID may be cut short
    #[arg(long, value_name = "all|ORDINAL|UUID", default_value = "all", value_parser = parse_device, help_heading = "Sharing")]
    device: DeviceArg,

    /// Print a report that was made with --json, on any machine, and run no probes
    #[arg(long, value_name = "FILE", conflicts_with_all = ["only", "faults", "device"], help_heading = "Output")]
    show: Option<PathBuf>,

    #[command(flatten)]
    output: Output,

    #[command(subcommand)]
    end: Option<MeetCommand>,
}

/// The two ends of a meeting.
#[derive(Debug, Subcommand)]
enum MeetCommand {
    /// Waits for another doctor, in another container or namespace or as another user, and tests sharing with it
    #[command(after_help = CODES, disable_help_flag = true)]
    Serve(MeetOptions),
    /// Connects to a doctor that serves; both print the same report
    #[command(after_help = CODES, disable_help_flag = true)]
    Join(MeetOptions),
}

#[derive(Debug, Args)]
struct MeetOptions {
    /// Where the memory is: host tries the command itself and tests no GPU
    #[arg(long, value_name = "BACKEND", value_parser = BACKEND, default_value = "cuda", help_heading = "Sharing")]
    backend: Backend,

    /// Unix socket to meet at, in a folder that both ends see: other sockets are created and removed under the same name
    #[arg(long, value_name = "PATH", help_heading = "Meeting")]
    socket: PathBuf,

    /// User that the other end may belong to, besides one's own and root; may be given several times. In a user namespace a
    /// user from outside shows as the overflow uid, 65534
    #[arg(long = "allow-uid", value_name = "UID", value_parser = parse_uid, help_heading = "Meeting")]
    allow_uids: Vec<u32>,

    /// How long to wait for the other end to appear
    #[arg(long, value_name = "DURATION", default_value = "2m", value_parser = parse_timeout, help_heading = "Meeting")]
    wait: Duration,

    /// How long each step may take
    #[arg(long, value_name = "DURATION", default_value = "20s", value_parser = parse_timeout, help_heading = "Meeting")]
    timeout: Duration,

    #[command(flatten)]
    output: Output,
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

fn probe_names() -> PossibleValuesParser {
    PossibleValuesParser::new(PROBES.iter().map(|probe| PossibleValue::new(probe.name).help(probe.about)))
}

/// What `--list` prints.
#[derive(Debug, Serialize, JsonSchema)]
struct ListReport {
    schema: u32,
    probes: Vec<ListedProbe>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct ListedProbe {
    name: &'static str,
    about: &'static str,
    /// Whether it must be `ok` for the verdict.
    required: bool,
    /// Whether it provokes a fault of the GPU.
    faults: bool,
}

impl ListReport {
    fn new() -> Self {
        let probe =
            |&Probe { name, about, required, faults, .. }: &Probe| ListedProbe { name, about, required, faults };
        Self { schema: VERSION, probes: PROBES.iter().map(probe).collect() }
    }
}

fn list() -> String {
    let line = |probe: &Probe| {
        let note = match (probe.required, probe.faults) {
            (true, _) => " (required)",
            (_, true) => " (only with --faults)",
            _ => "",
        };
        format!("{:<16}  {}{note}\n", probe.name, probe.about)
    };
    PROBES.iter().map(line).collect()
}

impl Tool for DoctorOptions {
    const NAME: &'static str = "doctor";

    const REPORTS: &'static [Named] = &[("doctor", document::<DoctorReport>), ("doctor-list", document::<ListReport>)];

    fn output(&self) -> &Output {
        match &self.end {
            Some(MeetCommand::Serve(meet) | MeetCommand::Join(meet)) => &meet.output,
            None => &self.output,
        }
    }

    fn run(&self, cancel: &Cancel, progress: &Progress) -> anyhow::Result<ToolOutput> {
        let faulting = |name: &&String| Probe::named(name).is_some_and(|probe| probe.faults);
        if let Some(name) = self.only.iter().find(faulting).filter(|_| !self.faults) {
            let problem = format!("the probe {name} provokes a fault of the GPU, which takes --faults");
            return Err(Error::Misuse { problem }.into());
        }
        let json = self.output().json;
        if self.list {
            let text = if json { json_line(&ListReport::new()) } else { list() };
            return Ok(ToolOutput { text, exit: Exit::Verified });
        }
        if let Some(file) = &self.show {
            return Ok(ToolOutput { text: rendered(&doctor::read(file)?, json), exit: Exit::Verified });
        }
        let observer = |step: doctor::Progress<'_>| progress.step(step.what, step.done, step.all);
        let report = match &self.end {
            Some(end) => {
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
                doctor::meet(&meeting, cancel, &observer)?
            }
            None => {
                let plan = DoctorPlan {
                    backend: self.backend,
                    device: self.device.0,
                    only: self.only.clone(),
                    faults: self.faults,
                    timeout: self.timeout,
                };
                doctor::run(&plan, cancel, &observer)?
            }
        };
        let exit = match report.exit_code {
            0 => Exit::Verified,
            3 => Exit::Unsupported,
            _ => Exit::Mismatch,
        };
        Ok(ToolOutput { text: rendered(&report, json), exit })
    }
}

fn rendered(report: &DoctorReport, json: bool) -> String {
    if json {
        return json_line(report);
    }
    let stdout = io::stdout();
    let width = rustix::termios::tcgetwinsize(&stdout).ok().map(|size| usize::from(size.ws_col));
    text::render(report, Style { color: is_coloured(&stdout), width: width.filter(|&width| width > 0) })
}
