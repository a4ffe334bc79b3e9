//! Watches: which events each client is sent, and when.

use super::effects::{Effect, Effects, Outgoing};
use crate::{
    broker::server::state::{caller::ConnectionId, client::Request, root::State, watchers::Watching},
    wire::broker::{Event, Events, Message, Watch},
};

/// How many events are compared for one record: the others wait until it is sent.
const EVENTS_AT_ONCE: usize = 512;

/// How much is done for clients that watch before others are served: so many events are compared, and a record is worth as many as
/// [`RECORD`].
const WORK_AT_ONCE: usize = 1024;
const RECORD: usize = 64;

/// How many bytes of events are sent in one record, about.
const PAGE: usize = 48 * 1024;

/// A watch has come.
pub(crate) fn watch(state: &mut State, id: ConnectionId, watch: Watch) {
    let Some(client) = state.clients.get_mut(&id) else { return };
    let journal = state.objects.journal();
    let other = watch.instance.as_ref().is_some_and(|instance| instance != journal.instance());
    let (after, lost) = match watch.after {
        // The numbers of another broker mean nothing here: all that is known is new.
        _ if other => (0, true),
        Some(after) => (after.min(journal.last_event()), false),
        None => (journal.last_event(), false),
    };
    state.watchers.add(id, &watch.prefix, client.caller.reader());
    let watching = Watching { prefix: watch.prefix, after, new: true, lost, unsent: false };
    client.request = Request::Watch(Box::new(watching));
}

/// Sends clients that watch what has happened since their last record, as much as one turn of the event loop has time for.
pub(crate) fn send_events(state: &mut State, effects: &mut Effects) {
    state.watchers.notice_new(state.objects.journal());
    let mut left = WORK_AT_ONCE;
    while left > 0
        && let Some((id, skip)) = state.watchers.next()
    {
        left = left.saturating_sub(send_page(state, effects, id, skip));
    }
}

/// The socket of a client has taken all records.
pub(crate) fn page_sent(state: &mut State, id: ConnectionId) {
    let Some(Request::Watch(watching)) = state.clients.get_mut(&id).map(|client| &mut client.request) else { return };
    if std::mem::take(&mut watching.unsent) {
        state.watchers.enqueue(id);
    }
}

/// Sends a client a record of the events that it was not sent, unless the socket has not taken the last one. Returns how much work it
/// was.
fn send_page(state: &mut State, effects: &mut Effects, id: ConnectionId, skip: u64) -> usize {
    let Some(Request::Watch(watching)) = state.clients.get_mut(&id).map(|client| &mut client.request) else { return 1 };
    if watching.unsent {
        return 1;
    }
    watching.after = watching.after.max(skip);
    let journal = state.objects.journal();
    let (forgotten, events) = journal.events_after(watching.after);
    let lost = watching.lost || forgotten;
    let (mut page, mut length, mut next, mut work) = (Vec::<Event>::new(), 0, journal.last_event(), 1);
    let reader = state.watchers.reader(id);
    for seen in events {
        if length > PAGE || work > EVENTS_AT_ONCE {
            next = seen.event.seq - 1;
            break;
        }
        work += 1;
        let visible = seen.event.name.starts_with(&watching.prefix)
            && reader.as_ref().is_some_and(|reader| reader.may_read(seen.owner, seen.mode));
        if visible {
            length += 240 + seen.event.name.len() + seen.event.message.as_ref().map_or(0, |text| 2 * text.len());
            page.push(seen.event.clone());
        }
    }
    let silent = page.is_empty() && !watching.new && !lost;
    (watching.after, watching.new, watching.lost) = (next, false, false);
    if !silent {
        let events = Events { instance: journal.instance().to_owned(), lost, events: page, next };
        match Outgoing::of(&Message::Events(events), Vec::new()) {
            Ok(record) => {
                // The rest follows once the socket has taken this one: a client that does not read costs nothing.
                watching.unsent = true;
                effects.push(Effect::Send { client: id, records: vec![record] });
                return work + RECORD;
            }
            Err(error) => tracing::error!(error = error.in_full(), "events can't be written"),
        }
    }
    if next < journal.last_event() {
        state.watchers.enqueue(id);
    } else {
        state.watchers.rest(id);
    }
    work
}
