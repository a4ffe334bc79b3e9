//! Server metrics.

use std::process;

use super::{list::claims, reply::reply, topic};
use crate::{
    broker::server::{
        admit::{Limits, Resource},
        state::{caller::ConnectionId, objects::ServerReport, root::State},
    },
    sys,
    wire::broker::{KeeperInfo, Measured, Message, Room, StoreRoom},
};

/// The most bytes of per-user totals.
const TOTALS_BYTES: usize = 32 * 1024;

/// Answers with the server's metrics.
pub(crate) fn measure(state: &mut State, id: ConnectionId) {
    let Some(caller) = state.caller(id).cloned() else { return };
    let ServerReport { objects, versions, leases, .. } = state.objects.total();
    let (used, allowed) = state.objects.store().room();
    let users = state.objects.users();
    let (Limits { user, total, files, .. }, used_files) = (users.limits, users.total(Resource::Descriptors));
    let number = |of: usize| u64::try_from(of).unwrap_or(u64::MAX);
    let measured = Measured {
        instance: state.objects.events().instance().to_owned(),
        started_ms: state.metrics.started_ms,
        restarts: state.objects.events().restarts(),
        objects,
        versions,
        leases,
        connections: number(state.clients.len()),
        watchers: number(state.watchers.len()),
        descriptors: Room { used: used_files, allowed: files },
        store: StoreRoom {
            kind: state.objects.store().keeper().as_str().to_owned(),
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
            .filter(|_| state.objects.store().is_greeted())
            .map(|pid| KeeperInfo { pid, started_ms: sys::started_ms(pid) }),
        claims: Some(claims(state, id, "")),
        topics: Some(topic::list(state, id, "")),
    };
    reply(state, id, &Message::Measured(Box::new(measured)));
}
