//! Deletes and recalls.

use super::{
    effects::Effects,
    publish::{answer_when_confirmed, change},
    reply::refuse,
};
use crate::{
    broker::{
        name::check_name,
        server::state::{
            caller::ConnectionId,
            root::{Change, State},
        },
    },
    wire::broker::{Delete, Recall},
};

pub(crate) fn delete(state: &mut State, effects: &mut Effects, id: ConnectionId, delete: Delete) {
    match check_name(&delete.name) {
        Ok(()) => change(state, effects, Change::Delete(id, delete)),
        Err(refusal) => refuse(state, effects, id, refusal),
    }
}

pub(crate) fn recall(state: &mut State, effects: &mut Effects, id: ConnectionId, recall: &Recall) {
    let Some(client) = state.clients.get(&id) else { return };
    let recalled = state.objects.recall(&client.caller, &recall.ids);
    answer_when_confirmed(state, effects, id, recalled);
}
