//! Changes of names: they begin in order, the keeper gets them, then they take effect and are answered.

use super::{
    effects::Effect,
    get::published,
    reply::{answer, refuse},
};
use crate::{
    broker::{
        name::check_name,
        server::{
            admit::Resource,
            state::{
                caller::{Caller, ConnectionId},
                client::PendingRequest,
                objects::NewVersion,
                root::{Change, State, Unconfirmed},
            },
        },
    },
    error::BrokerError,
    wire::broker::{Delete, Done, Message, Published, Restore, Resume, Token},
};

pub(crate) fn delete(state: &mut State, id: ConnectionId, delete: Delete) {
    match check_name(&delete.name) {
        Ok(()) => change(state, Change::Delete(id, delete)),
        Err(refusal) => refuse(state, id, refusal),
    }
}

/// Begins a change of a name. If a put of the name is unconfirmed, the change waits for it.
pub(crate) fn change(state: &mut State, change: Change) {
    let (name, makers) = match &change {
        Change::Put(put) => (&put.header.name, put.makers.as_slice()),
        Change::Delete(id, delete) => (&delete.name, std::slice::from_ref(id)),
    };
    makers.iter().for_each(|id| state.set_request(*id, PendingRequest::Confirmation));
    if state.objects.is_unconfirmed(name) {
        return state.changes.waiting.entry(name.clone()).or_default().push_back(change);
    }
    match change {
        Change::Put(put) => begin_put(state, *put),
        Change::Delete(id, delete) => {
            let Some(client) = state.clients.get(&id) else { return };
            let deleted = state.objects.delete(&client.caller, &delete.name, delete.request);
            answer_when_confirmed(state, id, deleted);
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
    if let Some(published) = published_before(state, &caller, &name, &put.requests) {
        discard(state, put);
        return reply_to_makers(state, &makers, &published);
    }
    state.objects.users().sub(put.uid(), Resource::Descriptors, put.descriptors() as u64);
    match state.objects.stage(&caller, put) {
        Ok(key) => {
            let mark = state.objects.store().mark();
            state.changes.unconfirmed.push_back((mark, Unconfirmed::Put { key, name, makers, restore }));
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
pub(crate) fn answer_when_confirmed(state: &mut State, id: ConnectionId, result: Result<(), BrokerError>) {
    if let Err(refusal) = result {
        answer(state, id, Err(refusal));
        return state.effects.push(Effect::Listen(id));
    }
    state.set_request(id, PendingRequest::Confirmation);
    let mark = state.objects.store().mark();
    state.changes.unconfirmed.push_back((mark, Unconfirmed::Request(id)));
    state.effects.push(Effect::Store);
}

/// Completes the changes that the keeper has confirmed. Returns whether there were any.
pub(crate) fn complete_confirmed(state: &mut State) -> bool {
    let mut any = false;
    let is_confirmed = |state: &State| {
        let first = state.changes.unconfirmed.front();
        first.is_some_and(|(mark, _)| state.objects.store().is_safe(*mark))
    };
    while is_confirmed(state) {
        let Some((_, change)) = state.changes.unconfirmed.pop_front() else { break };
        any = true;
        match change {
            Unconfirmed::Request(id) => {
                answer(state, id, Ok(Message::Done(Done {})));
                state.effects.push(Effect::Listen(id));
            }
            Unconfirmed::Put { key, name, makers, restore } => {
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
    while !state.objects.is_unconfirmed(&name)
        && let Some(next) = waiting.pop_front()
    {
        change(state, next);
    }
    if !waiting.is_empty() {
        state.changes.waiting.entry(name).or_default().extend(waiting);
    }
}

/// Drops the puts of a closed connection that have not begun.
pub(crate) fn withdraw(state: &mut State, id: ConnectionId) {
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
    state.objects.users().sub(put.uid(), Resource::Descriptors, put.descriptors() as u64);
    state.effects.close_fds(put.uid(), put.into_fds());
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
    if let Some(caller) = caller
        && let Some(client) = state.clients.get_mut(&caller.connection)
    {
        if state.objects.depends_on_maker(name) {
            client.names.insert(name.into());
        }
        if let Some(restore) = restore {
            client.leases.extend(state.objects.restore_leases(&caller, key, &restore.leases));
        }
    }
    reply_to_makers(state, makers, &Ok(version));
    published(state, name);
}

/// The version that an earlier attempt of these requests has published: a client repeats a put if it did not receive the answer.
pub(crate) fn published_before(
    state: &mut State,
    caller: &Caller,
    name: &str,
    requests: &[Token],
) -> Option<Result<Published, BrokerError>> {
    let find = |request: &Token| state.objects.published_before(caller, name, *request).transpose();
    let published = requests.iter().find_map(find)?;
    // If the name's lifetime depends on its maker, it now depends on this connection.
    if published.is_ok()
        && let Some(client) = state.clients.get_mut(&caller.connection)
    {
        let resume = Resume { leases: Vec::new(), puts: requests.to_vec() };
        client.names.extend(state.objects.resume(caller, &resume).names);
    }
    Some(published)
}

/// Gives a client its leases of a version that another client has already restored, if it may restore the version itself.
pub(crate) fn restored_version(
    state: &mut State,
    id: ConnectionId,
    name: &str,
    restore: &Restore,
) -> Option<Published> {
    let client = state.clients.get_mut(&id)?;
    let key = state.objects.restored(&client.caller, name, restore)?;
    client.leases.extend(state.objects.restore_leases(&client.caller, key, &restore.leases));
    Some(Published { version: restore.version, id: restore.id.clone() })
}

fn reply_to_makers(state: &mut State, makers: &[ConnectionId], result: &Result<Published, BrokerError>) {
    for id in makers {
        answer(state, *id, result.clone().map(Message::Published));
        state.effects.push(Effect::Listen(*id));
    }
}
