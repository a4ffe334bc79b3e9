//! The records of the catalogue: one for each change.

use serde::{Deserialize, Serialize};

use super::SegmentId;
use crate::{
    driver::Backend,
    wire::{
        Memory,
        broker::{Attached, Event, Lifetime, Maker, Owner, Published, Token},
    },
};

/// A change. Serialised as a JSON object with a single member, named after the kind of the change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(in crate::broker) enum Record {
    /// The first record: the broker's identity.
    Begin {
        /// A random UUID. It identifies the broker's state as long as that survives.
        instance: String,
        /// How many servers have started with this state.
        starts: u64,
    },
    /// An event from before this log.
    Seen(Seen),
    /// A request that was completed before this log and left no other record: a delete, or a put with its result.
    Completed(Completed),
    /// The end of a compacted log. `seq` is the number of the last event before it.
    Whole { seq: u64 },
    /// A server has started with this log.
    Started,
    /// A version was published under a name.
    Published(Box<Version>),
    /// A name was deleted.
    Deleted(Deleted),
    /// A version's memory was freed. `key` is the version's.
    Dropped { key: u64 },
    /// A lease of a version was granted.
    Leased(Lease),
    /// A lease ended.
    Ended {
        token: Token,
        /// In milliseconds since 1970.
        at_ms: u64,
    },
    /// A reader reported that a version is unusable.
    Reported(Report),
    /// The holders of a version were asked to release their leases. `key` is the version's.
    Recalled {
        key: u64,
        /// The process that asked.
        by: Maker,
        /// In milliseconds since 1970.
        at_ms: u64,
    },
}

/// An event, and the data that decides who may see it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::broker) struct Seen {
    pub(in crate::broker) event: Event,
    pub(in crate::broker) owner: Owner,
    pub(in crate::broker) mode: u16,
}

/// A completed request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::broker) struct Completed {
    pub(in crate::broker) request: Token,
    /// The name that was put or deleted.
    pub(in crate::broker) name: String,
    /// The result of a put.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(in crate::broker) published: Option<Published>,
}

/// A deleted name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::broker) struct Deleted {
    pub(in crate::broker) name: String,
    /// In milliseconds since 1970.
    pub(in crate::broker) at_ms: u64,
    /// The user and process that deleted it.
    pub(in crate::broker) uid: u32,
    pub(in crate::broker) pid: i32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(in crate::broker) command: Option<String>,
    /// The client's token for the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(in crate::broker) request: Option<Token>,
    /// The name's owner, if a request deleted it. Such a name can't be restored by its readers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(in crate::broker) owner: Option<u32>,
}

/// A published version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::broker) struct Version {
    /// Unique among the versions of all names in this catalogue.
    pub(in crate::broker) key: u64,
    pub(in crate::broker) name: String,
    /// Counted from 1 for each name.
    pub(in crate::broker) version: u64,
    /// A random UUID.
    pub(in crate::broker) id: String,
    /// When it was published, in milliseconds since 1970.
    pub(in crate::broker) created_ms: u64,
    pub(in crate::broker) owner: Owner,
    /// Permission bits, as for files.
    pub(in crate::broker) mode: u16,
    pub(in crate::broker) lifetime: Lifetime,
    pub(in crate::broker) backend: Backend,
    /// How many older versions of the name are kept without a lease.
    pub(in crate::broker) keep: u32,
    /// The clients' tokens for the puts of this version.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(in crate::broker) requests: Vec<Token>,
    /// The user's JSON object.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(in crate::broker) metadata: Option<Table>,
    pub(in crate::broker) parts: Vec<Part>,
}

/// A part of a version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::broker) struct Part {
    pub(in crate::broker) name: String,
    pub(in crate::broker) memory: Memory,
    /// The part's arrays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(in crate::broker) arrays: Option<Table>,
    pub(in crate::broker) array_count: u64,
    /// The process that put it.
    pub(in crate::broker) maker: Maker,
    /// The creator's digest of the contents.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(in crate::broker) digest: Option<String>,
    /// The segments in order, with their sizes in bytes.
    pub(in crate::broker) segments: Vec<(SegmentId, u64)>,
}

/// The claimed bytes of memory and tables.
pub(in crate::broker) fn bytes_of(metadata: Option<&Table>, parts: &[Part]) -> u64 {
    let memory = parts.iter().map(|part| part.memory.mapped_size).sum::<u64>();
    let tables = metadata.into_iter().chain(parts.iter().filter_map(|part| part.arrays.as_ref()));
    memory + tables.map(Table::length).sum::<u64>()
}

/// JSON text, inline or in a memfd.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(in crate::broker) enum Table {
    Inline(Attached),
    /// The text in a sealed memfd, kept like a segment.
    Held {
        /// The memfd's segment number.
        segment: SegmentId,
        /// The text's length in bytes.
        length: u64,
    },
}

impl Table {
    /// The text's length in bytes.
    fn length(&self) -> u64 {
        match self {
            Self::Inline(text) => text.as_str().len() as u64,
            Self::Held { length, .. } => *length,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::broker) struct Lease {
    pub(in crate::broker) token: Token,
    /// The version's key.
    pub(in crate::broker) key: u64,
    pub(in crate::broker) uid: u32,
    pub(in crate::broker) pid: i32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(in crate::broker) command: Option<String>,
    /// The time of the grant, in milliseconds since 1970.
    pub(in crate::broker) since_ms: u64,
    /// How many bytes of the version it covers.
    pub(in crate::broker) size: u64,
}

/// A reader's report of a version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::broker) struct Report {
    /// The version's key.
    pub(in crate::broker) key: u64,
    pub(in crate::broker) reader: Maker,
    /// In milliseconds since 1970.
    pub(in crate::broker) at_ms: u64,
    pub(in crate::broker) message: String,
}
