//! Changes of names: puts arrive, alone or as parts of one version; they begin in order, the keeper gets them, then they take effect and are
//! answered.

use std::{os::fd::OwnedFd, time::Duration};

use super::{
    dispatch::{answer, refuse, reply},
    effects::Effect,
    get::published,
};
use crate::{
    broker::{
        request::{self, check_name},
        server::{
            admit::{NOBODY, Resource},
            state::{
                caller::{Caller, ConnectionId},
                objects::NewVersion,
                root::{Change, DraftKey, PendingChange, PendingRequest, State},
            },
        },
    },
    error::{BrokerError, RefusalCode},
    wire::{
        Segments,
        broker::{Delete, Done, MAX_SEGMENTS, Message, Published, PutHeader, Restore, Send, Token},
    },
};

/// Starts a put. `fds` are the descriptors of its tables and first segments.
pub(crate) fn put(state: &mut State, id: ConnectionId, mut put: PutHeader, fds: Vec<OwnedFd>) {
    let Some(caller) = state.caller(id).cloned() else { return state.effects.close_fds(NOBODY, fds) };
    let before = match &put.restore {
        Some(restore) => restored_version(state, id, &put.name, restore).map(Ok),
        None => published_before(state, &caller, &put.name, put.request.as_slice()),
    };
    if let Some(published) = before {
        state.effects.close_fds(caller.uid, fds);
        return answer(state, id, published.map(Message::Published));
    }
    let admitted = request::check(&put).and_then(|backend| {
        let sizes = std::mem::take(&mut put.sizes);
        let version = NewVersion::new(put, backend, &caller);
        state.objects.check_put(&caller, &version)?;
        state.objects.users.take(caller.uid, Resource::Descriptors, version.record.descriptors() as u64)?;
        Ok((version, sizes))
    });
    let (mut version, sizes) = match admitted {
        Ok(admitted) => admitted,
        Err(refusal) => {
            state.effects.close_fds(caller.uid, fds);
            return refuse(state, id, refusal);
        }
    };
    let mut fds = fds.into_iter();
    let tables = version.take_tables(&mut fds);
    let segments = version.take_segments(sizes.into_iter().zip(fds), state.emulated);
    if let Err(refusal) = tables.and(segments) {
        discard(state, version);
        return refuse(state, id, refusal);
    }
    if version.arrived() == version.segments() {
        return finish_put(state, id, version);
    }
    state.set_request(id, PendingRequest::Upload { version: Box::new(version), problem: None });
    state.effects.deadline(id, state.objects.now.after(state.timeout));
    reply(state, id, &Message::Send(Send {}));
}

/// Receives more segments of a put.
pub(crate) fn segments(state: &mut State, id: ConnectionId, segments: Segments, fds: Vec<OwnedFd>) {
    let Some(client) = state.clients.get_mut(&id) else { return state.effects.close_fds(NOBODY, fds) };
    let uid = client.caller.uid;
    let PendingRequest::Upload { version, problem } = &mut client.request else {
        state.effects.close_fds(uid, fds);
        return state.effects.protocol_error(id, "segments arrived, but no put waits for segments");
    };
    let (first, more) = (segments.first, segments.sizes.len());
    let (have, total) = (version.arrived(), version.segments());
    if first != have as u64 || have + more > total {
        state.effects.close_fds(uid, fds);
        let end = first.saturating_add(more as u64);
        return state
            .effects
            .protocol_error(id, format!("segments {first} to {end} arrived, but {have} to {total} were expected"));
    }
    let taken = version.take_segments(segments.sizes.into_iter().zip(fds), state.emulated);
    // The client sends the other segments without waiting for an answer, so a refusal follows the last one.
    if let (Err(refusal), None) = (taken, &problem) {
        *problem = Some(refusal);
    }
    if have + more == total
        && let PendingRequest::Upload { version, problem } = std::mem::take(&mut client.request)
    {
        match problem {
            None => finish_put(state, id, *version),
            Some(refusal) => {
                discard(state, *version);
                refuse(state, id, refusal);
            }
        }
    }
}

