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

use super::{MeetBroker, fields::age, ls::no_match, shown, total};
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
    let command = command.as_ref().map(|command| format!(" ({command})")).unwrap_or_default();
    let mut line = format!("held     {} of {name} version {version} by pid {pid}{command}, uid {uid}", about(*size));
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
    let totals = options.prefix.is_empty();
    let mut tables = Vec::new();
    let mut users = UserNames::default();
    if !report.leases.is_empty() {
        let mut table = Table::new([
            Column::right("PID"),
            Column::left("USER").optional(),
            Column::left("COMMAND").optional(),
            Column::right("SIZE"),
            Column::right("SINCE").optional(),
            Column::right("VERSION"),
            Column::left("NAME"),
        ]);
        for lease in &report.leases {
            table.row([
                lease.pid.to_string(),
                users.of(lease.uid),
                lease.command.clone().unwrap_or_else(|| "-".to_owned()),
                about(lease.size),
                age(lease.since_ms),
                lease.version.to_string(),
                lease.name.clone(),
            ]);
        }
        tables.push(format!("Leases:\n{}", table.render(width)));
    }
    if !report.claims.is_empty() {
        tables.push(format!("Claims:\n{}", claims(&report.claims, &mut users, width)));
    }
    if !report.topics.is_empty() {
        tables.push(format!("Topics:\n{}", topics(&report.topics, &mut users, width)));
    }
    if !report.unnamed.is_empty() {
        let mut table = Table::new([
            Column::right("SIZE"),
            Column::right("LEASES"),
            Column::right("VERSION"),
            Column::left("NAME"),
        ]);
        for version in &report.unnamed {
            let Unnamed { name, version, leases, size, .. } = version;
            table.row([about(*size), leases.to_string(), version.to_string(), name.clone()]);
        }
        let heading = if options.pinned { "Versions that only readers keep" } else { "Versions without a name" };
        tables.push(format!("{heading}:\n{}", table.render(width)));
    }
    if totals && !report.users.is_empty() {
        let mut table = Table::new([
            Column::left("USER"),
            Column::right("OBJECTS"),
            Column::right("SIZE"),
            Column::right("LEASES"),
            Column::right("CONNECTIONS").optional(),
        ]);
        for user in &report.users {
            let UserTotal { uid, objects, leases, connections, devices } = user;
            let [objects, leases, connections] = [objects, leases, connections].map(u64::to_string);
            table.row([users.of(*uid), objects, about(total(devices)), leases, connections]);
        }
        tables.push(format!("Users:\n{}", table.render(width)));
    }
    if totals && !report.devices.is_empty() {
        let mut table = Table::new([Column::right("SIZE"), Column::left("DEVICE")]);
        for of in &report.devices {
            table.row([about(of.bytes), shown(&of.device, verbose)]);
        }
        tables.push(format!("Devices:\n{}", table.render(width)));
    }
    tables.join("\n")
}

/// The table of claims.
fn claims(claims: &[HeldClaim], users: &mut UserNames, width: Option<usize>) -> String {
    let mut table = Table::new([
        Column::right("PID"),
        Column::left("USER").optional(),
        Column::left("COMMAND").optional(),
        Column::right("SINCE").optional(),
        Column::left("PART").optional(),
        Column::left("NAME"),
    ]);
    let or_dash = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
    for HeldClaim { name, part, pid, uid, command, since_ms } in claims {
        let (command, part) = (or_dash(command), or_dash(part));
        table.row([pid.to_string(), users.of(*uid), command, age(*since_ms), part, name.clone()]);
    }
    table.render(width)
}

/// The table of topics.
fn topics(topics: &[HeldTopic], users: &mut UserNames, width: Option<usize>) -> String {
    let mut table = Table::new([
        Column::right("PID"),
        Column::left("USER").optional(),
        Column::left("COMMAND").optional(),
        Column::right("FOLLOWERS"),
        Column::left("NAME"),
    ]);
    for HeldTopic { name, pid, uid, command, followers, .. } in topics {
        let command = command.clone().unwrap_or_else(|| "-".to_owned());
        table.row([pid.to_string(), users.of(*uid), command, followers.to_string(), name.clone()]);
    }
    table.render(width)
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
