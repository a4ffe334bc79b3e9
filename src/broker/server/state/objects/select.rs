//! Selects the segments that answer a get.

use std::{
    collections::{HashSet, VecDeque},
    ops::Range,
    os::fd::{AsFd, OwnedFd},
};

use super::{Objects, Version, VersionFd, view::to_wire};
use crate::{
    broker::{
        manifest::{self, Table},
        server::state::{
            caller::{Caller, Right},
            refuse,
        },
        table,
    },
    error::{BrokerError, RefusalCode, units},
    wire::{
        Check, Run,
        broker::{Attached, GetObject, LeaseHeader, LeasePartHeader, MAX_METADATA, MAX_TABLE, Token, read_arrays},
    },
};

/// The most runs of one lease. If there are more, a single run covers them all.
const MAX_RUNS: usize = 128;

/// The most arrays that a refusal lists.
const MAX_LISTED: usize = 8;

/// Tables to read before a get can be answered.
#[derive(Debug)]
pub(crate) struct TableQuery {
    key: u64,
    name: String,
    expect: Option<(Check, Option<TableSource>)>,
    /// Arrays not found yet, and the tables of the parts that may have them.
    wanted: HashSet<String>,
    tables: VecDeque<(usize, TableSource)>,
    spans: Vec<(usize, Vec<Range<u64>>)>,
    /// The first arrays of the searched tables, and the number of all.
    present: (Vec<String>, usize),
}

#[derive(Debug)]
enum TableSource {
    Inline(Attached),
    Memfd { fd: OwnedFd, length: u64, max: u64 },
}

impl TableSource {
    fn is_small(&self) -> bool {
        matches!(self, Self::Inline(_))
    }

    fn read(self) -> Result<String, String> {
        match self {
            Self::Inline(text) => Ok(text.as_str().to_owned()),
            Self::Memfd { fd, length, max } => table::read(fd.as_fd(), length, max),
        }
    }
}

/// The result of a query: the byte ranges of the requested arrays, for each part that has some.
#[derive(Debug)]
pub(crate) struct Answer {
    key: u64,
    spans: Vec<(usize, Vec<Range<u64>>)>,
}

impl TableQuery {
    /// Whether the query reads no memfd.
    pub(crate) fn is_small(&self) -> bool {
        let metadata = self.expect.as_ref().and_then(|(_, source)| source.as_ref());
        metadata.into_iter().chain(self.tables.iter().map(|(_, source)| source)).all(TableSource::is_small)
    }

    /// Reads the next table, which takes milliseconds if it is large. `None` if more tables follow.
    pub(crate) fn step(&mut self) -> Result<Option<Answer>, BrokerError> {
        if let Some((expect, source)) = self.expect.take() {
            self.compare(&expect, source)?;
        } else if let Some((part, source)) = self.tables.pop_front() {
            self.search(part, source)?;
        }
        if self.expect.is_some() || !self.tables.is_empty() {
            return Ok(None);
        }
        if self.wanted.is_empty() {
            return Ok(Some(Answer { key: self.key, spans: std::mem::take(&mut self.spans) }));
        }
        let mut missing: Vec<&String> = self.wanted.iter().collect();
        missing.sort_unstable();
        let missing: Vec<String> = missing.iter().take(MAX_LISTED).map(|name| shortened(name.to_string())).collect();
        let (names, all) = &self.present;
        let more = if *all > names.len() { ", ..." } else { "" };
        let present = match all {
            0 => "it has no arrays".to_owned(),
            _ => format!("its arrays are {}{more} ({all} in all)", names.join(", ")),
        };
        Err(lacks(&self.name, &format!("array {}; {present}", missing.join(", "))))
    }

    fn failed(&self, error: &str) -> BrokerError {
        BrokerError::new(RefusalCode::Failed, format!("a table of `{}`: {error}", self.name))
    }

    /// Compares the metadata with the expected fields.
    fn compare(&self, expect: &Check, metadata: Option<TableSource>) -> Result<(), BrokerError> {
        let metadata = metadata.map(TableSource::read).transpose().map_err(|error| self.failed(&error))?;
        let metadata: Check = metadata
            .map(|text| serde_json::from_str(&text))
            .transpose()
            .map_err(|error| self.failed(&error.to_string()))?
            .unwrap_or_default();
        let difference = |(field, wanted): (&String, &serde_json::Value)| match metadata.get(field) {
            Some(found) if found == wanted => None,
            Some(found) => Some(format!("{field} is {}, not {}", short(found), short(wanted))),
            None => Some(format!("{field} is missing, expected {}", short(wanted))),
        };
        let differences: Vec<String> = expect.iter().filter_map(difference).collect();
        if differences.is_empty() { Ok(()) } else { Err(mismatch(&self.name, &differences)) }
    }

