#![doc = include_str!("../../../docs/broker-protocol.md")]

mod arrays;
mod listing;
mod messages;
mod monitoring;
mod table;
#[cfg(test)]
mod tests;

pub(crate) use self::arrays::read_arrays;
pub use self::{
    listing::{
        DeviceBytes, HeldLease, Leases, List, Objects, PartInfo, ReportInfo, Stat, Summary, UserTotal, VersionInfo, Who,
    },
    messages::{
        ArrayEntry, Claim, Claimed, Delete, Done, Get, GetObject, LeaseHeader, LeasePart, Lifetime, Maker, Owner,
        Published, Put, PutPart, Refusal, Release, Report, Restore, Resume, Resumed, Send, Stop, Table, Token,
    },
    monitoring::{
        Crash, Durations, Event, EventKind, Events, KeeperInfo, Limits, Measure, Measured, RequestCount, Room,
        StoreRoom, Watch,
    },
    table::Attached,
};
use super::{
    Busy, Failure, Hello, MAX_CAPABILITIES, MAX_FDS, MAX_MESSAGE, Received, Segments, bounded, clean,
    frame::{self, Head, parse},
    shorten,
};
use crate::error::ProtocolError;
pub use crate::error::RefusalCode;

/// The capability of both ends.
pub const BROKER: &str = "broker";

/// What a `hello` names as the backend, since neither end need have one.
pub const NO_BACKEND: &str = "none";

/// The most parts of a version.
pub const MAX_PARTS: usize = 64;

/// The most segments of a version.
pub const MAX_SEGMENTS: usize = 4096;

/// The most arrays of a part.
pub const MAX_ARRAYS: usize = 100_000;

/// The most earlier versions that a name keeps.
pub const MAX_KEPT: u32 = 64;

/// Why a replacement may exceed a quota that the new version alone would not, as the end of a sentence.
pub const NEEDS_BOTH: &str = "a replacement needs room for both versions";

/// The longest metadata, in bytes.
pub const MAX_METADATA: u64 = 1 << 20;

/// The longest attributes of an array, in bytes.
pub const MAX_ATTRIBUTES: usize = 1024;

/// The longest table of arrays, in bytes.
pub const MAX_TABLE: u64 = 256 << 20;

/// The longest table that is sent in a record and not beside it, in bytes.
pub const MAX_INLINE: usize = 4096;

/// The most bytes of tables in one record, together.
pub const MAX_INLINE_TOGETHER: usize = 16 * 1024;

/// The most objects of one `get`.
pub const MAX_OBJECTS: usize = 64;

/// The most parts and arrays that a `get` names, together.
pub const MAX_NAMED: usize = 1024;

/// The most leases and puts that a `resume` names, together.
pub const MAX_RESUMED: usize = 1024;

/// One record's content.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Message {
    /// Kind 1, as in a handoff.
    Hello(Hello),
    /// Kind 4, as in a handoff: the segments of a put or a lease behind the first ones.
    Segments(Segments),
    /// Kind 5, as in a handoff: the segments of the lease that came so far.
    Received(Received),
    /// Kind 7, as in a handoff.
    Busy(Busy),
    /// Kind 8, as in a handoff.
    Error(Failure),
    /// Kind 32.
    Put(Box<Put>),
    /// Kind 33.
    Send(Send),
    /// Kind 34.
    Published(Published),
    /// Kind 35.
    Get(Box<Get>),
    /// Kind 36.
    Lease(Box<LeaseHeader>),
    /// Kind 37.
    Claimed(Claimed),
    /// Kind 38.
    List(List),
    /// Kind 39.
    Objects(Objects),
    /// Kind 40.
    Stat(Stat),
    /// Kind 41.
    Version(Box<VersionInfo>),
    /// Kind 42.
    Who(Who),
    /// Kind 43.
    Leases(Leases),
    /// Kind 44.
    Delete(Delete),
    /// Kind 45.
    Done(Done),
    /// Kind 46.
    Refused(Refusal),
    /// Kind 47.
    Release(Release),
    /// Kind 48.
    Report(Report),
    /// Kind 49.
    Stop(Stop),
    /// Kind 50.
    Resume(Resume),
    /// Kind 51.
    Resumed(Resumed),
    /// Kind 52.
    Watch(Watch),
    /// Kind 53.
    Events(Events),
    /// Kind 54.
    Measure(Measure),
    /// Kind 55.
    Measured(Box<Measured>),
}

