//! Connects, hellos, disconnects, deadlines, and completed sends.

use std::time::Duration;

use super::{
    dispatch::{refuse, reply},
    effects::Effect,
    get, put,
    watch::page_sent,
};
use crate::{
    broker::server::{
        admit::Resource,
        state::{
            caller::{Caller, ConnectionId},
            root::{ClientState, PendingRequest, State},
        },
    },
    error::{BrokerError, ErrorCode},
    wire::{
        Hello, VERSION,
        broker::{BROKER, Message, NO_BACKEND},
    },
};

/// Adds a client, which must send a hello.
pub(crate) fn connected(state: &mut State, caller: Caller) {
    let id = caller.connection;
    state.objects.users.add(caller.uid, Resource::Connections, 1);
    state.clients.insert(id, ClientState::new(caller));
    state.effects.deadline(id, state.objects.now.after(state.timeout));
    state.effects.push(Effect::Listen(id));
}

/// Answers a hello, or disconnects a client with an incompatible protocol.
pub(crate) fn hello(state: &mut State, id: ConnectionId, hello: &Hello) {
    if !hello.capabilities.iter().any(|named| named == BROKER) {
        let message = "this is a broker, and the hello lacks the capability `broker`".to_owned();
        let why = "its hello is not for a broker";
        return state.effects.push(Effect::End { client: id, code: ErrorCode::Object, message, why });
    }
    if hello.version < VERSION {
        let message =
            format!("the hello is for protocol version {}, but this broker speaks version {VERSION}", hello.version);
        let why = "it speaks another protocol version";
        return state.effects.push(Effect::End { client: id, code: ErrorCode::Version, message, why });
    }
    let Some(client) = state.clients.get_mut(&id) else { return };
    client.greeted = true;
    let answer = Hello::new(&[BROKER], NO_BACKEND, state.timeout);
    reply(state, id, &Message::Hello(answer));
}

/// Removes a client: ends its leases and claims, and drops its unfinished put.
pub(crate) fn disconnected(state: &mut State, id: ConnectionId) {
    let Some(client) = state.clients.remove(&id) else { return };
    let uid = client.caller.uid;
    state.watchers.remove(id);
    state.topics.remove(id);
    if let Some(request_info) = &client.request_info {
        state.objects.users.sub(uid, Resource::Requests, request_info.bytes);
    }
    match client.request {
        PendingRequest::Upload { version, .. } => put::discard(state, *version),
        PendingRequest::Object(waiting) => state.waits.remove(id, &waiting.get),
        PendingRequest::Parts(key) => put::withdraw_part(state, id, &key),
        PendingRequest::Change => put::withdraw_changes(state, id),
        _ => {}
    }
    state.objects.connection_closed(id, uid);
    state.objects.clean_up_closed();
    get::end_claims(state, id, None);
}

/// How long an upload is extended if the event loop does not read from its user.
const EXTENSION: Duration = Duration::from_secs(1);

/// Handles a client's deadline.
pub(crate) fn deadline_passed(state: &mut State, id: ConnectionId) {
    let Some(client) = state.clients.get(&id) else { return };
    let code = ErrorCode::Timeout;
    if !client.greeted {
        let message = format!("no hello within {:?}", state.timeout);
        state.effects.push(Effect::End { client: id, code, message, why: "its hello timed out" });
    } else if matches!(client.request, PendingRequest::Upload { .. } | PendingRequest::Parts(_))
        && !state.objects.users.has_room(client.caller.uid, Resource::Closing, 0)
    {
        state.effects.deadline(id, state.objects.now.after(EXTENSION));
    } else if matches!(client.request, PendingRequest::Upload { .. }) {
        let message = format!("not all segments of a put arrived within {:?}", state.timeout);
        state.effects.push(Effect::End { client: id, code, message, why: "its put timed out" });
    } else if let PendingRequest::Parts(key) = &client.request {
        let key = key.clone();
        put::parts_timed_out(state, id, &key);
    } else {
        get::wait_timed_out(state, id);
    }
}

/// All records have been sent to the client's socket.
pub(crate) fn all_sent(state: &mut State, id: ConnectionId) {
    if let Some(client) = state.clients.get_mut(&id) {
        client.sending.clear();
    }
    page_sent(state, id);
}

/// Undoes an answer that can't be sent completely: ends its leases and refuses the request.
pub(crate) fn send_failed(state: &mut State, id: ConnectionId, refusal: BrokerError) {
    let Some(client) = state.clients.get_mut(&id) else { return };
    let mut tokens = std::mem::take(&mut client.sending);
    tokens.retain(|token| state.objects.holder(*token) == Some(id));
    tokens.into_iter().for_each(|token| state.objects.end_lease(token));
    refuse(state, id, refusal);
}