/// Publishes a complete put, or adds it to a draft.
fn finish_put(state: &mut State, id: ConnectionId, version: NewVersion) {
    if let Err(refusal) = version.check_sizes() {
        discard(state, version);
        return refuse(state, id, refusal);
    }
    if version.header.announced.len() > version.record.parts.len() {
        return join(state, id, version);
    }
    change(state, Change::Put(Box::new(version)));
}

// Versions of several puts.

/// Adds a put to its group's draft. Publishes the version once it is complete.
fn join(state: &mut State, id: ConnectionId, put: NewVersion) {
    let (uid, bytes) = (put.record.payer(), put.record.charged());
    let wait = Duration::from_millis(put.header.wait_ms.unwrap_or(0));
    let group = put.header.group.clone().unwrap_or_default();
    let key = DraftKey { name: put.header.name.clone(), group };
    let checked = check_part(&key, state.drafts.get(&key).map_or(&[], Vec::as_slice), &put);
    // Other puts may have arrived during the upload.
    if let Err(refusal) = checked.and_then(|()| state.objects.users.take(uid, Resource::Bytes, bytes)) {
        discard(state, put);
        return refuse(state, id, refusal);
    }
    let puts = state.drafts.entry(key.clone()).or_default();
    puts.push(put);
    let is_complete = missing(puts).is_empty();
    state.set_request(id, PendingRequest::Parts(key.clone()));
    if is_complete {
        join_all(state, &key);
    } else {
        state.effects.deadline(id, state.objects.now.after(wait));
    }
}

fn join_all(state: &mut State, key: &DraftKey) {
    let puts = state.drafts.remove(key).unwrap_or_default();
    puts.iter().for_each(|put| state.objects.users.sub(put.record.payer(), Resource::Bytes, put.record.charged()));
    let Some(mut version) = puts.into_iter().reduce(|mut first, put| {
        first.join(put);
        first
    }) else {
        return;
    };
    version.sort();
    change(state, Change::Put(Box::new(version)));
}

/// Removes a client's put from a draft.
pub(crate) fn withdraw_part(state: &mut State, id: ConnectionId, key: &DraftKey) {
    let Some(puts) = state.drafts.get_mut(key) else { return };
    let gone: Vec<NewVersion> = puts.extract_if(.., |put| put.makers.contains(&id)).collect();
    if puts.is_empty() {
        state.drafts.remove(key);
    }
    for put in gone {
        state.objects.users.sub(put.record.payer(), Resource::Bytes, put.record.charged());
        discard(state, put);
    }
}

/// Ends a client's wait for the other parts.
pub(crate) fn parts_timed_out(state: &mut State, id: ConnectionId, key: &DraftKey) {
    let missing = state.drafts.get(key).map_or_else(String::new, |puts| missing(puts).join(", "));
    withdraw_part(state, id, key);
    let message = format!("`{}` is not published: the parts {missing} are missing", key.name);
    refuse(state, id, BrokerError::new(RefusalCode::Timeout, message));
}

fn has(puts: &[NewVersion], part: &str) -> bool {
    puts.iter().flat_map(|put| &put.record.parts).any(|known| known.header.name == part)
}

/// The missing parts, in alphabetical order.
fn missing(puts: &[NewVersion]) -> Vec<&str> {
    let announced = puts.first().map_or(&[][..], |put| &put.header.announced);
    let mut missing: Vec<&str> = announced.iter().map(String::as_str).filter(|part| !has(puts, part)).collect();
    missing.sort_unstable();
    missing
}

/// Checks that a put belongs to a draft with these puts.
fn check_part(key: &DraftKey, puts: &[NewVersion], put: &NewVersion) -> Result<(), BrokerError> {
    let DraftKey { name, group } = key;
    let Some(first) = puts.first() else { return Ok(()) };
    let (uid, other) = (put.record.payer(), first.record.payer());
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
    if first.record.backend != put.record.backend {
        return refuse!(Invalid, "other puts of group `{group}` have memory of a different backend");
    }
    if puts.iter().chain([put]).map(NewVersion::segments).sum::<usize>() > MAX_SEGMENTS {
        return refuse!(Invalid, "the parts have more than {MAX_SEGMENTS} segments in total, the limit for an object");
    }
    if put.record.metadata.is_some() && puts.iter().any(|put| put.record.metadata.is_some()) {
        return refuse!(Invalid, "another put of group `{group}` already has metadata");
    }
    match put.record.parts.iter().map(|part| &part.header.name).find(|part| has(puts, part)) {
        Some(part) => refuse!(Exists, "part `{part}` has already been put"),
        None => Ok(()),
    }
}

