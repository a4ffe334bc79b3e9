//! The last steps of a put: the keeper gets the descriptors, then the version is published.

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
            objects::{NewPart, NewTable, Terms},
            root::{PendingVersion, State},
        },
        table::sealed,
    },
    error::{BrokerError, RefusalCode},
    wire::broker::{MAX_INLINE_TOGETHER, Message, Published, Restore, Token},
};

/// Gives the descriptors of a version to the keeper. The version is published once the keeper confirms them.
pub(crate) fn store(
    state: &mut State,
    effects: &mut Effects,
    makers: Vec<ConnectionId>,
    terms: Terms,
    mut metadata: Option<NewTable>,
    mut parts: Vec<NewPart>,
) {
    let staged = match fit(&mut metadata, &mut parts) {
        Ok(()) => state.objects.stage(metadata, parts),
        Err(error) => {
            state.objects.discard(metadata, parts);
            let message = format!("the broker can't create a memfd for a table: {error}");
            Err(BrokerError::new(RefusalCode::Full, message))
        }
    };
    match staged {
        Ok(staged) => {
            makers.iter().for_each(|id| state.set_request(*id, PendingRequest::Confirmation));
            state.pending_versions.queue.push_back(PendingVersion { makers, terms, staged });
            effects.push(Effect::Store);
        }
        Err(refusal) => reply_to_makers(state, effects, &makers, &Err(refusal)),
    }
}

/// Publishes the versions that the keeper has confirmed. Returns whether there were any.
pub(crate) fn publish_confirmed(state: &mut State, effects: &mut Effects) -> bool {
    let mut any = false;
    while let Some(version) = state.pending_versions.queue.pop_front() {
        if !state.objects.store().holds(version.staged.mark) {
            state.pending_versions.queue.push_front(version);
            break;
        }
        any = true;
        publish(state, effects, version);
    }
    any
}

/// Stops reserving names for clients that restore lost objects, and publishes the waiting versions.
pub(crate) fn end_reservation(state: &mut State, effects: &mut Effects) {
    state.pending_versions.reserves_names = false;
    for version in std::mem::take(&mut state.pending_versions.reserved) {
        publish(state, effects, version);
    }
}

fn publish(state: &mut State, effects: &mut Effects, version: PendingVersion) {
    // The name's former owner may still restore it, and the broker no longer knows the owner.
    let is_new = version.terms.restore.is_none() && state.objects.current_key(&version.terms.name).is_none();
    if state.pending_versions.reserves_names && is_new {
        return state.pending_versions.reserved.push(version);
    }
    let PendingVersion { makers, terms, staged } = version;
    let Some(caller) = makers.iter().find_map(|id| state.caller(*id)).cloned() else {
        return state.objects.unstage(staged);
    };
    // The same request may be pending twice if its first connection broke.
    let published_before = |request: &Token| state.objects.published_before(&caller, &terms.name, *request).transpose();
    if let Some(published) = terms.requests.iter().find_map(published_before) {
        state.objects.unstage(staged);
        return reply_to_makers(state, effects, &makers, &published);
    }
    let result = state.objects.publish(&caller, &terms, staged);
    if result.is_err() {
        // Another reader restored the version first.
        let restore = terms.restore.as_ref();
        let other = restore.and_then(|of| restored_version(state, caller.connection, &terms.name, of));
        return reply_to_makers(state, effects, &makers, &other.map_or(result, Ok));
    }
    if let Some(client) = state.clients.get_mut(&caller.connection) {
        if state.objects.depends_on_maker(&terms.name) {
            client.names.insert(terms.name.as_str().into());
        }
        let key = state.objects.current_key(&terms.name);
        if let (Some(restore), Some(key)) = (&terms.restore, key) {
            client.leases.extend(state.objects.restore_leases(&caller, key, &restore.leases));
        }
    }
    reply_to_makers(state, effects, &makers, &result);
    published(state, effects, &terms.name);
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
fn fit(metadata: &mut Option<NewTable>, parts: &mut [NewPart]) -> std::io::Result<()> {
    let mut room = MAX_INLINE_TOGETHER;
    for table in metadata.iter_mut().chain(parts.iter_mut().filter_map(|part| part.arrays.as_mut())) {
        let NewTable::Inline(text) = table else { continue };
        let length = text.as_str().len();
        match room.checked_sub(length) {
            Some(left) => room = left,
            None => *table = NewTable::Memfd { fd: sealed(text.as_str())?, length: length as u64 },
        }
    }
    Ok(())
}
