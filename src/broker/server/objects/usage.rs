//! What each user has in the broker, and may have.

use std::collections::HashMap;

use crate::{
    broker::{
        catalogue::record,
        server::{Quota, objects::view::add_bytes},
    },
    error::{BrokerError, RefusalCode},
    wire::broker::{DeviceBytes, UserTotal},
};

/// What one user has.
#[derive(Debug, Default)]
struct Usage {
    bytes: u64,
    /// Bytes of parts that wait for others.
    waiting: u64,
    objects: u64,
    leases: u64,
    connections: u64,
    devices: Vec<DeviceBytes>,
}

impl Usage {
    fn is_empty(&self) -> bool {
        (self.bytes, self.waiting, self.objects, self.leases, self.connections) == (0, 0, 0, 0, 0)
    }
}

/// All users.
#[derive(Debug)]
pub(in crate::broker::server) struct Users {
    quota: Quota,
    users: HashMap<u32, Usage>,
}

impl Users {
    pub(super) fn new(quota: Quota) -> Self {
        Self { quota, users: HashMap::new() }
    }

    fn of(&self, uid: u32) -> Option<&Usage> {
        self.users.get(&uid)
    }

    /// Changes what a user has. A user with nothing is forgotten.
    fn change(&mut self, uid: u32, change: impl FnOnce(&mut Usage)) {
        let usage = self.users.entry(uid).or_default();
        change(usage);
        if usage.is_empty() {
            self.users.remove(&uid);
        }
    }

    /// Refuses what would exceed a quota, with both figures.
    fn check(uid: u32, what: &str, has: u64, more: u64, quota: Option<u64>) -> Result<(), BrokerError> {
        match quota {
            Some(quota) if has.saturating_add(more) > quota => {
                let message = format!("uid {uid} has {has} {what} and asks for {more} more, and its quota is {quota}");
                Err(BrokerError::new(RefusalCode::Quota, message))
            }
            _ => Ok(()),
        }
    }

    pub(in crate::broker::server) fn check_bytes(&self, uid: u32, more: u64) -> Result<(), BrokerError> {
        // More than that can't be counted.
        const MOST: u64 = u64::MAX / 4;
        let has = self.of(uid).map_or(0, |usage| usage.bytes + usage.waiting);
        Self::check(uid, "bytes (claimed)", has, more, Some(self.quota.bytes.unwrap_or(MOST).min(MOST)))
    }

    pub(super) fn check_object(&self, uid: u32) -> Result<(), BrokerError> {
        Self::check(uid, "objects", self.of(uid).map_or(0, |usage| usage.objects), 1, self.quota.objects)
    }

    pub(super) fn check_lease(&self, uid: u32) -> Result<(), BrokerError> {
        Self::check(uid, "leases", self.of(uid).map_or(0, |usage| usage.leases), 1, self.quota.leases)
    }

    pub(in crate::broker::server) fn check_connection(&self, uid: u32) -> Result<(), BrokerError> {
        let has = self.of(uid).map_or(0, |usage| usage.connections);
        Self::check(uid, "connections", has, 1, self.quota.connections)
    }

    /// Counts bytes of parts that wait for others.
    pub(in crate::broker::server) fn add_waiting(&mut self, uid: u32, bytes: u64) {
        self.change(uid, |usage| usage.waiting += bytes);
    }

    pub(in crate::broker::server) fn remove_waiting(&mut self, uid: u32, bytes: u64) {
        self.change(uid, |usage| usage.waiting -= bytes);
    }

    pub(super) fn add_version(&mut self, uid: u32, bytes: u64, parts: &[record::Part]) {
        self.change(uid, |usage| {
            usage.bytes += bytes;
            parts.iter().for_each(|part| add_bytes(&mut usage.devices, &part.memory));
        });
    }

    pub(super) fn remove_version(&mut self, uid: u32, bytes: u64, parts: &[record::Part]) {
        self.change(uid, |usage| {
            usage.bytes -= bytes;
            for part in parts {
                let of = |device: &&mut DeviceBytes| device.device.uuid == part.memory.device.uuid;
                if let Some(device) = usage.devices.iter_mut().find(of) {
                    device.bytes -= part.memory.mapped_size;
                }
            }
            usage.devices.retain(|device| device.bytes > 0);
        });
    }

    pub(super) fn add_object(&mut self, uid: u32) {
        self.change(uid, |usage| usage.objects += 1);
    }

    pub(super) fn remove_object(&mut self, uid: u32) {
        self.change(uid, |usage| usage.objects -= 1);
    }

    pub(super) fn add_lease(&mut self, uid: u32) {
        self.change(uid, |usage| usage.leases += 1);
    }

    pub(super) fn remove_lease(&mut self, uid: u32) {
        self.change(uid, |usage| usage.leases -= 1);
    }

    pub(in crate::broker::server) fn add_connection(&mut self, uid: u32) {
        self.change(uid, |usage| usage.connections += 1);
    }

    pub(in crate::broker::server) fn remove_connection(&mut self, uid: u32) {
        self.change(uid, |usage| usage.connections -= 1);
    }

    /// What one user has, or all: in the order of their numbers, and as many of them and of their devices as fit so many bytes of
    /// JSON. A user may claim memory of any number of devices.
    pub(super) fn totals(&self, only: Option<u32>, most: usize) -> Vec<UserTotal> {
        let wanted = |uid: &&u32| only.is_none_or(|only| only == **uid);
        let mut uids: Vec<&u32> = self.users.keys().filter(wanted).collect();
        uids.sort_unstable();
        let mut left = most;
        let mut fits = |bytes: usize| {
            let fits = bytes <= left;
            left = left.saturating_sub(bytes);
            fits
        };
        let mut totals = Vec::new();
        for uid in uids {
            let usage = &self.users[uid];
            if !fits(120) {
                break;
            }
            let devices = usage.devices.iter().take_while(|of| fits(100 + 2 * of.device.name.len())).cloned().collect();
            let Usage { objects, leases, connections, .. } = *usage;
            totals.push(UserTotal { uid: *uid, objects, devices, leases, connections });
        }
        totals
    }
}
