//! The last steps of a put: the keeper gets the descriptors, then the version is published.

use super::{
    effects::{Effect, Effects},
    get::published,
    reply::{refuse, reply},
};
use crate::{
    broker::{
        server::state::{
            caller::ConnectionId,
            client::Request,
            objects::{NewPart, NewTable, Terms},
            root::{State, Stored},
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
            makers.iter().for_each(|id| state.set_request(*id, Request::Storing));
            state.storing.queue.push_back(Stored { makers, terms, staged });
            effects.push(Effect::Store);
        }
        Err(refusal) => answer_makers(state, effects, &makers, &Err(refusal)),
    }
}

/// Publishes the versions that the keeper has confirmed. Returns whether there were any.
pub(crate) fn kept(state: &mut State, effects: &mut Effects) -> bool {
    let mut any = false;
    while let Some(stored) = state.storing.queue.pop_front() {
        if !state.objects.store().has_kept(stored.staged.mark) {
            state.storing.queue.push_front(stored);
            break;
        }
        any = true;
        publish(state, effects, stored);
    }
    any
}

/// Stops reserving names for clients that restore lost objects, and publishes the waiting versions.
pub(crate) fn end_reservation(state: &mut State, effects: &mut Effects) {
    state.storing.reserves = false;
    for stored in std::mem::take(&mut state.storing.reserved) {
        publish(state, effects, stored);
    }
}

fn publish(state: &mut State, effects: &mut Effects, stored: Stored) {
    // The name's former owner may still restore it, and the broker no longer knows the owner.
    let is_new = stored.terms.restore.is_none() && state.objects.current_key(&stored.terms.name).is_none();
    if state.storing.reserves && is_new {
        return state.storing.reserved.push(stored);
    }
    let Stored { makers, terms, staged } = stored;
    let Some(caller) = makers.iter().find_map(|id| state.caller(*id)).cloned() else {
        return state.objects.unstage(staged);
    };
    // The same request may be pending twice if its first connection broke.
    let before = |request: &Token| state.objects.published_before(&caller, &terms.name, *request).transpose();
    if let Some(answer) = terms.requests.iter().find_map(before) {
        state.objects.unstage(staged);
        return answer_makers(state, effects, &makers, &answer);
    }
    let result = state.objects.publish(&caller, &terms, staged);
    if result.is_err() {
        // Another reader restored the version first.
        let restore = terms.restore.as_ref();
        let faster = restore.and_then(|of| restored_before(state, caller.connection, &terms.name, of));
        return answer_makers(state, effects, &makers, &faster.map_or(result, Ok));
    }
    if let Some(client) = state.clients.get_mut(&caller.connection) {
        if state.objects.follows_maker(&terms.name) {
            client.names.insert(terms.name.as_str().into());
        }
        let key = state.objects.current_key(&terms.name);
        if let (Some(restore), Some(key)) = (&terms.restore, key) {
            client.leases.extend(state.objects.lease_again(&caller, key, &restore.leases));
        }
    }
    answer_makers(state, effects, &makers, &result);
    published(state, effects, &terms.name);
}

/// Gives a client its leases of a version that another client has already restored, if it may restore the version itself.
pub(crate) fn restored_before(state: &mut State, id: ConnectionId, name: &str, restore: &Restore) -> Option<Published> {
    let client = state.clients.get_mut(&id)?;
    let key = state.objects.restored(&client.caller, name, restore)?;
    client.leases.extend(state.objects.lease_again(&client.caller, key, &restore.leases));
    Some(Published { version: restore.version, id: restore.id.clone() })
}

fn answer_makers(
    state: &mut State,
    effects: &mut Effects,
    makers: &[ConnectionId],
    result: &Result<Published, BrokerError>,
) {
    for id in makers {
        match result {
            Ok(published) => reply(state, effects, *id, &Message::Published(published.clone())),
            Err(refusal) => refuse(state, effects, *id, refusal.clone()),
        }
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
