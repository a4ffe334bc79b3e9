//! Receives and handles records, and executes the effects.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    time::{Duration, Instant},
};

use mio::{Interest, Token as Key, unix::SourceFd};
use rustix::net::{RecvFlags, ReturnFlags};

use super::{admission::send_error, closer::Closer, connection::ClientConnection, reactor::Reactor, timers::Timer};
use crate::{
    broker::{
        keeper::Flushed,
        server::{
            admit::{NOBODY, Resource},
            state::{
                caller::{Caller, ConnectionId},
                effects::{Effect, Outgoing},
                inspect::{Kind, kind},
                root::{State, Time},
            },
            verbs::{
                connection,
                dispatch::{handle, wants_descriptors},
            },
        },
    },
    channel::record::{Raw, has_descriptors, is_drained, is_gone, receive_raw},
    error::{BrokerError, Error, ErrorCode, ProtocolError, RefusalCode, Result},
    sys,
    wire::{Failure, broker::Message, is_error},
};

/// Connections accepted per turn.
const ACCEPTS_PER_TURN: usize = 64;

/// Records read per connection and turn.
const RECORDS_PER_TURN: usize = 8;

/// Retry interval for a reply that waits until the user's processes read descriptors sent earlier.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// The longest such wait.
const RETRY_TIMEOUT: Duration = Duration::from_secs(2);

/// Logs at this level if the line is the first of its kind, else at DEBUG.
macro_rules! log_once {
    ($first:expr, $level:ident, $($line:tt)*) => {
        if $first { tracing::$level!($($line)*) } else { tracing::debug!($($line)*) }
    };
}

// Incoming connections.
impl Reactor {
    pub(super) fn accept(&mut self) {
        for _ in 0..ACCEPTS_PER_TURN {
            if !self.admission.acceptable {
                return;
            }
            match self.admission.listener.accept() {
                Ok(Some(socket)) => {
                    if let Err(error) = self.admit(socket)
                        && self.should_log(sys::overflow_uid(), "a connection that can't be served")
                    {
                        tracing::warn!(error = error.in_full(), "cannot serve a connection");
                    }
                }
                Ok(None) => self.admission.acceptable = false,
                Err(error) => {
                    if self.should_log(sys::overflow_uid(), "no connection can be accepted") {
                        tracing::error!(error = error.in_full(), "cannot accept connections: retrying in 100 ms");
                    }
                    self.admission.acceptable = false;
                    self.timers.set_by(Duration::from_millis(100), Timer::Accept);
                }
            }
        }
    }

    /// Serves a new connection, or refuses it.
    fn admit(&mut self, socket: OwnedFd) -> Result<()> {
        let caller = match self.admission.identify(&socket) {
            Ok(caller) => caller,
            Err(error) => {
                self.close_refused(socket, NOBODY);
                return Err(error);
            }
        };
        let Caller { connection: id, uid, pid, .. } = caller;
        let users = &mut self.state.objects.users;
        let check = |resource| users.check(uid, resource, 1).map_err(|full| (uid, ErrorCode::Full, full.message));
        let allowed = self.admission.check(&caller).map_err(|message| (NOBODY, ErrorCode::Refused, message));
        let allowed = allowed.and_then(|()| check(Resource::Blocking)).and_then(|()| check(Resource::Connections));
        if let Err((of, code, message)) = allowed {
            log_once!(self.should_log(uid, "a connection refused"), info, uid, pid, message, "refused a connection");
            send_error(&socket, code, message);
            self.close_refused(socket, of);
            return Ok(());
        }
        let registry = self.poll.registry();
        let watched = registry.register(&mut SourceFd(&socket.as_raw_fd()), Key(id.0 as usize), Interest::READABLE);
        // Fails if the kernel lacks the option: descriptors are then always accepted.
        let _ = sys::pass_descriptors(socket.as_fd(), true);
        if let Err(error) = watched {
            self.close_refused(socket, uid);
            return Err(Error::system("watch a connection", error));
        }
        self.connections.all.insert(id, ClientConnection::new(socket, uid, pid));
        self.with(|state| connection::connected(state, caller));
        Ok(())
    }

    /// Whether to log a line that clients can trigger.
    fn should_log(&mut self, uid: u32, kind: &'static str) -> bool {
        self.state.repeats.should_log(uid, kind)
    }
}

// Incoming records.
impl Reactor {
    /// Serves each connection that may have data to read.
    pub(super) fn serve(&mut self) {
        for id in self.connections.take_listed() {
            if self.take_records(id) {
                self.connections.list(id);
            }
        }
    }

