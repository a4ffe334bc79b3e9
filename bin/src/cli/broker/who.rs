//! `who`: shows leases and their holders.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
};

use nix::unistd::{Uid, User};
use vmmfd::{
    broker::{Client, DeviceBytes, HeldClaim, HeldLease, HeldTopic, Holders, UserTotal},
    internals::clean,
};

use super::{
    MeetBroker,
    fields::{age, or_dash, process},
    ls::no_match,
    shown, total,
};
use crate::{
    cli::{Column, Table, prelude::*, stdout_width},
    schema,
    units::about,
};

/// Shows who holds the objects and publishes the topics of a broker
///
/// A claim is the right of a process to create an object for which others wait: it delays them until it ends. Other users' claims are shown on
/// names that this user may read or waits for, or if PREFIX is the whole name.
///
/// Without PREFIX, also shows the claimed memory of each user and device. A process that ended its lease but kept the memory mapped does
/// not appear: see `nvidia-smi`.
#[derive(Debug, Args)]
#[command(after_help = exit_codes!("shown, even if nothing matches"; 2 4 5 130))]
pub(in super::super) struct WhoOptions {
    /// Only objects whose names begin with PREFIX
    #[arg(value_name = "PREFIX", default_value = "", hide_default_value = true)]
    prefix: String,

    /// Only versions that the broker keeps for their readers alone, because they were deleted or replaced; largest first
    #[arg(long, help_heading = "Object")]
    pinned: bool,

    #[command(flatten)]
    meet: MeetBroker,
}

#[derive(Debug, Serialize, JsonSchema)]
struct WhoReport {
    leases: Vec<HeldLease>,
    /// The oldest claims.
    claims: Vec<HeldClaim>,
    /// The topics with their publishers: as many as fit.
    topics: Vec<HeldTopic>,
    unnamed: Vec<Unnamed>,
    users: Vec<UserTotal>,
    /// The memory of all users on each device.
    devices: Vec<DeviceBytes>,
}

/// A version that was deleted or replaced.
#[derive(Debug, Clone, Serialize, JsonSchema)]
struct Unnamed {
    name: String,
    #[schemars(range(min = 1))]
    version: u64,
    #[schemars(with = "schema::Id")]
    id: String,
    leases: u64,
    /// The bytes of its largest lease.
    size: u64,
}

/// The names of users. Each look-up may ask a server of the network.
#[derive(Debug, Default)]
pub(super) struct UserNames(BTreeMap<u32, String>);

impl UserNames {
    pub(super) fn of(&mut self, uid: u32) -> String {
        let user = || User::from_uid(Uid::from_raw(uid)).ok().flatten();
        self.0.entry(uid).or_insert_with(|| user().map_or_else(|| uid.to_string(), |user| user.name)).clone()
    }
}

/// A line of `rm`.
pub(super) fn held(lease: &HeldLease) -> String {
    let HeldLease { name, version, pid, uid, command, size, .. } = lease;
    let by = process(*pid, command.as_deref(), *uid);
    let mut line = format!("held     {} of {name} version {version} by {by}", about(*size));
    clean(&mut line);
    line + "\n"
}

impl WhoReport {
    fn of(Holders { leases, topics, totals, claims, .. }: Holders) -> Self {
        let unnamed = unnamed(leases.iter().filter(|lease| !lease.named));
        let devices = by_device(totals.iter().flat_map(|user| &user.devices));
        Self { leases, claims, topics, unnamed, users: totals, devices }
    }

    /// The leases of versions that no name keeps.
    fn pinned(client: &Client, mut leases: Vec<HeldLease>) -> Result<Self> {
        let named = leases.iter().filter(|lease| lease.named).map(|lease| (lease.name.as_str(), lease.version));
        let mut kept = BTreeSet::new();
        for (name, version) in named.collect::<BTreeSet<_>>() {
            match client.stat(name, Some(version)) {
                Ok(info) if info.is_kept() => drop(kept.insert(info.version.summary.id)),
                // It may be deleted since.
                Ok(_) | Err(Error::Broker(_)) => {}
                Err(error) => return Err(error),
            }
        }
        leases.retain(|lease| !kept.contains(&lease.id));
        let mut unnamed = unnamed(leases.iter());
        unnamed.sort_by_key(|version| Reverse(version.size));
        let place = |lease: &HeldLease| unnamed.iter().position(|version| version.id == lease.id);
        leases.sort_by_key(|lease| (place(lease), Reverse(lease.size)));
        let (claims, topics, users, devices) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Ok(Self { leases, claims, topics, unnamed, users, devices })
    }
}

/// The versions of these leases, in the order of their names.
fn unnamed<'a>(leases: impl Iterator<Item = &'a HeldLease>) -> Vec<Unnamed> {
    let mut found = BTreeMap::<(&str, u64, &str), Unnamed>::new();
    for lease in leases {
        let HeldLease { name, version, id, size, .. } = lease;
        let entry = found.entry((name, *version, id)).or_insert_with(|| Unnamed {
            name: name.clone(),
            version: *version,
            id: id.clone(),
            leases: 0,
            size: 0,
        });
        (entry.leases, entry.size) = (entry.leases + 1, entry.size.max(*size));
    }
    found.into_values().collect()
}

/// The memory of all users on each device.
pub(super) fn by_device<'a>(devices: impl Iterator<Item = &'a DeviceBytes>) -> Vec<DeviceBytes> {
    let mut sums = BTreeMap::<String, DeviceBytes>::new();
    for of in devices {
        let sum = sums.entry(of.device.uuid.to_string()).or_insert_with(|| DeviceBytes { bytes: 0, ..of.clone() });
        sum.bytes = sum.bytes.saturating_add(of.bytes);
    }
    sums.into_values().collect()
}

