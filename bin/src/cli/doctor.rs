//! `doctor`: tests whether this machine can share GPU memory.

use std::{io, path::PathBuf, time::Duration};

use clap::{
    Args, Subcommand,
    builder::{PossibleValue, PossibleValuesParser},
};
use schemars::JsonSchema;
use serde::Serialize;
use vmmfd::{
    channel::Trust,
    driver::Backend,
    error::{Error, ParseError},
    memory::Selector,
};

use super::{
    Exit, Running, Tool, ToolOutput,
    exit::exit_codes,
    options::{parse_timeout, parse_uid},
    output::{is_coloured, json_line},
    report::Stamped,
    values::BACKEND,
};
use crate::{
    doctor::{self, DoctorPlan, DoctorReport, Flag, Meeting, MeetingRole, PROBES, Probe, text},
    schema::{Named, document},
};

const CODES: &str = exit_codes!(
    "VMM fd sharing works on every selected device",
    "a required probe failed, or the installed driver does not start"; 2 3 4 5 130
);

/// Tests whether this machine can share GPU memory, and why not
#[derive(Debug, Args)]
#[command(after_help = CODES, args_conflicts_with_subcommands = true)]
pub(super) struct DoctorOptions {
    /// Probes to run, separated by commas [default: all but read-only-store]
    #[arg(long, value_name = "PROBE,...", value_delimiter = ',', value_parser = probe_names(), hide_possible_values = true,
        help_heading = "Probes")]
    only: Vec<String>,

    /// Run read-only-store too. It provokes a GPU fault, which the kernel logs as Xid 31: the monitoring of a fleet may then take the node
    /// out of service
    #[arg(long, help_heading = "Probes")]
    faults: bool,

    /// Time limit of each probe
    #[arg(long, value_name = "DURATION", default_value = "20s", value_parser = parse_timeout, help_heading = "Probes")]
    timeout: Duration,

    /// List the probes and run none
    #[arg(long, conflicts_with_all = ["only", "faults", "show", "device"], help_heading = "Probes")]
    list: bool,

    /// Backend of the memory: host tests this command, not a GPU. VMMFD_BACKEND is ignored, and there is no fallback
    #[arg(long, value_name = "BACKEND", value_parser = BACKEND, default_value = "cuda", help_heading = "Sharing")]
    backend: Backend,

    /// Device to test; a UUID may be abbreviated
    #[arg(long, value_name = "all|ORDINAL|UUID", default_value = "all", value_parser = parse_device, help_heading = "Sharing")]
    device: DeviceArg,

    /// Print a report that --json wrote on any machine, and run no probes
    #[arg(long, value_name = "FILE", conflicts_with_all = ["only", "faults", "device"], help_heading = "Output")]
    show: Option<PathBuf>,

    #[command(subcommand)]
    end: Option<MeetCommand>,
}

#[derive(Debug, Subcommand)]
enum MeetCommand {
    /// Waits for another doctor (in another container or namespace, or of another user) and tests sharing with it
    #[command(after_help = CODES)]
    Serve(MeetOptions),
    /// Connects to `doctor serve`; both print the same report
    #[command(after_help = CODES)]
    Join(MeetOptions),
}

#[derive(Debug, Args)]
struct MeetOptions {
    /// Backend of the memory: host tests this command, not a GPU
    #[arg(long, value_name = "BACKEND", value_parser = BACKEND, default_value = "cuda", help_heading = "Sharing")]
    backend: Backend,

    /// Unix socket in a folder that both doctors share: other sockets are created and removed under the same name
    #[arg(long, value_name = "PATH", help_heading = "Meeting")]
    socket: PathBuf,

    /// Other user that the peer may run as, besides this user and root; repeatable. In a user namespace, an outside user appears as the
    /// overflow uid, 65534
    #[arg(long = "allow-uid", value_name = "UID", value_parser = parse_uid, help_heading = "Meeting")]
    allow_uids: Vec<u32>,

    /// Longest wait for the other doctor
    #[arg(long, value_name = "DURATION", default_value = "2m", value_parser = parse_timeout, help_heading = "Meeting")]
    wait: Duration,

    /// Time limit of each step
    #[arg(long, value_name = "DURATION", default_value = "20s", value_parser = parse_timeout, help_heading = "Meeting")]
    timeout: Duration,
}

/// One device, or all. clap treats a plain `Option` as an option that may be omitted.
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

/// The report of `--list`.
#[derive(Debug, Serialize, JsonSchema)]
struct ListReport {
    probes: Vec<ListedProbe>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct ListedProbe {
    name: &'static str,
    about: &'static str,
    /// Whether the verdict requires it to be `ok`.
    required: bool,
    /// Whether it provokes a GPU fault.
    faults: bool,
}

impl ListReport {
    fn new() -> Self {
        let probe = |probe: &Probe| ListedProbe {
            name: probe.name,
            about: probe.about,
            required: probe.is(Flag::Required),
            faults: probe.is(Flag::Faults),
        };
        Self { probes: PROBES.iter().map(probe).collect() }
    }
}

fn list() -> String {
    let line = |probe: &Probe| {
        let note = match (probe.is(Flag::Required), probe.is(Flag::Faults)) {
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

    const REPORTS: &'static [Named] =
        &[("doctor", document::<DoctorReport>), ("doctor-list", document::<Stamped<ListReport>>)];

    fn run(&self, Running { output, cancel, progress }: Running<'_>) -> anyhow::Result<ToolOutput> {
        let faulting = |name: &&String| Probe::named(name).is_some_and(|probe| probe.is(Flag::Faults));
        if let Some(name) = self.only.iter().find(faulting).filter(|_| !self.faults) {
            let problem = format!("the probe {name} provokes a GPU fault: add --faults to run it");
            return Err(Error::Misuse { problem }.into());
        }
        let json = output.json;
        if self.list {
            return Ok(ToolOutput::of(output, Exit::Verified, ListReport::new(), |_, _| list()));
        }
        if let Some(file) = &self.show {
            return Ok(ToolOutput { text: rendered(&doctor::read(file)?, json), exit: Exit::Verified });
        }
        let observer = |what: &str, done: usize, all: usize| progress.step(what, done, all);
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
    text::render(report, is_coloured(&io::stdout()))
}
