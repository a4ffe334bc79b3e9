//! Gets: leases existing objects, waits for missing ones, grants claims on objects that nobody is making yet.

use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

use super::{
    effects::{Effect, Effects, Outgoing, Step, Work, work},
    reply::{count, end_request, refuse, reply},
};
use crate::{
    broker::{
        name::{check_component, check_name},
        server::state::{
            caller::ConnectionId,
            claims::Claims,
            client::PendingRequest,
            objects::{LeaseParts, Objects, Selected, Selection, TableQuery},
            root::State,
            waits::PendingGet,
        },
    },
    error::{BrokerError, RefusalCode},
    wire::{
        MAX_FDS, Segments,
        broker::{ClaimHeader, Claimed, GetHeader, Message, Token},
    },
};

/// Starts a get.
pub(crate) fn get(state: &mut State, effects: &mut Effects, id: ConnectionId, get: GetHeader) {
    match check(&get) {
        Ok(()) => try_get(state, effects, id, PendingGet { get, answers: HashMap::new(), deadline: None }),
        Err(refusal) => refuse(state, effects, id, refusal),
    }
}

/// The state of a get.
enum Lookup {
    /// All objects exist.
    All(Vec<Selection>),
    /// Tables must be read first.
    Query(VecDeque<(usize, TableQuery)>),
    /// This object does not exist.
    Absent(String),
}

/// Answers a get, or waits.
fn try_get(state: &mut State, effects: &mut Effects, id: ConnectionId, waiting: PendingGet) {
    match find(state, id, &waiting) {
        Err(refusal) => refuse_get(state, effects, id, refusal),
        Ok(Lookup::All(selections)) => send_leases(state, effects, id, &selections),
        Ok(Lookup::Query(queries)) => start_query(state, effects, id, waiting, queries),
        Ok(Lookup::Absent(name)) => absent(state, effects, id, waiting, &name),
    }
}

fn find(state: &State, id: ConnectionId, waiting: &PendingGet) -> Result<Lookup, BrokerError> {
    let Some(caller) = state.caller(id) else { return Ok(Lookup::All(Vec::new())) };
    let (mut selections, mut queries) = (Vec::new(), VecDeque::new());
    for (at, object) in waiting.get.objects.iter().enumerate() {
        match state.objects.select(caller, object, waiting.answers.get(&at))? {
            Selected::Ready(selection) => selections.push(selection),
            Selected::Query(query) => queries.push_back((at, query)),
            Selected::Absent => return Ok(Lookup::Absent(object.name.clone())),
        }
    }
    Ok(if queries.is_empty() { Lookup::All(selections) } else { Lookup::Query(queries) })
}

/// Refuses a get that may have waited.
fn refuse_get(state: &mut State, effects: &mut Effects, id: ConnectionId, refusal: BrokerError) {
    state.waits.remove(id);
    refuse(state, effects, id, refusal);
}

/// Reads tables: small ones here, others in the worker.
fn start_query(
    state: &mut State,
    effects: &mut Effects,
    id: ConnectionId,
    waiting: PendingGet,
    queries: VecDeque<(usize, TableQuery)>,
) {
    let Some(uid) = state.caller(id).map(|caller| caller.uid) else { return };
    let small = queries.iter().all(|(_, query)| query.is_small());
    state.set_request(id, PendingRequest::Worker { stopped: false });
    let job = Box::new(move || read_table(id, waiting, queries));
    work(state, effects, small, Work { client: id, uid, reserved: 0, job });
}

/// Reads one table for a get. The next table follows in the user's next turn.
fn read_table(id: ConnectionId, mut waiting: PendingGet, mut queries: VecDeque<(usize, TableQuery)>) -> Step {
    let mut refusal = None;
    if let Some((at, query)) = queries.front_mut() {
        match query.step() {
            Ok(None) => {}
            Ok(Some(answer)) => {
                waiting.answers.insert(*at, answer);
                queries.pop_front();
            }
            Err(error) => refusal = Some(error),
        }
    }
    if refusal.is_none() && !queries.is_empty() {
        return Step::More(Box::new(move || read_table(id, waiting, queries)));
    }
    Step::Done(Box::new(move |state, effects| {
        state.set_request(id, PendingRequest::None);
        match refusal {
            Some(refusal) => refuse_get(state, effects, id, refusal),
            None => try_get(state, effects, id, waiting),
        }
        effects.push(Effect::Listen(id));
    }))
}

