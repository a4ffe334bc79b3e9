//! Which connections and which descriptors are let in.

use std::{
    os::fd::{AsFd, AsRawFd, OwnedFd},
    time::Duration,
};

use mio::{Interest, Token as Key, unix::SourceFd};
use nix::unistd::{Gid, Group};
use rustix::net::SendFlags;

use crate::broker::server::{
    ConnectionId,
    io::connection::{Connection, Request},
    io::reactor::{Reactor, Timer},
    io::worker::MOST_WHILE_BEHIND,
    state::caller::Caller,
};
use crate::{
    channel::{deadline_after, record::brings_descriptors},
    error::{BrokerError, Error, ErrorCode, RefusalCode, Result},
    sys,
    wire::{Failure, MAX_FDS, broker::Message},
};

/// How many connections are accepted before the others have their turn.
const ACCEPTED_AT_ONCE: usize = 64;

/// Descriptors that are neither a connection's nor memory: those of a record that is being received, and the server's own.
const SPARE: usize = MAX_FDS + 64;

/// How a user who is refused can be allowed by a group. Looks up the groups' names, which may ask another machine: not for each refusal.
pub(crate) fn how_to_join(gids: &[u32]) -> String {
    if gids.is_empty() {
        return "with --allow-gid and a group of this user".to_owned();
    }
    let name = |gid: &u32| match Group::from_gid(Gid::from_raw(*gid)) {
        Ok(Some(group)) => group.name,
        _ => gid.to_string(),
    };
    format!("add this user to the group {}", gids.iter().map(name).collect::<Vec<_>>().join(" or "))
}

impl Reactor {
    /// Takes the connections that wait.
    pub(crate) fn accept(&mut self) {
        for _ in 0..ACCEPTED_AT_ONCE {
            if !self.acceptable {
                return;
            }
            match self.listener.accept() {
                Ok(Some(socket)) => {
                    if let Err(error) = self.admit(socket)
                        && self.is_logged(sys::overflow_uid(), "a connection that can't be served")
                    {
                        tracing::warn!(error = error.in_full(), "a connection can't be served");
                    }
                }
                Ok(None) => self.acceptable = false,
                Err(error) => {
                    if self.is_logged(sys::overflow_uid(), "no connection can be accepted") {
                        tracing::error!(error = error.in_full(), "no connection can be accepted");
                    }
                    self.acceptable = false;
                    self.timer(Duration::from_millis(100), Timer::Sweep);
                }
            }
        }
    }

    /// Serves a new connection, or refuses and closes it.
    fn admit(&mut self, socket: OwnedFd) -> Result<()> {
        self.last.0 += 1;
        let id = self.last;
        let caller = rustix::io::ioctl_fionbio(&socket, true)
            .map_err(|errno| Error::system("make a socket non-blocking", errno))
            .and_then(|()| Caller::of(id, &socket));
        let caller = match caller {
            Ok(caller) => caller,
            Err(error) => {
                self.close_refused(socket, None);
                return Err(error);
            }
        };
        let uid = caller.uid;
        if !self.is_allowed(&caller, &socket) {
            let message = format!(
                "uid {uid} is not allowed here: start the broker with --allow-uid {uid}, or {}",
                self.join_a_group
            );
            self.refuse_connection(&caller, &socket, ErrorCode::Refused, message);
            self.close_refused(socket, None);
            return Ok(());
        }
        if let Err(message) = self.check_admission(&caller) {
            self.refuse_connection(&caller, &socket, ErrorCode::Full, message);
            self.close_refused(socket, Some(uid));
            return Ok(());
        }
        let watched =
            self.poll.registry().register(&mut SourceFd(&socket.as_raw_fd()), Key(id.0 as usize), Interest::READABLE);
        // Fails where the kernel has no such option, and lets descriptors pass.
        let _ = sys::pass_descriptors(socket.as_fd(), true);
        if let Err(error) = watched {
            self.close_refused(socket, Some(uid));
            return Err(Error::system("watch a connection", error));
        }
        self.objects.users().add_connection(uid);
        let deadline = deadline_after(self.config.timeout);
        self.connections.insert(id, Connection::new(caller, socket, deadline));
        self.set_deadline(id, deadline);
        self.list(id);
        Ok(())
    }

