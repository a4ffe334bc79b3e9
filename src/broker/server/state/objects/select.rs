//! Selects the segments that answer a get.

use std::{collections::BTreeMap, ops::Range};

use super::{Objects, Version, VersionFd};
use crate::{
    broker::{
        manifest,
        server::state::{
            caller::{Caller, Right},
            refuse,
        },
    },
    error::{BrokerError, RefusalCode, units},
    wire::{
        ByteRange, Run,
        broker::{GetObject, LeaseHeader, LeasePartHeader, PutPartHeader, Token},
    },
};

/// The most runs of one lease. If there are more, a single run covers them all.
const MAX_RUNS: usize = 128;

/// The selected parts of a version.
#[derive(Debug)]
pub(crate) struct Selection {
    pub(crate) key: u64,
    /// The lease that gets the selected segments, if it exists.
    pub(crate) lease: Option<Token>,
    /// Parts by index, each with its runs.
    parts: Vec<(usize, Vec<Run>)>,
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
        let parts: Vec<_> = select_parts(version, object)?
            .into_iter()
            .map(|index| Ok((index, runs_of(&version.record.parts[index], object)?)))
            .collect::<Result<_, BrokerError>>()?;
        let bytes = parts.iter().flat_map(|(_, runs)| runs).map(|run| run.size).sum();
        Ok(Some(Selection { key, lease: object.lease, parts, bytes }))
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

    pub(crate) fn describe_lease(&self, token: Token, selection: &Selection) -> Option<LeaseParts> {
        let key = selection.key;
        let record = &self.versions.get(&key)?.record;
        let places: Vec<_> = record.places().collect();
        let fd = |at: usize| VersionFd { key, at };
        let mut tables: Vec<VersionFd> = record.metadata_place().map(fd).into_iter().collect();
        let mut segments = Vec::new();
        let mut parts = Vec::with_capacity(selection.parts.len());
        for (index, runs) in &selection.parts {
            let (part, place) = (&record.parts[*index], places[*index]);
            tables.extend(place.arrays.map(fd));
            for run in runs {
                let range = run.first as usize..(run.first + run.segments) as usize;
                segments.extend(range.map(|at| (fd(place.first_segment + at), part.sizes[at])));
            }
            parts.push(LeasePartHeader {
                name: part.header.name.clone(),
                memory: part.header.memory.clone(),
                runs: runs.clone(),
                arrays: part.header.arrays.clone(),
                digest: part.header.digest.clone(),
            });
        }
        let all = |(index, runs): &(usize, Vec<Run>)| {
            runs.iter().map(|run| run.segments).sum::<u64>() == record.parts[*index].sizes.len() as u64
        };
        let whole = selection.parts.len() == record.parts.len() && selection.parts.iter().all(all);
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
            whole,
            parts,
            sizes: Vec::new(),
        };
        Some(LeaseParts { header, tables, segments })
    }
}

/// An unsent lease.
#[derive(Debug)]
pub(crate) struct LeaseParts {
    /// The message, without segment sizes.
    pub(crate) header: LeaseHeader,
    /// Tables, in the order of their descriptors.
    pub(crate) tables: Vec<VersionFd>,
    /// Segments with sizes.
    pub(crate) segments: Vec<(VersionFd, u64)>,
}

/// Indices of the requested parts.
fn select_parts(version: &Version, object: &GetObject) -> Result<Vec<usize>, BrokerError> {
    let parts = &version.record.parts;
    let index = |name: &String| {
        let at = parts.iter().position(|part| part.header.name == *name);
        at.ok_or_else(|| {
            let known: Vec<&str> = parts.iter().map(|part| part.header.name.as_str()).collect();
            let mut message = format!("it has the parts {}", known.join(", "));
            crate::wire::shorten(&mut message, 300);
            BrokerError::new(RefusalCode::Lacks, format!("`{}` has no part {name}; {message}", object.name))
        })
    };
    let mut chosen = Vec::new();
    match &object.parts {
        None => chosen.extend(0..parts.len()),
        Some(names) => {
            for name in names {
                let at = index(name)?;
                if !chosen.contains(&at) {
                    chosen.push(at);
                }
            }
        }
    }
    for name in object.ranges.iter().flat_map(BTreeMap::keys) {
        if !chosen.contains(&index(name)?) {
            return refuse(RefusalCode::Invalid, format!("a range is in part `{name}`, which `parts` does not name"));
        }
    }
    Ok(chosen)
}

/// The requested segments of a part.
fn runs_of(part: &manifest::Part, object: &GetObject) -> Result<Vec<Run>, BrokerError> {
    let PutPartHeader { name, memory, .. } = &part.header;
    let Some(ranges) = &object.ranges else {
        return Ok(vec![Run { first: 0, segments: part.sizes.len() as u64, offset: 0, size: memory.mapped_size }]);
    };
    let bytes = |range: &ByteRange| {
        range.within(memory.size).ok_or_else(|| {
            let (offset, length, size) = (range.offset, units::bytes(range.length), units::bytes(memory.size));
            let object = &object.name;
            let message = format!("{length} at offset {offset} exceed part `{name}` of `{object}`, which has {size}");
            BrokerError::new(RefusalCode::Differs, message)
        })
    };
    let spans = ranges.get(name).into_iter().flatten().map(bytes).collect::<Result<Vec<Range<u64>>, _>>()?;
    Ok(cover(&part.sizes, spans))
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
