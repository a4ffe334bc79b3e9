//! Topics: introduces publishers and followers.

use super::{
    dispatch::refuse,
    effects::{Effect, Outgoing},
};
use crate::{
    broker::{
        request::{check_name, check_prefix},
        server::state::{
            caller::ConnectionId,
            root::{PendingRequest, State},
        },
    },
    error::BrokerError,
    wire::broker::{Follow, HeldTopic, Message, OpenTopic, Opened},
};

/// The most bytes of topics in an answer.
const TOPICS_BYTES: usize = 8 * 1024;

/// Opens a topic.
pub(crate) fn open(state: &mut State, id: ConnectionId, topic: &OpenTopic) {
    let Some(client) = state.clients.get(&id) else { return };
    let mode = topic.mode.unwrap_or(0o600);
    let checked =
        check_name(&topic.name).and_then(|()| state.topics.open(&client.caller, &topic.name, topic.epoch, mode));
    accept(state, id, checked);
}

/// Follows topics.
pub(crate) fn follow(state: &mut State, id: ConnectionId, follow: Follow) {
    let Some(client) = state.clients.get(&id) else { return };
    let checked = if follow.prefix { check_prefix(&follow.name) } else { check_name(&follow.name) };
    if checked.is_ok() {
        state.topics.follow(&client.caller, follow.name, follow.prefix);
    }
    accept(state, id, checked);
}

fn accept(state: &mut State, id: ConnectionId, checked: Result<(), BrokerError>) {
    if let Err(refusal) = checked {
        return refuse(state, id, refusal);
    }
    state.set_request(id, PendingRequest::Topic);
    match Outgoing::of(&Message::Opened(Opened {}), Vec::new()) {
        Ok(record) => state.effects.push(Effect::Send { client: id, records: vec![record] }),
        Err(error) => tracing::error!(error = error.in_full(), "cannot encode an answer"),
    }
    introduce(state);
}

/// A client has taken its last introduction.
pub(crate) fn met(state: &mut State, id: ConnectionId) {
    match state.topics.met(id) {
        true => introduce(state),
        false => state.effects.protocol_error(id, "met arrived, but no introduction was sent"),
    }
}

/// Introduces all clients that are ready.
pub(crate) fn introduce(state: &mut State) {
    state.topics.meetings().into_iter().for_each(|meeting| state.effects.push(Effect::Meet(meeting)));
}

/// The topics that a client may read: as many as fit.
pub(crate) fn list(state: &State, id: ConnectionId, prefix: &str) -> Vec<HeldTopic> {
    let Some(caller) = state.caller(id) else { return Vec::new() };
    let mut room = TOPICS_BYTES;
    let topics = state.topics.list(caller, prefix).map(|(publisher, topic)| {
        let publisher = state.caller(publisher);
        let (pid, command) = publisher.map_or((0, None), |caller| (caller.pid, caller.command.clone()));
        HeldTopic { pid, command, ..topic }
    });
    let fits = |topic: &HeldTopic| {
        room = room.saturating_sub(256 + topic.name.len());
        room > 0
    };
    topics.take_while(fits).collect()
}
