//! Messages without an answer: release, report, stop.

use super::{effects::Effects, get, parts, reply::refuse};
use crate::{
    broker::server::state::{caller::ConnectionId, client::PendingRequest, root::State},
    error::{BrokerError, RefusalCode},
    wire::broker::{ReportHeader, Token},
};

/// Ends a lease or a claim.
pub(crate) fn release(state: &mut State, effects: &mut Effects, id: ConnectionId, token: Token) {
    let Some(client) = state.clients.get_mut(&id) else { return };
    if client.is_sending(token) {
        effects.protocol_error(id, "a lease was released before it was received completely");
    } else if client.leases.remove(&token) {
        state.objects.end_lease(token);
    } else {
        get::end_claim(state, effects, id, token);
    }
}

/// Keeps a report about a leased version.
pub(crate) fn report(state: &mut State, id: ConnectionId, report: ReportHeader) {
    let Some(client) = state.clients.get(&id).filter(|client| client.leases.contains(&report.token)) else { return };
    let should_log = state.repeats.should_log(client.caller.uid, "a reader reports that memory differs from its claim");
    state.objects.report(&client.caller, report.token, report.message, should_log);
}

/// Stops the client's waiting request.
pub(crate) fn stop(state: &mut State, effects: &mut Effects, id: ConnectionId) {
    end_wait(state, effects, id, RefusalCode::Stopped);
}

/// Ends a request that waits for other clients.
pub(crate) fn end_wait(state: &mut State, effects: &mut Effects, id: ConnectionId, code: RefusalCode) {
    let Some(client) = state.clients.get_mut(&id) else { return };
    match &client.request {
        PendingRequest::Parts(key) => {
            let key = key.clone();
            parts::end_wait(state, effects, id, &key, code);
        }
        PendingRequest::Object(_) => get::end_wait(state, effects, id, code),
        PendingRequest::Watch(_) => refuse(state, effects, id, BrokerError::new(code, "the watch was stopped")),
        _ => {}
    }
}
