//! Gets and leases: leases existing objects, waits for missing ones, grants claims on objects that nobody is making yet; ends, resumes and
//! recalls leases.

use std::time::Duration;

use super::{
    dispatch::{count, end_request, refuse, reply},
    effects::{Effect, Outgoing},
    put::answer_when_safe,
};
use crate::{
    broker::{
        request::{check_component, check_name},
        server::state::{
            caller::ConnectionId,
            claims::Claims,
            objects::{Objects, Selection},
            root::{PendingGet, PendingRequest, State},
        },
    },
    error::{BrokerError, RefusalCode},
    wire::{
        MAX_FDS, Segments,
        broker::{
            ClaimHeader, Claimed, GetHeader, Message, Recall, ReportHeader, Resume, Resumed, ResumedLease, Token,
        },
    },
};

pub(crate) fn get(state: &mut State, id: ConnectionId, get: GetHeader) {
    match check(&get) {
        Ok(()) => try_get(state, id, PendingGet { get, deadline: None }),
        Err(refusal) => refuse(state, id, refusal),
    }
}

/// Answers a get, or waits.
fn try_get(state: &mut State, id: ConnectionId, waiting: PendingGet) {
    let Some(caller) = state.caller(id) else { return };
    let mut selections = Vec::with_capacity(waiting.get.objects.len());
    for object in &waiting.get.objects {
        match state.objects.select(caller, object) {
            Ok(Some(selection)) => selections.push(selection),
            Ok(None) => {
                let name = object.name.clone();
                return absent(state, id, waiting, &name);
            }
            Err(refusal) => return refuse(state, id, refusal),
        }
    }
    send_leases(state, id, &selections);
}