    /// Searches a part's table for wanted arrays.
    fn search(&mut self, part: usize, table: TableSource) -> Result<(), BrokerError> {
        let text = table.read().map_err(|error| self.failed(&error))?;
        let entries = read_arrays(&text).map_err(|error| self.failed(&error.to_string()))?;
        let mut found = Vec::new();
        let (names, all) = &mut self.present;
        *all += entries.len();
        let unnamed = MAX_LISTED - names.len();
        names.extend(entries.iter().take(unnamed).map(|entry| shortened(entry.name.clone())));
        for entry in entries {
            if self.wanted.remove(&entry.name) {
                found.push(entry.array.span().map_err(|error| self.failed(&error.in_full()))?);
            }
        }
        if !found.is_empty() {
            self.spans.push((part, found));
        }
        Ok(())
    }
}

/// A value, shortened for a sentence.
fn short(value: &serde_json::Value) -> String {
    shortened(value.to_string())
}

fn shortened(mut text: String) -> String {
    crate::wire::shorten(&mut text, 100);
    text
}

fn mismatch(name: &str, differences: &[String]) -> BrokerError {
    BrokerError::new(RefusalCode::Differs, format!("`{name}` is not as expected: {}", differences.join("; ")))
}

fn lacks(name: &str, what: &str) -> BrokerError {
    BrokerError::new(RefusalCode::Lacks, format!("`{name}` has no {what}"))
}

/// The selected parts of a version.
#[derive(Debug)]
pub(crate) struct Selection {
    pub(crate) key: u64,
    /// Parts by index, each with its runs.
    parts: Vec<(usize, Vec<Run>)>,
    /// Bytes of memory.
    pub(crate) bytes: u64,
}

/// The result of a selection.
pub(crate) enum Selected {
    Ready(Selection),
    /// There is no such version yet.
    Absent,
    /// Tables must be read first.
    Query(TableQuery),
}

impl Objects {
    /// Selects the answer to a get. `answer` is the result of the table query, if there was one.
    pub(crate) fn select(
        &self,
        caller: &Caller,
        object: &GetObject,
        answer: Option<&Answer>,
    ) -> Result<Selected, BrokerError> {
        // Only callers that may read the name learn whether a version exists.
        if let Some(of) = self.names.get(object.name.as_str()) {
            caller.require(Right::Read, &object.name, of.owner, of.mode)?;
        }
        let Some(key) = self.find(&object.name, object.version, object.newer_than) else { return Ok(Selected::Absent) };
        let Some(version) = self.versions.get(&key) else { return Ok(Selected::Absent) };
        let parts = select_parts(version, object)?;
        if let Some(digests) = &object.digests {
            check_digests(version, digests)?;
        }
        if object.expect.is_none() && object.arrays.is_none() {
            let parts = parts.into_iter().map(|index| {
                let part = &version.record.parts[index];
                match object.range {
                    None => Ok((index, vec![whole_part(part)])),
                    Some(range) => {
                        let size = part.memory.size;
                        let bytes = range.within(size).ok_or_else(|| {
                            let (offset, length) = (range.offset, range.length);
                            let message = format!(
                                "{} at offset {offset} exceed part `{}` of `{}`, which has {}",
                                units::bytes(length),
                                part.name,
                                object.name,
                                units::bytes(size)
                            );
                            BrokerError::new(RefusalCode::Differs, message)
                        })?;
                        Ok((index, runs_of(part, vec![bytes])))
                    }
                }
            });
            return parts.collect::<Result<_, _>>().map(|parts| Selected::Ready(Selection::new(key, parts)));
        }
        let Some(answer) = answer.filter(|answer| answer.key == key) else {
            return self.table_query(key, version, object, &parts).map(Selected::Query);
        };
        let parts = if object.arrays.is_some() {
            answer
                .spans
                .iter()
                .map(|(index, spans)| (*index, runs_of(&version.record.parts[*index], spans.clone())))
                .collect()
        } else {
            parts.into_iter().map(|index| (index, vec![whole_part(&version.record.parts[index])])).collect()
        };
        Ok(Selected::Ready(Selection::new(key, parts)))
    }

