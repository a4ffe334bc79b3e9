//! Runs the probes in processes of their own, so that the report is whole whatever becomes of those.

use std::{
    fs,
    io::Read,
    path::Path,
    time::{Duration, Instant},
};

use serde::Deserialize;

use super::{
    DeviceReport, Environment, Finding, PairReport, Report, Status,
    probes::{PROBES, Probe, Scope, micros},
    report::{SCHEMA, Seen},
    rules,
    task::{Role, TOOL, Task},
    verdict,
};
use crate::{
    channel::Cancel,
    driver::{Backend, DeviceUuid},
    error::{Error, Result},
    memory::Selector,
    tools::{
        child::{End, Group, Launch, OnParentDeath, Process, StderrTail},
        line::Line,
        temporary::{PREFIX, temporary_folder},
    },
    wire::clean,
};

/// What to try.
#[derive(Debug, Clone)]
pub struct Plan {
    /// On what.
    pub backend: Backend,
    /// Which device; `None` is all of them.
    pub device: Option<Selector>,
    /// Which probes, by name; none named is all of them.
    pub only: Vec<String>,
    /// How long each probe may take.
    pub timeout: Duration,
}

impl Plan {
    pub(super) fn wants(&self, probe: &Probe) -> bool {
        self.only.is_empty() || self.only.iter().any(|name| name == probe.name)
    }

    /// What must be `ok`: what sharing by descriptor needs, or exactly what was named; and a driver, whatever was.
    fn required(&self) -> Vec<String> {
        let required = |probe: &&Probe| match self.only.is_empty() {
            true => probe.required,
            false => probe.name == "driver" || self.wants(probe),
        };
        PROBES.iter().filter(required).map(|probe| probe.name.to_owned()).collect()
    }

    fn probes(&self, scope: Scope) -> Vec<&'static Probe> {
        PROBES.iter().filter(|probe| probe.scope() == scope && self.wants(probe)).collect()
    }
}

/// A device, as the `driver` probe lists it.
#[derive(Debug, Clone, Deserialize)]
struct Listed {
    ordinal: i32,
    name: String,
    uuid: DeviceUuid,
}

/// Tries what is planned, and reports. A probe that fails, hangs, or takes its process with it stops no other.
///
/// The program that calls this must call [`run_child`](crate::tools::run_child) for its hidden subcommand: probes run in child
/// processes, which are this program.
///
/// # Errors
/// [`Error::NoSuchDevice`] if the plan names a device that there is none of; [`Error::Interrupted`]; [`Error::System`] if no
/// child can be started. What the probes fail with is in the report.
pub fn run(plan: &Plan, cancel: &Cancel) -> Result<Report> {
    let folder = temporary_folder(PREFIX)?;
    let runner = Runner { plan, cancel, folder: folder.path() };
    let machine = runner.run(&runner.machine_probes(), None, None)?;
    let driver = machine.iter().position(|finding| finding.probe == "driver");
    let driver = driver.map(|at| machine[at].clone());
    let library = driver.as_ref().and_then(|driver| driver.figures.get("library")?.as_str()).map(Path::new);
    let environment = Environment::look(library);
    let listed = driver.as_ref().and_then(|driver| driver.figures.get("devices")).cloned();
    let listed: Vec<Listed> = listed.and_then(|listed| serde_json::from_value(listed).ok()).unwrap_or_default();
    let chosen = runner.choose(&listed, driver.as_ref())?;

    let mut report = Report {
        schema: SCHEMA,
        tool: super::tool(),
        made: super::now(),
        backend: plan.backend,
        environment,
        peer: None,
        required: plan.required(),
        machine,
        devices: Vec::new(),
        pairs: Vec::new(),
        verdict: String::new(),
        exit_code: 0,
    };
    for device in &chosen {
        let Listed { ordinal, name, uuid } = device.clone();
        let findings = runner.run(&plan.probes(Scope::Device), Some(ordinal), None)?;
        report.devices.push(DeviceReport { ordinal, name, uuid, findings });
    }
    for device in &chosen {
        for owner in &listed {
            if owner.ordinal == device.ordinal {
                continue;
            }
            let (device, owner) = (device.ordinal, owner.ordinal);
            let findings = runner.run(&plan.probes(Scope::Pair), Some(device), Some(owner))?;
            if !findings.is_empty() {
                report.pairs.push(PairReport { device, owner, findings });
            }
        }
    }
    conclude(&mut report);
    Ok(report)
}