impl Tool for WhoOptions {
    const NAME: &'static str = "who";

    const REPORTS: &'static [Named] = &[("who", document::<Stamped<WhoReport>>)];

    fn run(&self, Running { output, cancel, .. }: Running<'_>) -> anyhow::Result<ToolOutput> {
        let client = self.meet.connect(cancel)?;
        let holders = client.who(&self.prefix)?;
        let report = if self.pinned { WhoReport::pinned(&client, holders.leases)? } else { WhoReport::of(holders) };
        let is_empty = report.leases.is_empty() && report.claims.is_empty() && report.topics.is_empty();
        if is_empty && !output.json {
            let notice = match self.prefix.as_str() {
                _ if self.pinned => "readers alone keep no version".to_owned(),
                "" => "no object has a lease".to_owned(),
                prefix if client.list(prefix)?.is_empty() => no_match(prefix),
                prefix => format!("no object whose name begins with `{prefix}` has a lease"),
            };
            output.notice(&notice);
        }
        let text = |report: &WhoReport, verbose| render(report, self, verbose, stdout_width());
        Ok(ToolOutput::of(output, Exit::Verified, report, text))
    }
}

/// The tables with their headings; users and devices only without a prefix.
fn render(report: &WhoReport, options: &WhoOptions, verbose: bool, width: Option<usize>) -> String {
    let WhoReport { leases, claims, topics, unnamed, users, devices } = report;
    let mut names = UserNames::default();
    let leases = leases.iter().map(|lease| {
        let HeldLease { name, version, pid, uid, command, since_ms, size, .. } = lease;
        let (size, since) = (about(*size), age(*since_ms));
        [pid.to_string(), names.of(*uid), or_dash(command), size, since, version.to_string(), name.clone()]
    });
    let [pid, user, command] =
        [Column::right("PID"), Column::left("USER").optional(), Column::left("COMMAND").optional()];
    let [size, since, version] = [Column::right("SIZE"), Column::right("SINCE").optional(), Column::right("VERSION")];
    let name = Column::left("NAME");
    let leases = Table::new([pid, user, command, size, since, version, name], leases);
    let claims = claims.iter().map(|HeldClaim { name, part, pid, uid, command, since_ms }| {
        let part = or_dash(part);
        [pid.to_string(), names.of(*uid), or_dash(command), age(*since_ms), part, name.clone()]
    });
    let claims = Table::new([pid, user, command, since, Column::left("PART").optional(), name], claims);
    let topics = topics.iter().map(|HeldTopic { name, pid, uid, command, followers, .. }| {
        [pid.to_string(), names.of(*uid), or_dash(command), followers.to_string(), name.clone()]
    });
    let topics = Table::new([pid, user, command, Column::right("FOLLOWERS"), name], topics);
    let unnamed = unnamed.iter().map(|Unnamed { name, version, leases, size, .. }| {
        [about(*size), leases.to_string(), version.to_string(), name.clone()]
    });
    let unnamed = Table::new([size, Column::right("LEASES"), version, name], unnamed);
    let totals = options.prefix.is_empty();
    let users = users.iter().filter(|_| totals).map(|UserTotal { uid, objects, leases, connections, devices }| {
        let [objects, leases, connections] = [objects, leases, connections].map(u64::to_string);
        [names.of(*uid), objects, about(total(devices)), leases, connections]
    });
    let [objects, leases_of] = [Column::right("OBJECTS"), Column::right("LEASES")];
    let connections = Column::right("CONNECTIONS").optional();
    let users = Table::new([Column::left("USER"), objects, size, leases_of, connections], users);
    let devices = devices.iter().filter(|_| totals).map(|of| [about(of.bytes), shown(&of.device, verbose)]);
    let devices = Table::new([size, Column::left("DEVICE")], devices);
    let heading = if options.pinned { "Versions that only readers keep" } else { "Versions without a name" };
    let sections = [
        leases.section("Leases", width),
        claims.section("Claims", width),
        topics.section("Topics", width),
        unnamed.section(heading, width),
        users.section("Users", width),
        devices.section("Devices", width),
    ];
    sections.into_iter().flatten().collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use vmmfd::{driver::DeviceUuid, memory::DeviceIdentity};

    use super::*;

    fn lease(number: u64, name: &str, id: &str, named: bool, size: u64) -> HeldLease {
        let name = name.to_owned();
        let id = id.to_owned();
        HeldLease {
            number,
            name,
            version: 1,
            id,
            named,
            pid: 7,
            uid: 0,
            command: None,
            since_ms: 0,
            size,
            recalled: false,
        }
    }

    #[test]
    fn unnamed_versions_are_counted_once() {
        let leases = [lease(1, "b", "x", false, 5), lease(2, "b", "x", false, 9), lease(3, "b", "y", false, 1)];
        let found = unnamed(leases.iter());
        let found: Vec<_> = found.iter().map(|one| (one.id.as_str(), one.leases, one.size)).collect();
        assert_eq!(found, [("x", 2, 9), ("y", 1, 1)]);
    }

    #[test]
    fn devices_are_summed_over_users() {
        let of = |byte, bytes| {
            let device = DeviceIdentity { uuid: DeviceUuid::from_bytes([byte; 16]), name: String::new() };
            DeviceBytes { device, bytes }
        };
        let sums = by_device([of(2, 1), of(1, 2), of(2, u64::MAX)].iter());
        assert_eq!(sums, [of(1, 2), of(2, u64::MAX)]);
    }
}
