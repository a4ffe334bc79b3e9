#![doc = include_str!("../../../docs/broker-protocol.md")]

mod listing;
mod messages;
mod monitoring;
mod table;
#[cfg(test)]
mod tests;
mod topics;

use std::collections::BTreeMap;

pub use self::{
    listing::{
        DeviceBytes, HeldClaim, HeldLease, Leases, List, Objects, PartInfo, ReportInfo, Stat, Summary, UserTotal,
        VersionInfo, Who,
    },
    messages::{
        ArrayEntry, ClaimHeader, Claimed, Delete, Done, GetHeader, GetObject, LeaseHeader, LeasePartHeader, Lifetime,
        Maker, Owner, Published, PutHeader, PutPartHeader, Recall, Refusal, Release, ReportHeader, Restore, Resume,
        Resumed, ResumedLease, Send, Table, Token,
    },
    monitoring::{
        Durations, Event, EventKind, Events, KeeperInfo, Measure, Measured, Quota, RequestCount, Room, StoreRoom,
        WatchHeader,
    },
    table::Attached,
    topics::{Follow, HeldTopic, Meet, Met, OpenTopic, Opened},
};
use super::{
    Busy, ByteRange, Failure, Hello, MAX_FDS, MAX_MESSAGE, Received, Segments, bounded, check_hello,
    frame::{self, Head, parse},
    most, shorten,
};
pub use crate::error::RefusalCode;
use crate::{base::strict::no_texts, error::ProtocolError};

/// The capability of brokers and their clients.
pub const BROKER: &str = "broker";

/// The `backend` of a broker's or client's `hello`: the protocol does not depend on a backend.
pub const NO_BACKEND: &str = "none";

/// The largest number of parts in a version.
pub const MAX_PARTS: usize = 64;

/// The largest number of segments in a version.
pub const MAX_SEGMENTS: usize = 4096;

/// The largest number of arrays in a part.
pub const MAX_ARRAYS: usize = 100_000;

/// The largest number of earlier versions that a name keeps.
pub const MAX_KEPT: u32 = 64;

/// The end of the message for a refused replacement, which may exceed a quota that the new version alone would not.
pub const NEEDS_BOTH: &str = "a replacement needs room for both versions";

/// The longest metadata, in bytes.
pub const MAX_METADATA: u64 = 1 << 20;

/// The longest attributes of an array, in bytes.
pub const MAX_ATTRIBUTES: usize = 1 << 20;

/// The longest table of arrays, in bytes.
pub const MAX_TABLE: u64 = 256 << 20;

/// The longest table that may be sent in a record instead of a memfd, in bytes.
pub const MAX_INLINE: usize = 4096;

/// Total size of all tables in one record, in bytes.
pub const MAX_INLINE_TOGETHER: usize = 16 * 1024;

/// The largest number of objects in one `get`.
pub const MAX_OBJECTS: usize = 64;

/// The largest number of parts and ranges in one `get`.
pub const MAX_NAMED: usize = 1024;

/// The largest number of versions in one `recall`.
pub const MAX_RECALLED: usize = 64;

/// The largest number of leases and puts in one `resume`.
pub const MAX_RESUMED: usize = 256;

messages! {
    #[doc = "As in a handoff."]
    1 "hello" Hello(Hello),
    #[doc = "As in a handoff: the segments of a put or a lease after the first."]
    4 "segments" Segments(Segments),
    #[doc = "As in a handoff: the number of received segments of a lease."]
    5 "received" Received(Received),
    #[doc = "As in a handoff."]
    7 "busy" Busy(Busy),
    #[doc = "As in a handoff."]
    8 "error" Error(Failure),
    32 "put" Put(Box<PutHeader>),
    33 "send" Send(Send),
    34 "published" Published(Published),
    35 "get" Get(Box<GetHeader>),
    36 "lease" Lease(Box<LeaseHeader>),
    37 "claimed" Claimed(Claimed),
    38 "list" List(List),
    39 "objects" Objects(Objects),
    40 "stat" Stat(Stat),
    41 "version" Version(Box<VersionInfo>),
    42 "who" Who(Who),
    43 "leases" Leases(Leases),
    44 "delete" Delete(Delete),
    45 "done" Done(Done),
    46 "refused" Refused(Refusal),
    47 "release" Release(Release),
    48 "report" Report(ReportHeader),
    50 "resume" Resume(Resume),
    51 "resumed" Resumed(Resumed),
    52 "watch" Watch(WatchHeader),
    53 "events" Events(Events),
    54 "measure" Measure(Measure),
    55 "measured" Measured(Box<Measured>),
    56 "recall" Recall(Recall),
    57 "topic" OpenTopic(OpenTopic),
    58 "follow" Follow(Follow),
    59 "opened" Opened(Opened),
    60 "meet" Meet(Meet),
    61 "met" Met(Met),
}

no_texts!(Attached, EventKind, Lifetime, RefusalCode, Table, Token, BTreeMap<String, Vec<ByteRange>>);

