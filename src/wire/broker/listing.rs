//! The bodies of the messages that list: objects, their versions and who holds them.

use serde::{Deserialize, Serialize};

use super::messages::{Lifetime, Maker, Owner, Table};
use crate::wire::{Device, Memory, strict};

/// Asks which objects there are.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct List {
    /// Their names begin with this.
    pub prefix: String,
    /// Only those behind this name: the last one of the answer before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<String>,
}

/// Objects that the caller may read, in the order of their names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Objects {
    /// They.
    #[serde(deserialize_with = "strict::objects")]
    pub objects: Vec<Summary>,
    /// Whether there are more behind the last one.
    pub more: bool,
}

/// The current version of a name, in short. Sizes are as its maker claimed them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    /// The name.
    pub name: String,
    /// The version.
    pub version: u64,
    /// The version's UUID.
    pub id: String,
    /// Bytes of data.
    pub size: u64,
    /// Bytes of memory, for each device.
    #[serde(deserialize_with = "strict::objects")]
    pub devices: Vec<DeviceBytes>,
    /// The backend of the memory.
    pub backend: String,
    /// How many parts.
    pub parts: u64,
    /// How many segments in them.
    pub segments: u64,
    /// How many arrays in them.
    pub arrays: u64,
    /// How many leases of this version are held.
    pub leases: u64,
    /// Whose it is.
    #[serde(deserialize_with = "strict::object")]
    pub owner: Owner,
    /// The permissions of the name.
    pub mode: u16,
    /// When it was published, in milliseconds since 1970.
    pub created_ms: u64,
}

/// Memory of a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceBytes {
    /// Of which.
    #[serde(deserialize_with = "strict::object")]
    pub device: Device,
    /// How much, in bytes.
    pub bytes: u64,
}

/// Asks for all that is known of an object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stat {
    /// Its name.
    pub name: String,
    /// Its version; `None` is the current one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u64>,
}

/// All that is known of a version. Its descriptor, if any: the metadata's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VersionInfo {
    /// It in short.
    #[serde(deserialize_with = "strict::object")]
    pub summary: Summary,
    /// The versions of the name that can be had by number.
    pub versions: Vec<u64>,
    /// How long the name stays.
    #[serde(deserialize_with = "strict::object")]
    pub lifetime: Lifetime,
    /// How many versions before the current one stay.
    pub keep: u32,
    /// Its parts.
    #[serde(deserialize_with = "strict::objects")]
    pub parts: Vec<PartInfo>,
    /// What its maker says of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<Table>,
    /// What readers said of it.
    #[serde(deserialize_with = "strict::objects")]
    pub reports: Vec<ReportInfo>,
}

/// A part, as [`Stat`] is answered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartInfo {
    /// Its name.
    pub name: String,
    /// What it is, as its maker claims.
    #[serde(deserialize_with = "strict::object")]
    pub memory: Memory,
    /// How many arrays are in it.
    pub arrays: u64,
    /// The digest of its bytes, in its maker's words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// Who put it.
    #[serde(deserialize_with = "strict::object")]
    pub maker: Maker,
}

/// What a reader said of a version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReportInfo {
    /// Who.
    #[serde(deserialize_with = "strict::object")]
    pub reader: Maker,
    /// When, in milliseconds since 1970.
    pub at_ms: u64,
    /// What: one sentence.
    pub message: String,
}

/// Asks for the leases that are held.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Who {
    /// Of names that begin with this.
    pub prefix: String,
    /// Only those behind this number: that of the last one of the answer before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<u64>,
}

/// Leases of objects that the caller may read, in the order in which they were given.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leases {
    /// They.
    #[serde(deserialize_with = "strict::objects")]
    pub leases: Vec<HeldLease>,
    /// Whether there are more behind the last one.
    pub more: bool,
    /// What is held for each user, with the last answer: for the server's user of all users, for others their own.
    #[serde(deserialize_with = "strict::objects")]
    pub totals: Vec<UserTotal>,
}

/// A lease that is held.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldLease {
    /// Its number: they are counted from 1.
    pub number: u64,
    /// The name that the version has or had.
    pub name: String,
    /// The version.
    pub version: u64,
    /// The version's UUID.
    pub id: String,
    /// Whether the version can still be had by its name.
    pub named: bool,
    /// The holder's process in the server's PID namespace, or 0.
    pub pid: i32,
    /// The holder's user.
    pub uid: u32,
    /// The holder's command, where the server can read it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// Since when, in milliseconds since 1970.
    pub since_ms: u64,
    /// The bytes of memory that were handed out with it, as their maker claimed them.
    pub size: u64,
}

/// What the broker holds for a user.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserTotal {
    /// The user.
    pub uid: u32,
    /// Names that are the user's.
    pub objects: u64,
    /// Bytes of memory, as claimed, for each device: also of versions without a name.
    #[serde(deserialize_with = "strict::objects")]
    pub devices: Vec<DeviceBytes>,
    /// Leases of the user's processes.
    pub leases: u64,
    /// Connections of the user's processes.
    pub connections: u64,
}
