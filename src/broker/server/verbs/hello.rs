//! The hello, which must come first.

use std::process;

use super::{
    effects::{Effect, Effects},
    reply::reply,
};
use crate::{
    broker::server::state::{caller::ConnectionId, root::State},
    error::ErrorCode,
    wire::{
        Hello, VERSION,
        broker::{BROKER, Message, NO_BACKEND},
    },
};

/// Answers a hello, or disconnects a client with an incompatible protocol.
pub(crate) fn hello(state: &mut State, effects: &mut Effects, id: ConnectionId, hello: &Hello) {
    if !hello.capabilities.iter().any(|named| named == BROKER) {
        let message = "this is a broker, and the hello lacks the capability `broker`".to_owned();
        let why = "its hello is not for a broker";
        return effects.push(Effect::End { client: id, code: ErrorCode::Object, message, why });
    }
    if hello.version < VERSION {
        let message =
            format!("the hello is for protocol version {}, but this broker speaks version {VERSION}", hello.version);
        let why = "it speaks another protocol version";
        return effects.push(Effect::End { client: id, code: ErrorCode::Version, message, why });
    }
    let Some(client) = state.clients.get_mut(&id) else { return };
    client.greeted = true;
    let timeout_ms = u64::try_from(state.timeout.as_millis()).unwrap_or(u64::MAX).max(1);
    let answer = Hello {
        version: VERSION,
        capabilities: vec![BROKER.to_owned()],
        backend: NO_BACKEND.to_owned(),
        pid: process::id(),
        timeout_ms,
    };
    reply(state, effects, id, &Message::Hello(answer));
}
