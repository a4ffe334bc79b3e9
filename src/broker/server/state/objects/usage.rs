//! Resource usage and limits per user.

use std::collections::{HashMap, hash_map::Entry};

use crate::{
    broker::{
        manifest,
        server::state::{
            objects::view::add_bytes,
            quota::{Counted, Rules},
            refuse,
        },
    },
    driver::DeviceUuid,
    error::{
        BrokerError, RefusalCode,
        units::{bytes, count},
    },
    wire::{
        Memory,
        broker::{DeviceBytes, UserTotal},
    },
};

/// The most earlier versions kept for one user, even without a quota.
const MAX_KEPT_VERSIONS: u64 = 4096;

/// The most reports kept for one user.
const MAX_REPORTS: u64 = 1024;

/// The most bytes of memory for one user's pending requests.
const MAX_REQUESTED: u64 = 16 << 20;

/// The most unread bytes of answers for one user.
const MAX_UNREAD: u64 = 32 << 20;

/// The most devices per user: a node has up to 16 GPUs with up to seven instances each.
const MAX_DEVICES: usize = 128;

#[derive(Debug, Default)]
struct Usage {
    bytes: u64,
    /// Bytes of parts in incomplete drafts.
    waiting: u64,
    objects: u64,
    /// Earlier versions kept by the user's names.
    kept: u64,
    leases: u64,
    connections: u64,
    reports: u64,
    /// Bytes of memory of pending requests.
    requested: u64,
    /// Bytes of answers that the sockets have not accepted yet.
    unread: u64,
    /// Descriptors of unpublished puts, received or announced.
    reserved: usize,
    /// Descriptors of the user's versions.
    held: usize,
    devices: Vec<DeviceBytes>,
}

impl Usage {
    fn is_empty(&self) -> bool {
        let Self { bytes, waiting, objects, kept, leases, connections, reports, requested, unread, .. } = *self;
        let counts = [bytes, waiting, objects, kept, leases, connections, reports, requested, unread];
        counts.iter().all(|count| *count == 0) && self.reserved + self.held == 0
    }
}

/// Usage of all users together.
#[derive(Debug, Default)]
struct Totals {
    bytes: u64,
    objects: u64,
    leases: u64,
    connections: u64,
    /// Descriptors that are held or reserved.
    descriptors: usize,
    devices: HashMap<DeviceUuid, u64>,
}

#[derive(Debug)]
pub(crate) struct Users {
    rules: Rules,
    users: HashMap<u32, Usage>,
    all: Totals,
}

impl Users {
    pub(crate) fn new(rules: Rules) -> Self {
        Self { rules, users: HashMap::new(), all: Totals::default() }
    }

    pub(crate) fn rules(&self) -> &Rules {
        &self.rules
    }

    fn of(&self, uid: u32) -> Option<&Usage> {
        self.users.get(&uid)
    }

    /// Changes a user's usage. Removes users without any.
    fn change(&mut self, uid: u32, change: impl FnOnce(&mut Usage)) {
        let usage = self.users.entry(uid).or_default();
        change(usage);
        if usage.is_empty() {
            self.users.remove(&uid);
        }
    }

    pub(crate) fn check_bytes(&self, uid: u32, more: u64) -> Result<(), BrokerError> {
        const MAX: u64 = u64::MAX / 4;
        if self.all.bytes.saturating_add(more) > MAX {
            return refuse(
                RefusalCode::Quota,
                format!("{} are claimed: {} more would overflow the counter", bytes(self.all.bytes), bytes(more)),
            );
        }
        let has = self.of(uid).map_or(0, |usage| usage.bytes + usage.waiting);
        self.rules.check(uid, Counted::BYTES, |has| format!("{} (claimed)", bytes(has)), (has, self.all.bytes), more)
    }

