//! Runs the probes in child processes, so that a probe that hangs or crashes does not affect the rest of the report.

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
    outcome::micros,
    task::{Role, Task},
    verdict::conclude,
};
use crate::{
    child::{Group, Launch, OnParentDeath, Process, ProcessEnd, StderrTail},
    line::Line,
    temporary::{PREFIX, temporary_folder},
};

/// Selects the probes of a run.
#[derive(Debug, Clone)]
pub struct DoctorPlan {
    pub backend: Backend,
    /// The device; `None` for all.
    pub device: Option<Selector>,
    /// Names of probes; empty for all. Probes that provoke GPU faults also require `faults`.
    pub only: Vec<String>,
    /// Whether to include the probes that provoke GPU faults.
    pub faults: bool,
    /// The timeout of each probe.
    pub timeout: Duration,
}

impl DoctorPlan {
    fn wants(&self, probe: &Probe) -> bool {
        match probe.faults {
            true => self.faults,
            false => self.only.is_empty() || self.only.iter().any(|name| name == probe.name),
        }
    }

    /// The required probes: `driver`, and the named probes, or by default the probes of sharing by descriptor.
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

/// The progress of a run.
#[derive(Debug, Clone, Copy)]
pub struct Progress<'a> {
    /// The step that starts: a probe and its device.
    pub what: &'a str,
    /// The number of finished probes.
    pub done: usize,
    /// The number of all probes. It grows once the devices are known.
    pub all: usize,
}

/// Called when a probe starts, from several threads if there are several devices.
pub type Observer<'a> = &'a (dyn Fn(Progress<'_>) + Sync);

/// A device as reported by the `driver` probe.
#[derive(Debug, Clone, Deserialize)]
struct Listed {
    ordinal: i32,
    name: String,
    uuid: DeviceUuid,
}

/// Runs the probes of a plan. A probe that fails, hangs, crashes or corrupts its context does not affect the others. Blocks while they run,
/// each for at most the plan's timeout.
///
/// Devices are probed in parallel, then pairs of devices, such that each device is reader and owner of at most one pair at a time. The time
/// still grows with the number of devices because the driver starts processes one by one. Measurements that depend on the whole machine,
/// such as the cost of an export, run last and alone.
///
/// The calling program must pass its hidden subcommand to [`child::run`](crate::child::run): probes run in child processes of the same
/// program.
///
/// # Errors
/// [`DeviceError::NotFound`](vmmfd::error::DeviceError::NotFound) if the plan names a device that does not exist;
/// [`Error::Interrupted`]; [`Error::System`] if no child process can be started. The errors of the probes are in the report.
pub fn run(plan: &DoctorPlan, cancel: &Cancel, observer: Observer<'_>) -> Result<DoctorReport> {
    let folder = temporary_folder(PREFIX)?;
    let steps = Mutex::new((0, 0));
    let runner = Runner { plan, cancel, folder: folder.path(), observer, steps };
    let machine_probes = runner.machine_probes();
    runner.add_total(machine_probes.len());
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
    runner.add_total(chosen.len() * probes.len() + pairs * pair_probes.len());
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
    /// The numbers of finished probes and of all probes.
    steps: Mutex<(usize, usize)>,
}

/// The most devices or pairs probed in parallel; each needs up to three processes.
const MAX_PARALLEL: usize = 16;

/// After this many timeouts on one device, its remaining probes are skipped.
const MAX_TIMEOUTS: usize = 3;

impl Runner<'_> {
    /// The selected machine probes, and `driver`, which lists the devices.
    fn machine_probes(&self) -> Vec<&'static Probe> {
        PROBES
            .iter()
            .filter(|probe| probe.scope() == Scope::Machine && (self.plan.wants(probe) || probe.name == "driver"))
            .collect()
    }

    fn choose(&self, listed: &[Listed], driver: Option<&Finding>) -> Result<Vec<Listed>> {
        let Some(selector) = self.plan.device else { return Ok(listed.to_vec()) };
        // Without a device, the finding of `driver` has the reason.
        if driver.is_none_or(|driver| driver.status != Status::Ok) && listed.is_empty() {
            return Ok(Vec::new());
        }
        let identity = |device: &Listed| {
            (device.ordinal, device.uuid, format!("{} {}", device.name, device.uuid.prefixed(self.plan.backend)))
        };
        choose_device(selector, self.plan.backend, listed, identity).map(|device| vec![device.clone()])
    }

    fn add_total(&self, more: usize) {
        self.steps.lock().unwrap_or_else(PoisonError::into_inner).1 += more;
    }

    fn report_start(&self, probe: &Probe, device: Option<i32>, owner: Option<i32>) {
        let what = match (device, owner) {
            (Some(device), Some(owner)) => format!("devices {device} and {owner}: {}", probe.name),
            (Some(device), None) => format!("device {device}: {}", probe.name),
            _ => probe.name.to_owned(),
        };
        let (done, all) = *self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        (self.observer)(Progress { what: &what, done, all });
    }

    /// Skips a probe because too many others have timed out on its device.
    fn skip_after_timeouts(&self, probe: &Probe) -> Finding {
        self.count_done();
        probe.skipped("Not tested: too many probes of this device have timed out.")
    }

    fn count_done(&self) {
        self.steps.lock().unwrap_or_else(PoisonError::into_inner).0 += 1;
    }

    /// Probes devices in parallel.
    fn devices(&self, chosen: &[Listed], probes: &[&'static Probe]) -> Result<Vec<DeviceReport>> {
        // One device's probe would disturb another's measurement.
        let alone = |probe: &&'static Probe| chosen.len() > 1 && probe.machine_wide;
        let (later, together): (Vec<&'static Probe>, Vec<&'static Probe>) = probes.iter().copied().partition(alone);
        let mut reports: Vec<DeviceReport> = in_parallel(chosen, |device| {
            let Listed { ordinal, name, uuid } = device.clone();
            Ok(DeviceReport { ordinal, name, uuid, findings: self.run(&together, Some(ordinal), None)? })
        })?;
        for report in &mut reports {
            let timed_out = |finding: &&Finding| finding.error.as_ref().is_some_and(|error| error.kind == "timeout");
            let more = match report.findings.iter().filter(timed_out).count() {
                MAX_TIMEOUTS.. => later.iter().map(|probe| self.skip_after_timeouts(probe)).collect(),
                _ => self.run(&later, Some(report.ordinal), None)?,
            };
            report.findings.extend(more);
            let place = |finding: &Finding| probes.iter().position(|probe| probe.name == finding.probe);
            report.findings.sort_by_key(place);
        }
        Ok(reports)
    }

    /// Probes each selected device with the memory of every other one, in rounds in which each device is reader and owner once.
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
            reports.extend(in_parallel(&round, |&(device, owner)| {
                Ok(PairReport { device, owner, findings: self.run(probes, Some(device), Some(owner))? })
            })?);
        }
        reports.sort_by_key(|report| (report.device, report.owner));
        Ok(reports)
    }

    /// Runs probes in order, in as many child processes as necessary.
    fn run(&self, probes: &[&'static Probe], device: Option<i32>, owner: Option<i32>) -> Result<Vec<Finding>> {
        let mut findings = Vec::new();
        let mut timeouts = 0;
        let mut remaining = probes;
        while let Some(first) = remaining.first() {
            if timeouts >= MAX_TIMEOUTS {
                findings.push(self.skip_after_timeouts(first));
                remaining = &remaining[1..];
                continue;
            }
            let together = match first.alone {
                true => 1,
                false => remaining.iter().take_while(|probe| !probe.alone).count(),
            };
            let mut worker = Worker::start(self, &remaining[..together], device, owner)?;
            let mut done = 0;
            for probe in &remaining[..together] {
                self.report_start(probe, device, owner);
                match worker.finding(probe, self)? {
                    ProbeEnd::Finding(finding) => {
                        findings.push(*finding);
                        self.count_done();
                        done += 1;
                    }
                    // The remaining probes need another process.
                    ProbeEnd::Exited if done > 0 => break,
                    ProbeEnd::Exited => {
                        let error = worker.error("exit", "the probe's process exited".to_owned());
                        findings.push(probe.cut_short(None, error));
                        self.count_done();
                        done += 1;
                        break;
                    }
                    ProbeEnd::Killed(finding) => {
                        timeouts += usize::from(finding.error.as_ref().is_some_and(|error| error.kind == "timeout"));
                        findings.push(*finding);
                        self.count_done();
                        done += 1;
                        break;
                    }
                }
            }
            remaining = &remaining[done..];
        }
        Ok(findings)
    }
}

