//! Deletes and recalls.

use super::{effects::Effects, reply::answer};
use crate::{
    broker::{
        name::check_name,
        server::state::{caller::ConnectionId, root::State},
    },
    wire::broker::{Delete, Done, Message, Recall},
};

pub(crate) fn delete(state: &mut State, effects: &mut Effects, id: ConnectionId, delete: &Delete) {
    let Some(client) = state.clients.get(&id) else { return };
    let deleted =
        check_name(&delete.name).and_then(|()| state.objects.delete(&client.caller, &delete.name, delete.request));
    answer(state, effects, id, deleted.map(|()| Message::Done(Done {})));
}

pub(crate) fn recall(state: &mut State, effects: &mut Effects, id: ConnectionId, recall: &Recall) {
    let Some(client) = state.clients.get(&id) else { return };
    let recalled = state.objects.recall(&client.caller, &recall.ids);
    answer(state, effects, id, recalled.map(|()| Message::Done(Done {})));
}
