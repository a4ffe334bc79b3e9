//! The bodies of the messages for those who look on: events, and what the server measures of itself.

use serde::{Deserialize, Serialize};

use super::{listing::UserTotal, messages::or_default};
use crate::wire::strict;

/// Asks for what happens to names from now on, or since an event.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Watch {
    /// The names begin with this.
    pub prefix: String,
    /// The event after which to begin: `next` of the last answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<u64>,
    /// The broker that counted it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance: Option<String>,
}

/// Some of what happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Events {
    /// The UUID of what the broker holds.
    pub instance: String,
    /// Whether events before the first of these are not known any more.
    #[serde(default, deserialize_with = "or_default")]
    pub lost: bool,
    /// In their order.
    #[serde(deserialize_with = "strict::objects")]
    pub events: Vec<Event>,
    /// The number of the last event that was looked at: to go on behind it.
    pub next: u64,
}

/// Something that happened to a version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Its number: they are counted from 1.
    pub seq: u64,
    /// When, in milliseconds since 1970.
    pub at_ms: u64,
    /// What.
    pub kind: EventKind,
    /// The name that the version has or had.
    pub name: String,
    /// The version: of `deleted`, the current one at that time.
    pub version: u64,
    /// The version's UUID.
    pub id: String,
    /// The user of the process that did it; the server's for what no process did.
    pub uid: u32,
    /// That process in the server's PID namespace, or 0.
    pub pid: i32,
    /// Of `reported`: what was found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// What happens to a version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum EventKind {
    /// It is the first version of a name.
    Published,
    /// It is the next version of a name.
    Replaced,
    /// The name was taken away.
    Deleted,
    /// A reader found that it is not as claimed.
    Reported,
    /// A lease of it was given.
    Leased,
    /// A lease of it ended.
    Ended,
    /// What this build does not know.
    #[serde(other)]
    Unknown,
}

/// Asks how much the broker does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Measure {}

/// How much the broker holds and does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Measured {
    /// The UUID of what the broker holds.
    pub instance: String,
    /// When this process started, in milliseconds since 1970.
    pub started_ms: u64,
    /// How often a server started with what another one had held.
    pub restarts: u64,
    /// Names.
    pub objects: u64,
    /// Versions, also without a name.
    pub versions: u64,
    /// Leases.
    pub leases: u64,
    /// Connections, the caller's own included.
    pub connections: u64,
    /// Connections that watch.
    pub watchers: u64,
    /// Open descriptors of the server.
    #[serde(deserialize_with = "strict::object")]
    pub descriptors: Room,
    /// Descriptors in its store.
    #[serde(deserialize_with = "strict::object")]
    pub store: StoreRoom,
    /// Answered requests since this process started.
    #[serde(deserialize_with = "strict::objects")]
    pub requests: Vec<RequestCount>,
    /// How long they took, waits included.
    #[serde(deserialize_with = "strict::objects")]
    pub durations: Vec<Durations>,
    /// What is held for each user: for the server's user and root of all, for others their own.
    #[serde(deserialize_with = "strict::objects")]
    pub totals: Vec<UserTotal>,
    /// The version of the server's program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// How many versions this server lost when it took over from another one: not all of their memory was kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost_versions: Option<u64>,
    /// What each user may have.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "strict::optional_object")]
    pub quota: Option<Limits>,
    /// What all users together may have.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "strict::optional_object")]
    pub total_quota: Option<Limits>,
    /// The server's process, in its PID namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// The keeper's process.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "strict::optional_object")]
    pub keeper: Option<KeeperInfo>,
    /// The last crashes of server and keeper, the oldest first; `None` of a server that does not report them.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "strict::optional_objects")]
    pub crashes: Option<Vec<Crash>>,
}

/// The process of a keeper.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeeperInfo {
    /// Its process, in the server's PID namespace.
    pub pid: u32,
    /// When it started, in milliseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_ms: Option<u64>,
}

/// A crash of the server or its keeper: an end that was not requested.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Crash {
    /// When it was noticed, in milliseconds since 1970.
    pub at_ms: u64,
    /// `server`, `keeper`, or `both`.
    pub process: String,
    /// The process, or 0 if it is not known; the server for `both`.
    pub pid: u32,
    /// How many versions were lost; `None` if everything was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost_versions: Option<u64>,
    /// Some of the lost versions: reported to the server's user and root alone.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub names: Vec<String>,
}

/// What each user may have; `None` is without a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Limits {
    /// Bytes of memory and of tables, as claimed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// Bytes of memory of one device, as claimed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_bytes: Option<u64>,
    /// Names, and the earlier versions that they keep.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub objects: Option<u64>,
    /// Leases.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leases: Option<u64>,
    /// Connections.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connections: Option<u64>,
}

/// How much of something is used, and may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Room {
    /// Used.
    pub used: u64,
    /// The most.
    pub allowed: u64,
}

/// The store of descriptors.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreRoom {
    /// `none` or `keeper`.
    pub kind: String,
    /// Descriptors in it.
    pub used: u64,
    /// The most.
    pub allowed: u64,
}

/// How many requests of a kind were answered in a way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestCount {
    /// The request: `put`, `get`, ...
    pub verb: String,
    /// `ok`, or the code of the refusal.
    pub outcome: String,
    /// How many.
    pub count: u64,
}

/// How long requests of a kind took.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Durations {
    /// The request.
    pub verb: String,
    /// The upper bounds of the classes, in microseconds, ascending.
    pub bounds_us: Vec<u64>,
    /// How many requests are in each class, and last those beyond all bounds.
    pub counts: Vec<u64>,
    /// How long all together took, in microseconds.
    pub sum_us: u64,
}
