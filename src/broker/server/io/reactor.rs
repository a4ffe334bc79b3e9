//! The event loop: one thread that serves all connections, and never waits for one of them.

use std::{
    collections::{BTreeSet, HashMap, HashSet, VecDeque},
    io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use mio::{Events, Interest, Poll, Token as Key, Waker, unix::SourceFd};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use rustix::net::{RecvFlags, ReturnFlags};

use crate::broker::server::{
    ConnectionId, ServerConfig,
    io::admission::how_to_join,
    io::closer::Closers,
    io::connection::{Connection, Outgoing, Request, Sent},
    io::flight::Abandoned,
    io::keeper::Keeping,
    io::worker::Worker,
    state::caller::Caller,
    state::history::History,
    state::objects::{Expiry, Objects},
    state::repeats::{self, Repeats},
    verbs::get::Claims,
    verbs::metrics::Metrics,
    verbs::put::{Draft, DraftKey, Storing},
    verbs::watch::Watchers,
};
use crate::{
    broker::{keeper::Keeper, notify},
    channel::{
        Cancel, CancelReason, Listener, deadline_after,
        record::{Raw, is_gone, receive_raw},
    },
    error::{BrokerError, Error, ErrorCode, RefusalCode, Result},
    sys,
    wire::{
        Failure, HEADER_LENGTH, MAX_BODY,
        broker::{Message, Refusal},
        is_error,
    },
};

const LISTENER: Key = Key(0);
const WAKER: Key = Key(1);
const CANCEL: Key = Key(2);
pub(crate) const STORE: Key = Key(3);
const RESTART: Key = Key(4);

/// The first key of a connection.
const CONNECTIONS: u64 = 16;

/// How many records of a connection are read before the others have their turn.
const RECORDS_AT_ONCE: usize = 8;

/// How long to wait before a send is tried again that met the kernel's bound on descriptors in flight.
pub(crate) const IN_FLIGHT_PAUSE: Duration = Duration::from_millis(2);

/// How often connections are looked at that do not read.
const SWEEP: Duration = Duration::from_secs(1);

/// How long after the start clients can take up what they held of a server before this one.
const GRACE: Duration = Duration::from_secs(10);

/// How many leases and names of closed connections end before other connections are served.
const ENDS_AT_ONCE: usize = 256;

/// How many timers run before other connections are served.
const TIMERS_AT_ONCE: usize = 256;

/// What happens at a time.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Timer {
    /// The deadline of a connection, unless it was moved.
    Connection(ConnectionId),
    /// A connection's send is to be tried again.
    Retry(ConnectionId),
    /// The lifetime of a name, unless it goes on.
    Name(Arc<str>),
    /// To look at connections that do not read.
    Sweep,
    /// To tell the keeper what it could not be told.
    Store,
    /// To look whether the keeper reads what is sent to it.
    Keeper,
    /// To tell the init that this process runs.
    Watchdog,
    /// To end what no client took up of a server before this one.
    Unclaimed,
    /// To log how often clients repeated what was logged.
    Repeats,
}

