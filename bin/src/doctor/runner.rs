//! Runs the probes in child processes, so that the report is complete also if a probe hangs or kills its process.

use std::{
    io,
    path::Path,
    sync::{Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use serde::Deserialize;
use vmmfd::{
    channel::Cancel,
    driver::{Backend, DeviceUuid},
    error::{Error, PeerError, Result},
    internals::{choose_device, clean},
    memory::Selector,
};

use super::{
    DeviceReport, DoctorReport, Environment, ErrorDetails, Finding, PROBES, PairReport, Probe, Scope, Status,
    conclude::conclude,
    outcome::micros,
    task::{Role, Task},
};
use crate::{
    child::{Group, Launch, OnParentDeath, Process, ProcessEnd, StderrTail},
    line::Line,
    temporary::{PREFIX, temporary_folder},
};

/// Which probes to run.
#[derive(Debug, Clone)]
pub struct DoctorPlan {
    /// The backend.
    pub backend: Backend,
    /// The device; `None` for all of them.
    pub device: Option<Selector>,
    /// The probes, by name; if it is empty all of them. Those that provoke faults of the GPU take `faults` besides.
    pub only: Vec<String>,
    /// Whether to run those that provoke faults of the GPU too, whatever `only` names.
    pub faults: bool,
    /// How long each probe may take.
    pub timeout: Duration,
}

impl DoctorPlan {
    fn wants(&self, probe: &Probe) -> bool {
        match probe.faults {
            true => self.faults,
            false => self.only.is_empty() || self.only.iter().any(|name| name == probe.name),
        }
    }

    /// The probes that must be `ok`: those of sharing by descriptor, or exactly those that are named; and always the driver.
    fn required(&self) -> Vec<String> {
        let required = |probe: &&Probe| match self.only.is_empty() {
            true => probe.required,
            false => probe.name == "driver" || self.only.iter().any(|name| name == probe.name),
        };
        PROBES.iter().filter(required).map(|probe| probe.name.to_owned()).collect()
    }

    fn probes(&self, scope: Scope) -> Vec<&'static Probe> {
        PROBES.iter().filter(|probe| probe.scope() == scope && self.wants(probe)).collect()
    }
}

/// How far a run of the doctor is.
#[derive(Debug, Clone, Copy)]
pub struct Progress<'a> {
    /// What begins: a probe, with its device.
    pub what: &'a str,
    /// How many probes have ended.
    pub done: usize,
    /// How many there are; it grows once the devices are known.
    pub all: usize,
}

