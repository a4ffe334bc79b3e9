//! `status`: shows the broker's processes, limits and usage.

use std::{sync::mpsc, thread};

use vmmfd::{
    broker::{DeviceBytes, HeldClaim, HeldTopic, KeeperInfo, Metrics, Quota},
    driver::{DEVICE_NAME, DeviceUuid},
    internals::nvml,
};

use super::{
    MeetBroker, count,
    fields::{age, field, process},
    shown,
    who::by_device,
};
use crate::{
    cli::prelude::*,
    units::{about, bytes},
};

/// The time limit of NVML for all devices: NVML itself has none.
const NVML_WAIT: Duration = Duration::from_secs(5);

/// Shows a broker's processes, limits and memory
///
/// The memory of a device is shown as claimed by the makers and, if NVML loads, as used by all processes. The broker's user and root see
/// the memory of all users; other users see only their own.
#[derive(Debug, Args)]
#[command(after_help = exit_codes!("shown"; 2 4 5 130))]
pub(in super::super) struct StatusOptions {
    #[command(flatten)]
    meet: MeetBroker,
}

#[derive(Debug, Serialize, JsonSchema)]
struct StatusReport {
    socket: String,
    #[serde(flatten)]
    metrics: Metrics,
    devices: Vec<DeviceLine>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct DeviceLine {
    /// As claimed.
    #[serde(flatten)]
    claimed: DeviceBytes,
    /// Used and total bytes of the device's memory, as NVML reports them.
    used: Option<u64>,
    total: Option<u64>,
    /// The reason why NVML reports nothing; null if it does, and for host memory.
    unknown: Option<String>,
}

/// The devices with claimed memory, and NVML's figures for the GPUs.
fn devices(metrics: &Metrics) -> Vec<DeviceLine> {
    let claimed = by_device(metrics.totals.iter().flat_map(|total| &total.devices));
    let is_gpu = |of: &DeviceBytes| of.device.name != DEVICE_NAME;
    let gpus = claimed.iter().filter(|of| is_gpu(of)).map(|of| of.device.uuid);
    let mut reported = reported(gpus.collect()).into_iter();
    let line = |claimed: DeviceBytes| {
        let (used, total, unknown) = match is_gpu(&claimed).then(|| reported.next()).flatten() {
            Some(Ok((used, total))) => (Some(used), Some(total), None),
            Some(Err(reason)) => (None, None, Some(reason)),
            None => (None, None, None),
        };
        DeviceLine { claimed, used, total, unknown }
    };
    claimed.into_iter().map(line).collect()
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

    const REPORTS: &'static [Named] = &[("status", document::<Stamped<StatusReport>>)];

    fn run(&self, Running { output, cancel, .. }: Running<'_>) -> anyhow::Result<ToolOutput> {
        let (client, path) = self.meet.connect_at(cancel)?;
        let metrics = client.metrics()?;
        let socket = path.display().to_string();
        let devices = devices(&metrics);
        let report = StatusReport { socket, metrics, devices };
        let unknown = report.devices.iter().find_map(|device| device.unknown.as_ref());
        if let Some(reason) = unknown {
            output.notice(&format!("the devices do not report their memory: {reason}"));
        }
        Ok(ToolOutput::of(output, Exit::Verified, report, render))
    }
}

fn render(report: &StatusReport, verbose: bool) -> String {
    let StatusReport { metrics, socket, devices, .. } = report;
    let Metrics { store, keeper, .. } = metrics;
    let pid = |pid: Option<u32>| pid.map_or_else(|| "pid unknown".to_owned(), |pid| format!("pid {pid}"));
    let room = |used, allowed| format!("{used} of {allowed} descriptors");
    let version = metrics.version.as_deref().unwrap_or("unknown");
    let up = age(metrics.started_ms);
    let mut text = field("server", format!("{}, up {up}, vmmfd {version}, {socket}", pid(metrics.pid)));
    text += &match keeper {
        _ if store.kind == "none" => field("keeper", "none: the memory is freed when the server ends"),
        // A server that reports its own pid also reports the keeper's.
        None if metrics.pid.is_some() => {
            field("keeper", "out of sync: puts wait, and only the server holds all memory")
        }
        keeper => {
            let started = keeper.and_then(|KeeperInfo { started_ms, .. }| started_ms);
            let up = started.map(|ms| format!(", up {}", age(ms))).unwrap_or_default();
            let pid = pid(keeper.map(|keeper| keeper.pid));
            let room = room(store.used, store.allowed);
            field("keeper", format!("{pid}{up}, holds {room}"))
        }
    };
    let own = room(metrics.descriptors.used, metrics.descriptors.allowed);
    text += &field("limits", format!("{own} of the server, one for each segment and connection"));
    text += &field("each user", quota(metrics.quota));
    text += &field("all users", quota(metrics.total_quota));
    let [objects, versions] =
        [(metrics.objects, "object"), (metrics.versions, "version")].map(|(of, noun)| count(of, noun));
    text += &field(
        "holds",
        format!(
            "{objects}, {versions}, {}, {}",
            count(metrics.leases, "lease"),
            count(metrics.connections, "connection")
        ),
    );
    for HeldClaim { name, part, pid, uid, command, since_ms } in metrics.claims.iter().flatten() {
        let part = part.as_ref().map(|part| format!(", part {part},")).unwrap_or_default();
        let by = process(pid, command.as_deref(), *uid);
        text += &field("claim", format!("{name}{part} by {by}, for {}", age(*since_ms)));
    }
    for HeldTopic { name, pid, uid, command, followers, .. } in metrics.topics.iter().flatten() {
        let (by, followers) = (process(pid, command.as_deref(), *uid), count(*followers, "follower"));
        text += &field("topic", format!("{name} by {by}, {followers}"));
    }
    for DeviceLine { claimed, used, total, .. } in devices {
        let reported =
            used.zip(*total).map(|(used, total)| format!("; it reports {} of {} used", about(used), about(total)));
        let device = shown(&claimed.device, verbose);
        let size = about(claimed.bytes);
        text += &field("device", format!("{device}: {size} claimed{}", reported.unwrap_or_default()));
    }
    text += &field("restarts", if metrics.restarts == 0 { "none".to_owned() } else { metrics.restarts.to_string() });
    text
}

fn quota(of: Option<Quota>) -> String {
    let of = of.unwrap_or_default();
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
