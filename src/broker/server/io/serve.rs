//! Records in and out: what connections send is received and handled, and the effects are carried out.

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
    connection::{Connection, Sent},
    keeper::IN_FLIGHT_PAUSE,
    reactor::Reactor,
    timers::Timer,
};
use crate::{
    broker::server::{
        state::{
            caller::{Caller, ConnectionId},
            inspect::{Kind, kind},
            room::{Room, SPARE},
            time::Time,
        },
        verbs::{
            connection,
            dispatch::{handle, wants_descriptors},
            effects::{Effect, Effects, Origin, Outgoing},
        },
    },
    channel::record::{Raw, brings_descriptors, is_gone, receive_raw},
    error::{BrokerError, Error, ErrorCode, RefusalCode, Result},
    sys,
    wire::{Failure, broker::Message, is_error},
};

/// How many connections are accepted before the others have their turn.
const ACCEPTED_AT_ONCE: usize = 64;

/// How many records of a connection are read before the others have their turn.
const RECORDS_AT_ONCE: usize = 8;

/// How often a reply is tried again that waits until its user's processes have read some of the descriptors that were sent to them.
const ROOM_PAUSE: Duration = Duration::from_millis(20);

/// How long such a reply waits.
const ROOM_WAIT: Duration = Duration::from_secs(2);

// Connections that come.
impl Reactor {
    /// Accepts the connections that wait.
    pub(super) fn accept(&mut self) {
        for _ in 0..ACCEPTED_AT_ONCE {
            if !self.admission.acceptable {
                return;
            }
            match self.admission.listener.accept() {
                Ok(Some(socket)) => {
                    if let Err(error) = self.admit(socket)
                        && self.is_logged(sys::overflow_uid(), "a connection that can't be served")
                    {
                        tracing::warn!(error = error.in_full(), "a connection can't be served");
                    }
                }
                Ok(None) => self.admission.acceptable = false,
                Err(error) => {
                    if self.is_logged(sys::overflow_uid(), "no connection can be accepted") {
                        tracing::error!(error = error.in_full(), "no connection can be accepted");
                    }
                    self.admission.acceptable = false;
                    self.timers.set_once(Duration::from_millis(100), Timer::Accept);
                }
            }
        }
    }

    /// Serves a new connection, or refuses and closes it.
    fn admit(&mut self, socket: OwnedFd) -> Result<()> {
        let caller = match self.admission.identify(&socket) {
            Ok(caller) => caller,
            Err(error) => {
                self.close_refused(socket, None);
                return Err(error);
            }
        };
        let (id, uid, pid) = (caller.connection, caller.uid, caller.pid);
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
        // Fails where the kernel has no such option, and lets descriptors pass.
        let _ = sys::pass_descriptors(socket.as_fd(), true);
        if let Err(error) = watched {
            self.close_refused(socket, Some(uid));
            return Err(Error::system("watch a connection", error));
        }
        self.connections.insert(id, Connection::new(socket, uid, pid));
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
        if self.is_logged(uid, "a connection refused") {
            tracing::info!(uid, pid, message, "a connection is refused");
        } else {
            tracing::debug!(uid, pid, message, "a connection is refused");
        }
        send_rejection(socket, rejected);
    }

    /// Whether a line that a user's clients can cause at will is logged, and not counted.
    fn is_logged(&mut self, uid: u32, kind: &'static str) -> bool {
        self.state.repeats.is_first(uid, kind)
    }

    /// The descriptors of the process, for a request of a user.
    fn room(&self, uid: u32) -> Room {
        Room { used: self.descriptors(), limit: self.flight.limit, closing: self.closers.files_of(uid) }
    }
}

// Records that come.
impl Reactor {
    /// Gives each connection that may have something to read its turn.
    pub(super) fn serve(&mut self) {
        for id in self.connections.take_listed() {
            if self.take_records(id) {
                self.connections.list(id);
            }
        }
    }