/// Explains what is not as it should be, and sums up.
pub(super) fn conclude(report: &mut Report) {
    let Report { environment, machine, devices, pairs, .. } = report;
    // What a device is set to explains what it then refuses.
    for device in devices.iter_mut() {
        let mode = device.findings.iter().find_map(|finding| finding.figures.get("compute_mode")).cloned();
        let Some(mode) = mode.filter(|mode| mode.as_u64() != Some(0)) else { continue };
        for finding in device.findings.iter_mut().filter(|finding| finding.status == Status::Failed) {
            finding.figures.insert("compute_mode".to_owned(), mode.clone());
        }
    }
    let findings = machine
        .iter_mut()
        .chain(devices.iter_mut().flat_map(|device| &mut device.findings))
        .chain(pairs.iter_mut().flat_map(|pair| &mut pair.findings));
    for finding in findings.filter(|finding| finding.status != Status::Ok) {
        rules::explain(finding, environment);
    }
    (report.verdict, report.exit_code) = verdict::of(report);
}

struct Runner<'a> {
    plan: &'a Plan,
    cancel: &'a Cancel,
    folder: &'a Path,
}

/// After so many probes of one device that hung, no more are tried on it.
const PATIENCE: usize = 3;

impl Runner<'_> {
    /// Those of the machine that are asked for, and the one that lists the devices.
    fn machine_probes(&self) -> Vec<&'static Probe> {
        PROBES
            .iter()
            .filter(|probe| probe.scope() == Scope::Machine && (self.plan.wants(probe) || probe.name == "driver"))
            .collect()
    }

    fn choose(&self, listed: &[Listed], driver: Option<&Finding>) -> Result<Vec<Listed>> {
        let Some(selector) = self.plan.device else { return Ok(listed.to_vec()) };
        let wanted = |device: &&Listed| match selector {
            Selector::Ordinal(ordinal) => i64::from(device.ordinal) == i64::from(ordinal),
            Selector::Uuid(uuid) => device.uuid == uuid,
        };
        match listed.iter().find(wanted) {
            Some(device) => Ok(vec![device.clone()]),
            // The report says why there is none.
            None if driver.is_none_or(|driver| driver.status != Status::Ok) => Ok(Vec::new()),
            None => {
                let available: Vec<String> = listed
                    .iter()
                    .map(|device| format!("{} is {} {}", device.ordinal, device.name, device.uuid))
                    .collect();
                Err(Error::NoSuchDevice {
                    backend: self.plan.backend.as_str(),
                    wanted: selector.to_string(),
                    available: available.join(", "),
                })
            }
        }
    }

    /// Runs probes in order, in as many processes as it takes.
    fn run(&self, probes: &[&'static Probe], device: Option<i32>, owner: Option<i32>) -> Result<Vec<Finding>> {
        let mut findings = Vec::new();
        let mut hung = 0;
        let mut left = probes;
        while let Some(first) = left.first() {
            if hung >= PATIENCE {
                findings.push(first.skipped("Not tried: too much hung before on this device."));
                left = &left[1..];
                continue;
            }
            let together = match first.alone {
                true => 1,
                false => left.iter().take_while(|probe| !probe.alone).count(),
            };
            let mut worker = Worker::start(self, &left[..together], device, owner)?;
            let mut done = 0;
            for probe in &left[..together] {
                match worker.finding(probe, self)? {
                    Next::Found(finding) => {
                        findings.push(*finding);
                        done += 1;
                    }
                    // It has found all that it can in this process.
                    Next::Left if done > 0 => break,
                    Next::Left => {
                        findings
                            .push(probe.cut_short(None, worker.seen("exit", "the probe's process ended".to_owned())));
                        done += 1;
                        break;
                    }
                    Next::Cut(finding) => {
                        hung += usize::from(finding.error.as_ref().is_some_and(|seen| seen.kind == "timeout"));
                        findings.push(*finding);
                        done += 1;
                        break;
                    }
                }
            }
            left = &left[done..];
        }
        Ok(findings)
    }
}

/// What came of waiting for a probe.
enum Next {
    /// It found something.
    Found(Box<Finding>),
    /// Its process ended in good order before it.
    Left,
    /// Its process was taken away by it.
    Cut(Box<Finding>),
}

/// A process that runs probes. Dropping it kills it and all that it started.
struct Worker {
    process: Process,
    line: Line,
    stderr: Option<StderrTail>,
}