/// Whether two lists without duplicates name the same parts, in any order.
fn same(some: &[String], others: &[String]) -> bool {
    some.len() == others.len() && some.iter().all(|name| others.contains(name))
}

// Changes in order.

pub(crate) fn delete(state: &mut State, id: ConnectionId, delete: Delete) {
    match check_name(&delete.name) {
        Ok(()) => change(state, Change::Delete(id, delete)),
        Err(refusal) => refuse(state, id, refusal),
    }
}

/// Begins a change of a name. If a put of the name is pending, the change waits for it.
fn change(state: &mut State, change: Change) {
    let (name, makers) = match &change {
        Change::Put(put) => (&put.header.name, put.makers.as_slice()),
        Change::Delete(id, delete) => (&delete.name, std::slice::from_ref(id)),
    };
    makers.iter().for_each(|id| state.set_request(*id, PendingRequest::Change));
    if state.objects.is_pending(name) {
        return state.changes.waiting.entry(name.clone()).or_default().push_back(change);
    }
    match change {
        Change::Put(put) => begin_put(state, *put),
        Change::Delete(id, delete) => {
            let Some(client) = state.clients.get(&id) else { return };
            let deleted = state.objects.delete(&client.caller, &delete.name, delete.request);
            answer_when_safe(state, id, deleted);
        }
    }
}

/// Gives a version to the keeper.
fn begin_put(state: &mut State, mut put: NewVersion) {
    let (name, restore) = (put.header.name.clone(), put.header.restore.clone());
    // The name's former owner may still restore it, and the broker no longer knows the owner.
    let is_new = restore.is_none() && state.objects.current_key(&name).is_none();
    if state.changes.reserves_names && is_new {
        return state.changes.waiting.entry(name).or_default().push_back(Change::Put(Box::new(put)));
    }
    let makers = std::mem::take(&mut put.makers);
    let Some(caller) = makers.iter().find_map(|id| state.caller(*id)).cloned() else {
        return discard(state, put);
    };
    // The first attempt of this request may have been completed meanwhile.
    if let Some(published) = published_before(state, &caller, &name, &put.record.requests) {
        discard(state, put);
        return reply_to_makers(state, &makers, &published);
    }
    state.objects.users.sub(put.record.payer(), Resource::Descriptors, put.record.descriptors() as u64);
    match state.objects.stage(&caller, put) {
        Ok(key) => {
            let mark = state.objects.store.mark();
            state.changes.pending.push_back((mark, PendingChange::Put { key, name, makers, restore }));
            state.effects.push(Effect::Store);
        }
        Err(refusal) => {
            // Another reader may have restored the version first.
            let other = restore.and_then(|of| restored_version(state, caller.connection, &name, &of));
            reply_to_makers(state, &makers, &other.ok_or(refusal));
        }
    }
}

/// Answers a request once the keeper has its changes.
pub(crate) fn answer_when_safe(state: &mut State, id: ConnectionId, result: Result<(), BrokerError>) {
    if let Err(refusal) = result {
        answer(state, id, Err(refusal));
        return state.effects.push(Effect::Listen(id));
    }
    state.set_request(id, PendingRequest::Change);
    let mark = state.objects.store.mark();
    state.changes.pending.push_back((mark, PendingChange::Request(id)));
    state.effects.push(Effect::Store);
}

