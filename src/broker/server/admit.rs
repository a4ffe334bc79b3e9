//! Admission: how much of each resource a user has, and how much it may have.
//!
//! A user's share is fixed, whatever other users do. The totals of all users are a plain cap.

use std::collections::{BTreeMap, HashMap, hash_map::Entry};

use super::state::{caller::is_superuser, refuse};
use crate::{
    broker::manifest,
    driver::DeviceUuid,
    error::{
        BrokerError, RefusalCode,
        units::{bytes, count},
    },
    wire::{
        MAX_FDS, Memory,
        broker::{DeviceBytes, PutPartHeader, Quota, UserTotal},
    },
};

/// Descriptors reserved for the server and for a record being received.
const SPARE: usize = MAX_FDS + 64;

/// The least open-file limit with which a server and its keeper can hold an object: some descriptors of their own, connections, a segment.
#[cfg(feature = "internals")]
pub const MIN_FILE_LIMIT: usize = SPARE + 32;

/// A user's share of the open-file limit: one of this many parts.
const SHARES: u64 = 4;

/// No limit. The sum of two counts does not overflow.
const NONE: u64 = u64::MAX / 4;

/// The user of descriptors whose sender may not connect, and of the server's own.
pub(crate) const NOBODY: u32 = u32::MAX;

/// A resource that is counted for each user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Resource {
    /// Descriptors that are held or reserved for puts, connections, and descriptors that are not closed yet.
    Descriptors,
    /// Upper bound of the descriptors that were sent, but not read by their receivers. The kernel counts them for the server's user.
    InFlight,
    /// Connections, until their leases have ended.
    Connections,
    /// Memory descriptors that are not closed yet.
    Closing,
    /// Other descriptors that are not closed yet: a peer can block their close.
    Blocking,
    /// Claimed memory, and tables.
    Bytes,
    DeviceBytes,
    Devices,
    /// Names, and the earlier versions that they keep.
    Objects,
    /// Earlier versions that names keep.
    Kept,
    Leases,
    Claims,
    Reports,
    /// Bytes of memory of pending requests.
    Requests,
    /// Bytes of answers that the sockets have not accepted yet.
    Answers,
}

const RESOURCES: usize = Resource::Answers as usize + 1;

/// The origin of a limit.
enum Limit {
    /// An option: its key, and its place in a quota. The server's own user and root have no default share.
    Quota(&'static str, fn(&Quota) -> Option<u64>),
    /// The open-file limit.
    Files,
    /// The share of every user, and the total.
    Fixed(u64, u64),
}

/// The limit of a resource, and the words of its refusal.
struct Rule {
    noun: &'static str,
    limit: Limit,
    remedy: &'static str,
}

impl Resource {
    /// The table of limits.
    fn rule(self) -> Rule {
        use Limit::{Files, Fixed};
        let (noun, limit, remedy) = match self {
            Self::Descriptors => ("descriptor", Files, "delete objects or close connections"),
            Self::InFlight => ("unread descriptor", Files, "read or close earlier answers"),
            Self::Connections => {
                ("connection", Limit::Quota("connections", |quota| quota.connections), "close connections")
            }
            Self::Closing => ("unclosed memory descriptor", Fixed(256, NONE), "wait until they are closed"),
            Self::Blocking => ("unclosed descriptor", Fixed(256, NONE), "connect again when they are closed"),
            Self::Bytes => ("(claimed)", Limit::Quota("bytes", |quota| quota.bytes), "delete objects"),
            Self::DeviceBytes => {
                ("(claimed)", Limit::Quota("device-bytes", |quota| quota.device_bytes), "delete objects")
            }
            Self::Devices => ("device", Fixed(128, NONE), "put memory on fewer devices"),
            Self::Objects => {
                let remedy = "delete objects or keep fewer earlier versions";
                ("object", Limit::Quota("objects", |quota| quota.objects), remedy)
            }
            Self::Kept => ("kept version", Fixed(4096, NONE), "put with a smaller `keep`, or delete names"),
            Self::Leases => ("lease", Limit::Quota("leases", |quota| quota.leases), "release leases"),
            Self::Claims => ("claim", Fixed(1024, 16 << 10), "put the claimed objects or release the claims"),
            Self::Reports => ("report", Fixed(1024, 16 << 10), "delete reported objects"),
            Self::Requests => ("of pending requests", Fixed(16 << 20, 128 << 20), "wait in fewer connections"),
            Self::Answers => ("of unread answers", Fixed(32 << 20, 256 << 20), "read the answers"),
        };
        Rule { noun, limit, remedy }
    }