    /// Receives and handles some records of a connection. Returns whether there may be more.
    fn take_records(&mut self, id: ConnectionId) -> bool {
        let mut resets = 0;
        for _ in 0..RECORDS_AT_ONCE {
            if let Err(message) = self.check_room_to_receive(id) {
                self.end_connection(id, ErrorCode::Full, &message, "its user's descriptors can't be closed");
                return false;
            }
            if self.must_wait(id) {
                return false;
            }
            // What it sends waits until it has read the last answer.
            let waits = |connection: &&Connection| !connection.is_blocked();
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
                    self.disconnect(id, "the connection has failed");
                    return false;
                }
            }
        }
        true
    }

    /// Why nothing may be received on a connection, since it may bring descriptors that can't be closed or have no room. The kernel
    /// would close those without room in this thread.
    fn check_room_to_receive(&self, id: ConnectionId) -> Result<(), String> {
        let Some(connection) = self.connections.get(id) else { return Ok(()) };
        self.closers.check(connection.uid)?;
        let limit = self.flight.limit;
        if self.descriptors() + SPARE > limit && brings_descriptors(connection) {
            return Err(format!("the broker can't receive descriptors: it is close to its limit of {limit}"));
        }
        Ok(())
    }

    /// Whether a connection's next record has descriptors and waits, since the worker does not close memory as fast as its user sends it.
    fn must_wait(&mut self, id: ConnectionId) -> bool {
        // What the records before it replaced.
        self.worker.close(self.state.objects.take_garbage());
        let Some(connection) = self.connections.get(id).filter(|_| self.is_behind()) else { return false };
        let waits = self.backlog.is_full(connection.uid) && brings_descriptors(connection);
        if waits {
            self.backlog.hold_up(id, connection.uid, Instant::now());
        }
        waits
    }

    /// One record has come.
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
            return self.disconnect(id, "the peer has closed it");
        } else if flags.contains(ReturnFlags::CTRUNC) {
            let message = "descriptors were cut off: the broker's limit of open files is reached".to_owned();
            Some((ErrorCode::Failed, message, "descriptors were cut off"))
        } else if flags.contains(ReturnFlags::TRUNC) || bytes >= incoming.len() {
            let message = "a record is longer than the protocol allows".to_owned();
            Some((ErrorCode::Protocol, message, "it broke the protocol"))
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
                self.disconnect(id, "it sent an error that can't be read");
            }
            Err(error) => {
                self.close_fds(Some(uid), fds);
                let code = match error {
                    crate::error::ProtocolError::Version { .. } => ErrorCode::Version,
                    _ => ErrorCode::Protocol,
                };
                self.end_connection(id, code, &error.to_string(), "it broke the protocol");
            }
        }
    }

    fn message(&mut self, id: ConnectionId, uid: u32, message: Message, fds: Vec<OwnedFd>) {
        // The kernel counts descriptors that are not read against this process.
        if wants_descriptors(&message) && self.connections.get_mut(id).map_or(0, Connection::unread) > 0 {
            self.close_fds(Some(uid), fds);
            let message = "a request came before the descriptors of the reply before it were read";
            return self.end_connection(id, ErrorCode::Protocol, message, "it broke the protocol");
        }
        let room = self.room(uid);
        self.state.objects.now = Time::now();
        self.with(|state, effects| handle(state, effects, &room, id, message, fds));
    }
}

// Effects.
impl Reactor {
    /// Carries out effects, in their order.
    pub(super) fn execute(&mut self, effects: Effects) {
        for effect in effects.0 {
            match effect {
                Effect::Send { client, records } => {
                    if let Some(connection) = self.connections.get_mut(client) {
                        connection.answer(records);
                        self.pushed(client);
                    }
                }
                Effect::SendNext { client, received } => {
                    let Some(connection) = self.connections.get_mut(client) else { continue };
                    match connection.acknowledged(received) {
                        Ok(()) => self.pushed(client),
                        Err(problem) => {
                            self.end_connection(client, ErrorCode::Protocol, &problem, "it broke the protocol");
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
                Effect::Work(work) => self.worker.run(work),
                Effect::CloseFds { of, fds } => self.close_fds(of, fds),
                Effect::Count { verb, outcome, since } => self.state.metrics.count(verb, &outcome, since.elapsed()),
                Effect::Store => self.settle_store(),
            }
        }
    }

    /// Sends what was queued.
    fn pushed(&mut self, id: ConnectionId) {
        self.dispatch(id);
        self.count_unsent(id);
    }

    /// Counts what a connection has not sent yet for its user, and ends it if the user's connections leave too much unread.
    fn count_unsent(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get_mut(id) else { return };
        let (unsent, uid) = (connection.count_unsent(), connection.uid);
        if self.state.objects.users().set_unread(uid, unsent.before, unsent.now) && unsent.now > 0 {
            self.disconnect_stalled(id);
        }
    }

    /// Sends what waits on a connection, once there is room for its descriptors.
    fn dispatch(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get(id) else { return };
        let (more, uid) = (connection.queued(), connection.uid);
        if more > 0 {
            let mut read = Vec::new();
            let has_room = self.flight.has_room(&mut self.connections, uid, more, &mut read);
            read.into_iter().for_each(|(socket, uid)| self.close_connection(socket, uid));
            if !has_room {
                return self.wait_for_room(id, uid);
            }
        }
        let Some(connection) = self.connections.get_mut(id) else { return };
        connection.wants_room_since = None;
        let sent = connection.flush(&self.state.objects);
        let (is_unread, unread, is_done) = (connection.unread_since.is_some(), connection.unread, connection.is_done());
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
            Sent::InFlight => self.timers.set(IN_FLIGHT_PAUSE, Timer::Retry(id)),
            Sent::Gone => self.disconnect(id, "the peer is gone"),
        }
    }

    /// Tries a reply again later, or takes it back.
    fn wait_for_room(&mut self, id: ConnectionId, uid: u32) {
        let Some(connection) = self.connections.get_mut(id) else { return };
        let since = *connection.wants_room_since.get_or_insert_with(Instant::now);
        if since.elapsed() < ROOM_WAIT {
            return self.timers.set(ROOM_PAUSE, Timer::Retry(id));
        }
        connection.wants_room_since = None;
        let more = connection.queued();
        connection.take_back();
        let room = self.flight.room(&self.connections, uid);
        let message = format!(
            "{more} descriptors are more than the {room} that uid {uid} may be sent while others are unread: its processes must read, \
             or close, what they were sent before"
        );
        let refusal = BrokerError::new(RefusalCode::Full, message);
        self.with(|state, effects| connection::send_failed(state, effects, id, refusal));
    }

    /// A connection's socket may have room again.
    pub(super) fn send_more(&mut self, id: ConnectionId) {
        if self.connections.get(id).is_none_or(|connection| !connection.is_blocked()) {
            return;
        }
        self.pushed(id);
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
            tracing::error!(%error, "a connection can't be watched");
            self.disconnect(id, "it can't be watched");
        }
    }
}

// Connections and descriptors that go.
impl Reactor {
    /// Sends an error, and closes.
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
        if code != ErrorCode::Interrupted && self.is_logged(uid, "a connection ended for an error") {
            tracing::info!(uid, pid, %code, message, "a connection is ended");
        } else {
            tracing::debug!(uid, pid, %code, message, "a connection is ended");
        }
    }

