//! The server's state.

use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    time::{Duration, Instant, SystemTime},
};

use super::{
    caller::{Caller, ConnectionId},
    claims::Claims,
    effects::Effects,
    metrics::{Metrics, RepeatLimiter},
    objects::{NewVersion, Objects},
    topics::Topics,
    watchers::Watchers,
};
use crate::{
    broker::keeper::Mark,
    error::BrokerError,
    wire::broker::{Delete, GetHeader, Restore, Token, Who},
};

pub(crate) struct State {
    /// What the event loop must do, in order.
    pub(crate) effects: Effects,
    pub(crate) objects: Objects,
    pub(crate) clients: HashMap<ConnectionId, ClientState>,
    pub(crate) drafts: Drafts,
    pub(crate) changes: Changes,
    pub(crate) waits: Waits,
    pub(crate) claims: Claims,
    pub(crate) watchers: Watchers,
    pub(crate) topics: Topics,
    /// Clients whose listing continues in the next turn of the event loop.
    pub(crate) listings: VecDeque<ConnectionId>,
    pub(crate) metrics: Metrics,
    pub(crate) repeats: RepeatLimiter,
    /// The keeper's process, if it is visible in this PID namespace.
    pub(crate) keeper_pid: Option<u32>,
    /// Time limit for a client's hello, and for the segments of a put.
    pub(crate) timeout: Duration,
    /// Whether memfds are accepted as GPU memory.
    pub(crate) emulated: bool,
}

/// Changes of names that have begun, or wait for others.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    /// Oldest first. A change is safe with everything before its mark.
    pub(crate) pending: VecDeque<(Mark, PendingChange)>,
    /// Changes of names that have an pending put, and puts of reserved names, oldest first.
    pub(crate) waiting: HashMap<String, VecDeque<Change>>,
    /// Whether missing names are reserved for clients that restore objects which the previous broker lost.
    pub(crate) reserves_names: bool,
}

/// Identifies a draft.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct DraftKey {
    pub(crate) name: String,
    pub(crate) group: String,
}

/// The puts of each version that still lacks parts. The terms of the first one apply, and the order of the parts that it announced.
pub(crate) type Drafts = HashMap<DraftKey, Vec<NewVersion>>;

/// A change that has begun and is not safe yet.
#[derive(Debug)]
pub(crate) enum PendingChange {
    /// The version with this key.
    Put { key: u64, name: String, makers: Vec<ConnectionId>, restore: Option<Restore> },
    /// A client's request whose changes are done.
    Request(ConnectionId),
}

/// A change of a name that has not begun.
#[derive(Debug)]
pub(crate) enum Change {
    Put(Box<NewVersion>),
    Delete(ConnectionId, Delete),
}

impl State {
    pub(crate) fn new(objects: Objects, timeout: Duration, emulated: bool) -> Self {
        let watchers = Watchers::new(objects.events.last_event());
        let metrics = Metrics::new(objects.now.ms);
        Self {
            effects: Effects::default(),
            objects,
            clients: HashMap::new(),
            drafts: Drafts::new(),
            changes: Changes::default(),
            waits: Waits::default(),
            claims: Claims::default(),
            watchers,
            topics: Topics::default(),
            listings: VecDeque::new(),
            metrics,
            repeats: RepeatLimiter::default(),
            keeper_pid: None,
            timeout,
            emulated,
        }
    }

    pub(crate) fn caller(&self, id: ConnectionId) -> Option<&Caller> {
        self.clients.get(&id).map(|client| &client.caller)
    }

    pub(crate) fn set_request(&mut self, id: ConnectionId, request: PendingRequest) {
        if let Some(client) = self.clients.get_mut(&id) {
            client.request = request;
        }
    }

    /// Whether the event loop has work that no event announces.
    pub(crate) fn has_work(&self) -> bool {
        self.objects.has_work() || !self.watchers.queue.is_empty() || !self.listings.is_empty()
    }
}

/// A client, without its socket.
#[derive(Debug)]
pub(crate) struct ClientState {
    pub(crate) caller: Caller,
    pub(crate) greeted: bool,
    pub(crate) request: PendingRequest,
    pub(crate) request_info: Option<RequestInfo>,
    /// Leases of the answer being sent. Their segments are needed until the socket has accepted every record.
    pub(crate) sending: Vec<Token>,
}

/// Resources charged for the pending request.
#[derive(Debug)]
pub(crate) struct RequestInfo {
    pub(crate) verb: &'static str,
    pub(crate) since: Instant,
    /// Bytes of memory charged to the user.
    pub(crate) bytes: u64,
}

/// The state of a client's request.
#[derive(Debug, Default)]
pub(crate) enum PendingRequest {
    #[default]
    None,
    /// Waits for the rest of a put's segments. With a `problem`, the put is refused after the last one.
    Upload { version: Box<NewVersion>, problem: Option<BrokerError> },
    /// Waits for the other parts of its put.
    Parts(DraftKey),
    /// Waits for an object.
    Object(Box<PendingGet>),
    /// Waits until its change takes effect.
    Change,
    /// Waits for events.
    Watch,
    /// Waits for introductions.
    Topic,
    /// Waits for the next slice of a lease listing.
    Leases(Who),
}

impl ClientState {
    pub(crate) fn new(caller: Caller) -> Self {
        Self { caller, greeted: false, request: PendingRequest::None, request_info: None, sending: Vec::new() }
    }

    pub(crate) fn is_busy(&self) -> bool {
        !matches!(self.request, PendingRequest::None) || !self.sending.is_empty()
    }

    /// Whether some records of a lease are still unsent.
    pub(crate) fn is_sending(&self, token: Token) -> bool {
        self.sending.contains(&token)
    }
}

/// An unanswered get.
#[derive(Debug)]
pub(crate) struct PendingGet {
    pub(crate) get: GetHeader,
    /// `None` before the wait starts.
    pub(crate) deadline: Option<Instant>,
}

/// Clients with waiting gets, by object name, in the order in which they connected.
#[derive(Debug, Default)]
pub(crate) struct Waits(BTreeSet<(String, ConnectionId)>);

impl Waits {
    pub(crate) fn add(&mut self, id: ConnectionId, get: &GetHeader) {
        self.0.extend(get.objects.iter().map(|object| (object.name.clone(), id)));
    }

    pub(crate) fn remove(&mut self, id: ConnectionId, get: &GetHeader) {
        for object in &get.objects {
            self.0.remove(&(object.name.clone(), id));
        }
    }

    /// Clients that wait for a name.
    pub(crate) fn of(&self, name: &str) -> Vec<ConnectionId> {
        let all = (name.to_owned(), ConnectionId(0))..=(name.to_owned(), ConnectionId(u64::MAX));
        self.0.range(all).map(|(_, id)| *id).collect()
    }
}

/// A time on both clocks. Only the event loop reads them, so everything below it is a function of its arguments.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Time {
    /// Monotonic.
    pub(crate) at: Instant,
    /// Milliseconds since 1970.
    pub(crate) ms: u64,
}

impl Time {
    pub(crate) fn now() -> Self {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Self { at: Instant::now(), ms: u64::try_from(since.as_millis()).unwrap_or(u64::MAX) }
    }

    /// The time after `wait`, which a client chose: it may be centuries.
    pub(crate) fn after(self, wait: Duration) -> Instant {
        self.at.checked_add(wait).unwrap_or_else(|| self.at + Duration::from_secs(u32::MAX.into()))
    }
}