impl Message {
    /// The name of its kind.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Hello(_) => "hello",
            Self::Segments(_) => "segments",
            Self::Received(_) => "received",
            Self::Busy(_) => "busy",
            Self::Error(_) => "error",
            Self::Put(_) => "put",
            Self::Send(_) => "send",
            Self::Published(_) => "published",
            Self::Get(_) => "get",
            Self::Lease(_) => "lease",
            Self::Claimed(_) => "claimed",
            Self::List(_) => "list",
            Self::Objects(_) => "objects",
            Self::Stat(_) => "stat",
            Self::Version(_) => "version",
            Self::Who(_) => "who",
            Self::Leases(_) => "leases",
            Self::Delete(_) => "delete",
            Self::Done(_) => "done",
            Self::Refused(_) => "refused",
            Self::Release(_) => "release",
            Self::Report(_) => "report",
            Self::Stop(_) => "stop",
            Self::Resume(_) => "resume",
            Self::Resumed(_) => "resumed",
            Self::Watch(_) => "watch",
            Self::Events(_) => "events",
            Self::Measure(_) => "measure",
            Self::Measured(_) => "measured",
        }
    }

    /// How many descriptors belong to it: the one place that says which messages carry any.
    pub fn fd_count(&self) -> usize {
        let attached = |table: &Option<Table>| usize::from(matches!(table, Some(Table::Length(_))));
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
            _ => 0,
        }
    }

    /// The record, in place of what a buffer held.
    ///
    /// # Errors
    /// [`ProtocolError::LongRecord`] or [`ProtocolError::Content`] if the message is larger than the protocol allows.
    pub fn encode_into(&self, record: &mut Vec<u8>) -> Result<(), ProtocolError> {
        self.check()?;
        let fds = self.fd_count();
        match self {
            Self::Hello(body) => frame::write(record, 1, fds, body),
            Self::Segments(body) => frame::write(record, 4, fds, body),
            Self::Received(body) => frame::write(record, 5, fds, body),
            Self::Busy(body) => frame::write(record, 7, fds, body),
            Self::Error(body) => {
                let mut body = body.clone();
                shorten(&mut body.message, MAX_MESSAGE);
                frame::write(record, 8, fds, &body)
            }
            Self::Put(body) => frame::write(record, 32, fds, body),
            Self::Send(body) => frame::write(record, 33, fds, body),
            Self::Published(body) => frame::write(record, 34, fds, body),
            Self::Get(body) => frame::write(record, 35, fds, body),
            Self::Lease(body) => frame::write(record, 36, fds, body),
            Self::Claimed(body) => frame::write(record, 37, fds, body),
            Self::List(body) => frame::write(record, 38, fds, body),
            Self::Objects(body) => frame::write(record, 39, fds, body),
            Self::Stat(body) => frame::write(record, 40, fds, body),
            Self::Version(body) => frame::write(record, 41, fds, body),
            Self::Who(body) => frame::write(record, 42, fds, body),
            Self::Leases(body) => frame::write(record, 43, fds, body),
            Self::Delete(body) => frame::write(record, 44, fds, body),
            Self::Done(body) => frame::write(record, 45, fds, body),
            Self::Refused(body) => {
                let mut body = body.clone();
                shorten(&mut body.message, MAX_MESSAGE);
                frame::write(record, 46, fds, &body)
            }
            Self::Release(body) => frame::write(record, 47, fds, body),
            Self::Report(body) => {
                let mut body = body.clone();
                shorten(&mut body.message, MAX_MESSAGE);
                frame::write(record, 48, fds, &body)
            }
            Self::Stop(body) => frame::write(record, 49, fds, body),
            Self::Resume(body) => frame::write(record, 50, fds, body),
            Self::Resumed(body) => frame::write(record, 51, fds, body),
            Self::Watch(body) => frame::write(record, 52, fds, body),
            Self::Events(body) => frame::write(record, 53, fds, body),
            Self::Measure(body) => frame::write(record, 54, fds, body),
            Self::Measured(body) => frame::write(record, 55, fds, body),
        }
    }

    /// Reads a record that came with `fds` descriptors. Control characters in a peer's sentences become spaces.
    ///
    /// # Errors
    /// Each thing that can be wrong with it has its own [`ProtocolError`].
    pub fn decode(record: &[u8], fds: usize) -> Result<Self, ProtocolError> {
        let Head { kind, fds: claimed, body } = frame::read(record)?;
        let mut message = match kind {
            1 => Self::Hello(parse("hello", body)?),
            4 => Self::Segments(parse("segments", body)?),
            5 => Self::Received(parse("received", body)?),
            7 => Self::Busy(parse("busy", body)?),
            8 => Self::Error(parse("error", body)?),
            32 => Self::Put(parse("put", body)?),
            33 => Self::Send(parse("send", body)?),
            34 => Self::Published(parse("published", body)?),
            35 => Self::Get(parse("get", body)?),
            36 => Self::Lease(parse("lease", body)?),
            37 => Self::Claimed(parse("claimed", body)?),
            38 => Self::List(parse("list", body)?),
            39 => Self::Objects(parse("objects", body)?),
            40 => Self::Stat(parse("stat", body)?),
            41 => Self::Version(parse("version", body)?),
            42 => Self::Who(parse("who", body)?),
            43 => Self::Leases(parse("leases", body)?),
            44 => Self::Delete(parse("delete", body)?),
            45 => Self::Done(parse("done", body)?),
            46 => Self::Refused(parse("refused", body)?),
            47 => Self::Release(parse("release", body)?),
            48 => Self::Report(parse("report", body)?),
            49 => Self::Stop(parse("stop", body)?),
            50 => Self::Resume(parse("resume", body)?),
            51 => Self::Resumed(parse("resumed", body)?),
            52 => Self::Watch(parse("watch", body)?),
            53 => Self::Events(parse("events", body)?),
            54 => Self::Measure(parse("measure", body)?),
            55 => Self::Measured(parse("measured", body)?),
            got => return Err(ProtocolError::Kind { got }),
        };
        message.check()?;
        frame::check_fds(message.name(), message.fd_count(), claimed, fds)?;
        message.clean();
        Ok(message)
    }

    /// What types can't say: how many of something a record may hold, and how long a name may be.
    fn check(&self) -> Result<(), ProtocolError> {
        let most = |what: &str, got: usize, most: usize| match got <= most {
            true => Ok(()),
            false => Err(ProtocolError::Content(format!("{what} are {got} where at most {most} belong"))),
        };
        most("the descriptors of one record", self.fd_count(), MAX_FDS)?;
        match self {
            Self::Hello(Hello { timeout_ms: 0, .. }) => {
                Err(ProtocolError::Content("hello has a timeout_ms of 0".to_owned()))
            }
            Self::Hello(Hello { backend, capabilities, .. }) => {
                most("the capabilities of a hello", capabilities.len(), MAX_CAPABILITIES)?;
                capabilities.iter().chain([backend]).try_for_each(|name| bounded(name))
            }
            Self::Segments(segments) if segments.sizes.is_empty() => {
                Err(ProtocolError::SizeCount { kind: "segments", got: 0, least: 1, most: MAX_FDS })
            }
            Self::Put(put) => {
                most("the parts of a put", put.parts.len(), MAX_PARTS)?;
                most("the announced parts", put.announced.len(), MAX_PARTS)?;
                let parts = put.parts.iter().flat_map(|part| {
                    [Some(part.name.as_str()), Some(&part.memory.device.name), part.digest.as_deref()]
                });
                let restored = put.restore.as_ref();
                most("the leases of a restored version", restored.map_or(0, |of| of.leases.len()), MAX_RESUMED)?;
                let names = [Some(put.name.as_str()), Some(&put.backend), put.group.as_deref()];
                let names = names.into_iter().chain([restored.map(|of| of.id.as_str())]).chain(parts);
                names.flatten().chain(put.announced.iter().map(String::as_str)).try_for_each(bounded)
            }
            Self::Get(get) => {
                most("the objects of a get", get.objects.len(), MAX_OBJECTS)?;
                let named = |object: &GetObject| {
                    object.parts.as_ref().map_or(0, Vec::len)
                        + object.arrays.as_ref().map_or(0, Vec::len)
                        + object.digests.as_ref().map_or(0, |digests| digests.len())
                };
                most("the parts and arrays that a get names", get.objects.iter().map(named).sum(), MAX_NAMED)?;
                let claim = get.claim.iter().flat_map(|claim| [&claim.part, &claim.group]).flatten();
                get.objects.iter().map(|object| &object.name).chain(claim).try_for_each(|name| bounded(name))
            }
            Self::Resume(Resume { leases, puts }) => {
                most("the leases and puts of a resume", leases.len() + puts.len(), MAX_RESUMED)
            }
            Self::List(List { prefix, .. }) | Self::Who(Who { prefix, .. }) | Self::Watch(Watch { prefix, .. }) => {
                bounded(prefix)
            }
            Self::Stat(Stat { name, .. }) | Self::Delete(Delete { name, .. }) => bounded(name),
            _ => Ok(()),
        }
    }

    /// Makes the texts that reach a terminal fit for it.
    fn clean(&mut self) {
        match self {
            Self::Hello(hello) => clean(&mut hello.backend),
            Self::Error(failure) => {
                shorten(&mut failure.message, MAX_MESSAGE);
                clean(&mut failure.message);
            }
            Self::Refused(Refusal { message, .. }) | Self::Report(Report { message, .. }) => {
                shorten(message, MAX_MESSAGE);
                clean(message);
            }
            Self::Put(put) => {
                [&mut put.name, &mut put.backend].into_iter().chain(&mut put.group).for_each(clean);
                put.announced.iter_mut().chain(put.restore.as_mut().map(|of| &mut of.id)).for_each(clean);
                for part in &mut put.parts {
                    [&mut part.name, &mut part.memory.device.name].into_iter().chain(&mut part.digest).for_each(clean);
                }
            }
            Self::Published(published) => clean(&mut published.id),
            Self::Lease(lease) => {
                [&mut lease.name, &mut lease.id, &mut lease.backend].into_iter().for_each(clean);
                for part in &mut lease.parts {
                    [&mut part.name, &mut part.memory.device.name].into_iter().chain(&mut part.digest).for_each(clean);
                }
            }
            Self::Objects(objects) => objects.objects.iter_mut().for_each(Summary::clean),
            Self::Version(version) => {
                version.summary.clean();
                for part in &mut version.parts {
                    [&mut part.name, &mut part.memory.device.name].into_iter().chain(&mut part.digest).for_each(clean);
                    part.maker.command.iter_mut().for_each(clean);
                }
                for report in &mut version.reports {
                    [&mut report.message].into_iter().chain(&mut report.reader.command).for_each(clean);
                }
            }
            Self::Leases(leases) => {
                for lease in &mut leases.leases {
                    [&mut lease.name, &mut lease.id].into_iter().chain(&mut lease.command).for_each(clean);
                }
                clean_totals(&mut leases.totals);
            }
            Self::Resumed(resumed) => clean(&mut resumed.instance),
            Self::Events(events) => {
                clean(&mut events.instance);
                for event in &mut events.events {
                    [&mut event.name, &mut event.id].into_iter().chain(&mut event.message).for_each(clean);
                }
            }
            Self::Measured(measured) => {
                [&mut measured.instance, &mut measured.store.kind]
                    .into_iter()
                    .chain(&mut measured.version)
                    .for_each(clean);
                measured.requests.iter_mut().flat_map(|of| [&mut of.verb, &mut of.outcome]).for_each(clean);
                measured.durations.iter_mut().for_each(|of| clean(&mut of.verb));
                for crash in measured.crashes.iter_mut().flatten() {
                    clean(&mut crash.process);
                    crash.names.iter_mut().for_each(clean);
                }
                clean_totals(&mut measured.totals);
            }
            _ => {}
        }
    }
}

fn clean_totals(totals: &mut [UserTotal]) {
    totals.iter_mut().flat_map(|total| &mut total.devices).for_each(|bytes| clean(&mut bytes.device.name));
}

impl Summary {
    fn clean(&mut self) {
        [&mut self.name, &mut self.id, &mut self.backend].into_iter().for_each(clean);
        self.devices.iter_mut().for_each(|bytes| clean(&mut bytes.device.name));
    }
}