/// The server's state.
pub(crate) struct Reactor {
    pub(crate) poll: Poll,
    pub(crate) listener: Listener,
    pub(crate) cancel: Cancel,
    pub(crate) config: ServerConfig,
    pub(crate) emulated: bool,
    /// What a user who is refused can do besides `--allow-uid`.
    pub(crate) join_a_group: String,
    pub(crate) objects: Objects,
    pub(crate) worker: Worker,
    pub(crate) closers: Closers,
    pub(crate) connections: HashMap<ConnectionId, Connection>,
    pub(crate) drafts: HashMap<DraftKey, Draft>,
    pub(crate) claims: Claims,
    /// Versions whose descriptors are on their way to the keeper, in their order.
    pub(crate) storing: VecDeque<Storing>,
    /// Whether names that do not exist are reserved for offers, and the versions of others that wait for the end of that.
    pub(crate) reserves: bool,
    pub(crate) reserved: Vec<Storing>,
    pub(crate) keeping: Keeping,
    /// Whether a timer for the keeper is set.
    pub(crate) settles_later: bool,
    /// The nodes of devices that are held open.
    pub(crate) devices: Vec<(u8, OwnedFd)>,
    pub(crate) watchers: Watchers,
    pub(crate) history: History,
    repeats: Repeats,
    pub(crate) metrics: Metrics,
    /// The connections whose gets wait for a name.
    pub(crate) waiting: HashMap<String, HashSet<ConnectionId>>,
    pub(crate) last: ConnectionId,
    timers: BTreeSet<(Instant, Timer)>,
    /// How many leases and names of closed connections may still end in this turn of the loop.
    ends_left: usize,
    /// Connections that may have something to read.
    readable: Vec<ConnectionId>,
    /// Connections that have not read all that was sent with descriptors.
    pub(crate) unread: HashSet<ConnectionId>,
    /// Those of them that have not read descriptors.
    pub(crate) in_flight: HashSet<ConnectionId>,
    pub(crate) abandoned: Vec<Abandoned>,
    /// Connections with a put that waits until the worker has closed memory, and how many descriptors each user has sent since it is
    /// behind.
    pub(crate) held_up: HashSet<ConnectionId>,
    pub(crate) sent_while_behind: HashMap<u32, usize>,
    sweeping: bool,
    pub(crate) acceptable: bool,
    /// The most descriptors that this process may have.
    pub(crate) limit: usize,
    incoming: Vec<u8>,
}

impl Reactor {
    pub(crate) fn new(
        listener: Listener,
        objects: Objects,
        keeping: Keeping,
        config: ServerConfig,
        cancel: &Cancel,
    ) -> Result<Self> {
        let failed = |action: &'static str| move |error: io::Error| Error::system(action, error);
        let poll = Poll::new().map_err(failed("make an epoll instance"))?;
        let waker = Arc::new(Waker::new(poll.registry(), WAKER).map_err(failed("make an eventfd"))?);
        let sources = [(listener.as_fd(), LISTENER), (cancel.as_fd(), CANCEL)];
        let restart = keeping.restart_request().map(|restart| (restart.as_fd(), RESTART));
        for (fd, key) in sources.into_iter().chain(restart) {
            let registered = poll.registry().register(&mut SourceFd(&fd.as_raw_fd()), key, Interest::READABLE);
            registered.map_err(failed("watch a descriptor"))?;
        }
        // A connection takes descriptors once its user is allowed. Before Linux 6.16 each does.
        if let Err(error) = sys::pass_descriptors(listener.as_fd(), false) {
            tracing::debug!(%error, "users that are not allowed can send descriptors before they are disconnected");
        }
        let (worker, closers) = Worker::start(waker)?;
        let watchers = Watchers::new(objects.journal().last_event());
        let mut reactor = Self {
            poll,
            listener,
            cancel: cancel.clone(),
            emulated: config.emulated,
            join_a_group: how_to_join(&config.allow_gids),
            config,
            objects,
            worker,
            closers,
            connections: HashMap::new(),
            drafts: HashMap::new(),
            claims: Claims::default(),
            storing: VecDeque::new(),
            reserves: false,
            reserved: Vec::new(),
            keeping,
            settles_later: false,
            devices: Vec::new(),
            watchers,
            history: History::default(),
            repeats: Repeats::default(),
            metrics: Metrics::new(),
            waiting: HashMap::new(),
            last: ConnectionId(CONNECTIONS),
            timers: BTreeSet::new(),
            ends_left: ENDS_AT_ONCE,
            readable: Vec::new(),
            unread: HashSet::new(),
            in_flight: HashSet::new(),
            abandoned: Vec::new(),
            held_up: HashSet::new(),
            sent_while_behind: HashMap::new(),
            sweeping: false,
            acceptable: true,
            limit: raise_limit(),
            incoming: vec![0; HEADER_LENGTH + MAX_BODY + 1],
        };
        reactor.watch_store().map_err(failed("watch the keeper"))?;
        reactor.feed_watchdog();
        if reactor.objects.journal().restarts() > 0 {
            reactor.timer(GRACE, Timer::Unclaimed);
        }
        Ok(reactor)
    }