/// Handles a missing object: grants the claim, waits, or refuses.
fn absent(state: &mut State, id: ConnectionId, mut waiting: PendingGet, name: &str) {
    let Some(client) = state.clients.get(&id) else { return };
    if let Some(claim) = &waiting.get.claim {
        let now_ms = state.objects.now.ms;
        let allowed = state.objects.check_claim(&client.caller, name);
        let users = &mut state.objects.users;
        match allowed.and_then(|()| state.claims.grant(users, name, &client.caller, claim, now_ms)) {
            Ok(None) => {}
            Ok(Some(token)) => return reply(state, id, &Message::Claimed(Claimed { token })),
            Err(refusal) => return refuse(state, id, refusal),
        }
    }
    let Some(wait) = waiting.get.wait_ms else {
        let refusal = BrokerError::new(RefusalCode::Absent, why_absent(&state.claims, &waiting, name));
        return refuse(state, id, refusal);
    };
    state.waits.add(id, &waiting.get);
    let deadline = *waiting.deadline.get_or_insert_with(|| state.objects.now.after(Duration::from_millis(wait)));
    state.set_request(id, PendingRequest::Object(Box::new(waiting)));
    state.effects.deadline(id, deadline);
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

pub(crate) fn wait_timed_out(state: &mut State, id: ConnectionId) {
    let Some(client) = state.clients.get_mut(&id) else { return };
    let PendingRequest::Object(waiting) = std::mem::take(&mut client.request) else { return };
    state.waits.remove(id, &waiting.get);
    let objects = &waiting.get.objects;
    let missing =
        objects.iter().find(|object| state.objects.find(&object.name, object.version, object.newer_than).is_none());
    let name = missing.or(objects.first()).map_or("", |object| object.name.as_str());
    let why = why_absent(&state.claims, &waiting, name);
    refuse(state, id, BrokerError::new(RefusalCode::Timeout, why));
}

/// Handles a new version: releases claims on the name, and answers waiting gets.
pub(crate) fn published(state: &mut State, name: &str) {
    state.claims.release_all(&mut state.objects.users, name);
    wake(state, name);
}

/// Retries the gets that wait for a name.
fn wake(state: &mut State, name: &str) {
    for id in state.waits.of(name) {
        let Some(client) = state.clients.get_mut(&id) else { continue };
        let PendingRequest::Object(waiting) = std::mem::take(&mut client.request) else { continue };
        state.waits.remove(id, &waiting.get);
        try_get(state, id, *waiting);
        state.effects.push(Effect::Listen(id));
    }
}

/// Ends a claim of a client, or all of its claims.
pub(crate) fn end_claims(state: &mut State, id: ConnectionId, token: Option<Token>) {
    for name in state.claims.end(&mut state.objects.users, id, token) {
        wake(state, &name);
    }
}

/// Leases all selections, or none, and sends the leases.
fn send_leases(state: &mut State, id: ConnectionId, selections: &[Selection]) {
    let Some(caller) = state.caller(id).cloned() else { return };
    let (mut tokens, mut granted) = (Vec::with_capacity(selections.len()), Vec::new());
    let mut records = Vec::with_capacity(selections.len());
    let given = selections.iter().try_for_each(|selection| {
        let token = match selection.lease {
            Some(token) => token,
            None => state.objects.lease(&caller, selection.key, selection.bytes).inspect(|new| granted.push(*new))?,
        };
        tokens.push(token);
        records.extend(lease_records(&state.objects, token, selection)?);
        Ok(())
    });
    if let Err(refusal) = given {
        granted.into_iter().for_each(|token| state.objects.end_lease(token));
        return refuse(state, id, refusal);
    }
    selections.iter().zip(&tokens).for_each(|(of, token)| state.objects.extend_lease(*token, of.bytes));
    count(state, id, "ok");
    end_request(state, id);
    if let Some(client) = state.clients.get_mut(&id) {
        client.sending = tokens;
        state.effects.push(Effect::Send { client: id, records });
    }
}

fn lease_records(objects: &Objects, token: Token, selection: &Selection) -> Result<Vec<Outgoing>, BrokerError> {
    let gone = || BrokerError::new(RefusalCode::Absent, "the version is gone");
    let (mut header, tables, segments) = objects.describe_lease(token, selection).ok_or_else(gone)?;
    let (first, rest) = segments.split_at(segments.len().min(MAX_FDS - tables.len()));
    header.sizes = first.iter().map(|(_, size)| *size).collect();
    let fds = tables.into_iter().chain(first.iter().map(|(id, _)| *id)).collect();
    let long = |error: crate::error::Error| {
        let message = format!("the answer does not fit one record ({error}): request fewer parts at once");
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
    if get.objects.is_empty() {
        return refuse!(Invalid, "a get must name at least one object");
    }
    get.objects.iter().try_for_each(|object| check_name(&object.name))?;
    if let Some(ClaimHeader { part, group }) = &get.claim {
        if get.objects.len() > 1 {
            return refuse!(Invalid, "a claim requires exactly one object");
        }
        if part.is_some() != group.is_some() {
            return refuse!(
                Invalid,
                "a claim on a part requires a group, and a claim on the whole object must not have one"
            );
        }
        part.iter().try_for_each(|part| check_component("part", part))?;
        group.iter().try_for_each(|group| check_component("group", group))?;
    }
    Ok(())
}

/// Ends a lease or a claim.
pub(crate) fn release(state: &mut State, id: ConnectionId, token: Token) {
    let Some(client) = state.clients.get(&id) else { return };
    if client.is_sending(token) {
        state.effects.protocol_error(id, "a lease was released before it was received completely");
    } else if state.objects.holder(token) == Some(id) {
        state.objects.end_lease(token);
    } else {
        end_claims(state, id, Some(token));
    }
}

/// Keeps a report about a leased version.
pub(crate) fn report(state: &mut State, id: ConnectionId, report: ReportHeader) {
    let Some(client) = state.clients.get(&id).filter(|_| state.objects.holder(report.token) == Some(id)) else {
        return;
    };
    let should_log = state.repeats.should_log(client.caller.uid, "a reader reports that memory differs from its claim");
    state.objects.report(&client.caller, report.token, report.message, should_log);
}

/// Moves leases and names from the client's previous connection to this one.
pub(crate) fn resume(state: &mut State, id: ConnectionId, resume: Resume) {
    let Some(caller) = state.caller(id).cloned() else { return };
    // A lease whose segments are still being sent is not resumable.
    let is_sending = |lease: &ResumedLease| {
        let holder = state.objects.holder(lease.token).and_then(|holder| state.clients.get(&holder));
        holder.is_some_and(|holder| holder.is_sending(lease.token))
    };
    let (sending, leases): (Vec<_>, Vec<_>) = resume.leases.into_iter().partition(is_sending);
    let mut lost = state.objects.resume(&caller, &leases, &resume.puts);
    lost.extend(sending.iter().map(|lease| lease.token));
    let instance = state.objects.events.instance().to_owned();
    reply(state, id, &Message::Resumed(Resumed { instance, lost }));
}

/// Asks the holders of versions to release their leases.
pub(crate) fn recall(state: &mut State, id: ConnectionId, recall: &Recall) {
    let Some(client) = state.clients.get(&id) else { return };
    let recalled = state.objects.recall(&client.caller, &recall.ids);
    answer_when_safe(state, id, recalled);
}
