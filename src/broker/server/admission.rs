//! Which connections and which descriptors are let in.

use std::{
    os::fd::{AsFd, AsRawFd, OwnedFd},
    time::Duration,
};

use mio::{Interest, Token as Key, unix::SourceFd};

use super::{
    caller::Caller,
    connection::{Connection, Outgoing},
    puts::Draft,
    reactor::{Reactor, Timer},
};
use crate::{
    channel::deadline_after,
    error::{BrokerError, Error, ErrorCode, RefusalCode, Result},
    wire::{Failure, MAX_FDS, broker::Message},
};

/// How many connections are accepted before the others have their turn.
const ACCEPTED_AT_ONCE: usize = 64;

/// Descriptors that are neither a connection's nor memory: those of a record that is being received, and the server's own.
const SPARE: usize = MAX_FDS + 64;

impl Reactor {
    /// Takes the connections that wait.
    pub(super) fn accept(&mut self) {
        for _ in 0..ACCEPTED_AT_ONCE {
            if !self.acceptable {
                return;
            }
            match self.listener.accept() {
                Ok(Some(socket)) => {
                    if let Err(error) = self.admit(socket) {
                        tracing::warn!(error = error.in_full(), "a connection can't be served");
                    }
                }
                Ok(None) => self.acceptable = false,
                Err(error) => {
                    tracing::error!(error = error.in_full(), "no connection can be accepted");
                    self.acceptable = false;
                    self.timer(Duration::from_millis(100), Timer::Sweep);
                }
            }
        }
    }

    /// Serves a new connection, or says why not and closes it.
    fn admit(&mut self, socket: OwnedFd) -> Result<()> {
        self.last.0 += 1;
        let id = self.last;
        rustix::io::ioctl_fionbio(&socket, true).map_err(|errno| Error::system("make a socket non-blocking", errno))?;
        let mut connection = Connection::new(id, socket, deadline_after(self.config.timeout))?;
        let Caller { uid, pid, .. } = connection.caller;
        if let Err((code, message)) = self.check_admission(&connection) {
            tracing::info!(uid, pid, message, "a connection is refused");
            if let Ok(error) = Outgoing::of(&Message::Error(Failure { code, message }), Vec::new())
                && connection.push(error).is_ok()
            {
                connection.flush(&self.objects);
            }
            self.worker.close_socket(connection.socket.into());
            return Ok(());
        }
        let watched = self.poll.registry().register(
            &mut SourceFd(&connection.as_fd().as_raw_fd()),
            Key(id.0 as usize),
            Interest::READABLE,
        );
        watched.map_err(|error| Error::system("watch a connection", error))?;
        self.objects.users().add_connection(uid);
        let deadline = connection.deadline;
        self.connections.insert(id, connection);
        deadline.into_iter().for_each(|deadline| self.set_deadline(id, deadline));
        self.list(id);
        Ok(())
    }

    fn check_admission(&mut self, connection: &Connection) -> Result<(), (ErrorCode, String)> {
        let caller = &connection.caller;
        let uid = caller.uid;
        let allowed = caller.is_superuser()
            || self.config.allow_uids.contains(&uid)
            || self.config.allow_gids.iter().any(|gid| caller.is_of(*gid, connection));
        if !allowed {
            return Err((ErrorCode::Refused, format!("uid {uid} is not allowed here")));
        }
        if let Err(refusal) = self.objects.users().check_connection(uid) {
            return Err((ErrorCode::Full, refusal.message));
        }
        if self.worker.is_stuck() {
            let message =
                "files that came from peers can't be closed: the broker takes no more connections until they are";
            return Err((ErrorCode::Full, message.to_owned()));
        }
        self.require_descriptors(1).map_err(|refusal| (ErrorCode::Full, refusal.message))
    }

    /// Refuses what would need more descriptors than this process may have.
    pub(super) fn require_descriptors(&self, more: usize) -> Result<(), BrokerError> {
        let used = self.descriptors();
        if used + more + SPARE <= self.limit {
            return Ok(());
        }
        let limit = self.limit;
        Err(BrokerError::new(
            RefusalCode::Full,
            format!(
                "the broker has {used} descriptors, needs {SPARE} to spare, and {more} more are asked for: its limit is {limit}; \
                 raise it (ulimit -n, LimitNOFILE)"
            ),
        ))
    }

    /// Descriptors that this process has, about.
    pub(super) fn descriptors(&self) -> usize {
        let kept = self.objects.descriptors() + self.worker.closing();
        self.connections.len() + self.abandoned.len() + kept + self.uploading + self.held_back()
    }

    /// Descriptors that came and are not published yet.
    fn held_back(&self) -> usize {
        self.drafts.values().map(Draft::descriptors).sum()
    }
}
