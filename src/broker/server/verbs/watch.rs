//! The connections that watch: which of them an event concerns, and when each is sent what it has not seen.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::Arc,
};

use crate::broker::server::{ConnectionId, io::connection::Request, io::reactor::Reactor, state::caller::Reader};
use crate::{
    broker::catalogue::record::Seen,
    wire::broker::{Event, Events, Message, Watch},
};

/// How many events are looked at for one record: the others wait until it is sent.
const EVENTS_AT_ONCE: usize = 512;

/// How much is done for watchers before other connections are served: so many events are looked at, and a record is worth as
/// many as [`RECORD`].
const WORK_AT_ONCE: usize = 1024;
const RECORD: usize = 64;

/// How many bytes of events are sent in one record, about.
const PAGE: usize = 48 * 1024;

/// A connection that watches.
#[derive(Debug)]
pub(crate) struct Watching {
    prefix: String,
    /// The last event that was looked at.
    after: u64,
    /// Whether it is still to be told that it watches, and that events were lost.
    new: bool,
    lost: bool,
}

/// All connections that watch.
///
/// Those with nothing to be sent are in groups of equal prefix and equal rights. An event takes whole groups into the queue, and
/// costs nothing for the others, nor for a connection whose peer does not read.
#[derive(Debug, Default)]
pub(crate) struct Watchers {
    members: HashMap<ConnectionId, Member>,
    /// By prefix and rights.
    idle: HashMap<Arc<str>, HashMap<Arc<Reader>, HashSet<ConnectionId>>>,
    /// Those that may have something to be sent, in their order.
    queue: VecDeque<ConnectionId>,
    /// The last event that was compared with the groups.
    seen: u64,
}

#[derive(Debug)]
struct Member {
    prefix: Arc<str>,
    reader: Arc<Reader>,
    /// Whether it is in the queue.
    queued: bool,
    /// No event up to this one concerns it that it was not sent.
    skip: u64,
}

impl Watchers {
    /// `seen` is the last event that there was before.
    pub(crate) fn new(seen: u64) -> Self {
        Self { seen, ..Self::default() }
    }

    pub(crate) fn len(&self) -> usize {
        self.members.len()
    }

    /// Whether some may have something to be sent.
    pub(crate) fn are_due(&self) -> bool {
        !self.queue.is_empty()
    }

    fn add(&mut self, id: ConnectionId, prefix: &str, reader: Reader) {
        let (prefix, reader) = (prefix.into(), Arc::new(reader));
        self.members.insert(id, Member { prefix, reader, queued: false, skip: 0 });
        self.enqueue(id);
    }

    pub(crate) fn remove(&mut self, id: ConnectionId) {
        let Some(member) = self.members.remove(&id) else { return };
        let Some(groups) = self.idle.get_mut(&member.prefix) else { return };
        if let Some(ids) = groups.get_mut(&member.reader) {
            ids.remove(&id);
            if ids.is_empty() {
                groups.remove(&member.reader);
            }
        }
        if groups.is_empty() {
            self.idle.remove(&member.prefix);
        }
    }

    /// One that watches may have something to be sent.
    pub(crate) fn enqueue(&mut self, id: ConnectionId) {
        if let Some(member) = self.members.get_mut(&id).filter(|member| !member.queued) {
            member.queued = true;
            self.queue.push_back(id);
        }
    }

    /// The next one of the queue, and the event up to which none concerns it.
    fn next(&mut self) -> Option<(ConnectionId, u64)> {
        loop {
            let id = self.queue.pop_front()?;
            if let Some(member) = self.members.get_mut(&id) {
                member.queued = false;
                return Some((id, std::mem::take(&mut member.skip)));
            }
        }
    }

    /// One has been sent all that there is.
    fn rest(&mut self, id: ConnectionId) {
        let Some(Member { prefix, reader, .. }) = self.members.get(&id) else { return };
        let groups = self.idle.entry(Arc::clone(prefix)).or_default();
        groups.entry(Arc::clone(reader)).or_default().insert(id);
    }

    /// Takes those into the queue whom an event concerns.
    fn notice(&mut self, seen: &Seen) {
        let name = &seen.event.name;
        for end in 0..=name.len() {
            let Some(groups) = name.get(..end).and_then(|prefix| self.idle.get_mut(prefix)) else { continue };
            let concerned = groups.extract_if(|reader, _| reader.may_read(seen.owner, seen.mode));
            let ids: Vec<ConnectionId> = concerned.flat_map(|(_, ids)| ids).collect();
            if groups.is_empty() {
                self.idle.remove(&name[..end]);
            }
            self.wake(ids, seen.event.seq - 1);
        }
    }

