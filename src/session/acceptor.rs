//! Accepts connections for handoffs. Connections without a request are read concurrently: none delays or excludes
//! another.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use super::{
    Config,
    link::{Link, mismatch, unexpected},
};
use crate::{
    channel::{Cancel, Listener, deadline_after},
    driver::Backend,
    error::{Error, ErrorCode, PeerError, ProtocolError, Result},
    wire::{Hello, Message, Request},
};

/// The most idle connections, in addition to one for each expected consumer. Beyond it, the oldest is closed.
pub(super) const MAX_IDLE: usize = 64;

/// How long a refused peer may take to close before its connection is closed.
const REFUSAL_GRACE: Duration = Duration::from_millis(100);

/// The number of records that are read from a refused peer. Unread records would make the close reset the connection.
const MAX_DISCARDED: u8 = 8;

const FOR_A_REQUEST: &str = "for a request";

/// A consumer with its first request.
#[derive(Debug)]
pub(super) struct Arrival {
    pub(super) link: Link,
    /// The name of its backend.
    pub(super) backend: String,
    pub(super) request: Request,
}

/// Why [`Acceptor::next`] returned.
#[derive(Debug)]
pub(super) enum Next {
    Arrived(Box<Arrival>),
    /// The `wake` descriptor is readable.
    Woken,
    /// The deadline has passed.
    TimedOut,
}

/// Accepts connections and holds each until its first request.
#[derive(Debug)]
pub(super) struct Acceptor<'a> {
    backend: Backend,
    config: &'a Config,
    /// Interrupts waits for connections.
    cancel: Cancel,
    /// Interrupts the sessions of accepted consumers.
    sessions: Cancel,
    /// Oldest first.
    idle: Vec<Idle>,
    /// The number of consumers still expected.
    pub(super) expected: usize,
}

#[derive(Debug)]
struct Idle {
    link: Link,
    stage: Stage,
    deadline: Instant,
}

#[derive(Debug)]
enum Stage {
    /// The connection has sent nothing.
    Silent,
    /// The peer has sent its hello, with the name of its backend.
    Greeted(String),
    /// The peer was sent an `error` and may still read it. Holds how many of its records may still be discarded.
    Refused(u8),
}

impl<'a> Acceptor<'a> {
    pub(super) fn new(backend: Backend, config: &'a Config, sessions: &Cancel) -> Result<Self> {
        let cancel = config.cancellation()?;
        let sessions = sessions.clone();
        Ok(Self { backend, config, cancel, sessions, idle: Vec::new(), expected: 0 })
    }

    /// Waits until a consumer sends a request, `wake` is readable, or the deadline passes.
    pub(super) fn next(
        &mut self,
        listener: &Listener,
        wake: Option<BorrowedFd<'_>>,
        deadline: Instant,
    ) -> Result<Next> {
        loop {
            self.expire();
            let until = self.idle.iter().map(|idle| idle.deadline).fold(deadline, Instant::min);
            let links = self.idle.iter().map(|idle| idle.link.channel.as_fd());
            let links = wake.into_iter().chain(links).chain([listener.as_fd()]);
            let first = usize::from(wake.is_some());
            match self.cancel.wait_readable(links, until)? {
                Some(0) if wake.is_some() => return Ok(Next::Woken),
                Some(index) if index - first == self.idle.len() => self.accept(listener)?,
                Some(index) => {
                    if let Ok(Some(arrival)) = self.read(index - first) {
                        return Ok(Next::Arrived(Box::new(arrival)));
                    }
                }
                None => {}
            }
            if Instant::now() >= deadline {
                return Ok(Next::TimedOut);
            }
        }
    }

    /// Waits for the request of the one peer of `socket`.
    pub(super) fn accept_one(mut self, socket: OwnedFd) -> Result<Arrival> {
        self.admit(socket)?;
        let refused = self.idle.first().and_then(|idle| self.config.trust.check(idle.link.peer()).err());
        if let Some(refused) = refused {
            self.close_all(&refused);
            return Err(refused);
        }
        let deadline = deadline_after(self.config.timeout);
        loop {
            let Some(idle) = self.idle.first() else {
                return Err(Error::Peer(PeerError::Gone { pid: 0, purpose: FOR_A_REQUEST }));
            };
            let request = match self.cancel.wait_readable([idle.link.channel.as_fd()].into_iter(), deadline)? {
                Some(_) => self.read(0),
                None => Err(Error::Peer(PeerError::Timeout { purpose: FOR_A_REQUEST, waited: self.config.timeout })),
            };
            match request {
                Ok(None) => {}
                Ok(Some(arrival)) => return Ok(arrival),
                Err(error) => {
                    self.close_all(&error);
                    return Err(error);
                }
            }
        }
    }

    fn accept(&mut self, listener: &Listener) -> Result<()> {
        while self.idle.len() >= MAX_IDLE + self.expected {
            self.evict();
        }
        let accepted = match listener.accept() {
            Ok(Some(socket)) => self.admit(socket),
            Ok(None) => Ok(()),
            Err(error) => Err(error),
        };
        if let Err(error) = accepted {
            // Usually this process is out of descriptors, and idle connections hold some.
            tracing::debug!(%error, "can't accept a connection: closing an idle one and trying again");
            self.evict();
            self.cancel.pause(Duration::from_millis(5))?;
        }
        Ok(())
    }

