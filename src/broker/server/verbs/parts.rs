//! Versions assembled from several puts.

use std::time::Duration;

use super::{effects::Effects, publish::change, reply::refuse};
use crate::{
    broker::server::state::{
        caller::{Caller, ConnectionId},
        client::PendingRequest,
        drafts::{Draft, DraftKey, DraftPut, bytes_of, descriptors_of},
        objects::{NewPart, NewTable, NewVersion, Terms},
        root::{Change, ReadyPut, State},
    },
    error::{BrokerError, RefusalCode},
};

/// Adds a put to its group's draft. Publishes the version once it is complete.
pub(crate) fn join(
    state: &mut State,
    effects: &mut Effects,
    caller: &Caller,
    group: String,
    share: DraftPut,
    wait: Duration,
) {
    let (id, uid) = (caller.connection, caller.uid);
    let key = DraftKey { name: share.version.terms.name.clone(), group };
    let checked = state.drafts.get(&key).map_or(Ok(()), |draft| draft.check(&key, uid, &share));
    // Other puts may have arrived during the examination.
    let bytes = share.version.bytes();
    if let Err(refusal) = checked.and_then(|()| state.objects.users().check_bytes(uid, bytes)) {
        effects.close_fds(Some(uid), share.version.into_fds());
        return refuse(state, effects, id, refusal);
    }
    state.objects.users().add_waiting(uid, bytes);
    state.objects.users().reserve(uid, descriptors_of(&share.version.parts));
    let new = || Draft::new(uid, &share.announced, &share.version.terms);
    let draft = state.drafts.entry(key.clone()).or_insert_with(new);
    draft.add(id, share);
    let is_complete = draft.is_complete();
    state.set_request(id, PendingRequest::Parts(key.clone()));
    if is_complete {
        complete(state, effects, &key);
    } else {
        effects.upload_deadline(id, state.objects.now.after(wait));
    }
}

/// Publishes a complete draft.
fn complete(state: &mut State, effects: &mut Effects, key: &DraftKey) {
    let Some(draft) = state.drafts.remove(key) else { return };
    let Draft { uid, announced, terms, metadata, puts, requests } = draft;
    let terms = Terms { requests: requests.into_iter().map(|(_, request)| request).collect(), ..terms };
    let metadata = metadata.map(|(_, table)| table);
    let makers: Vec<ConnectionId> = puts.iter().map(|(id, _)| *id).collect();
    let mut parts: Vec<NewPart> = puts.into_iter().flat_map(|(_, parts)| parts).collect();
    end_draft_usage(state, uid, metadata.as_ref(), &parts);
    parts.sort_by_key(|part| announced.iter().position(|name| *name == part.name));
    change(state, effects, Change::Put(ReadyPut { makers, version: NewVersion { terms, metadata, parts } }));
}

/// Removes parts from the user's draft usage.
fn end_draft_usage(state: &mut State, uid: u32, metadata: Option<&NewTable>, parts: &[NewPart]) {
    let bytes = bytes_of(parts) + metadata.map_or(0, NewTable::length);
    state.objects.users().remove_waiting(uid, bytes);
    state.objects.users().end_reservation(uid, descriptors_of(parts));
}

/// Removes a client's parts from a draft.
pub(crate) fn withdraw(state: &mut State, effects: &mut Effects, id: ConnectionId, key: &DraftKey) {
    let Some(draft) = state.drafts.get_mut(key) else { return };
    let (uid, terms) = (draft.uid, draft.terms.clone());
    let (gone, stay): (Vec<_>, Vec<_>) = std::mem::take(&mut draft.puts).into_iter().partition(|(of, _)| *of == id);
    draft.puts = stay;
    draft.requests.retain(|(of, _)| *of != id);
    let metadata = draft.metadata.take_if(|(of, _)| *of == id).map(|(_, table)| table);
    if draft.puts.is_empty() {
        state.drafts.remove(key);
    }
    let parts: Vec<NewPart> = gone.into_iter().flat_map(|(_, parts)| parts).collect();
    end_draft_usage(state, uid, metadata.as_ref(), &parts);
    effects.close_fds(Some(uid), NewVersion { terms, metadata, parts }.into_fds());
}

/// Ends a client's wait for the other parts.
pub(crate) fn end_wait(state: &mut State, effects: &mut Effects, id: ConnectionId, key: &DraftKey, code: RefusalCode) {
    let missing = state.drafts.get(key).map_or_else(String::new, |draft| draft.missing().join(", "));
    withdraw(state, effects, id, key);
    let message = format!("`{}` is not published: the parts {missing} are missing", key.name);
    refuse(state, effects, id, BrokerError::new(code, message));
}
