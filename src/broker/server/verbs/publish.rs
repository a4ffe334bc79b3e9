//! Changes of names: they begin in order, the keeper confirms them, then they take effect and are answered.

use super::{
    effects::{Effect, Effects},
    get::published,
    reply::answer,
};
use crate::{
    broker::{
        server::state::{
            caller::ConnectionId,
            client::PendingRequest,
            objects::{NewPart, NewVersion},
            root::{Change, State, Unconfirmed, UnconfirmedKind},
        },
        table::sealed,
    },
    error::{BrokerError, RefusalCode},
    wire::broker::{Done, MAX_INLINE_TOGETHER, Message, Published, Restore, Resume, Table, Token},
};

/// Begins a change of a name. If a put of the name is unconfirmed, the change waits for it.
pub(crate) fn change(state: &mut State, effects: &mut Effects, change: Change) {
    let (name, makers) = match &change {
        Change::Put(put) => (&put.header.name, put.makers.as_slice()),
        Change::Delete(id, delete) => (&delete.name, std::slice::from_ref(id)),
    };
    makers.iter().for_each(|id| state.set_request(*id, PendingRequest::Confirmation));
    if state.objects.is_unconfirmed(name) {
        let name = name.clone();
        if let Change::Put(put) = &change {
            state.objects.users().reserve(put.uid(), put.descriptors());
        }
        return state.changes.waiting.entry(name).or_default().push_back(change);
    }
    match change {
        Change::Put(put) => begin_put(state, effects, put),
        Change::Delete(id, delete) => {
            let Some(client) = state.clients.get(&id) else { return };
            let deleted = state.objects.delete(&client.caller, &delete.name, delete.request);
            answer_when_confirmed(state, effects, id, deleted);
        }
    }
}

/// Gives a version to the keeper.
fn begin_put(state: &mut State, effects: &mut Effects, mut put: NewVersion) {
    let (name, restore) = (put.header.name.clone(), put.header.restore.clone());
    // The name's former owner may still restore it, and the broker no longer knows the owner.
    let is_new = restore.is_none() && state.objects.current_key(&name).is_none();
    if state.changes.reserves_names && is_new {
        state.objects.users().reserve(put.uid(), put.descriptors());
        return state.changes.reserved.push(put);
    }
    let makers = std::mem::take(&mut put.makers);
    let Some(caller) = makers.iter().find_map(|id| state.caller(*id)).cloned() else {
        return effects.close_fds(None, put.into_fds());
    };
    // The first attempt of this request may have been completed meanwhile.
    let published_before = |request: &Token| state.objects.published_before(&caller, &name, *request).transpose();
    if let Some(published) = put.requests.iter().find_map(published_before) {
        // If the name's lifetime depends on its maker, it now depends on this connection.
        let resume = Resume { leases: Vec::new(), puts: put.requests.clone() };
        let names = state.objects.resume(&caller, &resume).names;
        state.clients.entry(caller.connection).and_modify(|client| client.names.extend(names));
        effects.close_fds(Some(caller.uid), put.into_fds());
        return reply_to_makers(state, effects, &makers, &published);
    }
    match fit(&mut put).and_then(|()| state.objects.stage(&caller, put)) {
        Ok(key) => {
            let mark = state.objects.store().mark();
            let kind = UnconfirmedKind::Put { key, name, makers, restore };
            state.changes.unconfirmed.push_back(Unconfirmed { mark, kind });
            effects.push(Effect::Store);
        }
        Err(refusal) => {
            // Another reader may have restored the version first.
            let other = restore.and_then(|of| restored_version(state, caller.connection, &name, &of));
            reply_to_makers(state, effects, &makers, &other.ok_or(refusal));
        }
    }
}

/// Answers a request once the keeper has its changes.
pub(crate) fn answer_when_confirmed(
    state: &mut State,
    effects: &mut Effects,
    id: ConnectionId,
    result: Result<(), BrokerError>,
) {
    if let Err(refusal) = result {
        answer(state, effects, id, Err(refusal));
        return effects.push(Effect::Listen(id));
    }
    state.set_request(id, PendingRequest::Confirmation);
    let mark = state.objects.store().mark();
    state.changes.unconfirmed.push_back(Unconfirmed { mark, kind: UnconfirmedKind::Request(id) });
    effects.push(Effect::Store);
}

