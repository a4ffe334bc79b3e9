//! `status`: shows the broker's processes, limits and usage.

use std::{sync::mpsc, thread, time::Duration};

use clap::Args;
use schemars::JsonSchema;
use serde::Serialize;
use vmmfd::{
    broker::{Crash, Limits, Metrics, Room},
    channel::Cancel,
    driver::{DEVICE_NAME, DeviceUuid},
    internals::nvml,
    wire::Device,
};

use super::{
    DeviceSize, MeetBroker, count,
    fields::{age, field, time},
};
use crate::{
    cli::{
        Exit, Output, Tool, ToolOutput,
        exit::exit_codes,
        output::{Progress, json_line},
    },
    schema::{self, Named, VERSION, document},
    stamp,
    units::{about, bytes},
};

/// The time limit of NVML for all devices: NVML itself has none.
const NVML_WAIT: Duration = Duration::from_secs(5);

/// Shows a broker's processes, limits and last crashes
///
/// The memory of a device is shown as claimed by the makers and, if NVML loads, as used by all processes. The broker's user and root see
/// the memory of all users and the names of lost versions; other users see only their own memory.
#[derive(Debug, Args)]
#[command(after_help = exit_codes!("shown"; 2 4 5 130))]
pub(in super::super) struct StatusOptions {
    #[command(flatten)]
    meet: MeetBroker,

    #[command(flatten)]
    output: Output,
}

