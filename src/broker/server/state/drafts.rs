//! Versions assembled from several puts.

use std::collections::HashMap;

use super::{objects::NewVersion, refuse};
use crate::{
    error::{BrokerError, RefusalCode},
    wire::broker::MAX_SEGMENTS,
};

/// Identifies a draft.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct DraftKey {
    pub(crate) name: String,
    pub(crate) group: String,
}

/// The puts of each version that still lacks parts. The terms of the first one apply, and the order of the parts that it announced.
pub(crate) type Drafts = HashMap<DraftKey, Vec<NewVersion>>;

fn has(puts: &[NewVersion], part: &str) -> bool {
    puts.iter().flat_map(|put| &put.parts).any(|known| known.record.header.name == part)
}

/// The missing parts, in alphabetical order.
pub(crate) fn missing(puts: &[NewVersion]) -> Vec<&str> {
    let announced = puts.first().map_or(&[][..], |put| &put.header.announced);
    let mut missing: Vec<&str> = announced.iter().map(String::as_str).filter(|part| !has(puts, part)).collect();
    missing.sort_unstable();
    missing
}

/// Checks that a put belongs to a draft with these puts.
pub(crate) fn check(key: &DraftKey, puts: &[NewVersion], put: &NewVersion) -> Result<(), BrokerError> {
    let invalid = |message: String| refuse(RefusalCode::Invalid, message);
    let DraftKey { name, group } = key;
    let Some(first) = puts.first() else { return Ok(()) };
    let (uid, other) = (put.uid(), first.uid());
    if uid != other {
        return refuse(
            RefusalCode::Denied,
            format!("uid {other} is assembling this version of `{name}`, so uid {uid} can't add parts to it"),
        );
    }
    if !same(&first.header.announced, &put.header.announced) {
        return invalid(format!("other puts of group `{group}` announced different parts"));
    }
    let replaced = |put: &NewVersion| (put.header.replace, put.header.if_version);
    if replaced(first) != replaced(put) {
        return invalid(format!("other puts of group `{group}` replace a different version"));
    }
    if first.backend != put.backend {
        return invalid(format!("other puts of group `{group}` have memory of a different backend"));
    }
    if puts.iter().chain([put]).map(NewVersion::all_segments).sum::<usize>() > MAX_SEGMENTS {
        return invalid(format!("the parts have more than {MAX_SEGMENTS} segments in total, the limit for an object"));
    }
    if put.header.metadata.is_some() && puts.iter().any(|put| put.header.metadata.is_some()) {
        return invalid(format!("another put of group `{group}` already has metadata"));
    }
    match put.parts.iter().map(|part| &part.record.header.name).find(|part| has(puts, part)) {
        Some(part) => refuse(RefusalCode::Exists, format!("part `{part}` has already been put")),
        None => Ok(()),
    }
}

/// Whether two lists without duplicates name the same parts, in any order.
fn same(some: &[String], others: &[String]) -> bool {
    some.len() == others.len() && some.iter().all(|name| others.contains(name))
}
