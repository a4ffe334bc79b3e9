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
    internals::choose_device,
    memory::Selector,
};

use super::{
    DeviceReport, DoctorReport, Environment, ErrorDetails, Finding, Flag, PROBES, PairReport, Probe, Scope, Status,
    context::{Role, Task},
    report::micros,
    verdict::conclude,
};
use crate::{
    child::{Process, ProcessEnd, command, start},
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
        match probe.is(Flag::Faults) {
            true => self.faults,
            false => self.only.is_empty() || self.only.iter().any(|name| name == probe.name),
        }
    }

    /// The required probes: `driver`, and the named probes, or by default the probes of sharing by descriptor.
    fn required(&self) -> Vec<String> {
        let required = |probe: &&Probe| match self.only.is_empty() {
            true => probe.is(Flag::Required),
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
    // The probe `driver` lists the devices.
    let wanted = |probe: &&Probe| probe.scope() == Scope::Machine && (plan.wants(probe) || probe.name == "driver");
    let machine_probes: Vec<&Probe> = PROBES.iter().filter(wanted).collect();
    runner.count(0, machine_probes.len());
    let machine = runner.run(&machine_probes, None, None)?;
    let driver = machine.iter().find(|finding| finding.probe == "driver");
    let figure = |name: &str| driver.and_then(|driver| driver.figures.get(name));
    let environment = Environment::read(figure("library").and_then(|library| library.as_str()).map(Path::new));
    let listed = figure("devices").and_then(|listed| serde_json::from_value(listed.clone()).ok());
    let listed: Vec<Listed> = listed.unwrap_or_default();
    let chosen = runner.choose(&listed, driver)?;

    let mut report = DoctorReport::new(plan.backend, environment, plan.required());
    report.machine = machine;
    let probes = plan.probes(Scope::Device);
    let pair_probes = plan.probes(Scope::Pair);
    let pairs = chosen.len() * listed.len().saturating_sub(1);
    runner.count(0, chosen.len() * probes.len() + pairs * pair_probes.len());
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

    /// Adds to the numbers of finished probes and of all probes, and returns both.
    fn count(&self, finished: usize, more: usize) -> (usize, usize) {
        let mut steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        *steps = (steps.0 + finished, steps.1 + more);
        *steps
    }

    fn report_start(&self, probe: &Probe, device: Option<i32>, owner: Option<i32>) {
        let what = match (device, owner) {
            (Some(device), Some(owner)) => format!("devices {device} and {owner}: {}", probe.name),
            (Some(device), None) => format!("device {device}: {}", probe.name),
            _ => probe.name.to_owned(),
        };
        let (done, all) = self.count(0, 0);
        (self.observer)(Progress { what: &what, done, all });
    }

    /// Probes devices in parallel.
    fn devices(&self, chosen: &[Listed], probes: &[&Probe]) -> Result<Vec<DeviceReport>> {
        // One device's probe would disturb another's measurement.
        let alone = |probe: &&Probe| chosen.len() > 1 && probe.is(Flag::MachineWide);
        let (later, together): (Vec<&Probe>, Vec<&Probe>) = probes.iter().copied().partition(alone);
        let mut reports: Vec<DeviceReport> = in_parallel(chosen, |device| {
            let Listed { ordinal, name, uuid } = device.clone();
            let uuid = uuid.prefixed(self.plan.backend);
            Ok(DeviceReport { ordinal, name, uuid, findings: self.run(&together, Some(ordinal), None)? })
        })?;
        for DeviceReport { ordinal, findings, .. } in &mut reports {
            self.run_more(&later, Some(*ordinal), None, findings)?;
            findings.sort_by_key(|finding| probes.iter().position(|probe| probe.name == finding.probe));
        }
        Ok(reports)
    }

    /// Probes each selected device with the memory of every other one, in rounds in which each device is reader and owner once.
    fn pairs(&self, chosen: &[Listed], listed: &[Listed], probes: &[&Probe]) -> Result<Vec<PairReport>> {
        let mut reports = Vec::new();
        for round in 1..listed.len() {
            let pair = |device: &Listed| {
                let at = listed.iter().position(|listed| listed.ordinal == device.ordinal)?;
                Some((device.ordinal, listed[(at + round) % listed.len()].ordinal))
            };
            let pairs: Vec<(i32, i32)> = chosen.iter().filter_map(pair).collect();
            reports.extend(in_parallel(&pairs, |&(device, owner)| {
                Ok(PairReport { device, owner, findings: self.run(probes, Some(device), Some(owner))? })
            })?);
        }
        reports.sort_by_key(|report| (report.device, report.owner));
        Ok(reports)
    }

    fn run(&self, probes: &[&Probe], device: Option<i32>, owner: Option<i32>) -> Result<Vec<Finding>> {
        let mut findings = Vec::new();
        self.run_more(probes, device, owner, &mut findings)?;
        Ok(findings)
    }

    /// Runs probes in order, in as many child processes as necessary, and adds their findings.
    fn run_more(
        &self,
        probes: &[&Probe],
        device: Option<i32>,
        owner: Option<i32>,
        findings: &mut Vec<Finding>,
    ) -> Result<()> {
        let mut worker: Option<Worker> = None;
        let mut remaining = probes;
        while let Some((probe, later)) = remaining.split_first() {
            let finding = if findings.iter().filter(|finding| finding.timed_out()).count() >= MAX_TIMEOUTS {
                probe.skipped("Not tested: too many probes of this device have timed out.")
            } else {
                let fresh = worker.is_none();
                let mut running = match worker.take() {
                    Some(worker) => worker,
                    None => Worker::start(self, remaining, device, owner)?,
                };
                self.report_start(probe, device, owner);
                match running.finding(probe, self)? {
                    Ok(finding) => {
                        let alone =
                            [*probe].into_iter().chain(later.first().copied()).any(|probe| probe.is(Flag::Alone));
                        worker = (!alone).then_some(running);
                        finding
                    }
                    // It has run other probes, and leaves this one to another process.
                    Err(error) if error.kind == "exit" && !fresh => continue,
                    Err(error) => probe.cut_short(running.us(), error),
                }
            };
            findings.push(finding);
            self.count(1, 0);
            remaining = later;
        }
        Ok(())
    }
}

/// Processes items in parallel threads, [`MAX_PARALLEL`] at a time, and returns the results in order.
fn in_parallel<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> Result<R> + Sync) -> Result<Vec<R>> {
    let panicked = || Error::system("probe a device", io::Error::other("its thread panicked"));
    let mut results = Vec::new();
    for some in items.chunks(MAX_PARALLEL) {
        results.extend(thread::scope(|scope| {
            let threads: Vec<_> = some.iter().map(|item| scope.spawn(|| work(item))).collect();
            let done = threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err(panicked())));
            done.collect::<Result<Vec<R>>>()
        })?);
    }
    Ok(results)
}

