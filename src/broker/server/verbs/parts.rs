//! Versions assembled from several puts.

use std::time::Duration;

use super::{
    publish::{change, discard},
    reply::refuse,
};
use crate::{
    broker::server::{
        admit::Resource,
        state::{
            caller::ConnectionId,
            client::PendingRequest,
            objects::NewVersion,
            root::{Change, DraftKey, State},
        },
    },
    error::{BrokerError, RefusalCode},
    wire::broker::MAX_SEGMENTS,
};

/// Adds a put to its group's draft. Publishes the version once it is complete.
pub(crate) fn join(state: &mut State, id: ConnectionId, put: NewVersion) {
    let (uid, bytes) = (put.uid(), put.bytes());
    let wait = Duration::from_millis(put.header.wait_ms.unwrap_or(0));
    let group = put.header.group.clone().unwrap_or_default();
    let key = DraftKey { name: put.header.name.clone(), group };
    let checked = check(&key, state.drafts.get(&key).map_or(&[], Vec::as_slice), &put);
    // Other puts may have arrived during the upload.
    if let Err(refusal) = checked.and_then(|()| state.objects.users().take(uid, Resource::Bytes, bytes)) {
        discard(state, put);
        return refuse(state, id, refusal);
    }
    let puts = state.drafts.entry(key.clone()).or_default();
    puts.push(put);
    let is_complete = missing(puts).is_empty();
    state.set_request(id, PendingRequest::Parts(key.clone()));
    if is_complete {
        complete(state, &key);
    } else {
        state.effects.deadline(id, state.objects.now.after(wait));
    }
}

fn complete(state: &mut State, key: &DraftKey) {
    let puts = state.drafts.remove(key).unwrap_or_default();
    puts.iter().for_each(|put| state.objects.users().sub(put.uid(), Resource::Bytes, put.bytes()));
    let Some(mut version) = puts.into_iter().reduce(|mut first, put| {
        first.join(put);
        first
    }) else {
        return;
    };
    let announced = &version.header.announced;
    version.parts.sort_by_cached_key(|part| announced.iter().position(|name| *name == part.record.header.name));
    change(state, Change::Put(Box::new(version)));
}

/// Removes a client's put from a draft.
pub(crate) fn withdraw(state: &mut State, id: ConnectionId, key: &DraftKey) {
    let Some(puts) = state.drafts.get_mut(key) else { return };
    let gone: Vec<NewVersion> = puts.extract_if(.., |put| put.makers.contains(&id)).collect();
    if puts.is_empty() {
        state.drafts.remove(key);
    }
    for put in gone {
        state.objects.users().sub(put.uid(), Resource::Bytes, put.bytes());
        discard(state, put);
    }
}

/// Ends a client's wait for the other parts.
pub(crate) fn wait_timed_out(state: &mut State, id: ConnectionId, key: &DraftKey) {
    let missing = state.drafts.get(key).map_or_else(String::new, |puts| missing(puts).join(", "));
    withdraw(state, id, key);
    let message = format!("`{}` is not published: the parts {missing} are missing", key.name);
    refuse(state, id, BrokerError::new(RefusalCode::Timeout, message));
}

fn has(puts: &[NewVersion], part: &str) -> bool {
    puts.iter().flat_map(|put| &put.parts).any(|known| known.record.header.name == part)
}

/// The missing parts, in alphabetical order.
fn missing(puts: &[NewVersion]) -> Vec<&str> {
    let announced = puts.first().map_or(&[][..], |put| &put.header.announced);
    let mut missing: Vec<&str> = announced.iter().map(String::as_str).filter(|part| !has(puts, part)).collect();
    missing.sort_unstable();
    missing
}

/// Checks that a put belongs to a draft with these puts.
fn check(key: &DraftKey, puts: &[NewVersion], put: &NewVersion) -> Result<(), BrokerError> {
    let DraftKey { name, group } = key;
    let Some(first) = puts.first() else { return Ok(()) };
    let (uid, other) = (put.uid(), first.uid());
    let replaced = |put: &NewVersion| (put.header.replace, put.header.if_version);
    if uid != other {
        return refuse!(
            Denied,
            "uid {other} is assembling this version of `{name}`, so uid {uid} can't add parts to it"
        );
    }
    if !same(&first.header.announced, &put.header.announced) {
        return refuse!(Invalid, "other puts of group `{group}` announced different parts");
    }
    if replaced(first) != replaced(put) {
        return refuse!(Invalid, "other puts of group `{group}` replace a different version");
    }
    if first.backend != put.backend {
        return refuse!(Invalid, "other puts of group `{group}` have memory of a different backend");
    }
    if puts.iter().chain([put]).map(NewVersion::all_segments).sum::<usize>() > MAX_SEGMENTS {
        return refuse!(Invalid, "the parts have more than {MAX_SEGMENTS} segments in total, the limit for an object");
    }
    if put.header.metadata.is_some() && puts.iter().any(|put| put.header.metadata.is_some()) {
        return refuse!(Invalid, "another put of group `{group}` already has metadata");
    }
    match put.parts.iter().map(|part| &part.record.header.name).find(|part| has(puts, part)) {
        Some(part) => refuse!(Exists, "part `{part}` has already been put"),
        None => Ok(()),
    }
}

/// Whether two lists without duplicates name the same parts, in any order.
fn same(some: &[String], others: &[String]) -> bool {
    some.len() == others.len() && some.iter().all(|name| others.contains(name))
}
