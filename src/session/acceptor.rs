//! Accepts connections for both dialects. Connections that have not asked for anything yet are heard side by side: none delays
//! another, and none keeps a consumer out.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use super::{
    Config,
    link::{Link, unexpected},
};
use crate::{
    channel::{Cancel, Listener, deadline_after},
    driver::Backend,
    error::{Error, ErrorCode, PeerError, ProtocolError, Result},
    wire::{Hello, Message, Request, STREAM},
};

/// How many idle connections are kept, besides one for each consumer that is expected: beyond that the oldest is closed.
pub(super) const MAX_IDLE: usize = 64;

/// How long a peer that was refused has to leave before its connection is closed.
const GOODBYE: Duration = Duration::from_millis(100);

/// How many records of a refused peer are read, so that closing the connection does not reset it.
const DISCARDED: u8 = 8;

/// What a peer may ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dialect {
    /// A buffer.
    Handoff,
    /// A subscription to a stream.
    Stream,
}

/// A peer that has asked for something: a consumer.
#[derive(Debug)]
pub(super) struct Arrival {
    pub(super) link: Link,
    /// The name of its backend. A stream accepts only its own.
    pub(super) backend: String,
    pub(super) wish: Wish,
}

/// What a consumer asks for.
#[derive(Debug)]
pub(super) enum Wish {
    Buffer(Request),
    /// A subscription that keeps so many buffers.
    Stream(u64),
}

/// Why [`Acceptor::next`] returns.
#[derive(Debug)]
pub(super) enum Next {
    Arrived(Box<Arrival>),
    /// The other descriptor is readable.
    Woken,
    /// The deadline has passed.
    Late,
}

/// The connections that have not asked for anything.
#[derive(Debug)]
pub(super) struct Acceptor<'a> {
    dialect: Dialect,
    backend: Backend,
    config: &'a Config,
    /// What ends the waits for connections.
    cancel: Cancel,
    /// What ends the conversations of those accepted.
    conversations: Cancel,
    /// In the order in which they came.
    idle: Vec<Idle>,
    /// How many consumers are expected at most.
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
    /// It has sent nothing.
    Silent,
    /// It has said hello.
    Greeted(Greeting),
    /// It has an `error` of this side, and time to read it. How many more of its records are discarded.
    Refused(u8),
}

/// What its hello says.
#[derive(Debug)]
struct Greeting {
    /// The name of its backend.
    backend: String,
    /// Whether it has streams.
    streams: bool,
}

impl<'a> Acceptor<'a> {
    pub(super) fn new(dialect: Dialect, backend: Backend, config: &'a Config, conversations: &Cancel) -> Result<Self> {
        let (cancel, conversations) = (config.cancellation()?, conversations.clone());
        Ok(Self { dialect, backend, config, cancel, conversations, idle: Vec::new(), expected: 0 })
    }

