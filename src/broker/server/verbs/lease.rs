//! Leases: release, report, resume, recall.

use super::{get, publish::answer_when_confirmed, reply::reply};
use crate::{
    broker::server::state::{caller::ConnectionId, objects::Resumption, root::State},
    wire::broker::{Message, Recall, ReportHeader, Resume, Resumed, ResumedLease, Token},
};

/// Ends a lease or a claim.
pub(crate) fn release(state: &mut State, id: ConnectionId, token: Token) {
    let Some(client) = state.clients.get_mut(&id) else { return };
    if client.is_sending(token) {
        state.effects.protocol_error(id, "a lease was released before it was received completely");
    } else if client.leases.remove(&token) {
        state.objects.end_lease(token);
    } else {
        get::end_claim(state, id, token);
    }
}

/// Keeps a report about a leased version.
pub(crate) fn report(state: &mut State, id: ConnectionId, report: ReportHeader) {
    let Some(client) = state.clients.get(&id).filter(|client| client.leases.contains(&report.token)) else { return };
    let should_log = state.repeats.should_log(client.caller.uid, "a reader reports that memory differs from its claim");
    state.objects.report(&client.caller, report.token, report.message, should_log);
}

/// Moves leases and names from the client's previous connection to this one.
pub(crate) fn resume(state: &mut State, id: ConnectionId, resume: Resume) {
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
    reply(state, id, &Message::Resumed(Resumed { instance, lost }));
}

/// Asks the holders of versions to release their leases.
pub(crate) fn recall(state: &mut State, id: ConnectionId, recall: &Recall) {
    let Some(client) = state.clients.get(&id) else { return };
    let recalled = state.objects.recall(&client.caller, &recall.ids);
    answer_when_confirmed(state, id, recalled);
}
