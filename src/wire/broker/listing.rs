//! The bodies of the listing messages: objects, versions and leases.

use serde::{Deserialize, Serialize};

use super::messages::{Lifetime, Maker, Owner, Table};
use crate::wire::{DeviceIdentity, Memory, strict};

/// Lists objects.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct List {
    /// The prefix of the names.
    pub prefix: String,
    /// Lists only names after this one: the last name of the previous answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<String>,
}

/// Objects that the client may read, in the order of their names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Objects {
    /// The objects.
    #[serde(deserialize_with = "strict::objects")]
    pub objects: Vec<Summary>,
    /// Whether more objects follow.
    pub more: bool,
}

/// A summary of a name's current version. Sizes are as claimed in the put.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
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
    #[serde(deserialize_with = "strict::objects")]
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
    #[serde(deserialize_with = "strict::object")]
    pub owner: Owner,
    /// The permissions of the name.
    pub mode: u16,
    /// When the version was published, in milliseconds since 1970.
    pub created_ms: u64,
}

/// Memory of a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DeviceBytes {
    /// The device.
    #[serde(deserialize_with = "strict::object")]
    pub device: DeviceIdentity,
    /// Size of the memory, in bytes.
    pub bytes: u64,
}

/// Requests all information about an object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Stat {
    /// The object's name.
    pub name: String,
    /// The version. `None` requests the current one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u64>,
}

/// All information about a version. Carries a descriptor if the metadata is in a memfd.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct VersionInfo {
    /// The summary.
    #[serde(deserialize_with = "strict::object")]
    pub summary: Summary,
    /// The versions of the name that can be requested by number.
    pub versions: Vec<u64>,
    /// The lifetime of the name.
    #[serde(deserialize_with = "strict::object")]
    pub lifetime: Lifetime,
    /// The number of earlier versions that the name keeps.
    pub keep: u32,
    /// The version's parts.
    #[serde(deserialize_with = "strict::objects")]
    pub parts: Vec<PartInfo>,
    /// The version's metadata.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<Table>,
    /// The readers' reports.
    #[serde(deserialize_with = "strict::objects")]
    pub reports: Vec<ReportInfo>,
}

/// A part in the answer to [`Stat`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PartInfo {
    /// The part's name.
    pub name: String,
    /// The part's memory, as claimed in the put.
    #[serde(deserialize_with = "strict::object")]
    pub memory: Memory,
    /// The number of arrays in the part.
    pub arrays: u64,
    /// The digest of the part's bytes, in a form that the putting client defines.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// The process that put the part.
    #[serde(deserialize_with = "strict::object")]
    pub maker: Maker,
}

/// A reader's report on a version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ReportInfo {
    /// The reader.
    #[serde(deserialize_with = "strict::object")]
    pub reader: Maker,
    /// When it was reported, in milliseconds since 1970.
    pub at_ms: u64,
    /// The fault: one sentence.
    pub message: String,
}

/// Lists leases.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Who {
    /// The prefix of the names.
    pub prefix: String,
    /// Lists only leases after this number: the last number of the previous answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<u64>,
}

/// Leases of objects that the client may read, in the order in which they were granted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Leases {
    /// The leases.
    #[serde(deserialize_with = "strict::objects")]
    pub leases: Vec<HeldLease>,
    /// Whether more leases follow.
    pub more: bool,
    /// Totals for each user, with the last answer. The server's user receives all, other users their own.
    #[serde(deserialize_with = "strict::objects")]
    pub totals: Vec<UserTotal>,
}

/// A lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
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
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// When the lease was granted, in milliseconds since 1970.
    pub since_ms: u64,
    /// Size of the leased memory in bytes, as claimed in the put.
    pub size: u64,
}

/// A user's totals in the broker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct UserTotal {
    /// The user.
    pub uid: u32,
    /// The number of the user's names.
    pub objects: u64,
    /// Size of the user's memory on each device, as claimed, including versions without a name.
    #[serde(deserialize_with = "strict::objects")]
    pub devices: Vec<DeviceBytes>,
    /// The number of leases of the user's processes.
    pub leases: u64,
    /// The number of connections of the user's processes.
    pub connections: u64,
}
