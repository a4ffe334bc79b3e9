//! `doctor`: tests whether this machine can share GPU memory.

use std::io;

use super::output::{is_coloured, json_line};
use crate::{
    cli::prelude::*,
    doctor::{self, DoctorPlan, DoctorReport, Flag, PROBES, Probe, text},
};

const CODES: &str = exit_codes!(
    "VMM fd sharing works on every selected device",
    "a required probe failed, or the installed driver does not start"; 2 3 5 130
);

/// Tests whether this machine can share GPU memory, and why not
#[derive(Debug, Args)]
#[command(after_help = CODES)]
pub(super) struct DoctorOptions {
    #[command(flatten)]
    plan: DoctorPlan,

    /// List the probes and run none
    #[arg(long, conflicts_with_all = ["only", "faults", "show", "device"], help_heading = "Probes")]
    list: bool,

    /// Print a report that --json wrote on any machine, and run no probes
    #[arg(long, value_name = "FILE", conflicts_with_all = ["only", "faults", "device"], help_heading = "Output")]
    show: Option<PathBuf>,
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
        if let Some(name) = self.plan.only.iter().find(faulting).filter(|_| !self.plan.faults) {
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
        let report = doctor::run(&self.plan, cancel, &observer)?;
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