impl Message {
    /// The number of descriptors that the message carries. No other code knows which messages carry descriptors.
    pub fn fd_count(&self) -> usize {
        let attached = |table: &Option<Table>| usize::from(table.as_ref().is_some_and(Table::is_attached));
        match self {
            Self::Segments(segments) => segments.sizes.len(),
            Self::Put(put) => {
                let tables = put.parts.iter().map(|part| attached(&part.arrays)).sum::<usize>();
                attached(&put.metadata) + tables + put.sizes.len()
            }
            Self::Lease(lease) => {
                let tables = lease.parts.iter().map(|part| attached(&part.arrays)).sum::<usize>();
                attached(&lease.metadata) + tables + lease.sizes.len()
            }
            Self::Version(version) => attached(&version.metadata),
            Self::Meet(meet) => 1 + usize::from(meet.process),
            _ => 0,
        }
    }

    /// Encodes the message as a record, replacing the buffer's contents.
    ///
    /// # Errors
    /// [`ProtocolError::LongRecord`] or [`ProtocolError::Content`] if the message is larger than the protocol allows.
    pub fn encode_into(&self, record: &mut Vec<u8>) -> Result<(), ProtocolError> {
        self.check()?;
        let mut shortened = match self {
            Self::Error(_) | Self::Refused(_) | Self::Report(_) => self.clone(),
            _ => return self.write(record),
        };
        shortened.sentence().into_iter().for_each(|sentence| shorten(sentence, MAX_MESSAGE));
        shortened.write(record)
    }

    /// The sentence of the peer in a message, which is limited to [`MAX_MESSAGE`].
    fn sentence(&mut self) -> Option<&mut String> {
        match self {
            Self::Error(Failure { message, .. })
            | Self::Refused(Refusal { message, .. })
            | Self::Report(ReportHeader { message, .. }) => Some(message),
            _ => None,
        }
    }

    /// Decodes a record that was received with `fds` descriptors. Control characters in names and sentences become spaces.
    ///
    /// # Errors
    /// A [`ProtocolError`] for each kind of fault.
    pub fn decode(record: &[u8], fds: usize) -> Result<Self, ProtocolError> {
        let Head { kind, fds: claimed, body } = frame::read(record)?;
        let mut message = Self::parse(kind, body)?;
        message.check()?;
        frame::check_fds(message.name(), message.fd_count(), claimed, fds)?;
        if let Some(sentence) = message.sentence() {
            shorten(sentence, MAX_MESSAGE);
        }
        // The server checks the names in requests itself, and prints none that it does not know.
        if !matches!(
            message,
            Self::Get(_)
                | Self::List(_)
                | Self::Stat(_)
                | Self::Who(_)
                | Self::Delete(_)
                | Self::Watch(_)
                | Self::OpenTopic(_)
                | Self::Follow(_)
        ) {
            message.clean();
        }
        Ok(message)
    }

    /// Checks the limits that types don't express: counts, and lengths of names.
    fn check(&self) -> Result<(), ProtocolError> {
        most("descriptors in a record", self.fd_count(), MAX_FDS)?;
        match self {
            Self::Hello(hello) => check_hello(hello),
            Self::Segments(segments) if segments.sizes.is_empty() => {
                Err(ProtocolError::SizeCount { kind: "segments", got: 0, least: 1, most: MAX_FDS })
            }
            Self::Put(put) => {
                most("parts in a put", put.parts.len(), MAX_PARTS)?;
                most("announced parts in a put", put.announced.len(), MAX_PARTS)?;
                let parts = put.parts.iter().flat_map(|part| {
                    [Some(part.name.as_str()), Some(&part.memory.device.name), part.digest.as_deref()]
                });
                let restored = put.restore.as_ref();
                most("leases of a restored version", restored.map_or(0, |of| of.leases.len()), MAX_RESUMED)?;
                let names = [Some(put.name.as_str()), Some(&put.backend), put.group.as_deref()];
                let names = names.into_iter().chain([restored.map(|of| of.id.as_str())]).chain(parts);
                names.flatten().chain(put.announced.iter().map(String::as_str)).try_for_each(bounded)
            }
            Self::Get(get) => {
                most("objects in a get", get.objects.len(), MAX_OBJECTS)?;
                let parts = get.objects.iter().filter_map(|object| object.parts.as_ref()).flat_map(BTreeMap::values);
                most("parts and ranges in a get", parts.map(|ranges| 1 + ranges.len()).sum(), MAX_NAMED)?;
                let claim = get.claim.iter().flat_map(|claim| [&claim.part, &claim.group]).flatten();
                get.objects.iter().map(|object| &object.name).chain(claim).try_for_each(|name| bounded(name))
            }
            Self::Resume(Resume { leases, puts }) => {
                most("leases and puts in a resume", leases.len() + puts.len(), MAX_RESUMED)?;
                leases.iter().try_for_each(|lease| bounded(&lease.id))
            }
            Self::Recall(Recall { ids }) => {
                most("versions in a recall", ids.len(), MAX_RECALLED)?;
                ids.iter().try_for_each(|id| bounded(id))
            }
            Self::List(List { prefix, .. })
            | Self::Who(Who { prefix, .. })
            | Self::Watch(WatchHeader { prefix, .. }) => bounded(prefix),
            Self::Stat(Stat { name, .. })
            | Self::Delete(Delete { name, .. })
            | Self::OpenTopic(OpenTopic { name, .. })
            | Self::Follow(Follow { name, .. })
            | Self::Meet(Meet { name, .. }) => bounded(name),
            _ => Ok(()),
        }
    }
}