#[derive(Debug, Serialize, JsonSchema)]
struct StatusReport {
    schema: u32,
    tool: String,
    socket: String,
    server: ServerLine,
    /// Null without a keeper.
    keeper: Option<KeeperLine>,
    /// The number of times that a server took over from another.
    restarts: u64,
    /// Versions that this server could not take over.
    lost_versions: Option<u64>,
    /// Oldest first; null if the broker does not report crashes.
    crashes: Option<Vec<CrashLine>>,
    objects: u64,
    versions: u64,
    leases: u64,
    connections: u64,
    watchers: u64,
    /// Limits of each user, and of all together; null is unlimited.
    quota: QuotaLine,
    total_quota: QuotaLine,
    devices: Vec<DeviceLine>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct ServerLine {
    pid: Option<u32>,
    version: Option<String>,
    #[schemars(with = "schema::Time")]
    started: String,
    #[schemars(with = "schema::Room")]
    descriptors: Room,
    #[serde(skip)]
    started_ms: u64,
}

#[derive(Debug, Serialize, JsonSchema)]
struct KeeperLine {
    pid: Option<u32>,
    #[schemars(with = "Option<schema::Time>")]
    started: Option<String>,
    #[schemars(with = "schema::Room")]
    descriptors: Room,
    #[serde(skip)]
    started_ms: Option<u64>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct CrashLine {
    /// When the crash was noticed.
    #[schemars(with = "schema::Time")]
    at: String,
    /// `server`, `keeper` or `both`.
    process: String,
    pid: u32,
    /// Null if everything was lost.
    lost_versions: Option<u64>,
    /// Names and numbers of some lost versions.
    names: Vec<String>,
    #[serde(skip)]
    at_ms: u64,
}

#[derive(Debug, Default, Serialize, JsonSchema)]
struct QuotaLine {
    bytes: Option<u64>,
    device_bytes: Option<u64>,
    objects: Option<u64>,
    leases: Option<u64>,
    connections: Option<u64>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct DeviceLine {
    /// As claimed.
    #[serde(flatten)]
    claimed: DeviceSize,
    /// Used and total bytes of the device's memory, as NVML reports them.
    used: Option<u64>,
    total: Option<u64>,
    /// The reason why NVML reports nothing; null if it does, and for host memory.
    unknown: Option<String>,
}

impl From<Option<Limits>> for QuotaLine {
    fn from(limits: Option<Limits>) -> Self {
        let Limits { bytes, device_bytes, objects, leases, connections } = limits.unwrap_or_default();
        Self { bytes, device_bytes, objects, leases, connections }
    }
}

impl From<&Crash> for CrashLine {
    fn from(crash: &Crash) -> Self {
        let Crash { at_ms, process, pid, lost_versions, names } = crash.clone();
        Self { at: time(at_ms), process, pid, lost_versions, names, at_ms }
    }
}

impl StatusReport {
    fn of(metrics: &Metrics, socket: String) -> Self {
        let store = &metrics.store;
        let keeper = (store.kind != "none").then(|| {
            let started_ms = metrics.keeper.and_then(|keeper| keeper.started_ms);
            KeeperLine {
                pid: metrics.keeper.map(|keeper| keeper.pid),
                started: started_ms.map(time),
                descriptors: Room { used: store.used, allowed: store.allowed },
                started_ms,
            }
        });
        Self {
            schema: VERSION,
            tool: stamp::tool(),
            socket,
            server: ServerLine {
                pid: metrics.pid,
                version: metrics.version.clone(),
                started: time(metrics.started_ms),
                descriptors: metrics.descriptors,
                started_ms: metrics.started_ms,
            },
            keeper,
            restarts: metrics.restarts,
            lost_versions: metrics.lost_versions,
            crashes: metrics.crashes.as_ref().map(|crashes| crashes.iter().map(CrashLine::from).collect()),
            objects: metrics.objects,
            versions: metrics.versions,
            leases: metrics.leases,
            connections: metrics.connections,
            watchers: metrics.watchers,
            quota: metrics.quota.into(),
            total_quota: metrics.total_quota.into(),
            devices: devices(metrics),
        }
    }
}

/// The devices with claimed memory, and NVML's figures for the GPUs.
fn devices(metrics: &Metrics) -> Vec<DeviceLine> {
    let mut claimed: Vec<(Device, u64)> = Vec::new();
    for of in metrics.totals.iter().flat_map(|total| &total.devices) {
        match claimed.iter_mut().find(|(device, _)| device.uuid == of.device.uuid) {
            Some((_, bytes)) => *bytes = bytes.saturating_add(of.bytes),
            None => claimed.push((of.device.clone(), of.bytes)),
        }
    }
    claimed.sort_by_key(|(device, _)| device.uuid.to_string());
    let is_gpu = |device: &Device| device.name != DEVICE_NAME;
    let gpus = claimed.iter().filter(|(device, _)| is_gpu(device)).map(|(device, _)| device.uuid);
    let mut reported = reported(gpus.collect()).into_iter();
    let line = |(device, bytes): &(Device, u64)| {
        let reported = if is_gpu(device) { reported.next() } else { None };
        let (used, total, unknown) = match reported {
            Some(Ok((used, total))) => (Some(used), Some(total), None),
            Some(Err(reason)) => (None, None, Some(reason)),
            None => (None, None, None),
        };
        DeviceLine { claimed: DeviceSize::of(device, *bytes), used, total, unknown }
    };
    claimed.iter().map(line).collect()
}

/// The used and total bytes of each device from NVML, or the reason why there are none.
fn reported(uuids: Vec<DeviceUuid>) -> Vec<Result<(u64, u64), String>> {
    let (count, (sender, receiver)) = (uuids.len(), mpsc::channel());
    if count > 0 {
        // NVML may block forever: the thread then lasts until the process exits. If no thread starts, the channel is closed.
        let ask = move || uuids.into_iter().try_for_each(|uuid| sender.send(nvml::memory(uuid)));
        let _ = thread::Builder::new().name("nvml".to_owned()).spawn(ask);
    }
    let deadline = std::time::Instant::now() + NVML_WAIT;
    let next = |_| {
        let left = deadline.saturating_duration_since(std::time::Instant::now());
        receiver.recv_timeout(left).unwrap_or_else(|_| Err(format!("NVML does not answer within {NVML_WAIT:?}")))
    };
    (0..count).map(next).collect()
}

impl Tool for StatusOptions {
    const NAME: &'static str = "status";

    const REPORTS: &'static [Named] = &[("status", document::<StatusReport>)];

    fn output(&self) -> &Output {
        &self.output
    }