    /// The resource that includes this one.
    fn parent(self) -> Option<Self> {
        match self {
            Self::Connections | Self::Closing | Self::Blocking => Some(Self::Descriptors),
            Self::Kept => Some(Self::Objects),
            _ => None,
        }
    }

    fn is_bytes(self) -> bool {
        matches!(self, Self::Bytes | Self::DeviceBytes | Self::Requests | Self::Answers)
    }

    fn code(self) -> RefusalCode {
        match self {
            Self::Descriptors | Self::InFlight | Self::Blocking => RefusalCode::Full,
            _ => RefusalCode::Quota,
        }
    }
}

impl Quota {
    /// Default limits per user, except the server's own user and root.
    pub const fn user() -> Self {
        Self {
            bytes: Some(16 << 40),
            device_bytes: Some(2 << 40),
            objects: Some(20_000),
            leases: Some(100_000),
            connections: Some(10_000),
        }
    }

    /// Default limits for all users together. Memory is limited by the devices, connections by the descriptor limit.
    pub const fn total() -> Self {
        Self { bytes: None, device_bytes: None, objects: Some(100_000), leases: Some(400_000), connections: None }
    }

    /// No limits.
    pub const fn unlimited() -> Self {
        let max = Some(u64::MAX);
        Self { bytes: max, device_bytes: max, objects: max, leases: max, connections: max }
    }

    /// These limits, or else the limits of `default`. The largest number means no limit.
    fn or(self, default: Self) -> Self {
        let or = |given: Option<u64>, default| given.or(default).filter(|limit| *limit < u64::MAX);
        Self {
            bytes: or(self.bytes, default.bytes),
            device_bytes: or(self.device_bytes, default.device_bytes),
            objects: or(self.objects, default.objects),
            leases: or(self.leases, default.leases),
            connections: or(self.connections, default.connections),
        }
    }
}

/// The limits of a server.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) user: Quota,
    superuser: Quota,
    pub(crate) total: Quota,
    /// The open-file limit, which is also the kernel's limit on descriptors in flight.
    pub(crate) files: u64,
}

impl Limits {
    /// `user` limits each user, `total` all users together.
    pub(crate) fn new(user: Quota, total: Quota, files: usize) -> Self {
        Self {
            user: user.or(Quota::user()),
            superuser: user.or(Quota::default()),
            total: total.or(Quota::total()),
            files: files as u64,
        }
    }

    /// The descriptors for all users together.
    fn free(&self) -> u64 {
        self.files.saturating_sub(SPARE as u64)
    }

    /// A user's share of a resource, and the total.
    fn of(&self, uid: u32, resource: Resource) -> (u64, u64) {
        // Only where it matters: it makes a system call, and some limits are checked for each record.
        match resource.rule().limit {
            Limit::Quota(_, of) => {
                let user = if is_superuser(uid) { &self.superuser } else { &self.user };
                (of(user).unwrap_or(NONE), of(&self.total).unwrap_or(NONE))
            }
            // One record always fits.
            Limit::Files if resource == Resource::InFlight => {
                ((self.files / SHARES).max(MAX_FDS as u64), self.files.max(MAX_FDS as u64))
            }
            Limit::Files if is_superuser(uid) => (self.free(), self.free()),
            Limit::Files => (self.free() / SHARES, self.free()),
            Limit::Fixed(user, total) => (user, total),
        }
    }
}

/// The usage of a user, or of all.
#[derive(Debug, Default)]
struct Usage {
    counts: [u64; RESOURCES],
    devices: HashMap<DeviceUuid, DeviceBytes>,
}

/// The usage of each user.
#[derive(Debug)]
pub(crate) struct Users {
    pub(crate) limits: Limits,
    users: BTreeMap<u32, Usage>,
    all: Usage,
}

impl Users {
    pub(crate) fn new(limits: Limits) -> Self {
        Self { limits, users: BTreeMap::new(), all: Usage::default() }
    }

    fn of(&self, uid: u32, resource: Resource) -> u64 {
        self.users.get(&uid).map_or(0, |usage| usage.counts[resource as usize])
    }

    /// The amount of all users together.
    pub(crate) fn total(&self, resource: Resource) -> u64 {
        self.all.counts[resource as usize]
    }

    pub(crate) fn add(&mut self, uid: u32, resource: Resource, more: u64) {
        self.recount(uid, resource, &mut 0, more);
    }

