//! Answers: the segments that answer a get, and listings of objects and leases.

use std::{
    collections::BTreeMap,
    ops::{Bound, Range},
};

use super::{Name, Objects, Version, VersionFd};
use crate::{
    broker::{
        manifest,
        server::{
            admit::Resource,
            state::caller::{Caller, Right},
        },
    },
    error::{BrokerError, RefusalCode, units},
    wire::{
        ByteRange, Memory, Run,
        broker::{
            DeviceBytes, GetObject, HeldLease, LeaseHeader, LeasePartHeader, Leases, List, Objects as Page, PartInfo,
            PutPartHeader, Stat, Summary, Token, UserTotal, VersionInfo, Who,
        },
    },
};

/// The most JSON bytes filled per page. The rest of the record holds at least one summary.
const PAGE_BYTES: usize = 48 * 1024;

/// The most names and leases visited for one page: other clients wait during the scan.
const MAX_SCANNED: usize = 4096;

/// A broker's contents when it stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServerReport {
    /// Names.
    pub objects: u64,
    /// Versions, including versions without a name.
    pub versions: u64,
    /// Leases.
    pub leases: u64,
    /// Bytes of memory and of tables, as claimed.
    pub bytes: u64,
}

/// The result of one scan for leases.
#[derive(Debug)]
pub(crate) enum LeasePage {
    Leases(Leases),
    /// No matching lease up to this number: continue after it.
    NoneUpTo(u64),
}

impl Objects {
    fn summary(&self, name: &Name, version: &Version) -> Summary {
        let record = &version.record;
        let mut devices = Vec::<DeviceBytes>::new();
        for Memory { device, mapped_size: bytes, .. } in record.parts.iter().map(|part| &part.header.memory) {
            match devices.iter_mut().find(|known| known.device.uuid == device.uuid) {
                Some(known) => known.bytes += bytes,
                None => devices.push(DeviceBytes { device: device.clone(), bytes: *bytes }),
            }
        }
        Summary {
            name: record.name.clone(),
            version: record.version,
            id: record.id.clone(),
            size: record.parts.iter().map(|part| part.header.memory.size).sum(),
            devices,
            backend: record.backend.as_str().to_owned(),
            parts: record.parts.len() as u64,
            segments: record.parts.iter().map(|part| part.sizes.len() as u64).sum(),
            arrays: record.parts.iter().filter_map(|part| part.header.array_count).sum(),
            leases: version.leases,
            owner: name.owner,
            mode: name.mode,
            created_ms: record.created_ms,
        }
    }

    /// A page of names that the caller may read.
    pub(crate) fn list(&self, caller: &Caller, list: &List) -> Page {
        let List { prefix, after } = list;
        let from = match after {
            Some(after) if after >= prefix => Bound::Excluded(after.as_str()),
            _ => Bound::Included(prefix.as_str()),
        };
        let (mut objects, mut length) = (Vec::new(), 0);
        let names = self.name_readers.from(caller, from).map(|name| &**name);
        for name in names.take_while(|name| name.starts_with(prefix.as_str())) {
            let Some(entry) = self.names.get(name) else { continue };
            let summary = self.summary(entry, self.current(entry));
            length +=
                400 + name.len() + summary.devices.iter().map(|entry| 100 + 2 * entry.device.name.len()).sum::<usize>();
            if length > PAGE_BYTES && !objects.is_empty() {
                return Page { objects, more: true };
            }
            objects.push(summary);
        }
        Page { objects, more: false }
    }

