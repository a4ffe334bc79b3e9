//! Runs the probes in child processes, so that a probe that hangs or crashes does not affect the rest of the report.

use std::{
    io,
    sync::{Mutex, PoisonError},
    thread,
};

use vmmfd::{channel::Cancel, driver::DeviceUuid, internals::choose_device};

use super::{
    DeviceReport, DoctorPlan, DoctorReport, Flag, PROBES, PairReport, Probe, Scope,
    process::{Child, Role, Setting},
    report::micros,
    verdict::conclude,
};
use crate::{
    doctor::prelude::*,
    temporary::{PREFIX, temporary_folder},
};

/// Called when a probe starts, from several threads if there are several devices: with the step (a probe and its device), the number of
/// finished probes, and the number of all probes, which grows once the devices are known.
pub type Observer<'a> = &'a (dyn Fn(&str, usize, usize) + Sync);

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
    // The error of the other process of a probe must arrive before the probe's time limit.
    let step = plan.timeout.mul_f64(0.75);
    let socket = folder.path().to_owned();
    let setting = Setting { backend: plan.backend, socket, timeout: step };
    let runner =
        Runner { setting, folder: folder.path(), limit: plan.timeout, cancel, observer, counts: Mutex::default() };
    // The probe `driver` lists the devices.
    let wanted = |probe: &&Probe| probe.scope() == Scope::Machine && (plan.wants(probe) || probe.name == "driver");
    let machine_probes: Vec<&Probe> = PROBES.iter().filter(wanted).collect();
    runner.count(0, machine_probes.len());
    let machine = runner.run(&machine_probes, None, None)?;
    let driver = machine.iter().find(|finding| finding.probe == "driver");
    let environment = Environment::read(driver.and_then(Finding::library));
    let listed = driver.map(Finding::devices).unwrap_or_default();
    let chosen = match plan.device.0 {
        // Without a device, the finding of `driver` has the reason.
        Some(selector) if !listed.is_empty() || driver.is_some_and(|driver| driver.status == Status::Ok) => {
            let identity = |DeviceReport { ordinal, name, uuid, .. }: &DeviceReport| {
                (*ordinal, uuid.parse().unwrap_or(DeviceUuid::from_bytes([0; 16])), format!("{name} {uuid}"))
            };
            vec![choose_device(selector, plan.backend, &listed, identity)?.clone()]
        }
        _ => listed.clone(),
    };
    let mut report = DoctorReport::new(plan.backend, environment, plan.required());
    report.machine = machine;
    let probes = plan.probes(Scope::Device);
    let pair_probes = plan.probes(Scope::Pair);
    let pairs = chosen.len() * listed.len().saturating_sub(1);
    runner.count(0, chosen.len() * probes.len() + pairs * pair_probes.len());
    report.devices = runner.devices(chosen, &probes)?;
    if !pair_probes.is_empty() {
        report.pairs = runner.pairs(&report.devices, &listed, &pair_probes)?;
    }
    conclude(&mut report);
    Ok(report)
}

/// Starts the child processes that run probes.
struct Runner<'a> {
    /// The setting of the children. The socket is the folder for the sockets.
    setting: Setting,
    /// The folder that the children remove if this process dies.
    folder: &'a Path,
    /// The time limit of a probe.
    limit: Duration,
    cancel: &'a Cancel,
    observer: Observer<'a>,
    /// The numbers of finished probes and of all probes.
    counts: Mutex<(usize, usize)>,
}

/// The most devices or pairs probed in parallel; each needs up to three processes.
const MAX_PARALLEL: usize = 16;

/// After this many timeouts on one device, its remaining probes are skipped.
const MAX_TIMEOUTS: usize = 3;

impl Runner<'_> {
    /// Adds to the numbers of finished probes and of all probes, and returns both.
    fn count(&self, finished: usize, more: usize) -> (usize, usize) {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        *counts = (counts.0 + finished, counts.1 + more);
        *counts
    }

    fn report_start(&self, probe: &Probe, device: Option<i32>, owner: Option<i32>) {
        let what = match (device, owner) {
            (Some(device), Some(owner)) => format!("devices {device} and {owner}: {}", probe.name),
            (Some(device), None) => format!("device {device}: {}", probe.name),
            _ => probe.name.to_owned(),
        };
        let (done, all) = self.count(0, 0);
        (self.observer)(&what, done, all);
    }

    /// Starts a child. At any time, at most one child has this role for these devices.
    fn start(&self, role: Role, device: Option<i32>, owner: Option<i32>) -> Result<Child> {
        let number = |device: Option<i32>| device.map_or_else(String::new, |ordinal| ordinal.to_string());
        let mut setting = self.setting.clone();
        setting.socket.push(format!("m{}-{}", number(device), number(owner)));
        Child::start("the process of the probes", &setting, role, Some(self.folder), true, self.limit, self.cancel)
    }

    /// Probes devices in parallel.
    fn devices(&self, mut devices: Vec<DeviceReport>, probes: &[&Probe]) -> Result<Vec<DeviceReport>> {
        let findings = in_parallel(&devices, |device| self.run(probes, Some(device.ordinal), None))?;
        devices.iter_mut().zip(findings).for_each(|(device, findings)| device.findings = findings);
        Ok(devices)
    }

    /// Probes each selected device with the memory of every other one, in rounds in which each device is reader and owner once.
    fn pairs(&self, chosen: &[DeviceReport], listed: &[DeviceReport], probes: &[&Probe]) -> Result<Vec<PairReport>> {
        let mut reports = Vec::new();
        for round in 1..listed.len() {
            let pair = |device: &DeviceReport| {
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

    /// Runs probes in order, in as many child processes as necessary.
    fn run(&self, probes: &[&Probe], device: Option<i32>, owner: Option<i32>) -> Result<Vec<Finding>> {
        let mut findings: Vec<Finding> = Vec::new();
        let mut worker: Option<Child> = None;
        let mut remaining = probes;
        while let Some((probe, later)) = remaining.split_first() {
            if findings.iter().filter(|finding| finding.timed_out()).count() >= MAX_TIMEOUTS {
                findings.push(probe.skipped("Not tested: too many probes of this device have timed out."));
                remaining = later;
                continue;
            }
            let fresh = worker.is_none();
            let mut running = match worker.take() {
                Some(worker) => worker,
                None => self.start_probes(remaining, device, owner)?,
            };
            self.report_start(probe, device, owner);
            let started = Instant::now();
            match running.receive::<Finding>() {
                Ok(finding) => {
                    let alone = [*probe].into_iter().chain(later.first().copied()).any(|probe| probe.is(Flag::Alone));
                    worker = (!alone).then_some(running);
                    findings.push(finding);
                }
                // It has run other probes, and leaves this one to another process.
                Err(error) if error.kind == "exit" && !fresh => continue,
                Err(error) => {
                    self.cancel.check()?;
                    findings.push(probe.cut_short(Some(micros(started.elapsed())), error));
                }
            }
            remaining = later;
            self.count(1, 0);
        }
        Ok(findings)
    }

    fn start_probes(&self, probes: &[&Probe], device: Option<i32>, owner: Option<i32>) -> Result<Child> {
        let names = probes.iter().map(|probe| probe.name.to_owned()).collect();
        self.start(Role::Probes { device, owner, names }, device, owner)
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