    /// Closes a connection to make room: the oldest refused one, else the oldest silent one (with an `error`), else the oldest (with an
    /// `error`).
    fn evict(&mut self) {
        let first = |of: fn(&Stage) -> bool| self.idle.iter().position(|idle| of(&idle.stage));
        let refused = first(|stage| matches!(stage, Stage::Refused(_)));
        let Some(index) = refused.or_else(|| first(|stage| matches!(stage, Stage::Silent))).or_else(|| first(|_| true))
        else {
            return;
        };
        tracing::debug!("closing an idle connection to make room");
        let mut idle = self.idle.remove(index);
        if !matches!(idle.stage, Stage::Refused(_)) {
            let message = "too many connections have not sent a request: try again";
            idle.refuse(&mismatch(ErrorCode::Full, message));
        }
    }

    fn admit(&mut self, socket: OwnedFd) -> Result<()> {
        let link = Link::over(socket, self.config, &self.sessions)?;
        let mut idle = Idle { link, stage: Stage::Silent, deadline: deadline_after(self.config.timeout) };
        if let Err(refused) = self.config.trust.check(idle.link.peer()) {
            idle.refuse(&refused);
        }
        self.idle.push(idle);
        Ok(())
    }

    /// Reads one record of a connection. An error concerns only this connection, whose peer has received it.
    fn read(&mut self, index: usize) -> Result<Option<Arrival>> {
        let backend = self.backend;
        let idle = &mut self.idle[index];
        if let Stage::Refused(left) = &mut idle.stage {
            if idle.link.channel.discard() || *left == 0 {
                self.idle.remove(index);
            } else {
                *left -= 1;
            }
            return Ok(None);
        }
        match idle.next(backend) {
            Ok(None) => Ok(None),
            Ok(Some((backend, request))) => {
                let link = self.idle.remove(index).link;
                Ok(Some(Arrival { link, backend, request }))
            }
            Err(error) => {
                let peer = idle.link.peer();
                tracing::info!(pid = peer.pid, uid = peer.uid, error = error.in_full(), "refusing a connection");
                match &error {
                    Error::Peer(
                        PeerError::Gone { .. }
                        | PeerError::Reported { .. }
                        | PeerError::Protocol(ProtocolError::UnreadableError { .. }),
                    ) => drop(self.idle.remove(index)),
                    _ => idle.refuse(&error),
                }
                Err(error)
            }
        }
    }

    /// Refuses connections that sent no request within the timeout, and closes refused connections after [`REFUSAL_GRACE`].
    fn expire(&mut self) {
        let now = Instant::now();
        let waited = self.config.timeout;
        self.idle.retain_mut(|idle| {
            if idle.deadline > now {
                return true;
            }
            let purpose = match idle.stage {
                Stage::Silent => "for the consumer's hello",
                Stage::Greeted(_) => FOR_A_REQUEST,
                Stage::Refused(_) => return false,
            };
            idle.refuse(&Error::Peer(PeerError::Timeout { purpose, waited }));
            true
        });
    }

    /// Refuses all connections with `reason`, and waits up to [`REFUSAL_GRACE`] until the peers have closed.
    pub(super) fn close_all(mut self, reason: &Error) {
        for idle in self.idle.iter_mut().filter(|idle| !matches!(idle.stage, Stage::Refused(_))) {
            idle.refuse(reason);
        }
        // A new cancel: the sessions may already be cancelled.
        let (Ok(cancel), deadline) = (Cancel::new(), deadline_after(REFUSAL_GRACE)) else { return };
        while !self.idle.is_empty() && Instant::now() < deadline {
            let links = self.idle.iter().map(|idle| idle.link.channel.as_fd());
            let Ok(Some(index)) = cancel.wait_readable(links, deadline) else { return };
            if self.idle[index].link.channel.discard() {
                self.idle.remove(index);
            }
        }
    }
}

impl Idle {
    /// Reads one record. Returns the peer's backend and its request, if the record is one.
    fn next(&mut self, own: Backend) -> Result<Option<(String, Request)>> {
        let message = match self.link.receive_first(Instant::now(), FOR_A_REQUEST) {
            // The socket was readable, but not because of a record.
            Err(Error::Peer(PeerError::Timeout { .. })) => return Ok(None),
            message => message?,
        };
        match (&self.stage, message) {
            (Stage::Silent, hello) => {
                let Hello { backend, .. } = self.link.check_hello(hello)?;
                self.link.hello(own, &[])?;
                self.stage = Stage::Greeted(backend);
                Ok(None)
            }
            (Stage::Greeted(backend), Message::Request(request)) => Ok(Some((backend.clone(), request))),
            (Stage::Greeted(_), Message::Subscribe(_)) => {
                let message = "this producer has no stream, only a buffer: send a request instead of subscribing";
                Err(mismatch(ErrorCode::Object, message))
            }
            (_, other) => Err(unexpected(&other, "request")),
        }
    }

    /// Sends the error, and gives the peer [`REFUSAL_GRACE`] to close.
    fn refuse(&mut self, error: &Error) {
        self.link.report(error);
        self.link.channel.shut_down_writing();
        self.stage = Stage::Refused(MAX_DISCARDED);
        self.deadline = deadline_after(REFUSAL_GRACE);
    }
}
