//! The manifests of the keeper's entries. An entry is an object: its manifest, and the descriptors in the order of the manifest.

use serde::{Deserialize, Serialize};

use crate::{
    driver::Backend,
    wire::broker::{Lifetime, Maker, Owner, Published, PutPartHeader, ReportInfo, Table, Token},
};

/// The key of the entry that describes the broker itself. It is handed over first.
pub(in crate::broker) const BROKER: u64 = 0;

/// An entry's manifest: a JSON object with a single member, named after the kind of the entry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(in crate::broker) enum Manifest {
    Broker(Identity),
    Version(Box<Version>),
    /// A put whose version is gone. It has the key of the version.
    Completed(Completed),
    Deleted(Deleted),
}

impl Manifest {
    /// The tokens of a completed request.
    pub(in crate::broker) fn requests(&self) -> &[Token] {
        match self {
            Self::Completed(put) => &put.requests,
            Self::Deleted(deleted) => deleted.request.as_slice(),
            _ => &[],
        }
    }
}

/// The broker. Its descriptors are the listening socket and the device nodes that it holds open.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::broker) struct Identity {
    /// A random UUID. It identifies the broker's state as long as that survives.
    pub(in crate::broker) instance: String,
    /// How many servers have started with this state.
    pub(in crate::broker) starts: u64,
    /// The numbers of the devices.
    pub(in crate::broker) devices: Vec<u8>,
}

/// A put whose version is gone: a client may repeat it. It has no descriptors.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::broker) struct Completed {
    pub(in crate::broker) name: String,
    pub(in crate::broker) published: Published,
    /// The clients' tokens for the puts of the version.
    pub(in crate::broker) requests: Vec<Token>,
}

/// A deleted name. It has no descriptors.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::broker) struct Deleted {
    pub(in crate::broker) name: String,
    /// The name's owner. Readers can't restore the name.
    pub(in crate::broker) owner: u32,
    /// The client's token for the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(in crate::broker) request: Option<Token>,
}

/// A version. Its descriptors are the memfd of the metadata and, for each part, the memfd of the arrays and the segments.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::broker) struct Version {
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
    /// Whether its name was deleted, so that only leases hold it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(in crate::broker) is_unnamed: bool,
    /// Whether its holders were asked to release their leases.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(in crate::broker) is_recalled: bool,
    /// In milliseconds since 1970. Set if it was replaced or deleted while a restarted server waited for holders to resume their leases: without
    /// a lease until then, it goes, however often servers restart.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(in crate::broker) resume_by_ms: Option<u64>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(in crate::broker) reports: Vec<ReportInfo>,
}

/// A part of a version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::broker) struct Part {
    pub(in crate::broker) header: PutPartHeader,
    /// The process that put it.
    pub(in crate::broker) maker: Maker,
    /// The sizes of the segments in order, in bytes.
    pub(in crate::broker) sizes: Vec<u64>,
}

/// The positions of a part's descriptors among those of its version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::broker) struct Place {
    pub(in crate::broker) arrays: Option<usize>,
    pub(in crate::broker) first_segment: usize,
}

/// The number of a table's descriptors.
fn fds_of(table: Option<&Table>) -> usize {
    usize::from(table.is_some_and(Table::is_attached))
}

impl Part {
    /// Bytes of memory and of the table, as claimed.
    fn bytes(&self) -> u64 {
        self.header.memory.mapped_size + self.header.arrays.as_ref().map_or(0, Table::length)
    }

    /// The number of segments, as claimed.
    pub(in crate::broker) fn segments(&self) -> usize {
        self.header.memory.segments as usize
    }

    fn descriptors(&self) -> usize {
        self.segments() + fds_of(self.header.arrays.as_ref())
    }
}

impl Version {
    /// The position of the metadata's descriptor.
    pub(in crate::broker) fn metadata_place(&self) -> Option<usize> {
        (fds_of(self.metadata.as_ref()) > 0).then_some(0)
    }

    /// The positions of each part's descriptors.
    pub(in crate::broker) fn places(&self) -> impl Iterator<Item = Place> {
        let mut next = fds_of(self.metadata.as_ref());
        self.parts.iter().map(move |part| {
            let first_segment = next + fds_of(part.header.arrays.as_ref());
            let arrays = (first_segment > next).then_some(next);
            next += part.descriptors();
            Place { arrays, first_segment }
        })
    }

    /// The number of descriptors.
    pub(in crate::broker) fn descriptors(&self) -> usize {
        fds_of(self.metadata.as_ref()) + self.parts.iter().map(Part::descriptors).sum::<usize>()
    }

    /// Bytes of memory, as claimed.
    pub(in crate::broker) fn memory(&self) -> u64 {
        self.parts.iter().map(|part| part.header.memory.mapped_size).sum()
    }

    /// Bytes that count towards a quota: memory and tables, as claimed.
    pub(in crate::broker) fn charged(&self) -> u64 {
        self.metadata.as_ref().map_or(0, Table::length) + self.parts.iter().map(Part::bytes).sum::<u64>()
    }

    /// The user whose quota it counts towards. All parts belong to one user.
    pub(in crate::broker) fn payer(&self) -> u32 {
        self.parts.first().map_or(self.owner.uid, |part| part.maker.uid)
    }
}