    /// Receives and handles some records of a connection. Returns whether more may follow.
    fn take_records(&mut self, id: ConnectionId) -> bool {
        let mut resets = 0;
        for _ in 0..RECORDS_PER_TURN {
            if let Err(message) = self.check_room_to_receive(id) {
                self.end_connection(id, ErrorCode::Full, &message, "its descriptors can't be received");
                return false;
            }
            if self.must_wait(id) {
                return false;
            }
            // The client must read the last answer first.
            let waits = |connection: &&ClientConnection| !connection.is_blocked();
            let Some(connection) = self.connections.get(id).filter(waits) else { return false };
            let mut incoming = std::mem::take(&mut self.incoming);
            let received = receive_raw(connection, &mut incoming, RecvFlags::DONTWAIT);
            let result = received.map(|raw| self.record(id, &incoming, raw));
            self.incoming = incoming;
            match result {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // ECONNRESET is reported once, ahead of queued data: read on.
                Err(error) if is_gone(&error) && resets == 0 => resets += 1,
                Err(_) => {
                    self.disconnect(id, "receive failed");
                    return false;
                }
            }
        }
        true
    }

    /// Fails if the next record may carry descriptors that can't be closed or exceed the limit. The kernel would close the latter in this
    /// thread.
    fn check_room_to_receive(&mut self, id: ConnectionId) -> Result<(), String> {
        let Some(connection) = self.connections.get(id) else { return Ok(()) };
        let users = &mut self.state.objects.users;
        if !users.has_room(connection.uid, Resource::Blocking, 1) {
            users.check(connection.uid, Resource::Blocking, 1).map_err(|refusal| refusal.message)?;
        }
        if users.is_full() && has_descriptors(connection) {
            let limit = users.limits.files;
            return Err(format!(
                "the broker is near its limit of {limit} descriptors and can't receive more: raise the limit (ulimit -n)"
            ));
        }
        Ok(())
    }

    /// Whether a connection must wait because its user sends memory faster than it is closed.
    fn must_wait(&mut self, id: ConnectionId) -> bool {
        // Close versions that the previous records replaced.
        self.close_garbage();
        let Some(connection) = self.connections.get(id) else { return false };
        let uid = connection.uid;
        let waits = !self.state.objects.users.has_room(uid, Resource::Closing, 0) && has_descriptors(connection);
        if waits {
            self.connections.suspended.entry(uid).or_default().push(id);
        }
        waits
    }

    fn record(&mut self, id: ConnectionId, incoming: &[u8], raw: Raw) {
        let Raw { bytes, flags, fds } = raw;
        let Some(uid) = self.connections.get(id).map(|connection| connection.uid) else {
            return self.close_fds(NOBODY, fds);
        };
        let is_whole = bytes < incoming.len() && !flags.contains(ReturnFlags::TRUNC);
        let bytes = &incoming[..bytes];
        if bytes.is_empty() || is_error(bytes) {
            self.close_fds(uid, fds);
            return self.disconnect(id, "the peer closed it, or sent an error");
        }
        let message = if flags.contains(ReturnFlags::CTRUNC) {
            let message = "descriptors were cut off: the broker's open-file limit is reached (ulimit -n)";
            Err((ErrorCode::Failed, message.to_owned()))
        } else if !is_whole {
            Err((ErrorCode::Protocol, "the record exceeds the protocol's maximum length".to_owned()))
        } else {
            Message::decode(bytes, fds.len()).map_err(|error| match error {
                ProtocolError::Version { .. } => (ErrorCode::Version, error.to_string()),
                _ => (ErrorCode::Protocol, error.to_string()),
            })
        };
        match message {
            Ok(message) => self.message(id, uid, message, fds),
            Err((code, message)) => {
                self.close_fds(uid, fds);
                self.end_connection(id, code, &message, "protocol violation");
            }
        }
    }

    fn message(&mut self, id: ConnectionId, uid: u32, message: Message, fds: Vec<OwnedFd>) {
        // The kernel counts unread descriptors for this process.
        let users = &mut self.state.objects.users;
        let connection = self.connections.get_mut(id).filter(|_| wants_descriptors(&message));
        if connection.is_some_and(|connection| connection.has_unread_descriptors(users)) {
            self.close_fds(uid, fds);
            let message = "the request arrived before the descriptors of the previous reply were read";
            return self.end_connection(id, ErrorCode::Protocol, message, "protocol violation");
        }
        self.state.objects.now = Time::now();
        self.with(|state| handle(state, id, message, fds));
    }
}

