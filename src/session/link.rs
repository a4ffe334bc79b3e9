//! A channel on which `busy` is no message but a sign of life.

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    process,
    time::{Duration, Instant},
};

use crate::{
    channel::{Cancel, Channel, Config, Peer, deadline_after},
    driver::Backend,
    error::{Error, ErrorCode, PeerError, ProtocolError, Result},
    wire::{Busy, Failure, Hello, Message, VERSION},
};

/// How often a side that works instead of answering says so, at least. A little less than the second that the protocol demands,
/// for work is not interrupted at every moment.
const BUSY_EVERY: Duration = Duration::from_millis(900);

/// How long a peer that was silent for its whole timeout still has to read why and to leave.
pub(super) const FAREWELL: Duration = Duration::from_millis(100);

impl Turn {
    fn over(&self) -> Error {
        Error::Peer(PeerError::TurnTooLong { granted: self.granted })
    }
}

/// One end of a conversation.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) channel: Channel,
    /// When this side last sent something, or received something that it has to answer.
    active: Instant,
    busy_every: Duration,
    /// What the peer has to be done with, however often it says that it is busy.
    turn: Option<Turn>,
    /// Whether the peer waits for nothing of this side, so that `busy` would break the protocol.
    pub(super) at_rest: bool,
}

/// A time that the peer has for all that it does.
#[derive(Debug, Clone, Copy)]
struct Turn {
    granted: Duration,
    ends: Instant,
}

impl Link {
    pub(super) fn new(channel: Channel) -> Self {
        Self { channel, active: Instant::now(), busy_every: BUSY_EVERY, turn: None, at_rest: false }
    }

    /// A link over a connected socket.
    ///
    /// # Errors
    /// [`Error::Socket`] if it is no such socket; [`Error::System`].
    pub(super) fn over(socket: OwnedFd, config: &Config, cancel: &Cancel) -> Result<Self> {
        Channel::new(socket, config.timeout, cancel).map(Self::new)
    }

    pub(super) fn peer(&self) -> Peer {
        self.channel.peer()
    }

    pub(super) fn hello(&mut self, backend: Backend, capabilities: &[&str]) -> Result<()> {
        let capabilities = capabilities.iter().map(ToString::to_string).collect();
        let timeout_ms = u64::try_from(self.channel.timeout().as_millis()).unwrap_or(u64::MAX).max(1);
        let hello =
            Hello { version: VERSION, capabilities, backend: backend.to_string(), pid: process::id(), timeout_ms };
        self.send(&Message::Hello(hello), &[])
    }

    /// Reads the peer's first message: which version of the protocol it speaks, and how long it waits.
    pub(super) fn greeted(&mut self, message: Message) -> Result<Hello> {
        let hello = match message {
            Message::Hello(hello) if hello.version >= VERSION => hello,
            Message::Hello(hello) => {
                return Err(ProtocolError::Version { got: hello.version, own: VERSION }.into());
            }
            other => return Err(unexpected(&other, "hello")),
        };
        // Four times, so that what is between two calls of `busy` does not make it less than three.
        let patience = Duration::from_millis(hello.timeout_ms);
        self.busy_every = BUSY_EVERY.min(patience / 4).max(Duration::from_millis(1));
        Ok(hello)
    }

    /// How often [`Link::busy`] should be called at least.
    pub(super) fn tick_every(&self) -> Duration {
        (self.busy_every / 4).clamp(Duration::from_millis(1), Duration::from_millis(100))
    }

    pub(super) fn send(&mut self, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<()> {
        self.channel.send(message, fds)?;
        self.active = Instant::now();
        Ok(())
    }

    /// The next message that is an answer. The peer's `error` is this side's.
    pub(super) fn receive(&mut self, purpose: &'static str) -> Result<(Message, Vec<OwnedFd>)> {
        self.receive_within(self.channel.timeout(), purpose)
    }

    /// As [`Link::receive`], waiting no longer than `patience` between two messages of the peer.
    pub(super) fn receive_within(
        &mut self,
        patience: Duration,
        purpose: &'static str,
    ) -> Result<(Message, Vec<OwnedFd>)> {
        loop {
            let deadline = deadline_after(patience);
            let heard = match self.turn {
                // Also of a peer that says so without a pause.
                Some(turn) if turn.ends <= Instant::now() => return Err(turn.over()),
                Some(turn) if turn.ends < deadline => match self.channel.receive_by(turn.ends, purpose) {
                    Err(Error::Peer(PeerError::Timeout { .. })) => return Err(turn.over()),
                    heard => heard?,
                },
                _ => self.channel.receive_by(deadline, purpose)?,
            };
            match heard {
                (Message::Busy(_), _) => {}
                (Message::Error(Failure { code, message }), _) => {
                    return Err(Error::Peer(PeerError::Reported { code, message }));
                }
                answer => {
                    self.active = Instant::now();
                    return Ok(answer);
                }
            }
        }
    }

    /// From now on the peer has so much time, however often it says that it is busy, until [`Link::end_turn`].
    pub(super) fn begin_turn(&mut self, granted: Duration) {
        self.turn = Some(Turn { granted, ends: deadline_after(granted) });
    }

    /// The peer has as much time as it needs again.
    pub(super) fn end_turn(&mut self) {
        self.turn = None;
    }

    /// The next message of a peer that has asked for nothing yet, or for nothing since its last request was answered: it has nothing to
    /// be busy with, so that `busy` is returned like any other message.
    pub(super) fn receive_first(&mut self, deadline: Instant, purpose: &'static str) -> Result<Message> {
        match self.channel.receive_by(deadline, purpose)?.0 {
            // It is not answered with another.
            Message::Error(Failure { code, message }) => Err(Error::Peer(PeerError::Reported { code, message })),
            message => {
                self.active = Instant::now();
                Ok(message)
            }
        }
    }

    /// Says that this side is working, if it sent nothing for a while. To be called often.
    pub(super) fn busy(&mut self) -> Result<()> {
        self.channel.cancel().check()?;
        if !self.at_rest && self.active.elapsed() >= self.busy_every {
            self.send(&Message::Busy(Busy {}), &[])
        } else {
            Ok(())
        }
    }

    /// Ends the conversation, with an `error` if this side has one that the peer does not know. Waits for the peer to leave as long
    /// as the channel's timeout, or for [`FAREWELL`] if the peer has used its time up already and no memory is `lent` to it that it
    /// must close first. Returns whether it has left.
    pub(super) fn end<T>(mut self, result: &Result<T>, lent: bool) -> bool {
        if let Err(error) = result {
            self.report(error);
        }
        let used_up =
            matches!(result, Err(Error::Peer(PeerError::Timeout { .. }) | Error::Peer(PeerError::TurnTooLong { .. })));
        self.channel.finish(if used_up && !lent { FAREWELL } else { Duration::MAX })
    }

    /// Ends the conversation with a peer that has been silent, and that has read or will read why. Returns whether it has left.
    pub(super) fn leave(self) -> bool {
        self.channel.finish(FAREWELL)
    }

    /// Sends an error, if the peer does not know it.
    pub(super) fn report(&mut self, error: &Error) {
        let Some(code) = code_for(error) else { return };
        let message = Message::Error(Failure { code, message: error.in_full() });
        if let Err(unsent) = self.channel.send(&message, &[]) {
            tracing::debug!(%unsent, "an error can't be sent to the peer");
        }
    }
}

/// The code that the peer gets of an error; `None` where the peer left or reported an error itself, readable or not.
fn code_for(error: &Error) -> Option<ErrorCode> {
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