    /// Waits for a consumer, until a deadline.
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
            let (links, first) = (wake.into_iter().chain(links).chain([listener.as_fd()]), usize::from(wake.is_some()));
            match self.cancel.wait_readable(links, until)? {
                Some(0) if wake.is_some() => return Ok(Next::Woken),
                Some(index) if index - first == self.idle.len() => self.accept(listener)?,
                Some(index) => {
                    if let Ok(Some(arrival)) = self.hear(index - first) {
                        return Ok(Next::Arrived(Box::new(arrival)));
                    }
                }
                None => {}
            }
            if Instant::now() >= deadline {
                return Ok(Next::Late);
            }
        }
    }

    /// Waits for the peer of one connection to ask for something.
    pub(super) fn meet(mut self, socket: OwnedFd) -> Result<Arrival> {
        self.admit(socket)?;
        let refused = self.idle.first().and_then(|idle| self.config.trust.check(idle.link.peer()).err());
        if let Some(refused) = refused {
            self.close_all(&refused);
            return Err(refused);
        }
        let deadline = deadline_after(self.config.timeout);
        loop {
            let Some(idle) = self.idle.first() else {
                return Err(Error::Peer(PeerError::Gone { purpose: FOR_A_REQUEST }));
            };
            let heard = match self.cancel.wait_readable([idle.link.channel.as_fd()].into_iter(), deadline)? {
                Some(_) => self.hear(0),
                None => Err(Error::Peer(PeerError::Timeout { purpose: FOR_A_REQUEST, waited: self.config.timeout })),
            };
            match heard {
                Ok(None) => {}
                Ok(Some(arrival)) => return Ok(arrival),
                Err(error) => {
                    self.close_all(&error);
                    return Err(error);
                }
            }
        }
    }

    /// Takes a connection.
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
            // Out of descriptors, most often: idle connections hold some.
            tracing::debug!(%error, "a connection has to wait");
            self.evict();
            self.cancel.pause(Duration::from_millis(5))?;
        }
        Ok(())
    }

    /// Closes a connection, which learns why: the oldest of those that were refused already, else of those that have sent nothing,
    /// else of all.
    fn evict(&mut self) {
        let first = |of: fn(&Stage) -> bool| self.idle.iter().position(|idle| of(&idle.stage));
        let refused = first(|stage| matches!(stage, Stage::Refused(_)));
        let Some(index) = refused.or_else(|| first(|stage| matches!(stage, Stage::Silent))).or_else(|| first(|_| true))
        else {
            return;
        };
        tracing::debug!("an idle connection is closed to make room");
        let mut idle = self.idle.remove(index);
        if !matches!(idle.stage, Stage::Refused(_)) {
            let message = "there are too many connections that have asked for nothing: try again".to_owned();
            idle.refuse(&Error::Peer(PeerError::Mismatch { code: ErrorCode::Full, message }));
        }
    }

    fn admit(&mut self, socket: OwnedFd) -> Result<()> {
        let link = Link::over(socket, self.config, &self.conversations)?;
        let mut idle = Idle { link, stage: Stage::Silent, deadline: deadline_after(self.config.timeout) };
        if let Err(refused) = self.config.trust.check(idle.link.peer()) {
            idle.refuse(&refused);
        }
        self.idle.push(idle);
        Ok(())
    }

    /// Takes one record of a connection. An error concerns that connection alone, to which it was sent.
    fn hear(&mut self, index: usize) -> Result<Option<Arrival>> {
        let (dialect, backend) = (self.dialect, self.backend);
        let idle = &mut self.idle[index];
        if let Stage::Refused(left) = &mut idle.stage {
            if idle.link.channel.discard() || *left == 0 {
                self.idle.remove(index);
            } else {
                *left -= 1;
            }
            return Ok(None);
        }
        match idle.next(dialect, backend) {
            Ok(None) => Ok(None),
            Ok(Some((backend, wish))) => {
                let link = self.idle.remove(index).link;
                Ok(Some(Arrival { link, backend, wish }))
            }
            Err(error) => {
                let peer = idle.link.peer();
                tracing::info!(pid = peer.pid, uid = peer.uid, error = error.in_full(), "a connection is refused");
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

    /// Ends connections that have used up their time.
    fn expire(&mut self) {
        let (now, waited) = (Instant::now(), self.config.timeout);
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

    /// Ends all connections for a reason, and gives the peers a moment to read it.
    pub(super) fn close_all(mut self, reason: &Error) {
        for idle in self.idle.iter_mut().filter(|idle| !matches!(idle.stage, Stage::Refused(_))) {
            idle.refuse(reason);
        }
        // Not with the cancel of the conversations, which may be the reason.
        let (Ok(cancel), deadline) = (Cancel::new(), deadline_after(GOODBYE)) else { return };
        while !self.idle.is_empty() && Instant::now() < deadline {
            let links = self.idle.iter().map(|idle| idle.link.channel.as_fd());
            let Ok(Some(index)) = cancel.wait_readable(links, deadline) else { return };
            if self.idle[index].link.channel.discard() {
                self.idle.remove(index);
            }
        }
    }
}

/// What a peer that has said hello is waited for.
const FOR_A_REQUEST: &str = "for a request";

impl Idle {
    /// Takes one record. Returns the peer's backend and what it asks for, once it does.
    fn next(&mut self, dialect: Dialect, own: Backend) -> Result<Option<(String, Wish)>> {
        let message = match self.link.receive_first(Instant::now(), FOR_A_REQUEST) {
            // The wait ended for something else than a record.
            Err(Error::Peer(PeerError::Timeout { .. })) => return Ok(None),
            message => message?,
        };
        let refuse = |code, message: String| Err(Error::Peer(PeerError::Mismatch { code, message }));
        match (&self.stage, message, dialect) {
            (Stage::Silent, hello, _) => {
                let Hello { backend, capabilities: theirs, .. } = self.link.greeted(hello)?;
                let capabilities = if dialect == Dialect::Stream { &[STREAM][..] } else { &[] };
                self.link.hello(own, capabilities)?;
                self.stage = Stage::Greeted(Greeting { backend, streams: theirs.iter().any(|named| named == STREAM) });
                Ok(None)
            }
            (Stage::Greeted(greeting), Message::Request(request), Dialect::Handoff) => {
                Ok(Some((greeting.backend.clone(), Wish::Buffer(request))))
            }
            (Stage::Greeted(Greeting { backend, streams }), Message::Subscribe(subscribe), Dialect::Stream) => {
                let wrong = |message: &str| Err(ProtocolError::Content(message.to_owned()).into());
                if !streams {
                    return wrong("a consumer subscribes whose hello lacks the capability `stream`");
                }
                check_backend(backend, own)?;
                match subscribe.keep {
                    0 => wrong("a consumer subscribes that keeps no buffer"),
                    keep => Ok(Some((backend.clone(), Wish::Stream(keep)))),
                }
            }
            (Stage::Greeted(_), Message::Subscribe(_), Dialect::Handoff) => refuse(
                ErrorCode::Object,
                "this producer has no stream to subscribe to, only a buffer to request".to_owned(),
            ),
            (Stage::Greeted(_), Message::Request(request), Dialect::Stream) => refuse(
                ErrorCode::Object,
                format!(
                    "there is no object `{}` here: this producer has a stream, to which a consumer subscribes",
                    request.object
                ),
            ),
            (_, other, Dialect::Handoff) => Err(unexpected(&other, "request")),
            (_, other, Dialect::Stream) => Err(unexpected(&other, "subscribe")),
        }
    }

    /// Sends why it can't stay.
    fn refuse(&mut self, error: &Error) {
        self.link.report(error);
        self.link.channel.shut_down_writing();
        self.stage = Stage::Refused(DISCARDED);
        self.deadline = deadline_after(GOODBYE);
    }
}

/// Whether a consumer uses the same kind of memory.
pub(super) fn check_backend(theirs: &str, own: Backend) -> Result<()> {
    if theirs == own.as_str() {
        return Ok(());
    }
    let message = format!("the producer's memory is on backend {own}, and the consumer uses {theirs}");
    Err(Error::Peer(PeerError::Mismatch { code: ErrorCode::Backend, message }))
}