/// Completes the changes that the keeper has confirmed. Returns whether there were any.
pub(crate) fn complete_confirmed(state: &mut State, effects: &mut Effects) -> bool {
    let mut any = false;
    let is_confirmed = |state: &State| {
        let first = state.changes.unconfirmed.front();
        first.is_some_and(|change| state.objects.store().is_confirmed(change.mark))
    };
    while is_confirmed(state) {
        let Some(Unconfirmed { kind, .. }) = state.changes.unconfirmed.pop_front() else { break };
        any = true;
        match kind {
            UnconfirmedKind::Request(id) => {
                answer(state, effects, id, Ok(Message::Done(Done {})));
                effects.push(Effect::Listen(id));
            }
            UnconfirmedKind::Put { key, name, makers, restore } => {
                publish(state, effects, key, &name, &makers, restore.as_ref());
                continue_changes(state, effects, name);
            }
        }
    }
    any
}

/// Begins the changes that waited for a put of this name, up to the next put.
fn continue_changes(state: &mut State, effects: &mut Effects, name: String) {
    let mut waiting = state.changes.waiting.remove(&name).unwrap_or_default();
    while !state.objects.is_unconfirmed(&name)
        && let Some(next) = waiting.pop_front()
    {
        if let Change::Put(put) = &next {
            state.objects.users().end_reservation(put.uid(), put.descriptors());
        }
        change(state, effects, next);
    }
    if !waiting.is_empty() {
        state.changes.waiting.insert(name, waiting);
    }
}

/// Drops the puts of a closed connection that have not begun.
pub(crate) fn withdraw(state: &mut State, effects: &mut Effects, id: ConnectionId) {
    let clients = &state.clients;
    let is_abandoned =
        |put: &NewVersion| put.makers.contains(&id) && !put.makers.iter().any(|id| clients.contains_key(id));
    let mut abandoned = Vec::new();
    for changes in state.changes.waiting.values_mut() {
        for change in std::mem::take(changes) {
            match change {
                Change::Put(put) if is_abandoned(&put) => abandoned.push(put),
                change => changes.push_back(change),
            }
        }
    }
    abandoned.extend(state.changes.reserved.extract_if(.., |put| is_abandoned(put)));
    for put in abandoned {
        state.objects.users().end_reservation(put.uid(), put.descriptors());
        effects.close_fds(Some(put.uid()), put.into_fds());
    }
}

/// Stops reserving names for clients that restore lost objects, and continues the waiting puts.
pub(crate) fn end_reservation(state: &mut State, effects: &mut Effects) {
    state.changes.reserves_names = false;
    for put in std::mem::take(&mut state.changes.reserved) {
        state.objects.users().end_reservation(put.uid(), put.descriptors());
        change(state, effects, Change::Put(put));
    }
}

fn publish(
    state: &mut State,
    effects: &mut Effects,
    key: u64,
    name: &str,
    makers: &[ConnectionId],
    restore: Option<&Restore>,
) {
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
    reply_to_makers(state, effects, makers, &Ok(version));
    published(state, effects, name);
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

fn reply_to_makers(
    state: &mut State,
    effects: &mut Effects,
    makers: &[ConnectionId],
    result: &Result<Published, BrokerError>,
) {
    for id in makers {
        answer(state, effects, *id, result.clone().map(Message::Published));
        effects.push(Effect::Listen(*id));
    }
}

/// Moves tables into memfds until the remaining ones fit one record.
fn fit(put: &mut NewVersion) -> Result<(), BrokerError> {
    let mut room = MAX_INLINE_TOGETHER as u64;
    let mut moved = |table: Option<&mut Table>| {
        let Some(table) = table else { return Ok(None) };
        let Table::Inline(text) = &*table else { return Ok(None) };
        if let Some(left) = room.checked_sub(table.length()) {
            room = left;
            return Ok(None);
        }
        let fd = sealed(text.as_str())?;
        *table = Table::Length(table.length());
        Ok(Some(fd))
    };
    let failed = |error: std::io::Error| {
        BrokerError::new(RefusalCode::Full, format!("the broker can't create a memfd for a table: {error}"))
    };
    put.metadata = moved(put.header.metadata.as_mut()).map_err(failed)?.or(put.metadata.take());
    for NewPart { record, fds } in &mut put.parts {
        fds.splice(0..0, moved(record.header.arrays.as_mut()).map_err(failed)?);
    }
    Ok(())
}
