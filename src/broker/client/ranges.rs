//! Finds the bytes of arrays in a version's parts.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
};

use super::{holdings::PartHeader, lease::quoting};
use crate::{
    broker::request::short,
    driver::GRANULARITY,
    error::{RefusalCode, Result},
    wire::ByteRange,
};

/// The most ranges of one request. Its record has room for them.
const MAX_RANGES: usize = 512;

/// The most arrays that an error lists.
const MAX_LISTED: usize = 8;

/// The bytes of arrays, by part. If several parts have an array, the first does.
pub(super) fn ranges_of(
    object: &str,
    names: &[String],
    parts: &[&PartHeader],
) -> Result<BTreeMap<String, Vec<ByteRange>>> {
    let mut wanted: BTreeSet<&str> = names.iter().map(String::as_str).collect();
    let mut found = Vec::new();
    let (mut present, mut all) = (Vec::new(), 0);
    for part in parts {
        all += part.arrays.len();
        present.extend(part.arrays.iter().take(MAX_LISTED - present.len()).map(|entry| short(&entry.name)));
        let arrays = part.arrays.iter().filter(|entry| wanted.remove(entry.name.as_str()));
        let spans = arrays.map(|entry| entry.array.span()).collect::<Result<Vec<_>>>()?;
        if !spans.is_empty() {
            found.push((part, spans));
        }
    }
    if !wanted.is_empty() {
        let missing: Vec<String> = wanted.iter().take(MAX_LISTED).map(short).collect();
        let more = if all > present.len() { ", ..." } else { "" };
        let present = match all {
            0 => "it has no arrays".to_owned(),
            _ => format!("its arrays are {}{more} ({all} in all)", present.join(", ")),
        };
        let message = format!("`{object}` has no array {}; {present}", missing.join(", "));
        return Err(quoting(RefusalCode::Lacks, message));
    }
    let most = (MAX_RANGES / found.len().max(1)).max(1);
    Ok(found.into_iter().map(|(part, spans)| (part.name.clone(), merge(spans, part.description.size, most))).collect())
}

/// Merges byte ranges to at most `most`. Segments are multiples of the granularity, so ranges in adjacent units need no separate request. If
/// there are too many, larger units cover more bytes than needed.
fn merge(mut spans: Vec<Range<u64>>, size: u64, most: usize) -> Vec<ByteRange> {
    spans.sort_unstable_by_key(|span| span.start);
    let mut unit = GRANULARITY;
    loop {
        let mut merged: Vec<Range<u64>> = Vec::new();
        for span in &spans {
            // An empty array needs a byte too.
            let first = span.start.min(size.saturating_sub(1));
            let start = first / unit * unit;
            let end = span.end.max(first + 1).div_ceil(unit).saturating_mul(unit);
            match merged.last_mut() {
                Some(last) if start <= last.end => last.end = last.end.max(end),
                _ => merged.push(start..end),
            }
        }
        if merged.len() <= most {
            let range = |span: Range<u64>| ByteRange { offset: span.start, length: span.end.min(size) - span.start };
            return merged.into_iter().map(range).collect();
        }
        unit *= 2;
    }
}