/// Is called as each probe begins, from several threads where there are several devices.
pub type Observer<'a> = &'a (dyn Fn(Progress<'_>) + Sync);

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
/// Devices are probed side by side, and then pairs of devices, so that each device is the reader of one pair and the owner of one at a
/// time. It still takes longer with each device, since the driver starts one process after the other. What is measured of the whole machine, the cost of an export,
/// comes last, alone.
///
/// The program that calls this must call [`child::run`](crate::child::run) for its hidden subcommand: probes run in child
/// processes, which are this program.
///
/// # Errors
/// [`DeviceError::NotFound`](vmmfd::error::DeviceError::NotFound) if the plan names a device that does not exist;
/// [`Error::Interrupted`]; [`Error::System`] if no child process can be started. The errors of the probes are in the report.
pub fn run(plan: &DoctorPlan, cancel: &Cancel, observer: Observer<'_>) -> Result<DoctorReport> {
    let folder = temporary_folder(PREFIX)?;
    let steps = Mutex::new((0, 0));
    let runner = Runner { plan, cancel, folder: folder.path(), observer, steps };
    let machine_probes = runner.machine_probes();
    runner.expect(machine_probes.len());
    let machine = runner.run(&machine_probes, None, None)?;
    let driver = machine.iter().position(|finding| finding.probe == "driver");
    let driver = driver.map(|at| machine[at].clone());
    let library = driver.as_ref().and_then(|driver| driver.figures.get("library")?.as_str()).map(Path::new);
    let environment = Environment::read(library);
    let listed = driver.as_ref().and_then(|driver| driver.figures.get("devices")).cloned();
    let listed: Vec<Listed> = listed.and_then(|listed| serde_json::from_value(listed).ok()).unwrap_or_default();
    let chosen = runner.choose(&listed, driver.as_ref())?;

    let mut report = DoctorReport::new(plan.backend, environment, plan.required());
    report.machine = machine;
    let (probes, pair_probes) = (plan.probes(Scope::Device), plan.probes(Scope::Pair));
    let pairs = chosen.len() * listed.len().saturating_sub(1);
    runner.expect(chosen.len() * probes.len() + pairs * pair_probes.len());
    report.devices = runner.devices(&chosen, &probes)?;
    if !pair_probes.is_empty() {
        report.pairs = runner.pairs(&chosen, &listed, &pair_probes)?;
    }
    conclude(&mut report);
    Ok(report)
}

struct Runner<'a> {
    plan: &'a DoctorPlan,
    cancel: &'a Cancel,
    folder: &'a Path,
    observer: Observer<'a>,
    /// How many probes have ended, and how many there are.
    steps: Mutex<(usize, usize)>,
}

/// The most devices, and pairs of devices, that are probed at once: each takes up to three processes.
const AT_ONCE: usize = 16;

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
        // Without a device the finding of the driver says why there is none.
        if driver.is_none_or(|driver| driver.status != Status::Ok) && listed.is_empty() {
            return Ok(Vec::new());
        }
        let identity = |device: &Listed| {
            (device.ordinal, device.uuid, format!("{} {}", device.name, device.uuid.prefixed(self.plan.backend)))
        };
        choose_device(selector, self.plan.backend, listed, identity).map(|device| vec![device.clone()])
    }

    /// Adds to the probes that there are.
    fn expect(&self, more: usize) {
        self.steps.lock().unwrap_or_else(PoisonError::into_inner).1 += more;
    }

    fn begins(&self, probe: &Probe, device: Option<i32>, owner: Option<i32>) {
        let what = match (device, owner) {
            (Some(device), Some(owner)) => format!("devices {device} and {owner}: {}", probe.name),
            (Some(device), None) => format!("device {device}: {}", probe.name),
            _ => probe.name.to_owned(),
        };
        let (done, all) = *self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        (self.observer)(Progress { what: &what, done, all });
    }

    /// The finding of a probe of a device on which too many others have hung.
    fn give_up(&self, probe: &Probe) -> Finding {
        self.ended();
        probe.skipped("Not tried: too many probes of this device have hung.")
    }

    fn ended(&self) {
        self.steps.lock().unwrap_or_else(PoisonError::into_inner).0 += 1;
    }

    /// Probes devices, side by side.
    fn devices(&self, chosen: &[Listed], probes: &[&'static Probe]) -> Result<Vec<DeviceReport>> {
        // What one device's probe does to the machine would show in another's.
        let alone = |probe: &&'static Probe| chosen.len() > 1 && probe.machine_wide;
        let (later, together): (Vec<&'static Probe>, Vec<&'static Probe>) = probes.iter().copied().partition(alone);
        let mut reports: Vec<DeviceReport> = side_by_side(chosen, |device| {
            let Listed { ordinal, name, uuid } = device.clone();
            Ok(DeviceReport { ordinal, name, uuid, findings: self.run(&together, Some(ordinal), None)? })
        })?;
        for report in &mut reports {
            let hangs = |finding: &&Finding| finding.error.as_ref().is_some_and(|error| error.kind == "timeout");
            let more = match report.findings.iter().filter(hangs).count() {
                MOST_HUNG.. => later.iter().map(|probe| self.give_up(probe)).collect(),
                _ => self.run(&later, Some(report.ordinal), None)?,
            };
            report.findings.extend(more);
            let place = |finding: &Finding| probes.iter().position(|probe| probe.name == finding.probe);
            report.findings.sort_by_key(place);
        }
        Ok(reports)
    }

    /// Probes each chosen device with the memory of every other one, in rounds in which each device is a reader and an owner once.
    fn pairs(&self, chosen: &[Listed], listed: &[Listed], probes: &[&'static Probe]) -> Result<Vec<PairReport>> {
        let mut reports = Vec::new();
        for round in 1..listed.len() {
            let round: Vec<(i32, i32)> = chosen
                .iter()
                .filter_map(|device| {
                    let at = listed.iter().position(|listed| listed.ordinal == device.ordinal)?;
                    Some((device.ordinal, listed[(at + round) % listed.len()].ordinal))
                })
                .collect();
            reports.extend(side_by_side(&round, |&(device, owner)| {
                Ok(PairReport { device, owner, findings: self.run(probes, Some(device), Some(owner))? })
            })?);
        }
        reports.sort_by_key(|report| (report.device, report.owner));
        Ok(reports)
    }

    /// Runs probes in order, in as many child processes as are needed.
    fn run(&self, probes: &[&'static Probe], device: Option<i32>, owner: Option<i32>) -> Result<Vec<Finding>> {
        let mut findings = Vec::new();
        let mut hung = 0;
        let mut left = probes;
        while let Some(first) = left.first() {
            if hung >= MOST_HUNG {
                findings.push(self.give_up(first));
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
                self.begins(probe, device, owner);
                match worker.finding(probe, self)? {
                    Waited::Found(finding) => {
                        findings.push(*finding);
                        self.ended();
                        done += 1;
                    }
                    // The rest needs another process.
                    Waited::Left if done > 0 => break,
                    Waited::Left => {
                        let error = worker.error("exit", "the probe's process exited".to_owned());
                        findings.push(probe.cut_short(None, error));
                        self.ended();
                        done += 1;
                        break;
                    }
                    Waited::Cut(finding) => {
                        hung += usize::from(finding.error.as_ref().is_some_and(|error| error.kind == "timeout"));
                        findings.push(*finding);
                        self.ended();
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

/// Does work on each item in a thread of its own, a number of them at once, and returns the results in the items' order.
fn side_by_side<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> Result<R> + Sync) -> Result<Vec<R>> {
    if let [only] = items {
        return Ok(vec![work(only)?]);
    }
    let mut results = Vec::new();
    for some in items.chunks(AT_ONCE) {
        let done: Vec<Result<R>> = thread::scope(|scope| {
            let threads: Vec<_> = some.iter().map(|item| scope.spawn(|| work(item))).collect();
            let panicked = || Error::system("probe a device", io::Error::other("its thread panicked"));
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err(panicked()))).collect()
        });
        for result in done {
            results.push(result?);
        }
    }
    Ok(results)
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
        let Runner { plan, cancel, folder, .. } = runner;
        let launch = Launch {
            name: "the process of the probes",
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