    /// Reserves the names that do not exist for offers, until clients can take up nothing any more.
    pub(crate) fn reserving(mut self, reserves: bool) -> Self {
        self.reserves = reserves;
        if reserves {
            self.timer(GRACE, Timer::Unclaimed);
        }
        self
    }

    /// Goes on with this history of crashes.
    pub(crate) fn remembering(self, history: History) -> Self {
        Self { history, ..self }
    }

    /// Holds these nodes of devices open.
    pub(crate) fn holding(self, devices: Vec<(u8, OwnedFd)>) -> Self {
        Self { devices, ..self }
    }

    /// Serves until it is cancelled.
    pub(crate) fn run(&mut self) -> Result<(u64, u64, u64, u64)> {
        let (objects, versions, leases, bytes) = self.objects.sums();
        tracing::info!(
            path = %self.listener.path().display(),
            keeper = self.keeping.keeper_pid(),
            objects,
            versions,
            leases,
            bytes,
            restarts = self.objects.journal().restarts(),
            "serves"
        );
        let mut events = Events::with_capacity(1024);
        while !self.ends() {
            match self.poll.poll(&mut events, self.patience()) {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => {
                    return Err(Error::system("wait for connections", error));
                }
                _ => {}
            }
            for event in &events {
                match event.token() {
                    LISTENER => self.acceptable = true,
                    WAKER | CANCEL => {}
                    STORE => self.keeping.readable |= event.is_readable() || event.is_read_closed(),
                    RESTART => self.begin_end(),
                    Key(key) => {
                        let id = ConnectionId(key as u64);
                        if event.is_writable() {
                            self.flush(id);
                        }
                        self.list(id);
                    }
                }
            }
            for outcome in self.worker.outcomes() {
                outcome(self);
            }
            self.accept();
            self.serve();
            self.settle_store();
            self.tidy();
            self.tell_watchers();
        }
        self.repeats.log();
        // Before the connections end, and their leases with them.
        let sums = self.objects.sums();
        self.report_end(sums);
        if self.objects.store().keeper() != Keeper::None {
            // What they hold is the next server's: nothing of it is written down as ended.
            self.objects.flush_store();
            for id in self.connections.keys().copied().collect::<Vec<_>>() {
                self.send_error(id, ErrorCode::Interrupted, "the broker stops: connect again when it runs");
            }
            // Their close may block; the peers are to see the end before it.
            for connection in self.connections.values() {
                let _ = connection.socket.shutdown(std::net::Shutdown::Both);
            }
            return Ok(sums);
        }
        for id in self.connections.keys().copied().collect::<Vec<_>>() {
            self.end(id, ErrorCode::Interrupted, "the broker stops: connect again when it runs", "the broker stops");
        }
        Ok(sums)
    }

    /// Whether SIGHUP ended it: the next server goes on.
    pub(crate) fn is_hung_up(&self) -> bool {
        matches!(self.cancel.check(), Err(Error::Interrupted { reason: CancelReason::Signal(nix::libc::SIGHUP) }))
    }

    /// Tells the init that this process runs, if it watches it, and does so again in time.
    fn feed_watchdog(&mut self) {
        if let Some(every) = notify::watchdog() {
            notify::notify("WATCHDOG=1");
            self.timer(every / 3, Timer::Watchdog);
        }
    }

    pub(crate) fn timeout(&self) -> Duration {
        self.config.timeout
    }

    /// How long the loop may sleep.
    fn patience(&self) -> Option<Duration> {
        if self.acceptable || !self.readable.is_empty() || self.objects.has_departed() || self.watchers.are_due() {
            return Some(Duration::ZERO);
        }
        let (at, _) = self.timers.first()?;
        let left = at.saturating_duration_since(Instant::now());
        // epoll counts milliseconds: a moment too long, and not a spin before it.
        Some(if left.is_zero() { left } else { left + Duration::from_millis(1) })
    }

    /// Notes that a connection may have something to read.
    pub(crate) fn list(&mut self, id: ConnectionId) {
        if let Some(connection) = self.connections.get_mut(&id)
            && !connection.listed
        {
            connection.listed = true;
            self.readable.push(id);
        }
    }

    /// Reads again from a connection that was not read from while it waited.
    pub(crate) fn listen_again(&mut self, id: ConnectionId) {
        self.list(id);
    }

