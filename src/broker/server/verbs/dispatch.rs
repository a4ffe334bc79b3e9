//! Selects the function for each message, and answers requests.

use std::os::fd::OwnedFd;

use super::{
    connection::hello,
    effects::{Effect, Outgoing},
    get::{get, recall, release, report, resume},
    list::{list, measure, stat, who},
    put::{delete, put, segments},
    topic::{follow, met, open},
    watch::watch,
};
use crate::{
    broker::server::{
        admit::{NOBODY, Resource},
        state::{
            caller::{Caller, ConnectionId},
            root::{PendingRequest, RequestInfo, State},
        },
    },
    error::{BrokerError, RefusalCode},
    wire::{
        MAX_BODY,
        broker::{Message, Refusal},
    },
};

/// Whether a message is answered with descriptors. The client must have read all earlier descriptors.
pub(crate) fn wants_descriptors(message: &Message) -> bool {
    matches!(message, Message::Get(_) | Message::Stat(_) | Message::Received(_))
}

pub(crate) fn handle(state: &mut State, id: ConnectionId, message: Message, fds: Vec<OwnedFd>) {
    let Some(client) = state.clients.get(&id) else { return state.effects.close_fds(NOBODY, fds) };
    let of = client.caller.uid;
    tracing::trace!(kind = message.name(), pid = client.caller.pid, "received");
    let (greeted, busy) = (client.greeted, client.is_busy());
    match message {
        Message::Error(_) => state.effects.push(Effect::Close { client: id, why: "the peer sent an error" }),
        Message::Hello(message) if !greeted => hello(state, id, &message),
        other if !greeted => {
            state.effects.close_fds(of, fds);
            state.effects.protocol_error(id, format!("expected a hello, got {}", other.name()));
        }
        Message::Busy(_) => {}
        Message::Release(message) => release(state, id, message.token),
        Message::Report(message) => report(state, id, message),
        Message::Received(received) => state.effects.push(Effect::SendNext { client: id, received: received.segments }),
        Message::Met(_) => met(state, id),
        Message::Segments(message) => segments(state, id, message, fds),
        other if busy => {
            state.effects.close_fds(of, fds);
            state
                .effects
                .protocol_error(id, format!("{} arrived before the previous request was answered", other.name()));
        }
        other => match begin_request(state, id, &other) {
            Ok(()) => request(state, id, other, fds),
            Err(refusal) => {
                state.effects.close_fds(of, fds);
                refuse(state, id, refusal);
            }
        },
    }
}

/// Handles a message that needs an answer.
fn request(state: &mut State, id: ConnectionId, message: Message, fds: Vec<OwnedFd>) {
    match message {
        Message::Put(message) => put(state, id, *message, fds),
        Message::Get(message) => get(state, id, *message),
        Message::List(message) => list(state, id, &message),
        Message::Stat(message) => stat(state, id, &message),
        Message::Who(message) => who(state, id, message),
        Message::Delete(message) => delete(state, id, message),
        Message::Recall(message) => recall(state, id, &message),
        Message::Resume(message) => resume(state, id, message),
        Message::Watch(message) => watch(state, id, message),
        Message::Measure(_) => measure(state, id),
        Message::OpenTopic(message) => open(state, id, &message),
        Message::Follow(message) => follow(state, id, message),
        other => {
            state.effects.close_fds(state.caller(id).map_or(NOBODY, |caller| caller.uid), fds);
            state.effects.protocol_error(id, format!("{} arrived, which only a broker sends", other.name()));
        }
    }
}

/// Starts accounting for a request.
///
/// # Errors
/// [`RefusalCode::Quota`](crate::error::RefusalCode::Quota) if the user's pending requests would take too much memory.
fn begin_request(state: &mut State, id: ConnectionId, request: &Message) -> Result<(), BrokerError> {
    let Some(client) = state.clients.get_mut(&id) else { return Ok(()) };
    let memory = memory_of(request);
    let counted = state.objects.users.take(client.caller.uid, Resource::Requests, memory);
    let bytes = if counted.is_ok() { memory } else { 0 };
    client.request_info = Some(RequestInfo { verb: request.name(), since: state.objects.now.at, bytes });
    counted
}