    fn table_query(
        &self,
        key: u64,
        version: &Version,
        object: &GetObject,
        parts: &[usize],
    ) -> Result<TableQuery, BrokerError> {
        let source = |table: &Table, at: Option<usize>, max: u64| match table {
            Table::Inline(text) => Ok(TableSource::Inline(text.clone())),
            Table::Memfd(length) => {
                let fd = version.fds[at.unwrap_or(0)].try_clone();
                let fd = fd.map_err(|error| {
                    let message = format!("the broker has no free descriptor to read a table: {error}");
                    BrokerError::new(RefusalCode::Full, message)
                })?;
                Ok(TableSource::Memfd { fd, length: *length, max })
            }
        };
        let record = &version.record;
        let expect = match &object.expect {
            None => None,
            Some(expect) => {
                let metadata = record.metadata.as_ref();
                let at = record.metadata_place();
                let metadata = metadata.map(|table| source(table, at, MAX_METADATA)).transpose()?;
                Some((expect.clone(), metadata))
            }
        };
        let wanted: HashSet<String> = object.arrays.iter().flatten().cloned().collect();
        let tables = match wanted.is_empty() {
            true => VecDeque::new(),
            false => {
                let places: Vec<_> = record.places().collect();
                let tables = parts.iter().filter_map(|&index| Some((index, record.parts[index].arrays.as_ref()?)));
                let sources = tables
                    .map(|(index, table)| source(table, places[index].arrays, MAX_TABLE).map(|source| (index, source)));
                sources.collect::<Result<_, _>>()?
            }
        };
        Ok(TableQuery {
            key,
            name: object.name.clone(),
            expect,
            wanted,
            tables,
            spans: Vec::new(),
            present: (Vec::new(), 0),
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
                name: part.name.clone(),
                memory: part.memory.clone(),
                runs: runs.clone(),
                arrays: part.arrays.as_ref().map(to_wire),
                digest: part.digest.clone(),
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
            metadata: record.metadata.as_ref().map(to_wire),
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

impl Selection {
    fn new(key: u64, parts: Vec<(usize, Vec<Run>)>) -> Self {
        let bytes = parts.iter().flat_map(|(_, runs)| runs).map(|run| run.size).sum();
        Self { key, parts, bytes }
    }
}

/// Indices of the requested parts.
fn select_parts(version: &Version, object: &GetObject) -> Result<Vec<usize>, BrokerError> {
    let parts = &version.record.parts;
    let chosen: Vec<usize> = match &object.parts {
        None => (0..parts.len()).collect(),
        Some(names) => {
            let index = |name: &String| {
                let at = parts.iter().position(|part| part.name == *name);
                at.ok_or_else(|| {
                    let known: Vec<&str> = parts.iter().map(|part| part.name.as_str()).collect();
                    let mut message = format!("it has the parts {}", known.join(", "));
                    crate::wire::shorten(&mut message, 300);
                    lacks(&object.name, &format!("part {name}; {message}"))
                })
            };
            let mut chosen = names.iter().map(index).collect::<Result<Vec<usize>, _>>()?;
            let mut seen = Vec::new();
            chosen.retain(|index| {
                !seen.contains(index) && {
                    seen.push(*index);
                    true
                }
            });
            chosen
        }
    };
    if object.range.is_some() && chosen.len() != 1 {
        return refuse(
            RefusalCode::Invalid,
            format!("a range needs exactly one part, but `{}` has {}: name the part", object.name, chosen.len()),
        );
    }
    Ok(chosen)
}

fn check_digests(version: &Version, digests: &std::collections::BTreeMap<String, String>) -> Result<(), BrokerError> {
    let mut differences = Vec::new();
    for (name, wanted) in digests {
        let part = version.record.parts.iter().find(|part| part.name == *name);
        match part.ok_or_else(|| lacks(&version.record.name, &format!("part {name}")))?.digest.as_deref() {
            None => differences.push(format!("part {name} has no digest")),
            Some(found) if found == wanted => {}
            Some(found) => differences.push(format!("the digest of part {name} is {found}, not {wanted}")),
        }
    }
    match differences.is_empty() {
        true => Ok(()),
        false => Err(mismatch(&version.record.name, &differences)),
    }
}

fn whole_part(part: &manifest::Part) -> Run {
    Run { first: 0, segments: part.sizes.len() as u64, offset: 0, size: part.memory.mapped_size }
}

/// The segments that contain the given bytes of a part.
fn runs_of(part: &manifest::Part, mut spans: Vec<Range<u64>>) -> Vec<Run> {
    spans.sort_unstable_by_key(|span| span.start);
    // The start of each segment, and the end of the last one.
    let mut starts = vec![0u64];
    for size in &part.sizes {
        starts.push(starts[starts.len() - 1] + size);
    }
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for span in spans {
        let last_byte = span.end.max(span.start + 1) - 1;
        let at = |byte: u64| starts.partition_point(|start| *start <= byte).saturating_sub(1).min(part.sizes.len() - 1);
        let (first, end) = (at(span.start), at(last_byte) + 1);
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