/// A child process that runs probes. Drop kills it and its children.
struct Worker {
    process: Process,
    line: Line,
    /// The start of the current probe.
    started: Instant,
}

impl Worker {
    fn start(runner: &Runner<'_>, probes: &[&Probe], device: Option<i32>, owner: Option<i32>) -> Result<Self> {
        let names = probes.iter().map(|probe| probe.name.to_owned()).collect();
        let Runner { plan, folder, .. } = runner;
        let role = Role::Probes { device, owner, names };
        let task = Task { backend: plan.backend, folder: folder.to_path_buf(), timeout: plan.timeout, role };
        let mut command = command(Some(folder), &task)?;
        let (process, line) = start("the process of the probes", &mut command, true, plan.timeout, runner.cancel)?;
        Ok(Self { process, line, started: Instant::now() })
    }

    /// How long the current probe has run, in microseconds.
    fn us(&self) -> Option<u64> {
        Some(micros(self.started.elapsed()))
    }

    /// Waits for the finding of a probe until its timeout. Returns an error of kind `exit`, `signal` or `timeout` if it does not arrive.
    fn finding(&mut self, probe: &Probe, runner: &Runner<'_>) -> Result<std::result::Result<Finding, ErrorDetails>> {
        self.started = Instant::now();
        let deadline = self.started + runner.plan.timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.line.receive_within::<Finding>(left) {
                Ok(finding) if finding.probe == probe.name => return Ok(Ok(finding)),
                Ok(_) | Err(Error::Peer(PeerError::Protocol(_))) if !left.is_zero() => {}
                Err(error @ (Error::Interrupted { .. } | Error::System { .. })) => return Err(error),
                Err(Error::Peer(PeerError::Gone { .. })) => break,
                Ok(_) | Err(_) => return Ok(Err(self.overdue(runner.plan.timeout))),
            }
        }
        Ok(Err(match self.process.wait(deadline, runner.cancel)? {
            Some(ProcessEnd::Exited(_)) => self.error("exit", "the probe's process exited".to_owned()),
            Some(end @ ProcessEnd::Killed(signal)) => {
                let name = signal.map(|signal| signal.as_str().to_owned());
                ErrorDetails { name, ..self.error("signal", format!("its process {end}")) }
            }
            None => self.overdue(runner.plan.timeout),
        }))
    }

    fn overdue(&mut self, limit: Duration) -> ErrorDetails {
        self.process.kill();
        self.error("timeout", format!("it did not finish within {limit:?}, and was killed"))
    }

    /// An error of the process, with the last line on its standard error.
    fn error(&self, kind: &str, message: String) -> ErrorDetails {
        ErrorDetails::new(
            kind,
            match self.process.last_error_line() {
                Some(last) => format!("{message}: {last}"),
                None => message,
            },
        )
    }
}