    /// Gives each connection that may have something to read its turn.
    fn serve(&mut self) {
        for id in std::mem::take(&mut self.readable) {
            let Some(connection) = self.connections.get_mut(&id) else { continue };
            connection.listed = false;
            if self.take_records(id) {
                self.list(id);
            }
        }
    }

    /// Takes some records of a connection. Returns whether there may be more.
    fn take_records(&mut self, id: ConnectionId) -> bool {
        let mut resets = 0;
        for _ in 0..RECORDS_AT_ONCE {
            if let Err(message) = self.check_room_to_receive(id) {
                self.end(id, ErrorCode::Full, &message, "its user's descriptors can't be closed");
                return false;
            }
            if self.must_wait(id) {
                return false;
            }
            // What it sends waits until it has read the last answer.
            let waits = |connection: &&Connection| !connection.is_blocked();
            let Some(connection) = self.connections.get(&id).filter(waits) else { return false };
            let mut incoming = std::mem::take(&mut self.incoming);
            let received = receive_raw(connection, &mut incoming, RecvFlags::DONTWAIT);
            let result = match received {
                Ok(raw) => {
                    self.record(id, &incoming, raw);
                    Ok(())
                }
                Err(error) => Err(error),
            };
            self.incoming = incoming;
            match result {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // ECONNRESET is reported once, ahead of queued data: read on.
                Err(error) if is_gone(&error) && resets == 0 => resets += 1,
                Err(_) => {
                    self.close(id, "the connection has failed");
                    return false;
                }
            }
        }
        true
    }

    /// One record has come.
    fn record(&mut self, id: ConnectionId, incoming: &[u8], raw: Raw) {
        let Raw { bytes, flags, fds } = raw;
        if !fds.is_empty()
            && self.worker.is_behind()
            && let Some(connection) = self.connections.get(&id)
        {
            *self.sent_while_behind.entry(connection.caller.uid).or_default() += fds.len();
        }
        if bytes == 0 {
            self.reject(id, fds);
            return self.close(id, "the peer has closed it");
        }
        if flags.contains(ReturnFlags::CTRUNC) {
            self.reject(id, fds);
            return self.end(
                id,
                ErrorCode::Failed,
                "descriptors were cut off: the broker's limit of open files is reached",
                "descriptors were cut off",
            );
        }
        if flags.contains(ReturnFlags::TRUNC) || bytes >= incoming.len() {
            self.reject(id, fds);
            return self.break_off(id, "a record is longer than the protocol allows");
        }
        match Message::decode(&incoming[..bytes], fds.len()) {
            Ok(message) => self.message(id, message, fds),
            Err(_) if is_error(&incoming[..bytes]) => {
                self.reject(id, fds);
                self.close(id, "it sent an error that can't be read");
            }
            Err(error) => {
                self.reject(id, fds);
                let code = match error {
                    crate::error::ProtocolError::Version { .. } => ErrorCode::Version,
                    _ => ErrorCode::Protocol,
                };
                self.end(id, code, &error.to_string(), "it broke the protocol");
            }
        }
    }

    /// Sends what answers a request.
    pub(crate) fn reply(&mut self, id: ConnectionId, message: &Message) {
        self.reply_with(id, message, None);
    }

    /// Sends what answers a request, with a descriptor.
    pub(crate) fn reply_with(&mut self, id: ConnectionId, message: &Message, fd: Option<OwnedFd>) {
        if !matches!(message, Message::Send(_)) {
            self.count_request(id, "ok");
        }
        let Some(connection) = self.connections.get_mut(&id) else { return };
        if !matches!(connection.request, Request::Upload(_)) {
            connection.request = Request::None;
            self.watchers.remove(id);
            if connection.greeted {
                connection.deadline = None;
            }
        }
        match Outgoing::of(message, Vec::new()) {
            Ok(record) => {
                connection.push(record.with(fd));
                self.pushed(id);
            }
            Err(error) => {
                tracing::error!(error = error.in_full(), kind = message.name(), "a reply can't be written");
                let message = "what is known of it does not fit a record of the protocol: its maker gave too many and too long names";
                self.refuse(id, BrokerError::new(RefusalCode::Failed, message));
            }
        }
    }