    pub(crate) fn sub(&mut self, uid: u32, resource: Resource, less: u64) {
        self.recount(uid, resource, &mut { less }, 0);
    }

    /// Changes a number that was counted before.
    pub(crate) fn recount(&mut self, uid: u32, resource: Resource, counted: &mut u64, now: u64) {
        let before = std::mem::replace(counted, now);
        if before == now {
            return;
        }
        let usage = self.users.entry(uid).or_default();
        for resource in [Some(resource), resource.parent()].into_iter().flatten() {
            for counts in [&mut usage.counts, &mut self.all.counts] {
                let count = &mut counts[resource as usize];
                *count = *count + now - before;
            }
        }
        if usage.counts.iter().all(|count| *count == 0) && usage.devices.is_empty() {
            self.users.remove(&uid);
        }
    }

    /// Whether a user may have `more` of a resource, apart from the resource that includes it.
    pub(crate) fn has_room(&self, uid: u32, resource: Resource, more: u64) -> bool {
        let (share, total) = self.limits.of(uid, resource);
        self.of(uid, resource) + more <= share && self.total(resource) + more <= total
    }

    /// Whether the process has more descriptors than its limit allows, beyond the room to receive a record.
    pub(crate) fn is_full(&self) -> bool {
        self.total(Resource::Descriptors) > self.limits.free()
    }

    /// Refuses a user that may not have `more` of a resource.
    pub(crate) fn check(&self, uid: u32, resource: Resource, more: u64) -> Result<(), BrokerError> {
        [Some(resource), resource.parent()].into_iter().flatten().try_for_each(|resource| {
            let amounts = (self.of(uid, resource), self.total(resource));
            self.check_amounts(uid, resource, "", amounts, more)
        })
    }

    /// As [`Users::check`], and counts the amount.
    pub(crate) fn take(&mut self, uid: u32, resource: Resource, more: u64) -> Result<(), BrokerError> {
        self.check(uid, resource, more)?;
        self.add(uid, resource, more);
        Ok(())
    }

    fn check_amounts(
        &self,
        uid: u32,
        resource: Resource,
        of: &str,
        (has, all): (u64, u64),
        more: u64,
    ) -> Result<(), BrokerError> {
        let (share, total) = self.limits.of(uid, resource);
        let is_own = has.saturating_add(more) > share;
        if more == 0 || !is_own && all.saturating_add(more) <= total {
            return Ok(());
        }
        let Rule { noun, limit, remedy } = resource.rule();
        let option = match (limit, is_own) {
            (Limit::Quota(key, _), true) => format!(", or raise --quota {key}="),
            (Limit::Quota(key, _), false) => format!(", or raise --total-quota {key}="),
            (Limit::Files, _) => {
                format!(", or raise the broker's limit of {} open files (ulimit -n)", self.limits.files)
            }
            (Limit::Fixed(..), _) => String::new(),
        };
        let (who, has, asks, of_whom, max) = match is_own {
            true => (format!("uid {uid} has"), has, "asks".to_owned(), "its quota", share),
            false => ("all users have".to_owned(), all, format!("uid {uid} asks"), "the limit", total),
        };
        let amount = |number: u64| if resource.is_bytes() { bytes(number) } else { number.to_string() };
        let has = if resource.is_bytes() { format!("{} {noun}", bytes(has)) } else { count(has, noun) };
        let (more, max) = (amount(more), amount(max));
        let message = format!("{who} {has}{of} and {asks} for {more} more, but {of_whom} is {max}: {remedy}{option}");
        refuse(resource.code(), message)
    }

