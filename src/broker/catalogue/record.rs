//! What is written down, as plain data: one record for each change.

use serde::{Deserialize, Serialize};

use super::SegmentId;
use crate::{
    driver::Backend,
    wire::{
        Memory,
        broker::{Attached, Event, Lifetime, Maker, Owner, Published, Token},
    },
};

/// A change. Written as a JSON object with one member, whose name is the kind of the change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(in crate::broker) enum Record {
    /// The first record: what the broker is.
    Begin {
        /// A random UUID, kept for as long as what it holds is.
        instance: String,
        /// How many servers have started with this log or the ones before it.
        starts: u64,
    },
    /// An event that was before this log.
    Seen(Seen),
    /// A request that was done before this log and has left nothing in it: a delete, or a put, with what it published.
    Answered(Answered),
    /// What was written when the log was made anew ends here: `seq` is the number of the last event before.
    Whole { seq: u64 },
    /// A server has started with this log.
    Started,
    /// A version became the current one of its name.
    Published(Box<Version>),
    /// A name was taken away.
    Deleted(Deleted),
    /// The memory of a version was given back. `key` is the version's.
    Dropped { key: u64 },
    /// A lease of a version began.
    Leased(Lease),
    /// A lease ended.
    Ended {
        token: Token,
        /// In milliseconds since 1970.
        at_ms: u64,
    },
    /// A reader reported that a version can't be used.
    Reported(Report),
}

/// An event, and who may know of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::broker) struct Seen {
    pub(in crate::broker) event: Event,
    pub(in crate::broker) owner: Owner,
    pub(in crate::broker) mode: u16,
}

/// A request that was done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::broker) struct Answered {
    pub(in crate::broker) request: Token,
    /// What it put or deleted, unless an older build wrote this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(in crate::broker) name: Option<String>,
    /// What it published, if it was a put.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(in crate::broker) published: Option<Published>,
}

impl Answered {
    /// Whether it was about this name.
    pub(in crate::broker) fn is_of(&self, name: &str) -> bool {
        self.name.as_deref().is_none_or(|of| of == name)
    }
}

/// A name that was taken away.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::broker) struct Deleted {
    pub(in crate::broker) name: String,
    /// In milliseconds since 1970.
    pub(in crate::broker) at_ms: u64,
    /// Who did it.
    pub(in crate::broker) uid: u32,
    pub(in crate::broker) pid: i32,
    /// What the client calls its request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(in crate::broker) request: Option<Token>,
    /// Whose the name was, if it was deleted by a request: it can't be offered back then.
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
    /// The permission bits, as of files.
    pub(in crate::broker) mode: u16,
    pub(in crate::broker) lifetime: Lifetime,
    pub(in crate::broker) backend: Backend,
    /// How many older versions of the name are kept that have no lease.
    pub(in crate::broker) keep: u32,
    /// What the clients call the puts that it was made of.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(in crate::broker) requests: Vec<Token>,
    /// The user's own JSON object.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(in crate::broker) metadata: Option<Table>,
    pub(in crate::broker) parts: Vec<Part>,
}

/// One part of a version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::broker) struct Part {
    pub(in crate::broker) name: String,
    pub(in crate::broker) memory: Memory,
    /// The arrays in it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(in crate::broker) arrays: Option<Table>,
    pub(in crate::broker) array_count: u64,
    /// The process that put it.
    pub(in crate::broker) maker: Maker,
    /// Of the contents, if its maker gave one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(in crate::broker) digest: Option<String>,
    /// Its memory, in order: each segment with its size in bytes.
    pub(in crate::broker) segments: Vec<(SegmentId, u64)>,
}

/// Bytes of memory and tables, as claimed.
pub(in crate::broker) fn bytes_of(metadata: Option<&Table>, parts: &[Part]) -> u64 {
    let memory = parts.iter().map(|part| part.memory.mapped_size).sum::<u64>();
    let tables = metadata.into_iter().chain(parts.iter().filter_map(|part| part.arrays.as_ref()));
    memory + tables.map(Table::length).sum::<u64>()
}

/// JSON that is written here, or kept in a memfd where it is long.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(in crate::broker) enum Table {
    /// The JSON itself.
    Inline(Attached),
    /// A memfd with it, sealed against writing, which is kept as a segment is.
    Kept {
        /// The number of the memfd.
        segment: SegmentId,
        /// Its length in bytes.
        length: u64,
    },
}

impl Table {
    /// In bytes.
    fn length(&self) -> u64 {
        match self {
            Self::Inline(text) => text.as_str().len() as u64,
            Self::Kept { length, .. } => *length,
        }
    }
}

/// A lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::broker) struct Lease {
    pub(in crate::broker) token: Token,
    /// The version's.
    pub(in crate::broker) key: u64,
    pub(in crate::broker) uid: u32,
    pub(in crate::broker) pid: i32,
    /// When it was given, in milliseconds since 1970.
    pub(in crate::broker) since_ms: u64,
    /// How many bytes of the version it is of.
    pub(in crate::broker) size: u64,
}

/// A reader's report of a version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::broker) struct Report {
    /// The version's.
    pub(in crate::broker) key: u64,
    pub(in crate::broker) reader: Maker,
    /// In milliseconds since 1970.
    pub(in crate::broker) at_ms: u64,
    pub(in crate::broker) message: String,
}
