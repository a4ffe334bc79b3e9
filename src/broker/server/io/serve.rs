//! Receives and handles records, and executes the effects.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    time::{Duration, Instant},
};

use mio::{Interest, Token as Key, unix::SourceFd};
use rustix::net::{RecvFlags, ReturnFlags};

use super::{
    admission::{Rejected, send_rejection},
    closer::is_drained,
    connection::{ClientConnection, Sent},
    keeper::IN_FLIGHT_RETRY,
    reactor::Reactor,
    timers::Timer,
};
use crate::{
    broker::server::{
        state::{
            caller::{Caller, ConnectionId},
            inspect::{Kind, kind},
            room::{DescriptorRoom, SPARE},
            time::Time,
        },
        verbs::{
            connection,
            dispatch::{handle, wants_descriptors},
            effects::{Effect, Effects, Origin, Outgoing},
        },
    },
    channel::record::{Raw, has_descriptors, is_gone, receive_raw},
    error::{BrokerError, Error, ErrorCode, RefusalCode, Result},
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
                    self.timers.set_once(Duration::from_millis(100), Timer::Accept);
                }
            }
        }
    }

    /// Serves a new connection, or refuses it.
    fn admit(&mut self, socket: OwnedFd) -> Result<()> {
        let caller = match self.admission.identify(&socket) {
            Ok(caller) => caller,
            Err(error) => {
                self.close_refused(socket, None);
                return Err(error);
            }
        };
        let id = caller.connection;
        let uid = caller.uid;
        let pid = caller.pid;
        if let Err(rejected) = self.admission.check(&caller) {
            self.reject_connection(&caller, &socket, rejected);
            self.close_refused(socket, None);
            return Ok(());
        }
        if let Err(message) = self.check_admission(&caller) {
            self.reject_connection(&caller, &socket, Rejected { code: ErrorCode::Full, message });
            self.close_refused(socket, Some(uid));
            return Ok(());
        }
        let registry = self.poll.registry();
        let watched = registry.register(&mut SourceFd(&socket.as_raw_fd()), Key(id.0 as usize), Interest::READABLE);
        // Fails if the kernel lacks the option: descriptors are then always accepted.
        let _ = sys::pass_descriptors(socket.as_fd(), true);
        if let Err(error) = watched {
            self.close_refused(socket, Some(uid));
            return Err(Error::system("watch a connection", error));
        }
        self.connections.insert(id, ClientConnection::new(socket, uid, pid));
        self.with(|state, effects| connection::connected(state, effects, caller));
        Ok(())
    }

    fn check_admission(&mut self, caller: &Caller) -> Result<(), String> {
        self.state.objects.users().check_connection(caller.uid).map_err(|refusal| refusal.message)?;
        self.closers.check(caller.uid)?;
        let room = self.room(caller.uid);
        room.require(&self.state.objects, caller, 1).map_err(|refusal| refusal.message)
    }

    fn reject_connection(&mut self, caller: &Caller, socket: &OwnedFd, rejected: Rejected) {
        let (&Caller { uid, pid, .. }, message) = (caller, &rejected.message);
        log_once!(self.should_log(uid, "a connection refused"), info, uid, pid, message, "refused a connection");
        send_rejection(socket, rejected);
    }

    /// Whether to log a line that clients can trigger.
    fn should_log(&mut self, uid: u32, kind: &'static str) -> bool {
        self.state.repeats.should_log(uid, kind)
    }

    fn room(&self, uid: u32) -> DescriptorRoom {
        DescriptorRoom { used: self.descriptors(), limit: self.flight.limit, closing: self.closers.files_of(uid) }
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
    fn check_room_to_receive(&self, id: ConnectionId) -> Result<(), String> {
        let Some(connection) = self.connections.get(id) else { return Ok(()) };
        self.closers.check(connection.uid)?;
        let limit = self.flight.limit;
        if self.descriptors() + SPARE > limit && has_descriptors(connection) {
            return Err(format!(
                "the broker is near its limit of {limit} descriptors and can't receive more: raise the limit (ulimit -n)"
            ));
        }
        Ok(())
    }

    /// Whether a connection must wait because the worker can't close memory as fast as its user sends it.
    fn must_wait(&mut self, id: ConnectionId) -> bool {
        // Close versions that the previous records replaced.
        self.worker.close(self.state.objects.take_garbage());
        let Some(connection) = self.connections.get(id).filter(|_| self.is_behind()) else { return false };
        let waits = self.backlog.is_full(connection.uid) && has_descriptors(connection);
        if waits {
            self.backlog.suspend(id, connection.uid, Instant::now());
        }
        waits
    }

    fn record(&mut self, id: ConnectionId, incoming: &[u8], raw: Raw) {
        let Raw { bytes, flags, fds } = raw;
        let Some(uid) = self.connections.get(id).map(|connection| connection.uid) else {
            return self.close_fds(None, fds);
        };
        if !fds.is_empty() && self.is_behind() {
            self.backlog.count(uid, fds.len());
        }
        let problem = if bytes == 0 {
            self.close_fds(Some(uid), fds);
            return self.disconnect(id, "the peer closed it");
        } else if flags.contains(ReturnFlags::CTRUNC) {
            let message = "descriptors were cut off: the broker's open-file limit is reached (ulimit -n)".to_owned();
            Some((ErrorCode::Failed, message, "descriptors were cut off"))
        } else if flags.contains(ReturnFlags::TRUNC) || bytes >= incoming.len() {
            let message = "the record exceeds the protocol's maximum length".to_owned();
            Some((ErrorCode::Protocol, message, "protocol violation"))
        } else {
            None
        };
        if let Some((code, message, why)) = problem {
            self.close_fds(Some(uid), fds);
            return self.end_connection(id, code, &message, why);
        }
        match Message::decode(&incoming[..bytes], fds.len()) {
            Ok(message) => self.message(id, uid, message, fds),
            Err(_) if is_error(&incoming[..bytes]) => {
                self.close_fds(Some(uid), fds);
                self.disconnect(id, "it sent an undecodable error");
            }
            Err(error) => {
                self.close_fds(Some(uid), fds);
                let code = match error {
                    crate::error::ProtocolError::Version { .. } => ErrorCode::Version,
                    _ => ErrorCode::Protocol,
                };
                self.end_connection(id, code, &error.to_string(), "protocol violation");
            }
        }
    }

    fn message(&mut self, id: ConnectionId, uid: u32, message: Message, fds: Vec<OwnedFd>) {
        // The kernel counts unread descriptors for this process.
        if wants_descriptors(&message) && self.connections.get_mut(id).map_or(0, ClientConnection::unread) > 0 {
            self.close_fds(Some(uid), fds);
            let message = "the request arrived before the descriptors of the previous reply were read";
            return self.end_connection(id, ErrorCode::Protocol, message, "protocol violation");
        }
        let room = self.room(uid);
        self.state.objects.now = Time::now();
        self.with(|state, effects| handle(state, effects, &room, id, message, fds));
    }
}

