//! The bodies of the monitoring messages: events and measurements.

use serde::{Deserialize, Serialize};

use super::{
    listing::{HeldClaim, UserTotal},
    topics::HeldTopic,
};
use crate::{base::strict::objects, wire::strict::or_default};

objects! {
    /// Requests the events of names, starting now or after an earlier event.
    #[derive(Default)]
    pub struct WatchHeader {
        /// The prefix of the names.
        pub prefix: String,
        /// Starts after this event: `next` of the last answer.
        pub after: Option<u64>,
        /// The UUID of the broker's state that numbered `after`.
        pub instance: Option<String>,
        /// Requests only the events of the kind `recalled`.
        #[serde(default, deserialize_with = "or_default", skip_serializing_if = "std::ops::Not::not")]
        #[cfg_attr(feature = "schema", schemars(with = "Option<bool>"))]
        pub recalls: bool,
    }

    /// Events of versions.
    pub struct Events {
        /// The UUID of the broker's state.
        pub instance: String,
        /// Whether the server has dropped events before these.
        #[serde(default, deserialize_with = "or_default")]
        #[cfg_attr(feature = "schema", schemars(with = "Option<bool>"))]
        pub lost: bool,
        /// The events in order.
        pub events: Vec<Event>,
        /// The number of the last event examined: `after` of the next request.
        pub next: u64,
    }

    /// An event of a version.
    pub struct Event {
        /// The event's number, from 1.
        pub seq: u64,
        /// The event's time, in milliseconds since 1970.
        pub at_ms: u64,
        /// The kind of event.
        #[cfg_attr(feature = "schema", schemars(with = "String"))]
        pub kind: EventKind,
        /// The version's name, even if it no longer has one.
        pub name: String,
        /// The version. For `deleted`, the version that was current.
        pub version: u64,
        /// The version's UUID.
        pub id: String,
        /// The user of the process that caused the event. The server's user if no process did.
        pub uid: u32,
        /// The process that caused the event, in the server's PID namespace, or 0.
        pub pid: i32,
        /// The command of this process, if the server sees it.
        pub command: Option<String>,
        /// Bytes of memory, as claimed: of the lease, for `leased` and `ended`, else of the version.
        pub size: Option<u64>,
        /// The reader's message, for `reported`.
        pub message: Option<String>,
    }
}

/// The kind of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum EventKind {
    /// The first version of a name was published.
    Published,
    /// The next version of a name was published.
    Replaced,
    /// The name was deleted.
    Deleted,
    /// A reader reported that the version differs from its description.
    Reported,
    /// A lease was granted.
    Leased,
    /// A lease ended.
    Ended,
    /// The holders of a version were asked to release their leases.
    Recalled,
    /// A kind that this build does not know.
    #[serde(other)]
    Unknown,
}

objects! {
    /// Requests measurements.
    pub struct Measure {}

    /// The broker's measurements.
    pub struct Measured {
        /// The UUID of the broker's state.
        pub instance: String,
        /// When the server process started, in milliseconds since 1970.
        pub started_ms: u64,
        /// How many times a server has taken over an earlier server's state.
        pub restarts: u64,
        /// The number of names.
        pub objects: u64,
        /// The number of versions, including versions without a name.
        pub versions: u64,
        /// The number of leases.
        pub leases: u64,
        /// The number of connections, including this one.
        pub connections: u64,
        /// The number of watching connections.
        pub watchers: u64,
        /// The server's open descriptors.
        pub descriptors: Room,
        /// The descriptors in the server's store.
        pub store: StoreRoom,
        /// The requests answered since the server started.
        pub requests: Vec<RequestCount>,
        /// The durations of requests, including waits.
        pub durations: Vec<Durations>,
        /// Totals for each user. The server's user and root receive all, other users their own.
        pub totals: Vec<UserTotal>,
        /// The version of the server's executable.
        pub version: Option<String>,
        /// The limits for each user.
        pub quota: Option<Quota>,
        /// The limits for all users together.
        pub total_quota: Option<Quota>,
        /// The server's process ID, in its PID namespace.
        pub pid: Option<u32>,
        /// The keeper's process.
        pub keeper: Option<KeeperInfo>,
        /// The oldest claims that the client may see, as in `leases`. `None` if the server does not report claims.
        pub claims: Option<Vec<HeldClaim>>,
        /// The topics that the client may read, as in `leases`.
        pub topics: Option<Vec<HeldTopic>>,
    }

    /// The process of a keeper.
    #[derive(Copy)]
    pub struct KeeperInfo {
        /// The process ID, in the server's PID namespace.
        pub pid: u32,
        /// When it started, in milliseconds since 1970.
        pub started_ms: Option<u64>,
    }

    /// Limits on the resources of one user, or of all users together. `None` means unlimited, or the default in a configuration.
    #[derive(Copy, Default)]
    #[non_exhaustive]
    pub struct Quota {
        /// Bytes of memory and of tables as claimed, including versions without a name.
        pub bytes: Option<u64>,
        /// Bytes of memory of one device, as claimed.
        pub device_bytes: Option<u64>,
        /// Names, and the earlier versions that they keep.
        pub objects: Option<u64>,
        /// Leases.
        pub leases: Option<u64>,
        /// Connections.
        pub connections: Option<u64>,
    }

    /// The usage of a resource, and its limit.
    #[derive(Copy)]
    pub struct Room {
        /// Used.
        pub used: u64,
        /// The limit.
        pub allowed: u64,
    }

    /// The store of descriptors.
    pub struct StoreRoom {
        /// `none` or `keeper`.
        pub kind: String,
        /// The number of stored descriptors.
        pub used: u64,
        /// The limit.
        pub allowed: u64,
    }

    /// The number of requests with the same name and outcome.
    pub struct RequestCount {
        /// The request's name: `put`, `get`, ...
        pub verb: String,
        /// `ok`, or the refusal's code.
        pub outcome: String,
        /// The number of requests.
        pub count: u64,
    }

    /// A histogram of request durations.
    pub struct Durations {
        /// The request's name.
        pub verb: String,
        /// The upper bounds of the buckets, in microseconds, ascending.
        pub bounds_us: Vec<u64>,
        /// The number of requests in each bucket, and last the number beyond all bounds.
        pub counts: Vec<u64>,
        /// The total duration, in microseconds.
        pub sum_us: u64,
    }
}