    /// Takes all into the queue: events that may concern them are not known any more.
    fn notice_loss(&mut self) {
        let ids = std::mem::take(&mut self.idle).into_values().flat_map(HashMap::into_values).flatten().collect();
        self.wake(ids, 0);
    }

    fn wake(&mut self, ids: Vec<ConnectionId>, skip: u64) {
        for id in ids {
            self.enqueue(id);
            if let Some(member) = self.members.get_mut(&id) {
                member.skip = skip;
            }
        }
    }
}

/// What sending events to a connection came to.
enum Sent {
    /// It has seen everything.
    All,
    /// More are to be looked at.
    More,
    /// It is gone, watches no more, or has not read the last ones: it is looked at again when it has.
    Nothing,
}

impl Reactor {
    /// A watch has come.
    pub(crate) fn watch_events(&mut self, id: ConnectionId, watch: Watch) {
        let Some(connection) = self.connections.get(&id) else { return };
        let reader = connection.caller.reader(connection);
        let journal = self.objects.journal();
        let other = watch.instance.as_ref().is_some_and(|instance| instance != journal.instance());
        let (after, lost) = match watch.after {
            // What another broker counted says nothing here: all that is known is new.
            _ if other => (0, true),
            Some(after) => (after.min(journal.last_event()), false),
            None => (journal.last_event(), false),
        };
        self.watchers.add(id, &watch.prefix, reader);
        let watching = Watching { prefix: watch.prefix, after, new: true, lost };
        self.set_request(id, Request::Watch(Box::new(watching)));
    }

    /// Sends those who watch what has happened since they were sent something last, as much as one turn of the loop has time for.
    pub(crate) fn tell_watchers(&mut self) {
        let journal = self.objects.journal();
        let (forgotten, events) = journal.events_after(self.watchers.seen);
        if forgotten {
            self.watchers.notice_loss();
        }
        if self.watchers.members.is_empty() {
            self.watchers.seen = journal.last_event();
            return;
        }
        events.for_each(|seen| self.watchers.notice(seen));
        self.watchers.seen = journal.last_event();
        let mut left = WORK_AT_ONCE;
        while left > 0
            && let Some((id, skip)) = self.watchers.next()
        {
            let (sent, work) = self.send_events(id, skip);
            left = left.saturating_sub(work);
            match sent {
                Sent::All => self.watchers.rest(id),
                Sent::More => self.watchers.enqueue(id),
                Sent::Nothing => {}
            }
        }
    }

    /// Sends a connection a record of the events that it was not sent, unless it has not read the last one. Returns how much work it
    /// was, too.
    fn send_events(&mut self, id: ConnectionId, skip: u64) -> (Sent, usize) {
        let Some(connection) = self.connections.get_mut(&id).filter(|connection| !connection.is_blocked()) else {
            return (Sent::Nothing, 1);
        };
        let Request::Watch(watching) = &mut connection.request else { return (Sent::Nothing, 1) };
        watching.after = watching.after.max(skip);
        let journal = self.objects.journal();
        let (forgotten, events) = journal.events_after(watching.after);
        let lost = watching.lost || forgotten;
        let (mut page, mut length, mut next, mut work) = (Vec::<Event>::new(), 0, journal.last_event(), 1);
        let reader = self.watchers.members.get(&id).map(|member| &member.reader);
        for seen in events {
            if length > PAGE || work > EVENTS_AT_ONCE {
                next = seen.event.seq - 1;
                break;
            }
            work += 1;
            let visible = seen.event.name.starts_with(&watching.prefix)
                && reader.is_some_and(|reader| reader.may_read(seen.owner, seen.mode));
            if visible {
                length += 240 + seen.event.name.len() + seen.event.message.as_ref().map_or(0, |text| 2 * text.len());
                page.push(seen.event.clone());
            }
        }
        let silent = page.is_empty() && !watching.new && !lost;
        (watching.after, watching.new, watching.lost) = (next, false, false);
        let sent = if next < journal.last_event() { Sent::More } else { Sent::All };
        if silent {
            return (sent, work);
        }
        let events = Events { instance: journal.instance().to_owned(), lost, events: page, next };
        self.push_events(id, &Message::Events(events));
        let is_blocked = self.connections.get(&id).is_none_or(|connection| connection.is_blocked());
        (if is_blocked { Sent::Nothing } else { sent }, work + RECORD)
    }
}