    /// Describes a version. Also returns the descriptor of its metadata.
    pub(crate) fn stat(&self, caller: &Caller, stat: &Stat) -> Result<(VersionInfo, Option<VersionFd>), BrokerError> {
        let Stat { name, version } = stat;
        let (entry, version) = self.readable(caller, name, *version)?;
        let record = &version.record;
        let part = |part: &manifest::Part| PartInfo {
            name: part.header.name.clone(),
            memory: part.header.memory.clone(),
            arrays: part.header.array_count.unwrap_or(0),
            digest: part.header.digest.clone(),
            maker: part.maker.clone(),
        };
        let mut versions: Vec<u64> = entry.versions.keys().rev().take(1000).copied().collect();
        versions.reverse();
        let info = VersionInfo {
            summary: self.summary(entry, version),
            versions,
            lifetime: entry.lifetime,
            keep: entry.keep,
            parts: record.parts.iter().map(part).collect(),
            metadata: record.metadata.clone(),
            reports: record.reports.clone(),
        };
        let key = self.ids.get(&record.id).copied();
        let metadata = key.zip(record.metadata_place()).map(|(key, at)| VersionFd { key, at });
        Ok((info, metadata))
    }

    pub(super) fn readable(
        &self,
        caller: &Caller,
        name: &str,
        version: Option<u64>,
    ) -> Result<(&Name, &Version), BrokerError> {
        let absent = |message: String| BrokerError::new(RefusalCode::Absent, message);
        let entry = self.names.get(name).ok_or_else(|| absent(format!("there is no object `{name}`")))?;
        caller.require(Right::Read, name, entry.owner, entry.mode)?;
        let Some(key) = self.find(name, version, None) else {
            let wanted = version.unwrap_or_default();
            let current = self.current(entry).record.version;
            return Err(absent(format!(
                "`{name}` has no version {wanted} (it may have been dropped): its current version is {current}"
            )));
        };
        self.versions.get(&key).map(|version| (entry, version)).ok_or_else(|| absent(format!("`{name}` is gone")))
    }

    /// Whether the name exists, and the caller may read it.
    pub(crate) fn may_read(&self, caller: &Caller, name: &str) -> bool {
        self.names.get(name).is_some_and(|entry| caller.may(Right::Read, entry.owner, entry.mode))
    }

    /// A page of leases that the caller may see. The last page includes the totals: of all users for a superuser, else of the caller.
    pub(crate) fn who(&self, caller: &Caller, who: &Who) -> LeasePage {
        // The last page has totals.
        let page = |leases, totals: Option<Vec<UserTotal>>| {
            let (more, resuming) = (totals.is_none(), totals.is_some() && self.awaits_clients());
            LeasePage::Leases(Leases {
                leases,
                more,
                totals: totals.unwrap_or_default(),
                claims: None,
                topics: None,
                resuming,
            })
        };
        let (mut leases, mut length) = (Vec::new(), 0);
        let from = (who.after.map_or(0, |after| after.saturating_add(1)), Token([0; 16]));
        let visible = self.lease_readers.from(caller, Bound::Included(&from));
        for (scanned, &(number, token)) in visible.enumerate() {
            let Some(held) = self.leases.get(&token) else { continue };
            let Some(version) = self.versions.get(&held.key) else { continue };
            let record = &version.record;
            if !record.name.starts_with(&who.prefix) {
                if scanned >= MAX_SCANNED && leases.is_empty() {
                    return LeasePage::NoneUpTo(number);
                }
                continue;
            }
            length += 320 + record.name.len();
            if length > PAGE_BYTES || scanned > MAX_SCANNED && !leases.is_empty() {
                return page(leases, None);
            }
            leases.push(HeldLease {
                number,
                name: record.name.clone(),
                version: record.version,
                id: record.id.clone(),
                named: !record.is_unnamed,
                pid: held.reader.pid,
                uid: held.reader.uid,
                command: held.reader.command.clone(),
                since_ms: held.since_ms,
                size: held.size,
                recalled: record.is_recalled,
            });
        }
        // Totals get a separate page if there are many leases.
        if length > PAGE_BYTES / 3 && !leases.is_empty() {
            return page(leases, None);
        }
        page(leases, Some(self.totals(caller, PAGE_BYTES / 2)))
    }