impl Reactor {
    /// Executes effects in order.
    pub(super) fn execute(&mut self, effects: Effects) {
        for effect in effects.0 {
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
                    let Some(connection) = self.connections.get_mut(client) else { continue };
                    connection.deadline = deadline;
                    if let Some(deadline) = deadline {
                        self.set_timer(client, deadline.at);
                    }
                }
                Effect::Listen(client) => self.connections.list(client),
                Effect::CloseFds { of, fds } => self.close_fds(of, fds),
                Effect::Count { verb, outcome, since } => self.state.metrics.count(verb, &outcome, since.elapsed()),
                Effect::Store => self.sync_store(),
            }
        }
    }

    /// Sends queued records.
    fn flush_queue(&mut self, id: ConnectionId) {
        self.dispatch(id);
        self.update_unsent(id);
    }

    /// Updates the user's unsent bytes. Disconnects the client if the user's connections leave too much unread.
    fn update_unsent(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get_mut(id) else { return };
        let (unsent, uid) = (connection.update_unsent(), connection.uid);
        if self.state.objects.users().set_unread(uid, unsent.before, unsent.now) && unsent.now > 0 {
            self.disconnect_stalled(id);
        }
    }

    /// Sends queued records if there is room for their descriptors.
    fn dispatch(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get(id) else { return };
        let (more, uid) = (connection.queued(), connection.uid);
        if more > 0 {
            let mut read = Vec::new();
            let has_room = self.flight.has_room(&mut self.connections, uid, more, &mut read);
            read.into_iter().for_each(|(socket, uid)| self.close_connection(socket, uid));
            if !has_room {
                return self.retry_for_room(id, uid);
            }
        }
        let Some(connection) = self.connections.get_mut(id) else { return };
        connection.wants_room_since = None;
        let sent = connection.flush(&self.state.objects);
        let is_unread = connection.unread_since.is_some();
        let unread = connection.unread;
        let is_done = connection.is_done();
        if is_unread {
            self.connections.note_unread(id);
            if unread > 0 {
                self.flight.add(id);
            }
            self.sweep_later();
        }
        match sent {
            Sent::All if is_done => connection::all_sent(&mut self.state, id),
            Sent::All => {}
            Sent::Full => self.watch(id, Interest::READABLE | Interest::WRITABLE),
            Sent::InFlight => self.timers.set(IN_FLIGHT_RETRY, Timer::Retry(id)),
            Sent::Gone => self.disconnect(id, "the peer is gone"),
        }
    }

    /// Retries a reply later, or refuses it after [`RETRY_TIMEOUT`].
    fn retry_for_room(&mut self, id: ConnectionId, uid: u32) {
        let Some(connection) = self.connections.get_mut(id) else { return };
        let since = *connection.wants_room_since.get_or_insert_with(Instant::now);
        if since.elapsed() < RETRY_TIMEOUT {
            return self.timers.set(RETRY_INTERVAL, Timer::Retry(id));
        }
        connection.wants_room_since = None;
        let more = connection.queued();
        connection.discard_answer();
        let room = self.flight.room(&self.connections, uid);
        let message = format!(
            "the answer needs {more} descriptors, but only {room} more can be sent to uid {uid} while earlier ones are unread: its \
            processes must read or close them"
        );
        let refusal = BrokerError::new(RefusalCode::Full, message);
        self.with(|state, effects| connection::send_failed(state, effects, id, refusal));
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
        let Some(connection) = self.connections.remove(id) else { return };
        let (uid, pid) = (connection.uid, connection.pid);
        tracing::debug!(uid, pid, why, "closed a connection");
        self.flight.remove(id);
        self.state.objects.users().set_unread(uid, connection.counted_unsent(), 0);
        // The socket is closed before another client is served in its place. Until then, the user's connection count includes it.
        let source = connection.as_fd().as_raw_fd();
        let unread = connection.unread;
        let registry = self.poll.registry();
        let deregistered = registry.deregister(&mut SourceFd(&source));
        if let Err(error) = deregistered {
            tracing::debug!(%error, "cannot remove a connection from the event loop");
        }
        match self.flight.abandon(connection.socket, uid, unread) {
            Some(socket) => self.close_connection(socket.into(), uid),
            None => self.sweep_later(),
        }
        self.with(|state, effects| connection::disconnected(state, effects, id));
    }

    /// Asks the kernel which connections have read their descriptors.
    pub(super) fn count_unread(&mut self) {
        for (socket, uid) in self.flight.count(&mut self.connections) {
            self.close_connection(socket, uid);
        }
    }

    /// Closes descriptors that a client sent and the server did not keep.
    fn close_fds(&mut self, of: Origin, fds: Vec<OwnedFd>) {
        let (foreign, memory): (Vec<_>, Vec<_>) = fds.into_iter().partition(|fd| kind(fd.as_fd()) == Kind::Foreign);
        self.worker.close(memory);
        self.close_in_thread(of, foreign, 0);
    }

    /// Closes a connection counted for a user. The peer sees the end at once.
    fn close_connection(&mut self, socket: OwnedFd, uid: u32) {
        if is_drained(&socket) {
            drop(socket);
            self.state.objects.users().remove_connection(uid);
        } else {
            self.close_in_thread(Some(uid), vec![socket], 1);
        }
    }

    /// Closes a connection that was not served.
    fn close_refused(&mut self, socket: OwnedFd, of: Origin) {
        // If the kernel has refused descriptors from the start, no record has any.
        let without = sys::passes_descriptors(socket.as_fd()).is_ok_and(|passes| !passes);
        if without || is_drained(&socket) {
            drop(socket);
        } else {
            self.close_in_thread(of, vec![socket], 0);
        }
    }

    fn close_in_thread(&mut self, of: Origin, fds: Vec<OwnedFd>, connections: usize) {
        self.closers.close(of, fds, connections);
        if self.closers.wants_thread() {
            self.sweep_later();
        }
    }
}