impl Reactor {
    /// Executes the collected effects in order.
    pub(super) fn execute(&mut self) {
        for effect in std::mem::take(&mut self.state.effects).0 {
            match effect {
                Effect::Send { client, records } => {
                    if let Some(connection) = self.connections.get_mut(client) {
                        connection.answer(records);
                        self.flush_queue(client);
                    }
                }
                Effect::SendNext { client, received } => {
                    let Some(connection) = self.connections.get_mut(client) else { continue };
                    match connection.acknowledged(received) {
                        Ok(()) => self.flush_queue(client),
                        Err(problem) => {
                            self.end_connection(client, ErrorCode::Protocol, &problem, "protocol violation");
                        }
                    }
                }
                Effect::End { client, code, message, why } => self.end_connection(client, code, &message, why),
                Effect::Close { client, why } => self.disconnect(client, why),
                Effect::Deadline { client, deadline } => {
                    let deadline = deadline.filter(|_| self.connections.get(client).is_some());
                    self.timers.set_or_cancel(deadline, Timer::Connection(client));
                }
                Effect::Listen(client) => self.connections.list(client),
                Effect::CloseFds { of, fds } => self.close_fds(of, fds),
                Effect::Count { verb, outcome, since } => self.state.metrics.count(verb, outcome, since.elapsed()),
                Effect::Store => self.sync_store(),
                Effect::Meet(meeting) => self.introduce(&meeting),
            }
        }
    }

    /// Sends queued records. Disconnects the client if its user leaves too much unread.
    pub(super) fn flush_queue(&mut self, id: ConnectionId) {
        self.dispatch(id);
        let Some(connection) = self.connections.get_mut(id) else { return };
        let users = &mut self.state.objects.users;
        if connection.count(users) && !users.has_room(connection.uid, Resource::Answers, 0) {
            self.disconnect_stalled(id);
        }
    }

    /// Sends queued records if there is room for their descriptors.
    fn dispatch(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get(id) else { return };
        if !self.has_room_in_flight(connection.uid, connection.queued()) {
            return self.retry_for_room(id);
        }
        let Some(connection) = self.connections.get_mut(id) else { return };
        let sent = connection.flush(&self.state.objects);
        let is_done = connection.is_done();
        if sent != Flushed::InFlight {
            connection.wants_room_since = None;
        }
        if connection.unread_since.is_some() {
            self.connections.unread.insert(id);
            self.sweep_later();
        }
        match sent {
            Flushed::All if is_done => connection::all_sent(&mut self.state, id),
            Flushed::All => {}
            Flushed::Full => self.watch(id, Interest::READABLE | Interest::WRITABLE),
            Flushed::InFlight => self.retry_for_room(id),
            Flushed::Gone => self.disconnect(id, "the peer is gone"),
        }
    }

    /// Whether more descriptors can be sent to a user. If not, looks which earlier ones have been read.
    fn has_room_in_flight(&mut self, uid: u32, more: usize) -> bool {
        let has_room = |state: &mut State| state.objects.users.has_room(uid, Resource::InFlight, more as u64);
        more == 0 || has_room(&mut self.state) || {
            self.settle(RETRY_INTERVAL);
            has_room(&mut self.state)
        }
    }

    /// Retries a reply later, or refuses it after [`RETRY_TIMEOUT`].
    fn retry_for_room(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get_mut(id) else { return };
        let since = *connection.wants_room_since.get_or_insert_with(Instant::now);
        if since.elapsed() < RETRY_TIMEOUT {
            return self.timers.set(RETRY_INTERVAL, Timer::Retry(id));
        }
        connection.wants_room_since = None;
        let users = &mut self.state.objects.users;
        let refusal = users.check(connection.uid, Resource::InFlight, connection.queued() as u64).err();
        connection.discard_answer();
        let refusal = refusal.unwrap_or_else(|| {
            let message = "the kernel's limit on unread descriptors is reached: raise the broker's limit (ulimit -n)";
            BrokerError::new(RefusalCode::Full, message)
        });
        self.with(|state| connection::send_failed(state, id, refusal));
    }

    /// Retries queued sends of a connection.
    pub(super) fn send_more(&mut self, id: ConnectionId) {
        if self.connections.get(id).is_none_or(|connection| !connection.is_blocked()) {
            return;
        }
        self.flush_queue(id);
        if self.connections.get(id).is_some_and(|connection| !connection.is_blocked()) {
            self.watch(id, Interest::READABLE);
            self.connections.list(id);
        }
    }

    fn watch(&mut self, id: ConnectionId, interest: Interest) {
        let Some(connection) = self.connections.get(id) else { return };
        let source = connection.as_fd().as_raw_fd();
        let watched = self.poll.registry().reregister(&mut SourceFd(&source), Key(id.0 as usize), interest);
        if let Err(error) = watched {
            tracing::error!(%error, "cannot watch a connection");
            self.disconnect(id, "epoll failed");
        }
    }
}