/// The most bytes that a request occupies until it is answered; 0 if it is answered at once.
fn memory_of(request: &Message) -> u64 {
    const REQUEST: u64 = 512;
    // Per byte of the record. The maps of a get take the most: 750 bytes for an object with one part, in 28 bytes of JSON.
    let ratio = match request {
        Message::Get(_) => 32,
        Message::Put(_) | Message::Watch(_) | Message::OpenTopic(_) | Message::Follow(_) => 4,
        _ => return 0,
    };
    let mut record = Vec::new();
    // Written again, a record may exceed the limit: it has fields that the client omitted.
    let length = request.encode_into(&mut record).map_or(MAX_BODY, |()| record.len());
    REQUEST + ratio * length as u64
}

// Answers.

pub(crate) fn reply(state: &mut State, id: ConnectionId, message: &Message) {
    reply_with(state, id, message, None);
}

/// Answers a request, optionally with a descriptor.
pub(crate) fn reply_with(state: &mut State, id: ConnectionId, message: &Message, fd: Option<OwnedFd>) {
    if !matches!(message, Message::Send(_)) {
        count(state, id, "ok");
        end_request(state, id);
    }
    match Outgoing::of(message, Vec::new()) {
        Ok(record) => {
            state
                .effects
                .push(Effect::Send { client: id, records: vec![Outgoing { own: fd.into_iter().collect(), ..record }] });
        }
        Err(error) => {
            tracing::error!(error = error.in_full(), kind = message.name(), "cannot encode a reply");
            let message = "the description does not fit a protocol record: the object has too many or too long names";
            refuse(state, id, BrokerError::new(RefusalCode::Failed, message));
        }
    }
}

pub(crate) fn refuse(state: &mut State, id: ConnectionId, refusal: BrokerError) {
    count(state, id, refusal.code.as_str());
    if let Some(&Caller { uid, pid, .. }) = state.caller(id) {
        // Operators can act on these; the others are the client's responsibility.
        let kind = match refusal.code {
            RefusalCode::Quota => "a request refused because of a quota",
            RefusalCode::Full => "a request refused because a resource is exhausted",
            RefusalCode::Failed => "a request failed",
            _ => "",
        };
        if !kind.is_empty() && state.repeats.should_log(uid, kind) {
            tracing::info!(uid, pid, code = %refusal.code, message = refusal.message, "refused a request");
        } else {
            tracing::debug!(uid, pid, code = %refusal.code, message = refusal.message, "refused a request");
        }
    }
    let BrokerError { code, message } = refusal;
    reply(state, id, &Message::Refused(Refusal { code, message }));
}

pub(crate) fn answer(state: &mut State, id: ConnectionId, result: Result<Message, BrokerError>) {
    match result {
        Ok(message) => reply(state, id, &message),
        Err(refusal) => refuse(state, id, refusal),
    }
}

pub(crate) fn end_request(state: &mut State, id: ConnectionId) {
    let Some(client) = state.clients.get_mut(&id) else { return };
    match std::mem::take(&mut client.request) {
        PendingRequest::Watch => state.watchers.remove(id),
        PendingRequest::Topic => state.topics.remove(id),
        _ => {}
    }
    if client.greeted {
        state.effects.push(Effect::Deadline { client: id, deadline: None });
    }
}

pub(crate) fn count(state: &mut State, id: ConnectionId, outcome: &str) {
    let Some(client) = state.clients.get_mut(&id) else { return };
    if let Some(RequestInfo { verb, since, bytes }) = client.request_info.take() {
        state.objects.users.sub(client.caller.uid, Resource::Requests, bytes);
        state.effects.push(Effect::Count { verb, outcome: outcome.to_owned(), since });
    }
}
