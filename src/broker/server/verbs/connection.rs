//! Connects, disconnects, deadlines, and completed work and sends.

use super::{
    effects::{Effect, Effects, Outcome},
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
        PendingRequest::Upload(upload) => put::end_upload(state, effects, *upload),
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
    } else if matches!(client.request, PendingRequest::Upload(_)) {
        let message = format!("not all segments of a put arrived within {:?}", state.timeout);
        effects.push(Effect::End { client: id, code, message, why: "its put timed out" });
    } else {
        lease::end_wait(state, effects, id, RefusalCode::Timeout);
    }
}

/// Applies the worker's result. If the client sent a stop during the work, a following wait is stopped too.
pub(crate) fn work_done(state: &mut State, effects: &mut Effects, id: ConnectionId, outcome: Outcome) {
    let request = state.clients.get(&id).map(|client| &client.request);
    let stopped = matches!(request, Some(PendingRequest::Worker { stopped: true }));
    outcome(state, effects);
    if stopped {
        lease::stop(state, effects, id);
    }
}

/// Handles a panic in the worker.
pub(crate) fn work_failed(state: &mut State, effects: &mut Effects, id: ConnectionId, uid: u32, reserved: usize) {
    state.objects.users().end_reservation(uid, reserved);
    state.waits.remove(id);
    if state.clients.get(&id).is_some_and(|client| matches!(client.request, PendingRequest::Worker { .. })) {
        let message = "the broker failed to examine the tables of this request: see its log".to_owned();
        refuse(state, effects, id, BrokerError::new(RefusalCode::Failed, message));
        effects.push(Effect::Listen(id));
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