    /// Reports to a peer why it is not served.
    fn refuse_connection(&mut self, caller: &Caller, socket: &OwnedFd, code: ErrorCode, message: String) {
        let Caller { uid, pid, .. } = *caller;
        if self.is_logged(uid, "a connection refused") {
            tracing::info!(uid, pid, message, "a connection is refused");
        } else {
            tracing::debug!(uid, pid, message, "a connection is refused");
        }
        let mut record = Vec::new();
        if Message::Error(Failure { code, message }).encode_into(&mut record).is_ok() {
            // Fails if the peer is gone.
            let _ = rustix::net::send(socket, &record, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
        }
    }

    fn is_allowed(&self, caller: &Caller, socket: &OwnedFd) -> bool {
        caller.is_superuser()
            || self.config.allow_uids.contains(&caller.uid)
            || self.config.allow_gids.iter().any(|gid| caller.is_of(*gid, socket))
    }

    fn check_admission(&mut self, caller: &Caller) -> Result<(), String> {
        let uid = caller.uid;
        self.objects.users().check_connection(uid).map_err(|refusal| refusal.message)?;
        self.closers.check(uid)?;
        self.require_descriptors(caller, 1).map_err(|refusal| refusal.message)
    }

    /// Why nothing may be received on a connection, since it may bring descriptors that can't be closed or have no room. The kernel
    /// would close those without room in this thread.
    pub(crate) fn check_room_to_receive(&self, id: ConnectionId) -> Result<(), String> {
        let Some(connection) = self.connections.get(&id) else { return Ok(()) };
        self.closers.check(connection.caller.uid)?;
        if self.descriptors() + SPARE <= self.limit {
            return Ok(());
        }
        if brings_descriptors(connection) {
            return Err(format!("the broker can't receive descriptors: it is close to its limit of {}", self.limit));
        }
        Ok(())
    }

    /// Whether a connection's next record has descriptors and waits, since the worker does not close memory as fast as its user sends it.
    pub(crate) fn must_wait(&mut self, id: ConnectionId) -> bool {
        // What the records before it replaced.
        self.worker.close(self.objects.take_garbage());
        let Some(connection) = self.connections.get(&id).filter(|_| self.worker.is_behind()) else { return false };
        let sent = self.sent_while_behind.get(&connection.caller.uid).copied().unwrap_or(0);
        let waits = sent >= MOST_WHILE_BEHIND && brings_descriptors(connection);
        if waits {
            self.held_up.insert(id);
        }
        waits
    }

    /// Receives from the connections that waited for the worker.
    pub(crate) fn receive_again(&mut self) {
        self.sent_while_behind.clear();
        for id in std::mem::take(&mut self.held_up) {
            // It could not go on with its put.
            if self.connections.get(&id).is_some_and(|connection| matches!(connection.request, Request::Upload(_))) {
                self.set_deadline(id, deadline_after(self.timeout()));
            }
            self.list(id);
        }
    }

    /// Refuses what would need more descriptors than this process may have, or than a user's share: half of what other users leave.
    /// The server's own user and root, who may do everything, have no share.
    pub(crate) fn require_descriptors(&self, caller: &Caller, more: usize) -> Result<(), BrokerError> {
        let (used, limit, uid) = (self.descriptors(), self.limit, caller.uid);
        if used + more + SPARE > limit {
            return Err(BrokerError::new(
                RefusalCode::Full,
                format!(
                    "the broker has {used} descriptors, needs {SPARE} to spare, and {more} more are asked for: its limit is {limit}; \
                     raise it (ulimit -n, LimitNOFILE)"
                ),
            ));
        }
        let own = self.objects.descriptors_of(uid) + self.closers.files_of(uid);
        let share = limit.saturating_sub(SPARE + used.saturating_sub(own)) / 2;
        if caller.is_superuser() || own + more <= share {
            return Ok(());
        }
        Err(BrokerError::new(
            RefusalCode::Full,
            format!(
                "uid {uid} has {own} descriptors in the broker and asks for {more} more: its share is {share}, half of what other \
                 users leave; delete objects, or raise the broker's limit (ulimit -n, LimitNOFILE)"
            ),
        ))
    }

    /// Descriptors that this process has, about, and those that puts under way will bring.
    pub(crate) fn descriptors(&self) -> usize {
        let closing = self.worker.closing() + self.closers.descriptors();
        self.connections.len() + self.abandoned.len() + self.objects.descriptors() + closing
    }
}
