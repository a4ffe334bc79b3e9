//! Puts: checks the request and its descriptors as they arrive, and passes the version on.

use std::{os::fd::OwnedFd, time::Duration};

use super::{
    effects::Effects,
    parts,
    publish::{change, restored_version},
    reply::{answer, refuse, reply},
};
use crate::{
    broker::{
        request,
        server::state::{
            caller::{Caller, ConnectionId},
            client::PendingRequest,
            objects::NewVersion,
            room::DescriptorRoom,
            root::{Change, State},
        },
    },
    error::BrokerError,
    wire::{
        Segments,
        broker::{Message, Published, PutHeader, Resume, Send},
    },
};

/// Starts a put. `fds` are the descriptors of its tables and first segments.
pub(crate) fn put(
    state: &mut State,
    effects: &mut Effects,
    room: &DescriptorRoom,
    id: ConnectionId,
    mut put: PutHeader,
    fds: Vec<OwnedFd>,
) {
    let Some(caller) = state.caller(id).cloned() else { return effects.close_fds(None, fds) };
    if let Some(published) = published_before(state, id, &put).transpose() {
        effects.close_fds(Some(caller.uid), fds);
        return answer(state, effects, id, published.map(Message::Published));
    }
    let backend = request::check(&put);
    let sizes = std::mem::take(&mut put.sizes);
    let admitted = backend.and_then(|backend| {
        let version = NewVersion::new(put, backend, &caller);
        admit(state, room, &caller, &version).map(|()| version)
    });
    let mut version = match admitted {
        Ok(version) => version,
        Err(refusal) => {
            effects.close_fds(Some(caller.uid), fds);
            return refuse(state, effects, id, refusal);
        }
    };
    let mut fds = fds.into_iter();
    let tables = version.take_tables(&mut fds);
    let segments = version.take_segments(sizes.into_iter().zip(fds), state.emulated);
    if let Err(refusal) = tables.and(segments) {
        effects.close_fds(Some(caller.uid), version.into_fds());
        return refuse(state, effects, id, refusal);
    }
    if version.segments() == version.all_segments() {
        return finish_put(state, effects, id, version);
    }
    state.objects.users().reserve(caller.uid, version.descriptors());
    state.set_request(id, PendingRequest::Upload { version: Box::new(version), problem: None });
    effects.upload_deadline(id, state.objects.now.after(state.timeout));
    reply(state, effects, id, &Message::Send(Send {}));
}

/// The version that this put, or another reader's restore, has already published. A client repeats a put if it did not receive the answer.
fn published_before(state: &mut State, id: ConnectionId, put: &PutHeader) -> Result<Option<Published>, BrokerError> {
    if let Some(restore) = &put.restore {
        return Ok(restored_version(state, id, &put.name, restore));
    }
    let (Some(client), Some(request)) = (state.clients.get_mut(&id), put.request) else { return Ok(None) };
    let published = state.objects.published_before(&client.caller, &put.name, request)?;
    if published.is_some() {
        // If the name's lifetime depends on its maker, it now depends on this connection.
        let resume = Resume { leases: Vec::new(), puts: vec![request] };
        client.names.extend(state.objects.resume(&client.caller, &resume).names);
    }
    Ok(published)
}

/// Checks whether there is room for a put, before the rest of it is received.
fn admit(state: &State, room: &DescriptorRoom, caller: &Caller, version: &NewVersion) -> Result<(), BrokerError> {
    state.objects.check_put(caller, version)?;
    room.require(&state.objects, caller, version.descriptors())
}

/// Receives more segments of a put.
pub(crate) fn segments(
    state: &mut State,
    effects: &mut Effects,
    id: ConnectionId,
    segments: Segments,
    fds: Vec<OwnedFd>,
) {
    let Some(client) = state.clients.get_mut(&id) else { return effects.close_fds(None, fds) };
    let uid = client.caller.uid;
    let PendingRequest::Upload { version, problem } = &mut client.request else {
        effects.close_fds(Some(uid), fds);
        return effects.protocol_error(id, "segments arrived, but no put waits for segments");
    };
    let (first, more) = (segments.first, segments.sizes.len());
    let (have, total) = (version.segments(), version.all_segments());
    if first != have as u64 || have + more > total {
        effects.close_fds(Some(uid), fds);
        let end = first.saturating_add(more as u64);
        return effects
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
        state.objects.users().end_reservation(uid, version.descriptors());
        match problem {
            None => finish_put(state, effects, id, *version),
            Some(refusal) => {
                effects.close_fds(Some(uid), version.into_fds());
                refuse(state, effects, id, refusal);
            }
        }
    }
}

/// Releases an abandoned upload.
pub(crate) fn end_upload(state: &mut State, effects: &mut Effects, version: NewVersion) {
    state.objects.users().end_reservation(version.uid(), version.descriptors());
    effects.close_fds(Some(version.uid()), version.into_fds());
}

/// Publishes a complete put, or adds it to a draft.
fn finish_put(state: &mut State, effects: &mut Effects, id: ConnectionId, version: NewVersion) {
    if let Err(refusal) = version.check_sizes() {
        effects.close_fds(Some(version.uid()), version.into_fds());
        return refuse(state, effects, id, refusal);
    }
    if version.header.announced.len() > version.parts.len() {
        let wait = Duration::from_millis(version.header.wait_ms.unwrap_or(0));
        return parts::join(state, effects, id, version, wait);
    }
    change(state, effects, Change::Put(version));
}
