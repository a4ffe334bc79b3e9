//! Watching clients: which events concern each client, and which it has seen.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::Arc,
};

use super::{
    caller::{ConnectionId, Reader},
    objects::{Events, Seen},
};

/// All watching connections.
///
/// Connections with nothing to send are grouped by prefix and permissions. An event queues whole groups. It costs nothing for the other
/// groups, or for a connection whose peer does not read.
#[derive(Debug, Default)]
pub(crate) struct Watchers {
    pub(crate) members: HashMap<ConnectionId, Watch>,
    /// By prefix and permissions.
    idle: HashMap<Arc<str>, HashMap<Arc<Reader>, HashSet<ConnectionId>>>,
    /// Connections with possibly unsent events, oldest first.
    pub(crate) queue: VecDeque<ConnectionId>,
    /// The last event compared with the groups.
    seen: u64,
}

/// A client's watch.
#[derive(Debug)]
pub(crate) struct Watch {
    pub(crate) prefix: Arc<str>,
    /// The client's permissions.
    pub(crate) reader: Arc<Reader>,
    is_queued: bool,
    /// No event up to this number concerns the client, except events already sent.
    pub(crate) after: u64,
    /// Whether the first record, which confirms the watch, is still unsent.
    pub(crate) is_new: bool,
    /// Whether the next record must report lost events.
    pub(crate) is_lost: bool,
    /// Whether the socket has not accepted the last record yet.
    pub(crate) is_unsent: bool,
}

impl Watchers {
    /// `seen` is the last existing event.
    pub(crate) fn new(seen: u64) -> Self {
        Self { seen, ..Self::default() }
    }

    pub(crate) fn add(&mut self, id: ConnectionId, prefix: &str, reader: Reader, after: u64, is_lost: bool) {
        let (prefix, reader) = (prefix.into(), Arc::new(reader));
        let (is_queued, is_new, is_unsent) = (false, true, false);
        self.members.insert(id, Watch { prefix, reader, is_queued, after, is_new, is_lost, is_unsent });
        self.enqueue(id);
    }

    pub(crate) fn get_mut(&mut self, id: ConnectionId) -> Option<&mut Watch> {
        self.members.get_mut(&id)
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

    /// Queues a connection that may have unsent events.
    pub(crate) fn enqueue(&mut self, id: ConnectionId) {
        if let Some(member) = self.members.get_mut(&id).filter(|member| !member.is_queued) {
            member.is_queued = true;
            self.queue.push_back(id);
        }
    }

    /// The next queued connection.
    pub(crate) fn next(&mut self) -> Option<ConnectionId> {
        loop {
            let id = self.queue.pop_front()?;
            if let Some(member) = self.members.get_mut(&id) {
                member.is_queued = false;
                return Some(id);
            }
        }
    }

    /// Moves a connection with no unsent events to its group.
    pub(crate) fn set_idle(&mut self, id: ConnectionId) {
        let Some(Watch { prefix, reader, .. }) = self.members.get(&id) else { return };
        let groups = self.idle.entry(Arc::clone(prefix)).or_default();
        groups.entry(Arc::clone(reader)).or_default().insert(id);
    }

    /// Queues the clients that new events concern.
    pub(crate) fn queue_new_events(&mut self, events: &Events) {
        let (forgotten, new) = events.events_after(self.seen);
        if forgotten {
            // Events that are forgotten may concern any client.
            let groups = std::mem::take(&mut self.idle).into_values().flat_map(HashMap::into_values);
            self.wake(groups.flatten().collect(), 0);
        }
        if !self.members.is_empty() {
            new.for_each(|seen| self.queue_for_event(seen));
        }
        self.seen = events.last_event();
    }

    /// Queues the clients that an event concerns.
    fn queue_for_event(&mut self, seen: &Seen) {
        let name = &seen.event.name;
        for end in 0..=name.len() {
            let Some(groups) = name.get(..end).and_then(|prefix| self.idle.get_mut(prefix)) else { continue };
            let concerned = groups.extract_if(|reader, _| reader.sees(seen));
            let ids: Vec<ConnectionId> = concerned.flat_map(|(_, ids)| ids).collect();
            if groups.is_empty() {
                self.idle.remove(&name[..end]);
            }
            self.wake(ids, seen.event.seq - 1);
        }
    }

    fn wake(&mut self, ids: Vec<ConnectionId>, skip: u64) {
        for id in ids {
            self.enqueue(id);
            if let Some(member) = self.members.get_mut(&id) {
                member.after = member.after.max(skip);
            }
        }
    }
}