/// Processes items in parallel threads, [`MAX_PARALLEL`] at a time, and returns the results in order.
fn in_parallel<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> Result<R> + Sync) -> Result<Vec<R>> {
    if let [only] = items {
        return Ok(vec![work(only)?]);
    }
    let mut results = Vec::new();
    for some in items.chunks(MAX_PARALLEL) {
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
enum ProbeEnd {
    Finding(Box<Finding>),
    /// The process exited before it ran the probe.
    Exited,
    /// The process was killed, by the probe or at the deadline.
    Killed(Box<Finding>),
}

/// A child process that runs probes. Drop kills it and its children.
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
            // So that its children are killed too.
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

    /// Waits for the finding of a probe until its timeout.
    fn finding(&mut self, probe: &Probe, runner: &Runner<'_>) -> Result<ProbeEnd> {
        let (started, limit) = (Instant::now(), runner.plan.timeout);
        let us = || Some(micros(started.elapsed()));
        loop {
            let left = limit.saturating_sub(started.elapsed());
            match self.line.receive_within::<Finding>(left) {
                Ok(finding) if finding.probe == probe.name => return Ok(ProbeEnd::Finding(Box::new(finding))),
                Ok(_) | Err(Error::Peer(PeerError::Protocol(_))) if !left.is_zero() => {}
                Err(Error::Peer(PeerError::Gone { .. })) => match self.process.wait(started + limit, runner.cancel)? {
                    Some((ProcessEnd::Exited(_), _)) => return Ok(ProbeEnd::Exited),
                    Some((end @ ProcessEnd::Killed(signal), _)) => {
                        let name = signal.map(|signal| signal.as_str().to_owned());
                        let error = ErrorDetails { name, ..self.error("signal", format!("its process {end}")) };
                        return Ok(ProbeEnd::Killed(Box::new(probe.cut_short(us(), error))));
                    }
                    None => return Ok(self.overdue(probe, us(), limit)),
                },
                Err(error @ (Error::Interrupted { .. } | Error::System { .. })) => return Err(error),
                Ok(_) | Err(_) => return Ok(self.overdue(probe, us(), limit)),
            }
        }
    }

    fn overdue(&mut self, probe: &Probe, us: Option<u64>, limit: Duration) -> ProbeEnd {
        self.process.kill();
        let error = self.error("timeout", format!("it did not finish within {limit:?}, and was killed"));
        ProbeEnd::Killed(Box::new(probe.cut_short(us, error)))
    }

    /// An error of the process, with the last line on its standard error.
    fn error(&self, kind: &str, mut message: String) -> ErrorDetails {
        if let Some(last) = self.stderr.as_ref().and_then(StderrTail::last_line) {
            message = format!("{message}: {last}");
            clean(&mut message);
        }
        ErrorDetails::new(kind, message)
    }
}
