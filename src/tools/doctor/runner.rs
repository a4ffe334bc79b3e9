//! Runs the probes in child processes, so that the report is complete also if a probe hangs or kills its process.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use serde::Deserialize;

use super::{
    DeviceReport, DoctorReport, Environment, ErrorDetails, Finding, PROBES, PairReport, Probe, Scope, Status,
    conclude::conclude,
    outcome::micros,
    task::{Role, TOOL, Task},
};
use crate::{
    channel::Cancel,
    driver::{Backend, DeviceUuid},
    error::{DeviceError, Error, PeerError, Result},
    memory::Selector,
    tools::{
        child::{Group, Launch, OnParentDeath, Process, ProcessEnd, StderrTail},
        line::Line,
        temporary::{PREFIX, temporary_folder},
    },
    wire::clean,
};

/// Which probes to run.
#[derive(Debug, Clone)]
pub struct DoctorPlan {
    /// The backend.
    pub backend: Backend,
    /// The device; `None` for all of them.
    pub device: Option<Selector>,
    /// The probes, by name; all of them if it is empty.
    pub only: Vec<String>,
    /// How long each probe may take.
    pub timeout: Duration,
}

impl DoctorPlan {
    fn wants(&self, probe: &Probe) -> bool {
        self.only.is_empty() || self.only.iter().any(|name| name == probe.name)
    }

    /// The probes that must be `ok`: those of sharing by descriptor, or exactly those that are named; and always the driver.
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

/// A device, as the `driver` probe reports it.
#[derive(Debug, Clone, Deserialize)]
struct Listed {
    ordinal: i32,
    name: String,
    uuid: DeviceUuid,
}

/// Runs the probes of a plan. A probe that fails, hangs, crashes or corrupts its context does not affect the others. Blocks while they
/// run, each for at most the plan's timeout.
///
/// The program that calls this must call [`run_child`](crate::tools::run_child) for its hidden subcommand: probes run in child
/// processes, which are this program.
///
/// # Errors
/// [`DeviceError::NotFound`] if the plan names a device that does not exist; [`Error::Interrupted`]; [`Error::System`] if no
/// child process can be started. The errors of the probes are in the report.
pub fn run(plan: &DoctorPlan, cancel: &Cancel) -> Result<DoctorReport> {
    let folder = temporary_folder(PREFIX)?;
    let runner = Runner { plan, cancel, folder: folder.path() };
    let machine = runner.run(&runner.machine_probes(), None, None)?;
    let driver = machine.iter().position(|finding| finding.probe == "driver");
    let driver = driver.map(|at| machine[at].clone());
    let library = driver.as_ref().and_then(|driver| driver.figures.get("library")?.as_str()).map(Path::new);
    let environment = Environment::read(library);
    let listed = driver.as_ref().and_then(|driver| driver.figures.get("devices")).cloned();
    let listed: Vec<Listed> = listed.and_then(|listed| serde_json::from_value(listed).ok()).unwrap_or_default();
    let chosen = runner.choose(&listed, driver.as_ref())?;

    let mut report = DoctorReport::new(plan.backend, environment, plan.required());
    report.machine = machine;
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

struct Runner<'a> {
    plan: &'a DoctorPlan,
    cancel: &'a Cancel,
    folder: &'a Path,
}

/// After so many probes of one device have hung, no more are tried on it.
const MOST_HUNG: usize = 3;

impl Runner<'_> {
    /// The planned probes of the machine, and the one that lists the devices.
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
            // The finding of the driver says why there is none.
            None if driver.is_none_or(|driver| driver.status != Status::Ok) => Ok(Vec::new()),
            None => {
                let available: Vec<String> = listed
                    .iter()
                    .map(|device| format!("{} is {} {}", device.ordinal, device.name, device.uuid))
                    .collect();
                Err(Error::Device(DeviceError::NotFound {
                    backend: self.plan.backend.as_str(),
                    wanted: selector.to_string(),
                    available: available.join(", "),
                }))
            }
        }
    }

    /// Runs probes in order, in as many child processes as are needed.
    fn run(&self, probes: &[&'static Probe], device: Option<i32>, owner: Option<i32>) -> Result<Vec<Finding>> {
        let mut findings = Vec::new();
        let mut hung = 0;
        let mut left = probes;
        while let Some(first) = left.first() {
            if hung >= MOST_HUNG {
                findings.push(first.skipped("Not tried: too many probes of this device have hung."));
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
                    Waited::Found(finding) => {
                        findings.push(*finding);
                        done += 1;
                    }
                    // The rest needs another process.
                    Waited::Left if done > 0 => break,
                    Waited::Left => {
                        let error = worker.error("exit", "the probe's process exited".to_owned());
                        findings.push(probe.cut_short(None, error));
                        done += 1;
                        break;
                    }
                    Waited::Cut(finding) => {
                        hung += usize::from(finding.error.as_ref().is_some_and(|error| error.kind == "timeout"));
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

/// The result of waiting for a probe.
enum Waited {
    /// It has ended.
    Found(Box<Finding>),
    /// Its process exited before it ran.
    Left,
    /// Its process was killed, by the probe or because it was overdue.
    Cut(Box<Finding>),
}

/// A child process that runs probes. Dropping it kills it, and the processes that it started.
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
            // So that it can be killed with the processes that its probes start.
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

    /// Waits for a probe's finding, until its time is over.
    fn finding(&mut self, probe: &Probe, runner: &Runner<'_>) -> Result<Waited> {
        let (begun, limit) = (Instant::now(), runner.plan.timeout);
        let us = || Some(micros(begun.elapsed()));
        loop {
            let left = limit.saturating_sub(begun.elapsed());
            match self.line.receive_within::<Finding>(left) {
                Ok(finding) if finding.probe == probe.name => return Ok(Waited::Found(Box::new(finding))),
                Ok(_) | Err(Error::Peer(PeerError::Protocol(_))) if !left.is_zero() => {}
                Err(Error::Peer(PeerError::Gone { .. })) => match self.process.wait(begun + limit, runner.cancel)? {
                    Some((ProcessEnd::Exited(_), _)) => return Ok(Waited::Left),
                    Some((end @ ProcessEnd::Killed(signal), _)) => {
                        let name = signal.map(|signal| signal.as_str().to_owned());
                        let error = ErrorDetails { name, ..self.error("signal", format!("its process {end}")) };
                        return Ok(Waited::Cut(Box::new(probe.cut_short(us(), error))));
                    }
                    None => return Ok(self.overdue(probe, us(), limit)),
                },
                Err(error @ (Error::Interrupted { .. } | Error::System { .. })) => return Err(error),
                Ok(_) | Err(_) => return Ok(self.overdue(probe, us(), limit)),
            }
        }
    }

    fn overdue(&mut self, probe: &Probe, us: Option<u64>, limit: Duration) -> Waited {
        self.process.kill();
        let error = self.error("timeout", format!("it did not end within {limit:?}, and was killed"));
        Waited::Cut(Box::new(probe.cut_short(us, error)))
    }

    /// An error of the process, with the last line of its standard error.
    fn error(&self, kind: &str, mut message: String) -> ErrorDetails {
        if let Some(last) = self.stderr.as_ref().and_then(StderrTail::last_line) {
            message = format!("{message}: {last}");
            clean(&mut message);
        }
        ErrorDetails::new(kind, message)
    }
}
