//! Drafts: versions assembled from several puts.

use std::collections::HashMap;

use super::{
    caller::ConnectionId,
    objects::{NewPart, NewTable, NewVersion, Terms},
    refuse,
};
use crate::{
    error::{BrokerError, RefusalCode},
    wire::broker::{MAX_SEGMENTS, Token},
};

/// Identifies a draft.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct DraftKey {
    pub(crate) name: String,
    pub(crate) group: String,
}

pub(crate) type Drafts = HashMap<DraftKey, Draft>;

/// A version that still lacks parts.
#[derive(Debug)]
pub(crate) struct Draft {
    pub(crate) uid: u32,
    /// In the order of the first put, which is the order of the version's parts.
    pub(crate) announced: Vec<String>,
    pub(crate) terms: Terms,
    pub(crate) metadata: Option<(ConnectionId, NewTable)>,
    pub(crate) puts: Vec<(ConnectionId, Vec<NewPart>)>,
    /// Tokens of the puts.
    pub(crate) requests: Vec<(ConnectionId, Token)>,
}

/// A put of some parts of a version.
#[derive(Debug)]
pub(crate) struct DraftPut {
    pub(crate) announced: Vec<String>,
    pub(crate) version: NewVersion,
}

/// Bytes of memory and tables, as claimed.
pub(crate) fn bytes_of(parts: &[NewPart]) -> u64 {
    parts.iter().map(NewPart::bytes).sum()
}

/// Upper bound of the descriptors of parts: segments and tables.
pub(crate) fn descriptors_of(parts: &[NewPart]) -> usize {
    parts.iter().map(|part| part.segments.len() + 1).sum()
}

impl Draft {
    pub(crate) fn new(uid: u32, announced: &[String], terms: &Terms) -> Self {
        Self {
            uid,
            announced: announced.to_vec(),
            terms: Terms { requests: Vec::new(), ..terms.clone() },
            metadata: None,
            puts: Vec::new(),
            requests: Vec::new(),
        }
    }

    fn has(&self, part: &str) -> bool {
        self.puts.iter().flat_map(|(_, parts)| parts).any(|known| known.name == part)
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.announced.iter().all(|part| self.has(part))
    }

    /// Missing parts, in alphabetical order.
    pub(crate) fn missing(&self) -> Vec<&str> {
        let mut missing: Vec<&str> = self.announced.iter().map(String::as_str).filter(|part| !self.has(part)).collect();
        missing.sort_unstable();
        missing
    }

    /// Adds a checked put.
    pub(crate) fn add(&mut self, connection: ConnectionId, share: DraftPut) {
        let NewVersion { terms, metadata, parts } = share.version;
        if let Some(metadata) = metadata {
            self.metadata = Some((connection, metadata));
        }
        self.puts.push((connection, parts));
        self.requests.extend(terms.requests.iter().map(|request| (connection, *request)));
    }

    /// Checks that a user's put belongs to this draft.
    pub(crate) fn check(&self, key: &DraftKey, uid: u32, share: &DraftPut) -> Result<(), BrokerError> {
        let invalid = |message: String| refuse(RefusalCode::Invalid, message);
        let DraftKey { name, group } = key;
        let NewVersion { terms, metadata, parts } = &share.version;
        let count = |parts: &[NewPart]| parts.iter().map(|part| part.segments.len()).sum::<usize>();
        if self.uid != uid {
            return refuse(
                RefusalCode::Denied,
                format!("uid {} is assembling this version of `{name}`, so uid {uid} can't add parts to it", self.uid),
            );
        }
        if !same(&self.announced, &share.announced) {
            return invalid(format!("other puts of group `{group}` announced different parts"));
        }
        if (self.terms.replace, self.terms.if_version) != (terms.replace, terms.if_version) {
            return invalid(format!("other puts of group `{group}` replace a different version"));
        }
        if self.terms.backend != terms.backend {
            return invalid(format!("other puts of group `{group}` have memory of a different backend"));
        }
        if self.puts.iter().map(|(_, parts)| count(parts)).sum::<usize>() + count(parts) > MAX_SEGMENTS {
            return invalid(format!(
                "the parts have more than {MAX_SEGMENTS} segments in total, the limit for an object"
            ));
        }
        if metadata.is_some() && self.metadata.is_some() {
            return invalid(format!("another put of group `{group}` already has metadata"));
        }
        match parts.iter().find(|part| self.has(&part.name)) {
            Some(part) => refuse(RefusalCode::Exists, format!("part `{}` has already been put", part.name)),
            None => Ok(()),
        }
    }
}

/// Whether two lists without duplicates name the same parts, in any order.
fn same(some: &[String], others: &[String]) -> bool {
    some.len() == others.len() && some.iter().all(|name| others.contains(name))
}
