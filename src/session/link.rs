//! One side of a session: a channel on which `busy` only extends the peer's wait.

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use crate::{
    channel::{Cancel, Channel, Config, Peer, deadline_after},
    driver::Backend,
    error::{Error, ErrorCode, PeerError, ProtocolError, Result},
    wire::{Busy, Failure, Hello, Message, VERSION},
};

/// The longest interval between two `busy` messages. Shorter than the protocol's limit of one second, because long work can't send at
/// any moment.
const BUSY_INTERVAL: Duration = Duration::from_millis(900);

/// How long a peer that has used up its timeout may take to read the error and close.
pub(super) const CLOSE_GRACE: Duration = Duration::from_millis(100);

/// One side of a session.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) channel: Channel,
    /// The time of the last message sent, or of the last one received that needs an answer.
    active: Instant,
    busy_interval: Duration,
    /// The peer's time limit, which `busy` does not extend.
    turn: Option<Turn>,
    /// Whether the peer waits for no message of this side. Then `busy` would violate the protocol.
    pub(super) no_reply_due: bool,
}

/// A time limit for all messages of the peer until [`Link::end_turn`].
#[derive(Debug, Clone, Copy)]
struct Turn {
    limit: Duration,
    deadline: Instant,
}

impl Turn {
    fn exceeded(&self) -> Error {
        Error::Peer(PeerError::TurnTooLong { granted: self.limit })
    }
}

impl Link {
    pub(super) fn new(channel: Channel) -> Self {
        Self { channel, active: Instant::now(), busy_interval: BUSY_INTERVAL, turn: None, no_reply_due: false }
    }

    /// A link over a connected socket.
    ///
    /// # Errors
    /// [`Error::Socket`] if the descriptor is not a connected `SOCK_SEQPACKET` socket; [`Error::System`].
    pub(super) fn over(socket: OwnedFd, config: &Config, cancel: &Cancel) -> Result<Self> {
        Channel::new(socket, config.timeout, cancel).map(Self::new)
    }

    pub(super) fn peer(&self) -> Peer {
        self.channel.peer()
    }

    pub(super) fn hello(&mut self, backend: Backend, capabilities: &[&str]) -> Result<()> {
        let hello = Hello::new(capabilities, backend.as_str(), self.channel.timeout());
        self.send(&Message::Hello(hello), &[])
    }

    /// Checks the peer's first message, and adapts the interval of `busy` to the peer's timeout.
    pub(super) fn check_hello(&mut self, message: Message) -> Result<Hello> {
        let hello = match message {
            Message::Hello(hello) if hello.version >= VERSION => hello,
            Message::Hello(hello) => {
                return Err(ProtocolError::Version { got: hello.version, own: VERSION }.into());
            }
            other => return Err(unexpected(&other, "hello")),
        };
        // A quarter: with the time between two calls of `busy`, the peer still receives three in its timeout.
        let peer_timeout = Duration::from_millis(hello.timeout_ms);
        self.busy_interval = BUSY_INTERVAL.min(peer_timeout / 4).max(Duration::from_millis(1));
        Ok(hello)
    }

    /// The longest time between two calls of [`Link::busy`].
    pub(super) fn tick_interval(&self) -> Duration {
        (self.busy_interval / 4).clamp(Duration::from_millis(1), Duration::from_millis(100))
    }

