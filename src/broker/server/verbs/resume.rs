//! Resumes a client's leases and names on a new connection.

use super::{effects::Effects, reply::reply};
use crate::{
    broker::server::state::{caller::ConnectionId, objects::Resumption, root::State},
    wire::broker::{Message, Resume, Resumed, ResumedLease},
};

/// Moves leases and names from the client's previous connection to this one.
pub(crate) fn resume(state: &mut State, effects: &mut Effects, id: ConnectionId, resume: Resume) {
    let Some(caller) = state.caller(id).cloned() else { return };
    // A lease whose segments are still being sent is not resumable.
    let is_sending = |lease: &ResumedLease| {
        let holder = state.objects.holder(lease.token).and_then(|holder| state.clients.get(&holder));
        holder.is_some_and(|holder| holder.is_sending(lease.token))
    };
    let (sending, leases): (Vec<_>, Vec<_>) = resume.leases.into_iter().partition(is_sending);
    let resume = Resume { leases, puts: resume.puts };
    let Resumption { leases, names, before, mut lost } = state.objects.resume(&caller, &resume);
    lost.extend(sending.iter().map(|lease| lease.token));
    for (other, token) in before {
        if let Some(other) = state.clients.get_mut(&other) {
            other.leases.remove(&token);
        }
    }
    if let Some(client) = state.clients.get_mut(&id) {
        client.leases.extend(leases);
        client.names.extend(names);
    }
    let instance = state.objects.events().instance().to_owned();
    reply(state, effects, id, &Message::Resumed(Resumed { instance, lost }));
}
