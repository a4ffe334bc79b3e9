//! Versions assembled from several puts.

use std::time::Duration;

use super::{effects::Effects, publish::change, reply::refuse};
use crate::{
    broker::server::state::{
        caller::ConnectionId,
        client::PendingRequest,
        drafts::{self, DraftKey},
        objects::NewVersion,
        root::{Change, State},
    },
    error::{BrokerError, RefusalCode},
};

/// Adds a put to its group's draft. Publishes the version once it is complete.
pub(crate) fn join(state: &mut State, effects: &mut Effects, id: ConnectionId, put: NewVersion, wait: Duration) {
    let (uid, bytes) = (put.uid(), put.bytes());
    let group = put.header.group.clone().unwrap_or_default();
    let key = DraftKey { name: put.header.name.clone(), group };
    let checked = drafts::check(&key, state.drafts.get(&key).map_or(&[], Vec::as_slice), &put);
    // Other puts may have arrived during the upload.
    if let Err(refusal) = checked.and_then(|()| state.objects.users().check_bytes(uid, bytes)) {
        effects.close_fds(Some(uid), put.into_fds());
        return refuse(state, effects, id, refusal);
    }
    state.objects.users().add_waiting(uid, bytes);
    state.objects.users().reserve(uid, put.descriptors());
    let puts = state.drafts.entry(key.clone()).or_default();
    puts.push(put);
    let is_complete = drafts::missing(puts).is_empty();
    state.set_request(id, PendingRequest::Parts(key.clone()));
    if is_complete {
        complete(state, effects, &key);
    } else {
        effects.upload_deadline(id, state.objects.now.after(wait));
    }
}

/// Publishes a complete draft.
fn complete(state: &mut State, effects: &mut Effects, key: &DraftKey) {
    let puts = state.drafts.remove(key).unwrap_or_default();
    puts.iter().for_each(|put| end_usage(state, put));
    let Some(mut version) = puts.into_iter().reduce(|mut first, put| {
        first.join(put);
        first
    }) else {
        return;
    };
    let announced = &version.header.announced;
    version.parts.sort_by_key(|part| announced.iter().position(|name| *name == part.record.header.name));
    change(state, effects, Change::Put(version));
}

/// Removes a put from the user's draft usage.
fn end_usage(state: &mut State, put: &NewVersion) {
    state.objects.users().remove_waiting(put.uid(), put.bytes());
    state.objects.users().end_reservation(put.uid(), put.descriptors());
}

/// Removes a client's put from a draft.
pub(crate) fn withdraw(state: &mut State, effects: &mut Effects, id: ConnectionId, key: &DraftKey) {
    let Some(puts) = state.drafts.get_mut(key) else { return };
    let gone: Vec<NewVersion> = puts.extract_if(.., |put| put.makers.contains(&id)).collect();
    if puts.is_empty() {
        state.drafts.remove(key);
    }
    for put in gone {
        end_usage(state, &put);
        effects.close_fds(Some(put.uid()), put.into_fds());
    }
}

/// Ends a client's wait for the other parts.
pub(crate) fn end_wait(state: &mut State, effects: &mut Effects, id: ConnectionId, key: &DraftKey, code: RefusalCode) {
    let missing = state.drafts.get(key).map_or_else(String::new, |puts| drafts::missing(puts).join(", "));
    withdraw(state, effects, id, key);
    let message = format!("`{}` is not published: the parts {missing} are missing", key.name);
    refuse(state, effects, id, BrokerError::new(code, message));
}