/// Handles a missing object: grants the claim, waits, or refuses.
fn absent(state: &mut State, effects: &mut Effects, id: ConnectionId, mut waiting: PendingGet, name: &str) {
    let Some(client) = state.clients.get(&id) else { return };
    if let Some(claim) = &waiting.get.claim {
        let allowed = state.objects.check_claim(&client.caller, name);
        match allowed.and_then(|()| state.claims.grant(name, &client.caller, claim, state.objects.now.ms)) {
            Ok(None) => {}
            Ok(Some(token)) => {
                state.waits.remove(id);
                return reply(state, effects, id, &Message::Claimed(Claimed { token }));
            }
            Err(refusal) => return refuse_get(state, effects, id, refusal),
        }
    }
    let Some(wait) = waiting.get.wait_ms else {
        let refusal = BrokerError::new(RefusalCode::Absent, why_absent(&state.claims, &waiting, name));
        return refuse(state, effects, id, refusal);
    };
    state.waits.add(id, &waiting.get);
    // The deadline may have passed while tables were read.
    let deadline = *waiting.deadline.get_or_insert_with(|| state.objects.now.after(Duration::from_millis(wait)));
    state.set_request(id, PendingRequest::Object(Box::new(waiting)));
    effects.deadline(id, deadline);
}

/// Names the holder of a claim, for which the caller may have waited: another user may hold it for long.
fn why_absent(claims: &Claims, waiting: &PendingGet, name: &str) -> String {
    let object = waiting.get.objects.iter().find(|object| object.name == name);
    let mut why = match object.map(|object| (object.version, object.newer_than)) {
        Some((Some(version), _)) => format!("there is no version {version} of `{name}`"),
        Some((None, Some(older))) => format!("there is no version of `{name}` after {older}"),
        _ => format!("there is no object `{name}`"),
    };
    if let Some((pid, uid)) = claims.holder(name) {
        why += &format!(", and pid {pid} of uid {uid} has claimed it");
    }
    why
}

pub(crate) fn end_wait(state: &mut State, effects: &mut Effects, id: ConnectionId, code: RefusalCode) {
    let Some(client) = state.clients.get_mut(&id) else { return };
    let PendingRequest::Object(waiting) = std::mem::take(&mut client.request) else { return };
    let objects = &waiting.get.objects;
    let missing =
        objects.iter().find(|object| state.objects.find(&object.name, object.version, object.newer_than).is_none());
    let name = missing.or(objects.first()).map_or("", |object| object.name.as_str());
    let why = why_absent(&state.claims, &waiting, name);
    let message = match code {
        RefusalCode::Timeout => why,
        _ => format!("{why}: the wait was stopped"),
    };
    refuse_get(state, effects, id, BrokerError::new(code, message));
}

/// Handles a new version: releases claims on the name, and answers waiting gets.
pub(crate) fn published(state: &mut State, effects: &mut Effects, name: &str) {
    state.claims.release_all(name);
    wake(state, effects, name);
}

/// Retries the gets that wait for a name.
fn wake(state: &mut State, effects: &mut Effects, name: &str) {
    for id in state.waits.of(name) {
        // If a client's tables are being read, its get is retried after that.
        let idle = |client: &&mut crate::broker::server::state::client::ClientState| {
            matches!(client.request, PendingRequest::Object(_))
        };
        let Some(client) = state.clients.get_mut(&id).filter(idle) else { continue };
        let PendingRequest::Object(waiting) = std::mem::take(&mut client.request) else { continue };
        try_get(state, effects, id, *waiting);
        effects.push(Effect::Listen(id));
    }
}