    /// Refuses memory of too many devices, or more memory of a device than the quota allows.
    pub(crate) fn check_devices<'a>(
        &self,
        uid: u32,
        memory: impl Iterator<Item = &'a Memory>,
    ) -> Result<(), BrokerError> {
        let known = self.of(uid).map_or(&[][..], |usage| &usage.devices);
        let mut more = HashMap::<DeviceUuid, u64>::new();
        memory.for_each(|memory| {
            let bytes = more.entry(memory.device.uuid).or_default();
            *bytes = bytes.saturating_add(memory.mapped_size);
        });
        let new = more.keys().filter(|uuid| !known.iter().any(|of| of.device.uuid == **uuid)).count();
        let has = known.len();
        if new > 0 && has + new > MAX_DEVICES {
            return refuse(
                RefusalCode::Quota,
                format!(
                    "uid {uid} has memory of {has} devices and puts memory of {new} more: the limit is {MAX_DEVICES} devices per user"
                ),
            );
        }
        more.into_iter().try_for_each(|(uuid, more)| {
            let has = known.iter().find(|of| of.device.uuid == uuid).map_or(0, |of| of.bytes);
            let all = self.all.devices.get(&uuid).copied().unwrap_or(0);
            let text = |has| format!("{} (claimed) of the device {uuid}", bytes(has));
            self.rules.check(uid, Counted::DEVICE_BYTES, text, (has, all), more)
        })
    }

    /// Checks the quota for more names, and more earlier versions kept by them.
    pub(crate) fn check_objects(&self, uid: u32, names: u64, kept: u64) -> Result<(), BrokerError> {
        if names + kept == 0 {
            return Ok(());
        }
        let (has_names, holds) = self.of(uid).map_or((0, 0), |usage| (usage.objects, usage.kept));
        let kinds = if holds + kept == 0 { "" } else { " (including kept earlier versions)" };
        let text = |has| count(has, "object") + kinds;
        self.rules.check(uid, Counted::OBJECTS, text, (has_names + holds, self.all.objects), names + kept)?;
        if kept > 0 && holds + kept > MAX_KEPT_VERSIONS {
            return refuse(
                RefusalCode::Quota,
                format!(
                    "the names of uid {uid} keep {holds} earlier versions, and the limit is {MAX_KEPT_VERSIONS}: put with a smaller \
                `keep`, or delete names"
                ),
            );
        }
        Ok(())
    }

    pub(crate) fn check_lease(&self, uid: u32) -> Result<(), BrokerError> {
        let has = self.of(uid).map_or(0, |usage| usage.leases);
        self.rules.check(uid, Counted::LEASES, |has| count(has, "lease"), (has, self.all.leases), 1)
    }

    pub(crate) fn check_connection(&self, uid: u32) -> Result<(), BrokerError> {
        let has = self.of(uid).map_or(0, |usage| usage.connections);
        self.rules.check(uid, Counted::CONNECTIONS, |has| count(has, "connection"), (has, self.all.connections), 1)
    }

    /// Counts bytes of parts in incomplete drafts.
    pub(crate) fn add_waiting(&mut self, uid: u32, bytes: u64) {
        self.all.bytes += bytes;
        self.change(uid, |usage| usage.waiting += bytes);
    }

    pub(crate) fn remove_waiting(&mut self, uid: u32, bytes: u64) {
        self.all.bytes -= bytes;
        self.change(uid, |usage| usage.waiting -= bytes);
    }

    /// Counts descriptors of an unpublished put, received or announced.
    pub(crate) fn reserve(&mut self, uid: u32, descriptors: usize) {
        self.all.descriptors += descriptors;
        self.change(uid, |usage| usage.reserved += descriptors);
    }

    pub(crate) fn end_reservation(&mut self, uid: u32, descriptors: usize) {
        self.all.descriptors -= descriptors;
        self.change(uid, |usage| usage.reserved -= descriptors);
    }

    /// Descriptors that are held, or reserved for unpublished puts.
    pub(crate) fn descriptors(&self) -> usize {
        self.all.descriptors
    }

    /// The number of a user's descriptors: connections, pending puts, and kept segments.
    pub(crate) fn descriptors_of(&self, uid: u32) -> usize {
        self.of(uid).map_or(0, |usage| usage.connections as usize + usage.reserved + usage.held)
    }

    /// Counts a version, and its descriptors.
    pub(crate) fn add_version(&mut self, of: &manifest::Version) {
        let (bytes, descriptors) = (of.charged(), of.descriptors());
        self.all.bytes += bytes;
        self.all.descriptors += descriptors;
        for part in &of.parts {
            *self.all.devices.entry(part.header.memory.device.uuid).or_default() += part.header.memory.mapped_size;
        }
        self.change(of.payer(), |usage| {
            usage.bytes += bytes;
            usage.held += descriptors;
            of.parts.iter().for_each(|part| add_bytes(&mut usage.devices, &part.header.memory));
        });
    }

    pub(crate) fn remove_version(&mut self, of: &manifest::Version) {
        let (bytes, descriptors) = (of.charged(), of.descriptors());
        self.all.bytes -= bytes;
        self.all.descriptors -= descriptors;
        for part in &of.parts {
            if let Entry::Occupied(mut entry) = self.all.devices.entry(part.header.memory.device.uuid) {
                *entry.get_mut() -= part.header.memory.mapped_size;
                if *entry.get() == 0 {
                    entry.remove();
                }
            }
        }
        self.change(of.payer(), |usage| {
            usage.bytes -= bytes;
            usage.held -= descriptors;
            for part in &of.parts {
                let is_of_part = |device: &&mut DeviceBytes| device.device.uuid == part.header.memory.device.uuid;
                if let Some(device) = usage.devices.iter_mut().find(is_of_part) {
                    device.bytes -= part.header.memory.mapped_size;
                }
            }
            usage.devices.retain(|device| device.bytes > 0);
        });
    }

    pub(crate) fn add_object(&mut self, uid: u32) {
        self.all.objects += 1;
        self.change(uid, |usage| usage.objects += 1);
    }

    pub(crate) fn remove_object(&mut self, uid: u32) {
        self.all.objects -= 1;
        self.change(uid, |usage| usage.objects -= 1);
    }

    /// Updates the number of earlier versions that a name of this user keeps.
    pub(crate) fn set_kept(&mut self, uid: u32, before: u64, now: u64) {
        self.all.objects = self.all.objects + now - before;
        self.change(uid, |usage| usage.kept = usage.kept + now - before);
    }

    pub(crate) fn add_lease(&mut self, uid: u32) {
        self.all.leases += 1;
        self.change(uid, |usage| usage.leases += 1);
    }

    pub(crate) fn remove_lease(&mut self, uid: u32) {
        self.all.leases -= 1;
        self.change(uid, |usage| usage.leases -= 1);
    }

    pub(crate) fn add_connection(&mut self, uid: u32) {
        self.all.connections += 1;
        self.change(uid, |usage| usage.connections += 1);
    }

    pub(crate) fn remove_connection(&mut self, uid: u32) {
        self.all.connections -= 1;
        self.change(uid, |usage| usage.connections -= 1);
    }

    pub(crate) fn has_room_for_report(&self, uid: u32) -> bool {
        self.of(uid).is_none_or(|usage| usage.reports < MAX_REPORTS)
    }

    pub(crate) fn add_report(&mut self, uid: u32) {
        self.change(uid, |usage| usage.reports += 1);
    }

    pub(crate) fn remove_report(&mut self, uid: u32) {
        self.change(uid, |usage| usage.reports -= 1);
    }

    /// Counts the memory of a pending request.
    ///
    /// # Errors
    /// [`RefusalCode::Quota`] if the user's requests would take too much memory. The request is not counted then.
    pub(crate) fn add_request(&mut self, uid: u32, more: u64) -> Result<(), BrokerError> {
        let has = self.of(uid).map_or(0, |usage| usage.requested);
        if more > 0 && has + more > MAX_REQUESTED {
            return refuse(
                RefusalCode::Quota,
                format!(
                    "the pending requests of uid {uid} take {} and this one {}, and the limit is {}: wait in fewer connections",
                    bytes(has),
                    bytes(more),
                    bytes(MAX_REQUESTED)
                ),
            );
        }
        self.change(uid, |usage| usage.requested += more);
        Ok(())
    }

    pub(crate) fn remove_request(&mut self, uid: u32, bytes: u64) {
        self.change(uid, |usage| usage.requested -= bytes);
    }

    /// Updates the unread bytes of a connection. Returns whether the user's connections exceed the limit together.
    pub(crate) fn set_unread(&mut self, uid: u32, before: u64, now: u64) -> bool {
        let mut all = 0;
        self.change(uid, |usage| {
            usage.unread = usage.unread + now - before;
            all = usage.unread;
        });
        all > MAX_UNREAD
    }

    /// Usage of one user or of all, by uid, in at most about `max` bytes of JSON. Each user gets the same space for devices, largest
    /// first: a user may claim memory of many nonexistent devices.
    pub(crate) fn totals(&self, only: Option<u32>, max: usize) -> Vec<UserTotal> {
        const USER: usize = 120;
        let has_any = |usage: &Usage| usage.objects + usage.leases + usage.connections > 0 || !usage.devices.is_empty();
        let wanted = |(uid, usage): &(&u32, &Usage)| only.is_none_or(|only| only == **uid) && has_any(usage);
        let mut uids: Vec<u32> = self.users.iter().filter(wanted).map(|(uid, _)| *uid).collect();
        uids.sort_unstable();
        uids.truncate(max / USER);
        let share = (max - uids.len() * USER) / uids.len().max(1);
        let total = |uid: u32| {
            let Usage { objects, leases, connections, ref devices, .. } = self.users[&uid];
            let mut devices: Vec<&DeviceBytes> = devices.iter().collect();
            devices.sort_by_key(|of| std::cmp::Reverse(of.bytes));
            let mut left = share;
            let mut fits = |of: &&&DeviceBytes| {
                let length = 100 + 2 * of.device.name.len();
                let fits = length <= left;
                left = left.saturating_sub(length);
                fits
            };
            let devices = devices.iter().take_while(&mut fits).map(|of| (*of).clone()).collect();
            UserTotal { uid, objects, devices, leases, connections }
        };
        uids.into_iter().map(total).collect()
    }
}