    /// Usage of all users for a superuser, else of the caller.
    pub(crate) fn totals(&self, caller: &Caller, max: usize) -> Vec<UserTotal> {
        self.users.totals((!caller.is_superuser()).then_some(caller.uid), max)
    }

    pub(crate) fn total(&self) -> ServerReport {
        let [objects, versions, leases] =
            [self.names.len(), self.versions.len(), self.leases.len()].map(|count| count as u64);
        ServerReport { objects, versions, leases, bytes: self.users.total(Resource::Bytes) }
    }

    /// Logs each name that may be lost.
    pub(crate) fn log_names(&self) {
        for (name, entry) in &self.names {
            let version = self.current(entry).record.version;
            tracing::error!(name = &**name, version, "a version may be lost");
        }
    }

    /// Whether there are no names and no leases.
    pub(crate) fn is_empty(&self) -> bool {
        self.names.is_empty() && self.leases.is_empty()
    }
}

// Gets.

/// The most runs of one lease. If there are more, a single run covers them all.
const MAX_RUNS: usize = 128;

/// The selected segments of a version.
#[derive(Debug)]
pub(crate) struct Selection {
    pub(crate) key: u64,
    /// The lease that gets the selected segments, if it exists.
    pub(crate) lease: Option<Token>,
    /// The runs of each part; `None` for parts that are not requested.
    runs: Vec<Option<Vec<Run>>>,
    /// Bytes of memory.
    pub(crate) bytes: u64,
}

impl Objects {
    /// Selects the answer to a get. `None` if there is no such version yet.
    pub(crate) fn select(&self, caller: &Caller, object: &GetObject) -> Result<Option<Selection>, BrokerError> {
        let key = match object.lease {
            Some(token) => Some(self.leased_by(caller, token, &object.name)?),
            None => {
                // Only callers that may read the name learn whether a version exists.
                if let Some(of) = self.names.get(object.name.as_str()) {
                    caller.require(Right::Read, &object.name, of.owner, of.mode)?;
                }
                self.find(&object.name, object.version, object.newer_than)
            }
        };
        let Some((key, version)) = key.and_then(|key| Some((key, self.versions.get(&key)?))) else { return Ok(None) };
        let parts = &version.record.parts;
        check_parts(parts, object)?;
        let runs = parts.iter().map(|part| runs_of(part, object)).collect::<Result<Vec<_>, _>>()?;
        let bytes = runs.iter().flatten().flatten().map(|run| run.size).sum();
        Ok(Some(Selection { key, lease: object.lease, runs, bytes }))
    }

    /// The version of a lease that the caller's connection holds.
    fn leased_by(&self, caller: &Caller, token: Token, name: &str) -> Result<u64, BrokerError> {
        let held = self.leases.get(&token).filter(|held| held.holder == caller.connection);
        let key = held.map(|held| held.key);
        let is_of_name = |key: &u64| self.versions.get(key).is_some_and(|version| version.record.name == name);
        key.filter(is_of_name).ok_or_else(|| {
            BrokerError::new(RefusalCode::Absent, format!("this connection does not hold the given lease of `{name}`"))
        })
    }

    /// The message of a lease, without segment sizes; its tables; and its segments with their sizes.
    pub(crate) fn describe_lease(&self, token: Token, selection: &Selection) -> Option<DescribedLease> {
        let Selection { key, runs, bytes, .. } = selection;
        let record = &self.versions.get(key)?.record;
        let fd = |at: usize| VersionFd { key: *key, at };
        let mut tables: Vec<VersionFd> = record.metadata_place().map(fd).into_iter().collect();
        let mut segments = Vec::new();
        let mut parts = Vec::with_capacity(record.parts.len());
        for ((part, place), runs) in record.parts.iter().zip(record.places()).zip(runs) {
            let Some(runs) = runs else { continue };
            let PutPartHeader { name, memory, arrays, digest, .. } = part.header.clone();
            tables.extend(place.arrays.map(fd));
            for run in runs {
                let range = run.first as usize..(run.first + run.segments) as usize;
                segments.extend(range.map(|at| (fd(place.first_segment + at), part.sizes[at])));
            }
            parts.push(LeasePartHeader { name, memory, runs: runs.clone(), arrays, digest });
        }
        let header = LeaseHeader {
            token,
            name: record.name.clone(),
            version: record.version,
            id: record.id.clone(),
            created_ms: record.created_ms,
            owner: record.owner,
            backend: record.backend.as_str().to_owned(),
            metadata: record.metadata.clone(),
            mode: Some(record.mode),
            lifetime: Some(record.lifetime),
            keep: Some(record.keep),
            whole: *bytes == record.memory(),
            parts,
            sizes: Vec::new(),
        };
        Some((header, tables, segments))
    }
}

