//! Selects the segments that answer a get.

use std::{collections::BTreeMap, ops::Range};

use super::{Objects, VersionFd};
use crate::{
    broker::{
        manifest,
        server::state::caller::{Caller, Right},
    },
    error::{BrokerError, RefusalCode, units},
    wire::{
        ByteRange, Run,
        broker::{GetObject, LeaseHeader, LeasePartHeader, PutPartHeader, Token},
    },
};

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
