//! Puts: checks the request and its descriptors as they arrive, and passes the version on.

use std::os::fd::OwnedFd;

use super::{
    parts,
    publish::{change, discard, published_before, restored_version},
    reply::{answer, refuse, reply},
};
use crate::{
    broker::{
        request,
        server::{
            admit::{NOBODY, Resource},
            state::{
                caller::ConnectionId,
                client::PendingRequest,
                objects::NewVersion,
                root::{Change, State},
            },
        },
    },
    wire::{
        Segments,
        broker::{Message, PutHeader, Send},
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
        state.objects.users().take(caller.uid, Resource::Descriptors, version.descriptors() as u64)?;
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
    if version.segments() == version.all_segments() {
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
    let (have, total) = (version.segments(), version.all_segments());
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
    if version.header.announced.len() > version.parts.len() {
        return parts::join(state, id, version);
    }
    change(state, Change::Put(Box::new(version)));
}
