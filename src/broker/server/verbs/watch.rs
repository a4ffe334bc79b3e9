//! Watches: which events are sent to a client, and when.

use super::effects::{Effect, Outgoing};
use crate::{
    broker::server::state::{
        caller::ConnectionId,
        root::{PendingRequest, State},
    },
    wire::broker::{Event, Events, Message, WatchHeader},
};

/// The most events compared per record. The rest follow after the record is sent.
const EVENTS_PER_RECORD: usize = 512;

/// Work for watchers per turn of the event loop, in compared events. A record counts as [`RECORD_COST`] events.
const WORK_PER_TURN: usize = 1024;
const RECORD_COST: usize = 64;

/// Approximate size of a record, in bytes.
const PAGE_BYTES: usize = 48 * 1024;

/// Starts a watch.
pub(crate) fn watch(state: &mut State, id: ConnectionId, watch: WatchHeader) {
    let Some(client) = state.clients.get_mut(&id) else { return };
    let known = &state.objects.events;
    let other = watch.instance.as_ref().is_some_and(|instance| instance != known.instance());
    let (after, lost) = match watch.after {
        // Another instance numbers its events differently: treat all known events as new.
        _ if other => (0, true),
        Some(after) => (after.min(known.last_event()), false),
        None => (known.last_event(), false),
    };
    state.watchers.add(id, &watch.prefix, client.caller.reader(watch.recalls), after, lost);
    client.request = PendingRequest::Watch;
}

/// Sends new events to watching clients, within the budget of one turn.
pub(crate) fn send_events(state: &mut State) {
    state.watchers.queue_new_events(&state.objects.events);
    let mut left = WORK_PER_TURN;
    while left > 0
        && let Some(id) = state.watchers.next()
    {
        left = left.saturating_sub(send_page(state, id));
    }
}

/// Allows the next record after the socket has accepted the last one.
pub(crate) fn page_sent(state: &mut State, id: ConnectionId) {
    if state.watchers.get_mut(id).is_some_and(|watch| std::mem::take(&mut watch.is_unsent)) {
        state.watchers.enqueue(id);
    }
}

/// Sends a client its next events, unless the socket has not accepted the last record. Returns the work done.
fn send_page(state: &mut State, id: ConnectionId) -> usize {
    let Some(watch) = state.watchers.get_mut(id).filter(|watch| !watch.is_unsent) else { return 1 };
    let known = &state.objects.events;
    let (forgotten, events) = known.events_after(watch.after);
    let lost = watch.is_lost || forgotten;
    let mut page = Vec::<Event>::new();
    let mut length = 0;
    let mut next = known.last_event();
    let mut work = 1;
    for seen in events {
        if length > PAGE_BYTES || work > EVENTS_PER_RECORD {
            next = seen.event.seq - 1;
            break;
        }
        work += 1;
        if seen.event.name.starts_with(&*watch.prefix) && watch.reader.sees(seen) {
            length += 320 + seen.event.name.len() + seen.event.message.as_ref().map_or(0, |text| 2 * text.len());
            page.push(seen.event.clone());
        }
    }
    let silent = page.is_empty() && !watch.is_new && !lost;
    (watch.after, watch.is_new, watch.is_lost) = (next, false, false);
    if !silent {
        let events = Events { instance: known.instance().to_owned(), lost, events: page, next };
        match Outgoing::of(&Message::Events(events), Vec::new()) {
            Ok(record) => {
                // The next record follows after the socket has accepted this one. A client that does not read costs nothing.
                watch.is_unsent = true;
                state.effects.push(Effect::Send { client: id, records: vec![record] });
                return work + RECORD_COST;
            }
            Err(error) => tracing::error!(error = error.in_full(), "cannot encode events"),
        }
    }
    if next < known.last_event() {
        state.watchers.enqueue(id);
    } else {
        state.watchers.set_idle(id);
    }
    work
}
