//! List, stat, who, and the server's metrics.

use std::process;

use super::{
    dispatch::{refuse, reply, reply_with},
    topic,
};
use crate::{
    broker::{
        request::check_name,
        server::{
            admit::{Limits, Resource},
            state::{
                caller::ConnectionId,
                objects::{LeasePage, ServerReport},
                root::{PendingRequest, State},
            },
        },
    },
    error::{BrokerError, RefusalCode},
    sys,
    wire::broker::{HeldClaim, KeeperInfo, List, Measured, Message, Room, Stat, StoreRoom, Who},
};

/// The most bytes of claims. The rest of a record holds leases, totals and figures.
const CLAIMS_BYTES: usize = 8 * 1024;

/// Answers with a page of names that the client may read.
pub(crate) fn list(state: &mut State, id: ConnectionId, list: &List) {
    let Some(client) = state.clients.get(&id) else { return };
    let page = state.objects.list(&client.caller, list);
    reply(state, id, &Message::Objects(page));
}

pub(crate) fn stat(state: &mut State, id: ConnectionId, stat: &Stat) {
    let Some(client) = state.clients.get(&id) else { return };
    let found = check_name(&stat.name).and_then(|()| state.objects.stat(&client.caller, stat));
    // Duplicate the descriptor: the name may be deleted before the reply is sent.
    let found = found.and_then(|(info, metadata)| {
        let fd = metadata.map(|metadata| state.objects.descriptor(metadata).try_clone_to_owned()).transpose();
        let fd = fd.map_err(|error| {
            let message = format!("the broker has no free descriptor for the metadata: {error}");
            BrokerError::new(RefusalCode::Full, message)
        })?;
        Ok((info, fd))
    });
    match found {
        Ok((info, fd)) => reply_with(state, id, &Message::Version(Box::new(info)), fd),
        Err(refusal) => refuse(state, id, refusal),
    }
}

/// Answers with a page of leases that the client may see, or continues the search in the next turn.
pub(crate) fn who(state: &mut State, id: ConnectionId, who: Who) {
    let Some(client) = state.clients.get_mut(&id) else { return };
    match state.objects.who(&client.caller, &who) {
        LeasePage::Leases(mut page) => {
            page.claims = (!page.more).then(|| claims(state, id, &who.prefix));
            page.topics = (!page.more).then(|| topic::list(state, id, &who.prefix));
            reply(state, id, &Message::Leases(page));
        }
        LeasePage::NoneUpTo(after) => {
            client.request = PendingRequest::Leases(Who { after: Some(after), ..who });
            state.listings.push_back(id);
        }
    }
}

/// The oldest claims that a client may see: as many as fit. It learns no more names than from a `get`.
fn claims(state: &State, id: ConnectionId, prefix: &str) -> Vec<HeldClaim> {
    let Some(caller) = state.caller(id) else { return Vec::new() };
    let is_waiting = |name: &str| {
        let mut waiting = state.waits.of(name).into_iter().filter_map(|id| state.caller(id));
        waiting.any(|waiting| waiting.uid == caller.uid)
    };
    let may_see = |claim: &HeldClaim| {
        let HeldClaim { name, uid, .. } = claim;
        caller.is_superuser()
            || caller.uid == *uid
            || name == prefix
            || state.objects.may_read(caller, name)
            || is_waiting(name)
    };
    let mut room = CLAIMS_BYTES;
    let mut fits = |claim: &HeldClaim| {
        let bytes = 320 + claim.name.len() + claim.part.as_ref().map_or(0, String::len);
        room.checked_sub(bytes).is_some_and(|left| {
            room = left;
            true
        })
    };
    state.claims.list(prefix).into_iter().filter(may_see).take_while(|claim| fits(claim)).collect()
}

/// Continues one listing that has not found anything yet.
pub(crate) fn continue_listing(state: &mut State) {
    let Some(id) = state.listings.pop_front() else { return };
    let request = state.clients.get_mut(&id).map(|client| &mut client.request);
    if let Some(PendingRequest::Leases(next)) = request {
        let next = next.clone();
        who(state, id, next);
    }
}

/// The most bytes of per-user totals.
const TOTALS_BYTES: usize = 32 * 1024;

/// Answers with the server's metrics.
pub(crate) fn measure(state: &mut State, id: ConnectionId) {
    let Some(caller) = state.caller(id).cloned() else { return };
    let ServerReport { objects, versions, leases, .. } = state.objects.total();
    let (used, allowed) = state.objects.store.room();
    let users = &mut state.objects.users;
    let (Limits { user, total, files, .. }, used_files) = (users.limits, users.total(Resource::Descriptors));
    let number = |of: usize| u64::try_from(of).unwrap_or(u64::MAX);
    let measured = Measured {
        instance: state.objects.events.instance().to_owned(),
        started_ms: state.metrics.started_ms,
        restarts: state.objects.events.restarts(),
        objects,
        versions,
        leases,
        connections: number(state.clients.len()),
        watchers: number(state.watchers.members.len()),
        descriptors: Room { used: used_files, allowed: files },
        store: StoreRoom {
            kind: if state.objects.store.has_keeper { "keeper" } else { "none" }.to_owned(),
            used: number(used),
            allowed: number(allowed),
        },
        requests: state.metrics.requests().collect(),
        durations: state.metrics.durations().collect(),
        totals: state.objects.totals(&caller, TOTALS_BYTES),
        version: Some(env!("CARGO_PKG_VERSION").to_owned()),
        quota: Some(user),
        total_quota: Some(total),
        pid: Some(process::id()),
        keeper: state
            .keeper_pid
            .filter(|_| state.objects.store.greeted)
            .map(|pid| KeeperInfo { pid, started_ms: sys::started_ms(pid) }),
        claims: Some(claims(state, id, "")),
        topics: Some(topic::list(state, id, "")),
    };
    reply(state, id, &Message::Measured(Box::new(measured)));
}