impl Worker {
    fn start(runner: &Runner<'_>, probes: &[&Probe], device: Option<i32>, owner: Option<i32>) -> Result<Self> {
        let names = probes.iter().map(|probe| probe.name.to_owned()).collect();
        let Runner { plan, cancel, folder } = runner;
        let launch = Launch {
            name: "the process of the probes",
            tool: TOOL,
            on_parent_death: OnParentDeath::KillGroup { remove: Some(folder.to_path_buf()) },
            // With the processes that its probes start: so all of them can be killed at once.
            group: Group::Own,
            variables: &[],
            keep_stderr: true,
            timeout: plan.timeout,
            cancel,
        };
        let role = Role::Probes { device, owner, names };
        let task = Task { backend: plan.backend, folder: folder.to_path_buf(), timeout: plan.timeout, role };
        let (mut process, line) = launch.start(&task)?;
        let stderr = process.take_stderr().map(StderrTail::read).transpose()?;
        Ok(Self { process, line, stderr })
    }

    /// Waits for a probe's finding, no longer than it may take.
    fn finding(&mut self, probe: &Probe, runner: &Runner<'_>) -> Result<Next> {
        let (begun, limit) = (Instant::now(), runner.plan.timeout);
        let us = || Some(micros(begun.elapsed()));
        loop {
            let left = limit.saturating_sub(begun.elapsed());
            match self.line.receive_within::<Finding>(left) {
                Ok(finding) if finding.probe == probe.name => return Ok(Next::Found(Box::new(finding))),
                Ok(_) | Err(Error::Protocol(_)) if !left.is_zero() => {}
                Err(Error::PeerGone { .. }) => match self.process.wait(begun + limit, runner.cancel)? {
                    Some((End::Exited(_), _)) => return Ok(Next::Left),
                    Some((end @ End::Killed(signal), _)) => {
                        let mut seen = self.seen("signal", format!("its process {end}"));
                        seen.name = signal.map(|signal| signal.as_str().to_owned());
                        return Ok(Next::Cut(Box::new(probe.cut_short(us(), seen))));
                    }
                    None => return Ok(self.overdue(probe, us(), limit)),
                },
                Err(error @ (Error::Interrupted { .. } | Error::System { .. })) => return Err(error),
                Ok(_) | Err(_) => return Ok(self.overdue(probe, us(), limit)),
            }
        }
    }

    fn overdue(&mut self, probe: &Probe, us: Option<u64>, limit: Duration) -> Next {
        self.process.kill();
        let seen = self.seen("timeout", format!("it did not end within {limit:?}, and was killed"));
        Next::Cut(Box::new(probe.cut_short(us, seen)))
    }

    /// An end of the process, with the last line of its standard error.
    fn seen(&self, kind: &str, mut message: String) -> Seen {
        if let Some(last) = self.stderr.as_ref().and_then(StderrTail::last_line) {
            message = format!("{message}: {last}");
            clean(&mut message);
        }
        Seen { call: None, code: None, name: None, kind: kind.to_owned(), message }
    }
}

/// More bytes than any report has.
const LARGEST: u64 = 16 << 20;

/// Reads a report that was made elsewhere.
///
/// # Errors
/// [`Error::System`] if the file can't be read; [`Error::File`] if it is no report, or one of another schema.
pub fn read(path: &Path) -> Result<Report> {
    let unfit = |problem: String| Error::File { path: path.to_owned(), problem };
    let mut text = Vec::new();
    let read = fs::File::open(path).and_then(|file| file.take(LARGEST + 1).read_to_end(&mut text));
    read.map_err(|error| Error::system(format!("read {}", path.display()), error))?;
    if text.len() as u64 > LARGEST {
        return Err(unfit(format!("is no report: it has more than {LARGEST} bytes")));
    }
    let mut value: serde_json::Value =
        serde_json::from_slice(&text).map_err(|error| unfit(format!("is no report: {error}")))?;
    match value.get("schema").and_then(serde_json::Value::as_u64) {
        Some(schema) if schema == u64::from(SCHEMA) => {}
        Some(schema) => return Err(unfit(format!("is a report of schema {schema}, and this program reads {SCHEMA}"))),
        None => return Err(unfit("is no report: it has no schema".to_owned())),
    }
    super::control::clean_all(&mut value);
    serde_json::from_value(value).map_err(|error| unfit(format!("is no report: {error}")))
}