    /// Disconnects a client that does not read.
    pub(super) fn disconnect_stalled(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get(id) else { return };
        let (uid, pid) = (connection.uid, connection.pid);
        if self.is_logged(uid, "a client disconnected that does not read") {
            tracing::warn!(uid, pid, "a client does not read what was sent to it: it is disconnected");
        } else {
            tracing::debug!(uid, pid, "a client does not read what was sent to it: it is disconnected");
        }
        self.disconnect(id, "it does not read what is sent to it");
    }

    /// Closes a connection.
    pub(super) fn disconnect(&mut self, id: ConnectionId, why: &'static str) {
        let Some(connection) = self.connections.remove(id) else { return };
        let (uid, pid) = (connection.uid, connection.pid);
        tracing::debug!(uid, pid, why, "a connection is closed");
        self.flight.remove(id);
        self.state.objects.users().set_unread(uid, connection.counted_unsent(), 0);
        // The socket is closed before others are answered in its place. Its user has the connection until then.
        let source = connection.as_fd().as_raw_fd();
        let unread = connection.unread;
        let registry = self.poll.registry();
        let deregistered = registry.deregister(&mut SourceFd(&source));
        if let Err(error) = deregistered {
            tracing::debug!(%error, "a connection can't be removed from the event loop");
        }
        match self.flight.abandon(connection.socket, uid, unread) {
            Some(socket) => self.close_connection(socket.into(), uid),
            None => self.sweep_later(),
        }
        self.with(|state, effects| connection::disconnected(state, effects, id));
    }

    /// Asks the kernel which connections have read the descriptors that were sent.
    pub(super) fn count_unread(&mut self) {
        for (socket, uid) in self.flight.count(&mut self.connections) {
            self.close_connection(socket, uid);
        }
    }

    /// Closes what a client sent and the server did not keep.
    fn close_fds(&mut self, of: Origin, fds: Vec<OwnedFd>) {
        let (foreign, memory): (Vec<_>, Vec<_>) = fds.into_iter().partition(|fd| kind(fd.as_fd()) == Kind::Foreign);
        self.worker.close(memory);
        self.close_elsewhere(of, foreign, 0);
    }

    /// Closes a connection that counts as its user's. The peer sees its end at once.
    fn close_connection(&mut self, socket: OwnedFd, uid: u32) {
        if is_drained(&socket) {
            drop(socket);
            self.state.objects.users().remove_connection(uid);
        } else {
            self.close_elsewhere(Some(uid), vec![socket], 1);
        }
    }

    /// Closes a connection that was never served.
    fn close_refused(&mut self, socket: OwnedFd, of: Origin) {
        // No record has descriptors if the kernel refused them from the beginning.
        let without = sys::passes_descriptors(socket.as_fd()).is_ok_and(|passes| !passes);
        if without || is_drained(&socket) {
            drop(socket);
        } else {
            self.close_elsewhere(of, vec![socket], 0);
        }
    }

    fn close_elsewhere(&mut self, of: Origin, fds: Vec<OwnedFd>, connections: usize) {
        self.closers.close(of, fds, connections);
        if self.closers.wants_thread() {
            self.sweep_later();
        }
    }
}