    fn run(&self, cancel: &Cancel, _progress: &Progress) -> anyhow::Result<ToolOutput> {
        let (client, path) = self.meet.connect_at(cancel)?;
        let report = StatusReport::of(&client.metrics()?, path.display().to_string());
        let unknown = report.devices.iter().find_map(|device| device.unknown.as_ref());
        if let Some(reason) = unknown {
            self.output.notice(&format!("the devices do not report their memory: {reason}"));
        }
        let text = if self.output.json { json_line(&report) } else { render(&report, self.output.verbose > 0) };
        Ok(ToolOutput { text, exit: Exit::Verified })
    }
}

fn render(report: &StatusReport, verbose: bool) -> String {
    let StatusReport { server, keeper, .. } = report;
    let pid = |pid: Option<u32>| pid.map_or_else(|| "pid unknown".to_owned(), |pid| format!("pid {pid}"));
    let room = |room: &Room| format!("{} of {} descriptors", room.used, room.allowed);
    let version = server.version.as_deref().unwrap_or("unknown");
    let up = age(server.started_ms);
    let mut text = field("server", format!("{}, up {up}, vmmfd {version}, {}", pid(server.pid), report.socket));
    text += &match keeper {
        // A server that reports its own pid also reports the keeper's.
        Some(KeeperLine { pid: None, .. }) if server.pid.is_some() => {
            field("keeper", "out of sync: puts wait, and only the server holds all memory")
        }
        Some(keeper) => {
            let up = keeper.started_ms.map(|ms| format!(", up {}", age(ms))).unwrap_or_default();
            field("keeper", format!("{}{up}, holds {}", pid(keeper.pid), room(&keeper.descriptors)))
        }
        None => field("keeper", "none: the memory is freed when the server ends"),
    };
    text +=
        &field("limits", format!("{} of the server, one for each segment and connection", room(&server.descriptors)));
    text += &field("each user", quota(&report.quota));
    text += &field("all users", quota(&report.total_quota));
    let [objects, versions] =
        [(report.objects, "object"), (report.versions, "version")].map(|(of, noun)| count(of, noun));
    text += &field(
        "holds",
        format!(
            "{objects}, {versions}, {}, {}",
            count(report.leases, "lease"),
            count(report.connections, "connection")
        ),
    );
    for DeviceLine { claimed, used, total, .. } in &report.devices {
        let reported =
            used.zip(*total).map(|(used, total)| format!("; it reports {} of {} used", about(used), about(total)));
        let (device, size) = (claimed.shown(verbose), about(claimed.size));
        text += &field("device", format!("{device}: {size} claimed{}", reported.unwrap_or_default()));
    }
    let lost = report.lost_versions.map(|lost| format!("; {} lost at the last one", count(lost, "version")));
    text += &match report.restarts {
        0 => field("restarts", "none"),
        restarts => field("restarts", format!("{restarts}{}", lost.unwrap_or_default())),
    };
    if let Some([]) = report.crashes.as_deref() {
        text += &field("crashes", "none");
    }
    for CrashLine { at, at_ms, process, pid, lost_versions, names } in report.crashes.iter().flatten() {
        let process = match process.as_str() {
            "both" => "server and keeper, pid",
            "keeper" => "keeper, pid",
            _ => "server, pid",
        };
        let lost = match lost_versions {
            None => "everything was lost".to_owned(),
            Some(0) => "nothing was lost".to_owned(),
            Some(lost) => format!("lost {}: {}", count(*lost, "version"), named(names, *lost)),
        };
        text += &field("crash", format!("{at}, {} ago: {process} {pid}; {lost}", age(*at_ms)));
    }
    text
}

/// The known names of lost versions, and the number of others.
fn named(names: &[String], lost: u64) -> String {
    let more = lost.saturating_sub(names.len() as u64);
    let more =
        (more > 0).then(|| if names.is_empty() { "not shown to this user".to_owned() } else { format!("{more} more") });
    names.iter().cloned().chain(more).collect::<Vec<_>>().join(", ")
}

fn quota(of: &QuotaLine) -> String {
    let size = |of: Option<u64>, what: &str| of.map(|of| format!("{}{what}", bytes(of)));
    let number = |of: Option<u64>, noun: &str| of.map(|of| count(of, noun));
    let limits = [
        size(of.bytes, " of memory"),
        size(of.device_bytes, " of each device"),
        number(of.objects, "object"),
        number(of.leases, "lease"),
        number(of.connections, "connection"),
    ];
    let limits: Vec<String> = limits.into_iter().flatten().collect();
    if limits.is_empty() { "no quota".to_owned() } else { format!("at most {}", limits.join(", ")) }
}