/// Releases a client's claim.
pub(crate) fn end_claim(state: &mut State, effects: &mut Effects, id: ConnectionId, token: Token) {
    if let Some(name) = state.claims.end(id, token) {
        wake(state, effects, &name);
    }
}

/// Releases all claims of a disconnected client.
pub(crate) fn end_claims(state: &mut State, effects: &mut Effects, id: ConnectionId) {
    for name in state.claims.release_connection(id) {
        wake(state, effects, &name);
    }
}

/// Leases all selections, or none, and sends the leases.
fn send_leases(state: &mut State, effects: &mut Effects, id: ConnectionId, selections: &[Selection]) {
    state.waits.remove(id);
    let Some(caller) = state.caller(id).cloned() else { return };
    let mut tokens = Vec::with_capacity(selections.len());
    let mut records = Vec::with_capacity(selections.len());
    let given = selections.iter().try_for_each(|selection| {
        let token = state.objects.lease(&caller, selection.key, selection.bytes)?;
        tokens.push(token);
        records.extend(lease_records(&state.objects, token, selection)?);
        Ok(())
    });
    if let Err(refusal) = given {
        tokens.into_iter().for_each(|token| state.objects.end_lease(token));
        return refuse(state, effects, id, refusal);
    }
    count(state, effects, id, "ok");
    end_request(state, effects, id);
    if let Some(client) = state.clients.get_mut(&id) {
        client.leases.extend(&tokens);
        client.sending = tokens;
        effects.push(Effect::Send { client: id, records });
    }
}

fn lease_records(objects: &Objects, token: Token, selection: &Selection) -> Result<Vec<Outgoing>, BrokerError> {
    let gone = || BrokerError::new(RefusalCode::Absent, "the version is gone");
    let LeaseParts { mut header, tables, segments } = objects.describe_lease(token, selection).ok_or_else(gone)?;
    let (first, rest) = segments.split_at(segments.len().min(MAX_FDS - tables.len()));
    header.sizes = first.iter().map(|(_, size)| *size).collect();
    let fds = tables.into_iter().chain(first.iter().map(|(id, _)| *id)).collect();
    let long = |error: crate::error::Error| {
        let message = format!("the answer does not fit one record ({error}): request fewer parts or arrays at once");
        BrokerError::new(RefusalCode::Invalid, message)
    };
    let mut records = vec![Outgoing::of(&Message::Lease(Box::new(header)), fds).map_err(long)?];
    let mut at = first.len();
    for some in rest.chunks(MAX_FDS) {
        let sizes = some.iter().map(|(_, size)| *size).collect();
        let message = Message::Segments(Segments { first: at as u64, sizes });
        records.push(Outgoing::of(&message, some.iter().map(|(id, _)| *id).collect()).map_err(long)?);
        at += some.len();
    }
    Ok(records)
}

fn check(get: &GetHeader) -> Result<(), BrokerError> {
    let invalid = |message: &str| Err(BrokerError::new(RefusalCode::Invalid, message));
    if get.objects.is_empty() {
        return invalid("a get must name at least one object");
    }
    for object in &get.objects {
        check_name(&object.name)?;
        if object.range.is_some() && object.arrays.is_some() {
            return invalid("a get can request a range or arrays, not both");
        }
        if object.parts.as_ref().is_some_and(Vec::is_empty) || object.arrays.as_ref().is_some_and(Vec::is_empty) {
            return invalid("a get must request at least one part and one array of an object, or omit the list");
        }
    }
    if let Some(ClaimHeader { part, group }) = &get.claim {
        if get.objects.len() > 1 {
            return invalid("a claim requires exactly one object");
        }
        if part.is_some() != group.is_some() {
            return invalid("a claim on a part requires a group, and a claim on the whole object must not have one");
        }
        part.iter().try_for_each(|part| check_component("part", part))?;
        group.iter().try_for_each(|group| check_component("group", group))?;
    }
    Ok(())
}