    /// Sends events: they answer a request, and do not end it.
    pub(crate) fn push_events(&mut self, id: ConnectionId, message: &Message) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        match Outgoing::of(message, Vec::new()) {
            Ok(record) => {
                connection.push(record);
                self.pushed(id);
            }
            Err(error) => tracing::error!(error = error.in_full(), "events can't be written"),
        }
    }

    /// Refuses a request.
    pub(crate) fn refuse(&mut self, id: ConnectionId, refusal: BrokerError) {
        self.count_request(id, refusal.code.as_str());
        if let Some(connection) = self.connections.get(&id) {
            let Caller { uid, pid, .. } = connection.caller;
            // An operator can do something about these; the others are the client's own.
            let kind = match refusal.code {
                RefusalCode::Quota => "a request refused for a quota",
                RefusalCode::Full => "a request refused for lack of room",
                RefusalCode::Failed => "a request failed",
                _ => "",
            };
            if !kind.is_empty() && self.is_logged(uid, kind) {
                tracing::info!(uid, pid, code = %refusal.code, message = refusal.message, "refused");
            } else {
                tracing::debug!(uid, pid, code = %refusal.code, message = refusal.message, "refused");
            }
        }
        let BrokerError { code, message } = refusal;
        self.reply(id, &Message::Refused(Refusal { code, message }));
    }

    /// Whether something that a user's clients can repeat at will is logged, and not counted.
    pub(crate) fn is_logged(&mut self, uid: u32, kind: &'static str) -> bool {
        if self.repeats.is_empty() {
            self.timer(repeats::EVERY, Timer::Repeats);
        }
        self.repeats.is_first(uid, kind)
    }

    /// Sends what was taken to be sent.
    pub(crate) fn pushed(&mut self, id: ConnectionId) {
        self.dispatch(id);
        self.count_unsent(id);
    }

    /// Counts what a connection has not taken yet for its user, and ends it if the user's connections leave too much.
    fn count_unsent(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let (before, unsent) = connection.count_unsent();
        let uid = connection.caller.uid;
        if self.objects.users().set_unread(uid, before, unsent) && unsent > 0 {
            self.stalled(id);
        }
    }

    /// Sends what waits on a connection, once there is room for its descriptors.
    fn dispatch(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let (more, uid) = (connection.queued(), connection.caller.uid);
        if more > 0 && !self.has_room(uid, more) {
            return self.wait_for_room(id, uid);
        }
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.wants_room_since = None;
        let sent = connection.flush(&self.objects);
        self.sent(id, sent);
    }

    /// What became of a send.
    fn sent(&mut self, id: ConnectionId, sent: Sent) {
        if let Some(connection) = self.connections.get(&id)
            && connection.unread_since.is_some()
        {
            self.unread.insert(id);
            if connection.counted_unread() > 0 {
                self.in_flight.insert(id);
            }
            self.sweep_later();
        }
        match sent {
            Sent::All => {}
            Sent::Full => self.watch(id, Interest::READABLE | Interest::WRITABLE),
            Sent::InFlight => self.timer(IN_FLIGHT_PAUSE, Timer::Retry(id)),
            Sent::Gone => self.close(id, "the peer is gone"),
        }
    }

    pub(crate) fn sweep_later(&mut self) {
        if !self.sweeping {
            self.sweeping = true;
            self.timer(SWEEP, Timer::Sweep);
        }
    }

    /// Disconnects a client that does not read.
    fn stalled(&mut self, id: ConnectionId) {
        if let Some(connection) = self.connections.get(&id) {
            let Caller { uid, pid, .. } = connection.caller;
            if self.is_logged(uid, "a client disconnected that does not read") {
                tracing::warn!(uid, pid, "a client does not read what was sent to it: it is disconnected");
            } else {
                tracing::debug!(uid, pid, "a client does not read what was sent to it: it is disconnected");
            }
        }
        self.close(id, "it does not read what is sent to it");
    }

    /// A connection's socket may have room again.
    fn flush(&mut self, id: ConnectionId) {
        if self.connections.get(&id).is_none_or(|connection| !connection.is_blocked()) {
            return;
        }
        self.pushed(id);
        if self.connections.get(&id).is_some_and(|connection| !connection.is_blocked()) {
            self.watch(id, Interest::READABLE);
            self.list(id);
            self.watchers.enqueue(id);
        }
    }

    fn watch(&mut self, id: ConnectionId, interest: Interest) {
        let Some(connection) = self.connections.get(&id) else { return };
        let source = connection.as_fd().as_raw_fd();
        let watched = self.poll.registry().reregister(&mut SourceFd(&source), Key(id.0 as usize), interest);
        if let Err(error) = watched {
            tracing::error!(%error, "a connection can't be watched");
            self.close(id, "it can't be watched");
        }
    }

    /// The peer broke the protocol: says so, and closes.
    pub(crate) fn break_off(&mut self, id: ConnectionId, message: &str) {
        self.end(id, ErrorCode::Protocol, message, "it broke the protocol");
    }

    /// Sends an error, and closes.
    pub(crate) fn end(&mut self, id: ConnectionId, code: ErrorCode, message: &str, why: &'static str) {
        self.send_error(id, code, message);
        self.close(id, why);
    }

    fn send_error(&mut self, id: ConnectionId, code: ErrorCode, message: &str) {
        if let Some(connection) = self.connections.get_mut(&id) {
            let error = Message::Error(Failure { code, message: message.to_owned() });
            if let Ok(error) = Outgoing::of(&error, Vec::new()) {
                connection.push(error);
                connection.flush(&self.objects);
            }
            let Caller { uid, pid, .. } = connection.caller;
            if code != ErrorCode::Interrupted && self.is_logged(uid, "a connection ended for an error") {
                tracing::info!(uid, pid, %code, message, "a connection is ended");
            } else {
                tracing::debug!(uid, pid, %code, message, "a connection is ended");
            }
        }
    }

    /// Closes a connection: its leases and claims end, and what it had put half goes.
    pub(crate) fn close(&mut self, id: ConnectionId, why: &'static str) {
        let Some(connection) = self.connections.remove(&id) else { return };
        let Caller { uid, pid, .. } = connection.caller;
        tracing::debug!(uid, pid, leases = connection.leases.len(), why, "a connection is closed");
        self.unread.remove(&id);
        self.in_flight.remove(&id);
        self.watchers.remove(id);
        self.objects.users().set_unread(uid, connection.counted_unsent(), 0);
        if let Some(asked) = &connection.asked {
            self.objects.users().remove_request(uid, asked.bytes);
        }
        match connection.request {
            Request::Upload(upload) => self.end_upload(*upload),
            Request::Parts(key) => self.withdraw(id, &key),
            Request::Object(waiting) => self.stop_waiting_of(id, &waiting),
            Request::None | Request::Worker | Request::Storing | Request::Watch(_) => {}
        }
        self.objects.depart(id, uid, connection.leases, connection.names);
        self.end_departed();
        // The socket is closed before others are answered in its place.
        self.close_socket(connection.socket, uid, connection.unread);
        self.end_claims(id);
    }

    /// Ends leases and names of connections that have closed, as many as this turn of the loop has left.
    fn end_departed(&mut self) {
        self.ends_left = self.objects.end_departed(self.ends_left);
    }

    pub(crate) fn set_request(&mut self, id: ConnectionId, request: Request) {
        match self.connections.get_mut(&id) {
            Some(connection) => connection.request = request,
            None => {
                if let Request::Upload(upload) = request {
                    self.end_upload(*upload);
                }
            }
        }
    }

    pub(crate) fn set_deadline(&mut self, id: ConnectionId, deadline: Instant) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.deadline = Some(deadline);
        // One timer for each connection: a client may make requests with other waits as often as it likes.
        if connection.looked_at.is_none_or(|at| at > deadline) {
            let before = connection.looked_at.replace(deadline);
            if let Some(before) = before {
                self.timers.remove(&(before, Timer::Connection(id)));
            }
            self.timers.insert((deadline, Timer::Connection(id)));
        }
    }

    pub(crate) fn timer(&mut self, after: Duration, timer: Timer) {
        self.timers.insert((deadline_after(after), timer));
    }

    /// Closes what is to be closed, and does what is due.
    fn tidy(&mut self) {
        let now = Instant::now();
        self.end_departed();
        self.ends_left = ENDS_AT_ONCE;
        for _ in 0..TIMERS_AT_ONCE {
            // Anew each time: what is due may end leases, and so begin the end of names.
            self.schedule_expiries();
            if self.timers.first().is_none_or(|(at, _)| *at > now) {
                break;
            }
            let Some((_, timer)) = self.timers.pop_first() else { break };
            match timer {
                Timer::Connection(id) => self.late(id, now),
                Timer::Retry(id) => self.flush(id),
                Timer::Name(name) => self.objects.expire(&name, now),
                Timer::Sweep => self.sweep(now),
                Timer::Store => {
                    self.settles_later = false;
                    self.settle_store();
                }
                Timer::Keeper => self.look_after_keeper(),
                Timer::Watchdog => self.feed_watchdog(),
                Timer::Repeats => {
                    self.repeats.log();
                    if !self.repeats.is_empty() {
                        self.timer(repeats::EVERY, Timer::Repeats);
                    }
                }
                Timer::Unclaimed => {
                    self.objects.end_unclaimed();
                    self.end_reservation();
                }
            }
        }
        self.schedule_expiries();
        self.worker.close(self.objects.take_garbage());
    }

    fn schedule_expiries(&mut self) {
        for Expiry { name, at, before } in self.objects.take_expiries() {
            if let Some(before) = before {
                self.timers.remove(&(before, Timer::Name(name.clone())));
            }
            self.timers.insert((at, Timer::Name(name)));
        }
    }

    /// Disconnects those that do not read.
    fn sweep(&mut self, now: Instant) {
        self.acceptable = true;
        self.closers.start();
        self.count_unread();
        let connections = &mut self.connections;
        self.unread.retain(|id| connections.get_mut(id).is_some_and(Connection::is_unread));
        let timeout = self.config.timeout;
        let stuck = |id: &&ConnectionId| {
            let since = self.connections.get(*id).and_then(|connection| connection.unread_since);
            since.is_some_and(|since| now.saturating_duration_since(since) > timeout)
        };
        let stuck: Vec<ConnectionId> = self.unread.iter().filter(stuck).copied().collect();
        stuck.into_iter().for_each(|id| self.stalled(id));
        self.sweeping = false;
        if !self.unread.is_empty() || !self.abandoned.is_empty() || self.closers.wants_thread() {
            self.sweep_later();
        }
    }

    /// The deadline of a connection may have passed.
    fn late(&mut self, id: ConnectionId, now: Instant) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.looked_at = None;
        match connection.deadline {
            None => return,
            Some(later) if later > now => return self.set_deadline(id, later),
            Some(_) => connection.deadline = None,
        }
        if !connection.greeted {
            let message = format!("no hello came within {:?}", self.config.timeout);
            return self.end(id, ErrorCode::Timeout, &message, "it said no hello");
        }
        if matches!(connection.request, Request::Upload(_)) {
            if self.held_up.contains(&id) {
                return self.set_deadline(id, deadline_after(self.config.timeout));
            }
            let message = format!("the segments of a put did not come within {:?}", self.config.timeout);
            return self.end(id, ErrorCode::Timeout, &message, "the segments of its put did not come");
        }
        self.end_wait(id, RefusalCode::Timeout);
    }

    /// Ends the wait of a request.
    pub(crate) fn end_wait(&mut self, id: ConnectionId, code: RefusalCode) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        match std::mem::take(&mut connection.request) {
            Request::Parts(key) => self.parts_late(id, &key, code),
            Request::Object(waiting) => self.object_late(id, &waiting, code),
            Request::Watch(_) => self.refuse(id, BrokerError::new(code, "the watch was ended")),
            other => connection.request = other,
        }
    }
}

/// Raises the limit of open files as far as this process may, and returns it.
pub(crate) fn raise_limit() -> usize {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return 1024 };
    let raised = soft >= hard || setrlimit(Resource::RLIMIT_NOFILE, hard, hard).is_ok();
    usize::try_from(if raised { hard } else { soft }).unwrap_or(usize::MAX)
}
