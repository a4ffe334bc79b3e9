//! Puts: checks the request, collects and examines its segments, and passes the version on.

mod check;

use std::os::fd::OwnedFd;

use self::check::{Checked, Examination, Examined, ExaminedPut, check, invalid};
use super::{
    effects::{Effect, Effects, Step, Work, work},
    parts,
    publish::{change, restored_version},
    reply::{answer, refuse, reply},
};
use crate::{
    broker::server::state::{
        caller::ConnectionId,
        client::PendingRequest,
        room::DescriptorRoom,
        root::{Change, ReadyPut, State},
        upload::ReceivedPut,
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
    put: PutHeader,
    mut fds: Vec<OwnedFd>,
) {
    let Some(uid) = state.caller(id).map(|caller| caller.uid) else { return effects.close_fds(None, fds) };
    if let Some(published) = published_before(state, id, &put).transpose() {
        effects.close_fds(Some(uid), fds);
        return answer(state, effects, id, published.map(Message::Published));
    }
    let Checked { terms, segments: total, .. } = match admit(state, room, id, &put) {
        Ok(checked) => checked,
        Err(refusal) => {
            effects.close_fds(Some(uid), fds);
            return refuse(state, effects, id, refusal);
        }
    };
    let segments = fds.split_off(fds.len() - put.sizes.len());
    let segments = put.sizes.iter().copied().zip(segments).collect::<Vec<_>>();
    let upload = ReceivedPut { uid, put, terms, total, tables: fds, segments };
    state.objects.users().reserve(uid, upload.descriptors());
    if upload.segments.len() == total {
        return uploaded(state, effects, id, upload);
    }
    state.set_request(id, PendingRequest::Upload(Box::new(upload)));
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

/// Checks a put before the rest of it is received.
fn admit(state: &State, room: &DescriptorRoom, id: ConnectionId, put: &PutHeader) -> Result<Checked, BrokerError> {
    let checked = check(put)?;
    let Some(caller) = state.caller(id) else { return invalid("the connection is closed") };
    state.objects.check_put(caller, &checked.terms, checked.bytes)?;
    state.objects.check_devices(caller, &put.name, put.parts.iter().map(|part| &part.memory))?;
    let tables = put.parts.len() + 1;
    room.require(&state.objects, caller, checked.segments + tables)?;
    Ok(checked)
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
    let of = Some(client.caller.uid);
    let PendingRequest::Upload(upload) = &mut client.request else {
        effects.close_fds(of, fds);
        return effects.protocol_error(id, "segments arrived, but no put waits for segments");
    };
    let first = segments.first;
    let have = upload.segments.len();
    let more = segments.sizes.len();
    let total = upload.total;
    if first != have as u64 || have + more > total {
        effects.close_fds(of, fds);
        let end = first.saturating_add(more as u64);
        return effects
            .protocol_error(id, format!("segments {first} to {end} arrived, but {have} to {total} were expected"));
    }
    upload.segments.extend(segments.sizes.into_iter().zip(fds));
    if upload.segments.len() == total
        && let PendingRequest::Upload(upload) = std::mem::take(&mut client.request)
    {
        uploaded(state, effects, id, *upload);
    }
}

/// Releases an abandoned upload.
pub(crate) fn end_upload(state: &mut State, effects: &mut Effects, upload: ReceivedPut) {
    state.objects.users().end_reservation(upload.uid, upload.descriptors());
    effects.close_fds(Some(upload.uid), upload.into_fds());
}

/// Starts the examination of a completely received put.
fn uploaded(state: &mut State, effects: &mut Effects, id: ConnectionId, upload: ReceivedPut) {
    let uid = upload.uid;
    let reserved = upload.descriptors();
    let small = upload.is_small();
    let Some(client) = state.clients.get_mut(&id) else { return end_upload(state, effects, upload) };
    let examination = Examination::new(upload, client.caller.describe(), state.emulated);
    client.request = PendingRequest::Worker { stopped: false };
    let job = Box::new(move || examine(id, uid, reserved, examination));
    work(state, effects, small, Work { client: id, uid, reserved, job });
}

/// Examines one part of a put. The next part follows in the user's next turn.
fn examine(id: ConnectionId, uid: u32, reserved: usize, examination: Examination) -> Step {
    let examined = match examination.step() {
        Examined::More(rest) => return Step::More(Box::new(move || examine(id, uid, reserved, *rest))),
        examined => examined,
    };
    Step::Done(Box::new(move |state, effects| {
        state.objects.users().end_reservation(uid, reserved);
        state.set_request(id, PendingRequest::None);
        match examined {
            Examined::Accepted(prepared) => finish_put(state, effects, id, prepared),
            Examined::Refused(refusal, fds) => {
                effects.close_fds(Some(uid), fds);
                refuse(state, effects, id, refusal);
            }
            Examined::More(_) => {}
        }
        effects.push(Effect::Listen(id));
    }))
}

/// Publishes an examined put, or adds it to a draft.
fn finish_put(state: &mut State, effects: &mut Effects, id: ConnectionId, prepared: ExaminedPut) {
    let ExaminedPut { share, group, wait } = prepared;
    let Some(caller) = state.caller(id).cloned() else {
        return effects.close_fds(None, share.version.into_fds());
    };
    match group.filter(|_| share.announced.len() > share.version.parts.len()) {
        Some(group) => parts::join(state, effects, &caller, group, share, wait),
        None => change(state, effects, Change::Put(ReadyPut { makers: vec![id], version: share.version })),
    }
}
