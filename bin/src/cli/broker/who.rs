//! `who`: shows leases and their holders.

use std::collections::BTreeMap;

use clap::Args;
use nix::unistd::{Uid, User};
use schemars::JsonSchema;
use serde::Serialize;
use vmmfd::{
    broker::{HeldLease, Holders, UserTotal},
    channel::Cancel,
    internals::clean,
};

use super::{
    DeviceSize, MeetBroker,
    fields::{age, time},
    ls::no_match,
    total,
};
use crate::{
    cli::{
        Column, Exit, Output, Table, Tool, ToolOutput,
        exit::exit_codes,
        output::{Progress, json_line},
        stdout_width,
    },
    schema::{self, Named, VERSION, document},
    stamp,
    units::about,
};

/// Shows which processes hold which objects of a broker
///
/// Without PREFIX, also shows the claimed memory of each user and device. A process that ended its lease but kept the memory mapped does
/// not appear: see `nvidia-smi`.
#[derive(Debug, Args)]
#[command(after_help = exit_codes!("shown, even if nothing matches"; 2 4 5 130))]
pub(in super::super) struct WhoOptions {
    /// Only objects whose names begin with PREFIX
    #[arg(value_name = "PREFIX", default_value = "", hide_default_value = true)]
    prefix: String,

    #[command(flatten)]
    meet: MeetBroker,

    #[command(flatten)]
    output: Output,
}

#[derive(Debug, Serialize, JsonSchema)]
struct WhoReport {
    schema: u32,
    tool: String,
    leases: Vec<LeaseLine>,
    unnamed: Vec<Unnamed>,
    users: Vec<UserLine>,
    devices: Vec<DeviceSize>,
}

#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct LeaseLine {
    number: u64,
    name: String,
    #[schemars(range(min = 1))]
    version: u64,
    #[schemars(with = "schema::Id")]
    id: String,
    /// Whether the name still refers to the version.
    named: bool,
    pid: i32,
    uid: u32,
    command: Option<String>,
    #[schemars(with = "schema::Time")]
    since: String,
    size: u64,
    #[serde(skip)]
    since_ms: u64,
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

#[derive(Debug, Serialize, JsonSchema)]
struct UserLine {
    uid: u32,
    objects: u64,
    size: u64,
    devices: Vec<DeviceSize>,
    leases: u64,
    connections: u64,
}

impl LeaseLine {
    /// A line of `rm`.
    pub(super) fn held(&self) -> String {
        let Self { name, version, pid, uid, command, size, .. } = self;
        let command = command.as_ref().map(|command| format!(" ({command})")).unwrap_or_default();
        let mut line =
            format!("held     {} of {name} version {version} by pid {pid}{command}, uid {uid}", about(*size));
        clean(&mut line);
        line + "\n"
    }
}

impl From<&HeldLease> for LeaseLine {
    fn from(of: &HeldLease) -> Self {
        Self {
            number: of.number,
            name: of.name.clone(),
            version: of.version,
            id: of.id.clone(),
            named: of.named,
            pid: of.pid,
            uid: of.uid,
            command: of.command.clone(),
            since: time(of.since_ms),
            size: of.size,
            since_ms: of.since_ms,
        }
    }
}

impl From<&UserTotal> for UserLine {
    fn from(of: &UserTotal) -> Self {
        let devices: Vec<DeviceSize> = of.devices.iter().map(DeviceSize::from).collect();
        let size = total(&devices);
        Self { uid: of.uid, objects: of.objects, size, devices, leases: of.leases, connections: of.connections }
    }
}

impl WhoReport {
    fn of(holders: &Holders) -> Self {
        let users: Vec<UserLine> = holders.totals.iter().map(UserLine::from).collect();
        Self {
            schema: VERSION,
            tool: stamp::tool(),
            leases: holders.leases.iter().map(LeaseLine::from).collect(),
            unnamed: unnamed(&holders.leases),
            devices: by_device(users.iter().flat_map(|user| &user.devices)),
            users,
        }
    }
}