/// A lease to send.
type DescribedLease = (LeaseHeader, Vec<VersionFd>, Vec<(VersionFd, u64)>);

/// Checks that a version has the named parts.
fn check_parts(parts: &[manifest::Part], object: &GetObject) -> Result<(), BrokerError> {
    let known: Vec<&str> = parts.iter().map(|part| part.header.name.as_str()).collect();
    let mut named = object.parts.iter().flat_map(BTreeMap::keys);
    let Some(name) = named.find(|name| !known.contains(&name.as_str())) else { return Ok(()) };
    let mut message = format!("it has the parts {}", known.join(", "));
    crate::wire::shorten(&mut message, 300);
    refuse!(Lacks, "`{}` has no part {name}; {message}", object.name)
}

/// The requested segments of a part, or `None` if the part is not requested.
fn runs_of(part: &manifest::Part, object: &GetObject) -> Result<Option<Vec<Run>>, BrokerError> {
    let PutPartHeader { name, memory, .. } = &part.header;
    let ranges = match &object.parts {
        None => &[][..],
        Some(parts) if parts.is_empty() => return Ok(Some(Vec::new())),
        Some(parts) => match parts.get(name) {
            None => return Ok(None),
            Some(ranges) => ranges,
        },
    };
    if ranges.is_empty() {
        let all = Run { first: 0, segments: part.sizes.len() as u64, offset: 0, size: memory.mapped_size };
        return Ok(Some(vec![all]));
    }
    let bytes = |range: &ByteRange| {
        range.within(memory.size).ok_or_else(|| {
            let (offset, length, size) = (range.offset, units::bytes(range.length), units::bytes(memory.size));
            let object = &object.name;
            let message = format!("{length} at offset {offset} exceed part `{name}` of `{object}`, which has {size}");
            BrokerError::new(RefusalCode::Differs, message)
        })
    };
    let spans = ranges.iter().map(bytes).collect::<Result<Vec<Range<u64>>, _>>()?;
    Ok(Some(cover(&part.sizes, spans)))
}

/// The segments that contain the given bytes.
fn cover(sizes: &[u64], mut spans: Vec<Range<u64>>) -> Vec<Run> {
    spans.sort_unstable_by_key(|span| span.start);
    // The start of each segment, and the end of the last one.
    let mut starts = vec![0u64];
    for size in sizes {
        starts.push(starts[starts.len() - 1] + size);
    }
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for span in spans {
        let at = |byte: u64| starts.partition_point(|start| *start <= byte).saturating_sub(1).min(sizes.len() - 1);
        let (first, end) = (at(span.start), at(span.end - 1) + 1);
        match ranges.last_mut() {
            Some(last) if first <= last.end => last.end = last.end.max(end),
            _ => ranges.push(first..end),
        }
    }
    if ranges.len() > MAX_RUNS {
        let end = ranges[ranges.len() - 1].end;
        ranges.truncate(1);
        ranges[0].end = end;
    }
    let run = |range: Range<usize>| Run {
        first: range.start as u64,
        segments: range.len() as u64,
        offset: starts[range.start],
        size: starts[range.end] - starts[range.start],
    };
    ranges.into_iter().map(run).collect()
}
