//! The bodies of the listing messages: objects, versions and leases.

use super::{
    messages::{Lifetime, Maker, Owner, Table},
    topics::HeldTopic,
};
use crate::{
    base::strict::objects,
    wire::{DeviceIdentity, Memory, strict::or_default},
};

objects! {
    /// Lists objects.
    #[derive(Default)]
    pub struct List {
        /// The prefix of the names.
        pub prefix: String,
        /// Lists only names after this one: the last name of the previous answer.
        pub after: Option<String>,
    }

    /// Objects that the client may read, in the order of their names.
    pub struct Objects {
        /// The objects.
        pub objects: Vec<Summary>,
        /// Whether more objects follow.
        pub more: bool,
    }

    /// A summary of a name's current version. Sizes are as claimed in the put.
    pub struct Summary {
        /// The name.
        pub name: String,
        /// The version.
        pub version: u64,
        /// The version's UUID.
        pub id: String,
        /// Size of the data, in bytes.
        pub size: u64,
        /// Size of the memory on each device.
        pub devices: Vec<DeviceBytes>,
        /// The backend of the memory.
        pub backend: String,
        /// The number of parts.
        pub parts: u64,
        /// The number of segments in all parts.
        pub segments: u64,
        /// The number of arrays in all parts.
        pub arrays: u64,
        /// The number of leases of this version.
        pub leases: u64,
        /// The owner of the name.
        pub owner: Owner,
        /// The permissions of the name.
        pub mode: u16,
        /// When the version was published, in milliseconds since 1970.
        pub created_ms: u64,
    }

    /// Memory of a device.
    pub struct DeviceBytes {
        /// The device.
        pub device: DeviceIdentity,
        /// Size of the memory, in bytes.
        pub bytes: u64,
    }

    /// Requests all information about an object.
    pub struct Stat {
        /// The object's name.
        pub name: String,
        /// The version. `None` requests the current one.
        pub version: Option<u64>,
    }

    /// All information about a version. Carries a descriptor if the metadata is in a memfd.
    pub struct VersionInfo {
        /// The summary.
        pub summary: Summary,
        /// The versions of the name that can be requested by number.
        pub versions: Vec<u64>,
        /// The lifetime of the name.
        pub lifetime: Lifetime,
        /// The number of earlier versions that the name keeps.
        pub keep: u32,
        /// The version's parts.
        pub parts: Vec<PartInfo>,
        /// The version's metadata.
        pub metadata: Option<Table>,
        /// The readers' reports.
        pub reports: Vec<ReportInfo>,
    }

    /// A part in the answer to [`Stat`].
    pub struct PartInfo {
        /// The part's name.
        pub name: String,
        /// The part's memory, as claimed in the put.
        pub memory: Memory,
        /// The number of arrays in the part.
        pub arrays: u64,
        /// The digest of the part's bytes, in a form that the putting client defines.
        pub digest: Option<String>,
        /// The process that put the part.
        pub maker: Maker,
    }

    /// A reader's report on a version.
    pub struct ReportInfo {
        /// The reader.
        pub reader: Maker,
        /// When it was reported, in milliseconds since 1970.
        pub at_ms: u64,
        /// The fault: one sentence.
        pub message: String,
    }

    /// Lists leases.
    #[derive(Default)]
    pub struct Who {
        /// The prefix of the names.
        pub prefix: String,
        /// Lists only leases after this number: the last number of the previous answer.
        pub after: Option<u64>,
    }

    /// Leases of objects that the client may read, in the order in which they were granted.
    pub struct Leases {
        /// The leases.
        pub leases: Vec<HeldLease>,
        /// Whether more leases follow.
        pub more: bool,
        /// Totals for each user, with the last answer. The server's user receives all, other users their own.
        pub totals: Vec<UserTotal>,
        /// The oldest claims on the names, with the last answer: as many as fit. Other users' claims only on names that the client may
        /// read or waits for, or whose whole name is the prefix.
        pub claims: Option<Vec<HeldClaim>>,
        /// The topics that the client may read, with the last answer: as many as fit.
        pub topics: Option<Vec<HeldTopic>>,
        /// Whether clients of the previous server may still resume leases: more leases may appear, at most 10 s after the server's start.
        #[serde(default, deserialize_with = "or_default", skip_serializing_if = "std::ops::Not::not")]
        #[cfg_attr(feature = "schema", schemars(with = "Option<bool>"))]
        pub resuming: bool,
    }

    /// A claim: the right of a process to create an object, or a part of it.
    pub struct HeldClaim {
        /// The object's name.
        pub name: String,
        /// The part, if it is not the whole object.
        pub part: Option<String>,
        /// The holder's process in the server's PID namespace, or 0.
        pub pid: i32,
        /// The holder's user.
        pub uid: u32,
        /// The holder's command, if the server can read it.
        pub command: Option<String>,
        /// When the claim was granted, in milliseconds since 1970.
        pub since_ms: u64,
    }

    /// A lease.
    pub struct HeldLease {
        /// The lease's number, from 1.
        pub number: u64,
        /// The version's name, even if it no longer has one.
        pub name: String,
        /// The version.
        pub version: u64,
        /// The version's UUID.
        pub id: String,
        /// Whether the version can still be requested by name.
        pub named: bool,
        /// The holder's process in the server's PID namespace, or 0.
        pub pid: i32,
        /// The holder's user.
        pub uid: u32,
        /// The holder's command, if the server can read it.
        pub command: Option<String>,
        /// When the lease was granted, in milliseconds since 1970.
        pub since_ms: u64,
        /// Size of the leased memory in bytes, as claimed in the put.
        pub size: u64,
        /// Whether the holders of the version were asked to release their leases.
        #[serde(default, deserialize_with = "or_default")]
        #[cfg_attr(feature = "schema", schemars(with = "Option<bool>"))]
        pub recalled: bool,
    }

    /// A user's totals in the broker.
    pub struct UserTotal {
        /// The user.
        pub uid: u32,
        /// The number of the user's names.
        pub objects: u64,
        /// Size of the user's memory on each device, as claimed, including versions without a name.
        pub devices: Vec<DeviceBytes>,
        /// The number of leases of the user's processes.
        pub leases: u64,
        /// The number of connections of the user's processes.
        pub connections: u64,
    }
}