// Disconnects and closed descriptors.
impl Reactor {
    /// Sends an error and disconnects.
    pub(super) fn end_connection(&mut self, id: ConnectionId, code: ErrorCode, message: &str, why: &'static str) {
        self.send_error(id, code, message);
        self.disconnect(id, why);
    }

    pub(super) fn send_error(&mut self, id: ConnectionId, code: ErrorCode, message: &str) {
        let Some(connection) = self.connections.get_mut(id) else { return };
        let error = Message::Error(Failure { code, message: message.to_owned() });
        if let Ok(error) = Outgoing::of(&error, Vec::new()) {
            connection.answer(vec![error]);
            connection.flush(&self.state.objects);
        }
        let (uid, pid) = (connection.uid, connection.pid);
        let first = code != ErrorCode::Interrupted && self.should_log(uid, "a connection closed because of an error");
        log_once!(first, info, uid, pid, %code, message, "closing a connection");
    }

    pub(super) fn disconnect_stalled(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get(id) else { return };
        let (uid, pid) = (connection.uid, connection.pid);
        let first = self.should_log(uid, "a client disconnected because it does not read");
        log_once!(first, warn, uid, pid, "disconnecting a client that does not read its records");
        self.disconnect(id, "it does not read its records");
    }

    pub(super) fn disconnect(&mut self, id: ConnectionId, why: &'static str) {
        let Some(mut connection) = self.connections.all.remove(&id) else { return };
        let (uid, pid) = (connection.uid, connection.pid);
        tracing::debug!(uid, pid, why, "closed a connection");
        let registry = self.poll.registry();
        if let Err(error) = registry.deregister(&mut SourceFd(&connection.as_fd().as_raw_fd())) {
            tracing::debug!(%error, "cannot remove a connection from the event loop");
        }
        self.timers.cancel(&Timer::Connection(id));
        self.timers.cancel(&Timer::Retry(id));
        // The socket is closed before another client is served in its place. Until then, the user's connection count includes it.
        if connection.close(&mut self.state.objects.users) {
            self.connections.lingering.push(connection);
            self.sweep_later();
        } else {
            self.close_connection(connection);
        }
        self.with(|state| connection::disconnected(state, id));
    }

    /// Asks the kernel which connections have read their descriptors, at most once in `interval`.
    pub(super) fn settle(&mut self, interval: Duration) {
        for connection in self.connections.settle(&mut self.state.objects.users, interval) {
            self.close_connection(connection);
        }
    }

    /// Closes descriptors that a client sent and the server did not keep.
    fn close_fds(&mut self, uid: u32, fds: Vec<OwnedFd>) {
        let (foreign, memory) = fds.into_iter().partition(|fd| kind(fd.as_fd()) == Kind::Foreign);
        self.close_in_thread(Resource::Closing, uid, memory);
        self.close_in_thread(Resource::Blocking, uid, foreign);
    }

    /// Closes the memory of versions that are gone.
    pub(super) fn close_garbage(&mut self) {
        for (uid, fds) in std::mem::take(&mut self.state.objects.garbage) {
            self.close_in_thread(Resource::Closing, uid, fds);
        }
    }

    /// Closes a connection counted for a user. The peer sees the end at once.
    fn close_connection(&mut self, ClientConnection { socket, uid, .. }: ClientConnection) {
        self.state.objects.users.sub(uid, Resource::Connections, 1);
        self.close_socket(socket.into(), uid);
    }

    /// Closes a connection that was not served.
    fn close_refused(&mut self, socket: OwnedFd, uid: u32) {
        // If the kernel has refused descriptors from the start, no record has any.
        if sys::passes_descriptors(socket.as_fd()).is_ok_and(|passes| !passes) {
            return;
        }
        self.close_socket(socket, uid);
    }

    fn close_socket(&mut self, socket: OwnedFd, uid: u32) {
        if !is_drained(&socket) {
            self.close_in_thread(Resource::Blocking, uid, vec![socket]);
        }
    }

    fn close_in_thread(&mut self, resource: Resource, uid: u32, fds: Vec<OwnedFd>) {
        if fds.is_empty() {
            return;
        }
        self.state.objects.users.add(uid, resource, fds.len() as u64);
        let closer = self.closer(resource);
        closer.close(uid, fds);
        if closer.lacks_threads() {
            self.sweep_later();
        }
    }

    pub(super) fn closer(&mut self, resource: Resource) -> &mut Closer {
        if resource == Resource::Blocking { &mut self.blocking } else { &mut self.closing }
    }
}