    pub(super) fn send(&mut self, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<()> {
        self.channel.send(message, fds)?;
        self.active = Instant::now();
        Ok(())
    }

    /// Returns the next message except `busy`, which restarts the time limit. The peer's `error` becomes [`PeerError::Reported`].
    pub(super) fn receive(&mut self, purpose: &'static str) -> Result<(Message, Vec<OwnedFd>)> {
        loop {
            match self.receive_by(deadline_after(self.channel.timeout()), purpose)? {
                (Message::Busy(_), _) => {}
                answer => return Ok(answer),
            }
        }
    }

    /// As [`Link::receive`], for one of several messages for which the peer may take `left` in all: `busy` does not extend it.
    pub(super) fn receive_within(
        &mut self,
        left: &mut Duration,
        purpose: &'static str,
    ) -> Result<(Message, Vec<OwnedFd>)> {
        let deadline = deadline_after(*left);
        loop {
            let received = self.receive_by(deadline, purpose)?;
            *left = deadline.saturating_duration_since(Instant::now());
            match received {
                (Message::Busy(_), _) if left.is_zero() => {
                    return Err(Error::Peer(PeerError::Timeout { purpose, waited: self.channel.timeout() }));
                }
                (Message::Busy(_), _) => {}
                answer => return Ok(answer),
            }
        }
    }

    /// As [`Link::receive`], but returns `busy` too, so that the caller can limit the time in which the peer sends nothing else. After the
    /// deadline, returns only a message that has already arrived.
    pub(super) fn receive_by(&mut self, deadline: Instant, purpose: &'static str) -> Result<(Message, Vec<OwnedFd>)> {
        let received = match self.turn {
            // Checked first: a peer may send `busy` without a pause.
            Some(turn) if turn.deadline <= Instant::now() => return Err(turn.exceeded()),
            Some(turn) if turn.deadline < deadline => match self.channel.receive_by(turn.deadline, purpose) {
                Err(Error::Peer(PeerError::Timeout { .. })) => return Err(turn.exceeded()),
                received => received?,
            },
            _ => self.channel.receive_by(deadline, purpose)?,
        };
        match received {
            (Message::Error(Failure { code, message }), _) => Err(Error::Peer(PeerError::Reported { code, message })),
            received => {
                if !matches!(received, (Message::Busy(_), _)) {
                    self.active = Instant::now();
                }
                Ok(received)
            }
        }
    }

    /// Limits the time of the peer until [`Link::end_turn`]. `busy` does not extend it.
    pub(super) fn begin_turn(&mut self, limit: Duration) {
        self.turn = Some(Turn { limit, deadline: deadline_after(limit) });
    }

    /// Removes the peer's time limit.
    pub(super) fn end_turn(&mut self) {
        self.turn = None;
    }

    /// Returns the next message of a peer that has no request in progress. Such a peer must not send `busy`, so `busy` is returned like
    /// any other message.
    pub(super) fn receive_first(&mut self, deadline: Instant, purpose: &'static str) -> Result<Message> {
        match self.channel.receive_by(deadline, purpose)?.0 {
            // An error is never answered with an error.
            Message::Error(Failure { code, message }) => Err(Error::Peer(PeerError::Reported { code, message })),
            message => {
                self.active = Instant::now();
                Ok(message)
            }
        }
    }

    /// Sends `busy` if this side has sent nothing for the interval. Long work calls it at least every [`Link::tick_interval`].
    pub(super) fn busy(&mut self) -> Result<()> {
        self.channel.cancel().check()?;
        if !self.no_reply_due && self.active.elapsed() >= self.busy_interval {
            self.send(&Message::Busy(Busy {}), &[])
        } else {
            Ok(())
        }
    }

    /// Sends the error if the peer does not know it, then waits for the peer to close the connection, at most for the channel's
    /// timeout. If the peer has used up its time and borrows no memory (`lent`) that it must close first, the limit is
    /// [`CLOSE_GRACE`]. Returns whether the peer has closed.
    pub(super) fn end<T>(mut self, result: &Result<T>, lent: bool) -> bool {
        if let Err(error) = result {
            self.report(error);
        }
        let used_up =
            matches!(result, Err(Error::Peer(PeerError::Timeout { .. }) | Error::Peer(PeerError::TurnTooLong { .. })));
        self.channel.finish(if used_up && !lent { CLOSE_GRACE } else { Duration::MAX })
    }

    /// Waits [`CLOSE_GRACE`] for a silent peer, which already has the error, to close. Returns whether it has.
    pub(super) fn leave(self) -> bool {
        self.channel.finish(CLOSE_GRACE)
    }

    /// Sends an error unless the peer caused or reported it.
    pub(super) fn report(&mut self, error: &Error) {
        let Some(code) = code_for(error) else { return };
        let message = Message::Error(Failure { code, message: error.in_full() });
        if let Err(unsent) = self.channel.send(&message, &[]) {
            tracing::debug!(%unsent, "can't send an error to the peer");
        }
    }
}

/// The code to send for an error. `None` if the peer has closed, or has itself sent an `error`, readable or not.
pub(super) fn code_for(error: &Error) -> Option<ErrorCode> {
    Some(match error {
        Error::Peer(
            PeerError::Reported { .. }
            | PeerError::Gone { .. }
            | PeerError::Protocol(ProtocolError::UnreadableError { .. }),
        ) => return None,
        Error::Peer(PeerError::Protocol(ProtocolError::Version { .. })) => ErrorCode::Version,
        Error::Peer(PeerError::Protocol(_)) => ErrorCode::Protocol,
        Error::Peer(PeerError::Mismatch { code, .. }) => *code,
        Error::Peer(PeerError::NotAllowed { .. }) => ErrorCode::Refused,
        Error::Peer(PeerError::Timeout { .. } | PeerError::TurnTooLong { .. }) => ErrorCode::Timeout,
        Error::Interrupted { .. } => ErrorCode::Interrupted,
        _ => ErrorCode::Failed,
    })
}

pub(super) fn unexpected(got: &Message, want: &'static str) -> Error {
    ProtocolError::Unexpected { got: got.name(), want }.into()
}

/// The peer's message violates the protocol.
pub(super) fn violation(message: impl Into<String>) -> Error {
    ProtocolError::Content(message.into()).into()
}

pub(super) fn mismatch(code: ErrorCode, message: impl Into<String>) -> Error {
    Error::Peer(PeerError::Mismatch { code, message: message.into() })
}

/// Checks that the producer's memory and the consumer use the same backend.
pub(super) fn check_backend(producer: &str, consumer: &str) -> Result<()> {
    if producer == consumer {
        return Ok(());
    }
    let message = format!("the producer's memory is on backend {producer}, and the consumer uses {consumer}");
    Err(mismatch(ErrorCode::Backend, message))
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, thread};

    use super::*;

    #[test]
    fn silent_peer_is_awaited_once() {
        let (ours, _theirs) = Channel::socket_pair().unwrap();
        let config = Config::default().timeout(Duration::from_secs(3600));
        let mut link = Link::over(ours, &config, &Cancel::new().unwrap()).unwrap();
        let (ended, end) = mpsc::channel();
        thread::spawn(move || {
            let result = link.receive_by(deadline_after(Duration::from_millis(1)), "for an answer");
            let _ = ended.send(link.end(&result, false));
        });
        // A second wait would take an hour.
        assert_eq!(end.recv_timeout(Duration::from_secs(60)), Ok(false), "the peer has not closed");
    }
}