    /// Refuses memory of too many devices, or more memory of a device than the quota allows.
    pub(crate) fn check_devices<'a>(
        &self,
        uid: u32,
        memory: impl Iterator<Item = &'a Memory>,
    ) -> Result<(), BrokerError> {
        let mut more = HashMap::<DeviceUuid, u64>::new();
        memory.for_each(|memory| {
            let bytes = more.entry(memory.device.uuid).or_default();
            *bytes = bytes.saturating_add(memory.mapped_size);
        });
        let known = self.users.get(&uid).map(|usage| &usage.devices);
        let has = |uuid: &DeviceUuid| known.and_then(|devices| devices.get(uuid));
        let new = more.keys().filter(|uuid| has(uuid).is_none()).count() as u64;
        let devices = known.map_or(0, HashMap::len) as u64;
        self.check_amounts(uid, Resource::Devices, "", (devices, 0), new)?;
        more.iter().try_for_each(|(uuid, more)| {
            let [has, all] = [has(uuid), self.all.devices.get(uuid)].map(|of| of.map_or(0, |of| of.bytes));
            self.check_amounts(uid, Resource::DeviceBytes, &format!(" of the device {uuid}"), (has, all), *more)
        })
    }

    /// Counts a version.
    pub(crate) fn add_version(&mut self, of: &manifest::Version) {
        self.add(of.payer(), Resource::Bytes, of.charged());
        self.add(of.payer(), Resource::Descriptors, of.descriptors() as u64);
        for Usage { devices, .. } in [self.users.entry(of.payer()).or_default(), &mut self.all] {
            for manifest::Part { header: PutPartHeader { memory, .. }, .. } in &of.parts {
                let new = || DeviceBytes { device: memory.device.clone(), bytes: 0 };
                devices.entry(memory.device.uuid).or_insert_with(new).bytes += memory.mapped_size;
            }
        }
    }

    pub(crate) fn remove_version(&mut self, of: &manifest::Version) {
        for Usage { devices, .. } in [self.users.entry(of.payer()).or_default(), &mut self.all] {
            for manifest::Part { header: PutPartHeader { memory, .. }, .. } in &of.parts {
                if let Entry::Occupied(mut entry) = devices.entry(memory.device.uuid) {
                    entry.get_mut().bytes -= memory.mapped_size;
                    if entry.get().bytes == 0 {
                        entry.remove();
                    }
                }
            }
        }
        self.sub(of.payer(), Resource::Bytes, of.charged());
        self.sub(of.payer(), Resource::Descriptors, of.descriptors() as u64);
    }

    /// Usage of one user or of all, by uid, in at most about `max` bytes of JSON. Each user gets the same space for devices, largest
    /// first: a user may claim memory of many nonexistent devices.
    pub(crate) fn totals(&self, only: Option<u32>, max: usize) -> Vec<UserTotal> {
        const USER: usize = 120;
        let shown = |(uid, usage): (&u32, &Usage)| {
            let of = |resource: Resource| usage.counts[resource as usize];
            let objects = of(Resource::Objects) - of(Resource::Kept);
            let devices = usage.devices.values().cloned().collect();
            let (leases, connections) = (of(Resource::Leases), of(Resource::Connections));
            UserTotal { uid: *uid, objects, devices, leases, connections }
        };
        let has_any =
            |total: &UserTotal| total.objects + total.leases + total.connections > 0 || !total.devices.is_empty();
        let users = self.users.iter().filter(|(uid, _)| only.is_none_or(|only| only == **uid));
        let mut users: Vec<UserTotal> = users.map(shown).filter(has_any).take(max / USER).collect();
        let share = max / users.len().max(1) - USER;
        for UserTotal { devices, .. } in &mut users {
            devices.sort_by_key(|of| std::cmp::Reverse(of.bytes));
            let mut length = 0;
            devices.retain(|of| {
                length += 100 + 2 * of.device.name.len();
                length <= share
            });
        }
        users
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const USER_UID: u32 = 34_560;

    fn refusal(users: &mut Users, uid: u32, resource: Resource, more: u64) -> Option<String> {
        users.take(uid, resource, more).err().map(|refusal| refusal.message)
    }

    #[test]
    fn root_has_no_default_share() {
        let mut users = Users::new(Limits::new(Quota::default(), Quota::default(), 1000));
        let max = Quota::user().objects.unwrap();
        assert_eq!(refusal(&mut users, USER_UID, Resource::Objects, max), None);
        assert_eq!(
            refusal(&mut users, USER_UID, Resource::Objects, 1).unwrap(),
            "uid 34560 has 20000 objects and asks for 1 more, but its quota is 20000: delete objects or keep fewer earlier versions, \
             or raise --quota objects="
        );
        assert_eq!(refusal(&mut users, 0, Resource::Objects, max + 1), None);
        // A configured limit applies to root too, and so does the total.
        let one = Quota { objects: Some(1), ..Quota::default() };
        let mut users = Users::new(Limits::new(one, Quota::default(), 1000));
        assert!(refusal(&mut users, 0, Resource::Objects, 2).is_some());
        let mut users = Users::new(Limits::new(Quota::unlimited(), one, 1000));
        assert!(refusal(&mut users, 0, Resource::Objects, 2).is_some());
        assert_eq!(refusal(&mut users, USER_UID, Resource::Leases, 400_000), None);
    }
}
