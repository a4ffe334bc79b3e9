//! Answers to requests.

use std::os::fd::OwnedFd;

use super::effects::{Effect, Outgoing};
use crate::{
    broker::server::{
        admit::Resource,
        state::{
            caller::{Caller, ConnectionId},
            root::{PendingRequest, RequestInfo, State},
        },
    },
    error::{BrokerError, RefusalCode},
    wire::broker::{Message, Refusal},
};

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
        state.objects.users().sub(client.caller.uid, Resource::Requests, bytes);
        state.effects.push(Effect::Count { verb, outcome: outcome.to_owned(), since });
    }
}