/// The deleted or replaced versions, in the order of their names.
fn unnamed(leases: &[HeldLease]) -> Vec<Unnamed> {
    let mut found = BTreeMap::<(&str, u64, &str), Unnamed>::new();
    for lease in leases.iter().filter(|lease| !lease.named) {
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
fn by_device<'a>(devices: impl Iterator<Item = &'a DeviceSize>) -> Vec<DeviceSize> {
    let mut sums = BTreeMap::<&str, DeviceSize>::new();
    for device in devices {
        let sum = sums.entry(&device.uuid).or_insert_with(|| DeviceSize { size: 0, ..device.clone() });
        sum.size = sum.size.saturating_add(device.size);
    }
    sums.into_values().collect()
}

impl Tool for WhoOptions {
    const NAME: &'static str = "who";

    const REPORTS: &'static [Named] = &[("who", document::<WhoReport>)];

    fn output(&self) -> &Output {
        &self.output
    }

    fn run(&self, cancel: &Cancel, _progress: &Progress) -> anyhow::Result<ToolOutput> {
        let client = self.meet.connect(cancel)?;
        let report = WhoReport::of(&client.who(&self.prefix)?);
        if self.output.json {
            return Ok(ToolOutput { text: json_line(&report), exit: Exit::Verified });
        }
        if report.leases.is_empty() {
            let notice = match self.prefix.as_str() {
                "" => "no object has a lease".to_owned(),
                prefix if client.list(prefix)?.is_empty() => no_match(prefix),
                prefix => format!("no object whose name begins with `{prefix}` has a lease"),
            };
            self.output.notice(&notice);
        }
        let totals = self.prefix.is_empty();
        let text = render(&report, totals, self.output.verbose > 0, stdout_width());
        Ok(ToolOutput { text, exit: Exit::Verified })
    }
}

/// The tables with their headings; users and devices only with `totals`.
fn render(report: &WhoReport, totals: bool, verbose: bool, width: Option<usize>) -> String {
    let (mut tables, mut users) = (Vec::new(), BTreeMap::new());
    // Each lookup may ask a server of the network.
    let mut user_name = |uid: u32| {
        let user = || User::from_uid(Uid::from_raw(uid)).ok().flatten();
        users.entry(uid).or_insert_with(|| user().map_or_else(|| uid.to_string(), |user| user.name)).clone()
    };
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
                user_name(lease.uid),
                lease.command.clone().unwrap_or_else(|| "-".to_owned()),
                about(lease.size),
                age(lease.since_ms),
                lease.version.to_string(),
                lease.name.clone(),
            ]);
        }
        tables.push(format!("Leases:\n{}", table.render(width)));
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
        tables.push(format!("Versions without a name:\n{}", table.render(width)));
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
            let UserLine { uid, objects, size, leases, connections, .. } = user;
            let [objects, leases, connections] = [objects, leases, connections].map(u64::to_string);
            table.row([user_name(*uid), objects, about(*size), leases, connections]);
        }
        tables.push(format!("Users:\n{}", table.render(width)));
    }
    if totals && !report.devices.is_empty() {
        let mut table = Table::new([Column::right("SIZE"), Column::left("DEVICE")]);
        for device in &report.devices {
            table.row([about(device.size), device.shown(verbose)]);
        }
        tables.push(format!("Devices:\n{}", table.render(width)));
    }
    tables.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease(number: u64, name: &str, id: &str, named: bool, size: u64) -> HeldLease {
        let (name, id) = (name.to_owned(), id.to_owned());
        HeldLease { number, name, version: 1, id, named, pid: 7, uid: 0, command: None, since_ms: 0, size }
    }

    #[test]
    fn unnamed_versions_are_counted_once() {
        let leases = [lease(1, "b", "x", false, 5), lease(2, "b", "x", false, 9), lease(3, "b", "y", false, 1)];
        let found = unnamed(&[&leases[..], &[lease(4, "a", "z", true, 2)]].concat());
        let found: Vec<_> = found.iter().map(|one| (one.id.as_str(), one.leases, one.size)).collect();
        assert_eq!(found, [("x", 2, 9), ("y", 1, 1)]);
    }

    #[test]
    fn devices_are_summed_over_users() {
        let of = |uuid: &str, size| DeviceSize { uuid: uuid.to_owned(), name: String::new(), size };
        let sums = by_device([of("b", 1), of("a", 2), of("b", u64::MAX)].iter());
        assert_eq!(sums, [of("a", 2), of("b", u64::MAX)]);
    }
}
