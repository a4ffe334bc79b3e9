//! Connects, disconnects, deadlines, and completed sends.

use super::{
    effects::{Effect, Effects},
    get, lease, parts, publish, put,
    reply::refuse,
    watch::page_sent,
};
use crate::{
    broker::server::state::{
        caller::{Caller, ConnectionId},
        client::{ClientState, PendingRequest},
        root::State,
    },
    error::{BrokerError, ErrorCode, RefusalCode},
};

/// Adds a client, which must send a hello.
pub(crate) fn connected(state: &mut State, effects: &mut Effects, caller: Caller) {
    let id = caller.connection;
    state.objects.users().add_connection(caller.uid);
    state.clients.insert(id, ClientState::new(caller));
    effects.deadline(id, state.objects.now.after(state.timeout));
    effects.push(Effect::Listen(id));
}

/// Removes a client: ends its leases and claims, and drops its unfinished put.
pub(crate) fn disconnected(state: &mut State, effects: &mut Effects, id: ConnectionId) {
    let Some(client) = state.clients.remove(&id) else { return };
    let uid = client.caller.uid;
    state.watchers.remove(id);
    state.waits.remove(id);
    if let Some(request_info) = &client.request_info {
        state.objects.users().remove_request(uid, request_info.bytes);
    }
    match client.request {
        PendingRequest::Upload { version, .. } => put::end_upload(state, effects, *version),
        PendingRequest::Parts(key) => parts::withdraw(state, effects, id, &key),
        PendingRequest::Confirmation => publish::withdraw(state, effects, id),
        _ => {}
    }
    state.objects.connection_closed(id, uid, client.leases, client.names);
    state.objects.clean_up_closed();
    get::end_claims(state, effects, id);
}

/// Handles a client's deadline.
pub(crate) fn deadline_passed(state: &mut State, effects: &mut Effects, id: ConnectionId) {
    let Some(client) = state.clients.get(&id) else { return };
    let code = ErrorCode::Timeout;
    if !client.greeted {
        let message = format!("no hello within {:?}", state.timeout);
        effects.push(Effect::End { client: id, code, message, why: "its hello timed out" });
    } else if matches!(client.request, PendingRequest::Upload { .. }) {
        let message = format!("not all segments of a put arrived within {:?}", state.timeout);
        effects.push(Effect::End { client: id, code, message, why: "its put timed out" });
    } else {
        lease::end_wait(state, effects, id, RefusalCode::Timeout);
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
pub(crate) fn send_failed(state: &mut State, effects: &mut Effects, id: ConnectionId, refusal: BrokerError) {
    let Some(client) = state.clients.get_mut(&id) else { return };
    let mut tokens = std::mem::take(&mut client.sending);
    tokens.retain(|token| client.leases.remove(token));
    tokens.into_iter().for_each(|token| state.objects.end_lease(token));
    refuse(state, effects, id, refusal);
}