/// Completes the changes that are safe: see [`Store::is_safe`](crate::broker::keeper::Store::is_safe). Returns whether there were any.
pub(crate) fn complete_safe(state: &mut State) -> bool {
    let mut any = false;
    let is_confirmed = |state: &State| {
        let first = state.changes.pending.front();
        first.is_some_and(|(mark, _)| state.objects.store.is_safe(*mark))
    };
    while is_confirmed(state) {
        let Some((_, change)) = state.changes.pending.pop_front() else { break };
        any = true;
        match change {
            PendingChange::Request(id) => {
                answer(state, id, Ok(Message::Done(Done {})));
                state.effects.push(Effect::Listen(id));
            }
            PendingChange::Put { key, name, makers, restore } => {
                publish(state, key, &name, &makers, restore.as_ref());
                continue_changes(state, name);
            }
        }
    }
    any
}

/// Begins the changes that waited for a put of this name, up to the next put.
fn continue_changes(state: &mut State, name: String) {
    let mut waiting = state.changes.waiting.remove(&name).unwrap_or_default();
    while !state.objects.is_pending(&name)
        && let Some(next) = waiting.pop_front()
    {
        change(state, next);
    }
    if !waiting.is_empty() {
        state.changes.waiting.entry(name).or_default().extend(waiting);
    }
}

/// Drops the puts of a closed connection that have not begun.
pub(crate) fn withdraw_changes(state: &mut State, id: ConnectionId) {
    let clients = &state.clients;
    let is_abandoned =
        |put: &NewVersion| put.makers.contains(&id) && !put.makers.iter().any(|id| clients.contains_key(id));
    let mut abandoned = Vec::new();
    for changes in state.changes.waiting.values_mut() {
        for change in std::mem::take(changes) {
            match change {
                Change::Put(put) if is_abandoned(&put) => abandoned.push(*put),
                change => changes.push_back(change),
            }
        }
    }
    abandoned.into_iter().for_each(|put| discard(state, put));
}

/// Gives up a put that has not begun.
pub(crate) fn discard(state: &mut State, put: NewVersion) {
    state.objects.users.sub(put.record.payer(), Resource::Descriptors, put.record.descriptors() as u64);
    state.effects.close_fds(put.record.payer(), put.into_fds());
}

/// Stops reserving names for clients that restore lost objects, and continues the waiting puts.
pub(crate) fn end_reservation(state: &mut State) {
    state.changes.reserves_names = false;
    let names: Vec<String> = state.changes.waiting.keys().cloned().collect();
    names.into_iter().for_each(|name| continue_changes(state, name));
}

fn publish(state: &mut State, key: u64, name: &str, makers: &[ConnectionId], restore: Option<&Restore>) {
    let caller = makers.iter().find_map(|id| state.caller(*id)).cloned();
    let maker = caller.as_ref().map(|caller| caller.connection);
    let Some(version) = state.objects.publish(key, maker) else { return };
    if let (Some(caller), Some(restore)) = (caller, restore) {
        state.objects.restore_leases(&caller, key, &restore.leases);
    }
    reply_to_makers(state, makers, &Ok(version));
    published(state, name);
}

/// The version that an earlier attempt of these requests has published: a client repeats a put if it did not receive the answer.
fn published_before(
    state: &mut State,
    caller: &Caller,
    name: &str,
    requests: &[Token],
) -> Option<Result<Published, BrokerError>> {
    let find = |request: &Token| state.objects.published_before(caller, name, *request).transpose();
    let published = requests.iter().find_map(find)?;
    // If the name's lifetime depends on its maker, it now depends on this connection.
    if published.is_ok() {
        state.objects.resume(caller, &[], requests);
    }
    Some(published)
}

/// Gives a client its leases of a version that another client has already restored, if it may restore the version itself.
fn restored_version(state: &mut State, id: ConnectionId, name: &str, restore: &Restore) -> Option<Published> {
    let client = state.clients.get(&id)?;
    let key = state.objects.restored(&client.caller, name, restore)?;
    state.objects.restore_leases(&client.caller, key, &restore.leases);
    Some(Published { version: restore.version, id: restore.id.clone() })
}

fn reply_to_makers(state: &mut State, makers: &[ConnectionId], result: &Result<Published, BrokerError>) {
    for id in makers {
        answer(state, *id, result.clone().map(Message::Published));
        state.effects.push(Effect::Listen(*id));
    }
}
