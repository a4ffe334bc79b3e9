//! The connection to the implementation under test.

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    process, thread,
    time::{Duration, Instant},
};

use vmmfd::{
    channel::{Cancel, Peer as PeerInfo},
    error::{Error, ErrorCode, PeerError, ProtocolError, Result},
    internals::{RecordSocket, deadline_after, peer_of},
    wire::{Failure, HEADER_LENGTH, Hello, MAX_BODY, Message, VERSION, broker},
};

use super::case_end::{CaseEnd, CaseResult, skip, violation};

/// The message types of the two protocols.
pub(super) trait WireMessage: Sized {
    /// Errors that mean that the peer serves no more connections.
    const UNAVAILABLE: &[ErrorCode];
    /// The rule that a silent peer violates, instead of the rule about the missing answer.
    const SILENCE: Option<&'static str>;

    fn decode(record: &[u8], fds: usize) -> Result<Self, ProtocolError>;
    fn encode_into(&self, record: &mut Vec<u8>) -> Result<(), ProtocolError>;
    fn name(&self) -> &'static str;
    fn is_busy(&self) -> bool;
    fn as_error(&self) -> Option<&Failure>;
    /// Describes an answer after which no `error` can follow.
    fn as_answer(&self) -> Option<String>;
}

macro_rules! wire_message {
    ($message:ty, $unavailable:expr, $silence:expr, $answer:pat => $text:expr) => {
        impl WireMessage for $message {
            const UNAVAILABLE: &[ErrorCode] = $unavailable;
            const SILENCE: Option<&'static str> = $silence;

            fn decode(record: &[u8], fds: usize) -> Result<Self, ProtocolError> {
                Self::decode(record, fds)
            }

            fn encode_into(&self, record: &mut Vec<u8>) -> Result<(), ProtocolError> {
                self.encode_into(record)
            }

            fn name(&self) -> &'static str {
                self.name()
            }

            fn is_busy(&self) -> bool {
                matches!(self, Self::Busy(_))
            }

            fn as_error(&self) -> Option<&Failure> {
                if let Self::Error(failure) = self { Some(failure) } else { None }
            }

            fn as_answer(&self) -> Option<String> {
                if let $answer = self { Some($text) } else { None }
            }
        }
    };
}

wire_message!(
    Message,
    &[ErrorCode::Full, ErrorCode::Refused, ErrorCode::Interrupted],
    Some("H3"),
    Self::Result(_) => "got a result".to_owned()
);
wire_message!(
    broker::Message,
    &[ErrorCode::Full, ErrorCode::Refused],
    None,
    Self::Refused(refusal) => format!("was refused: `{}`", refusal.code)
);

/// The result of a receive.
pub(super) enum Incoming<M = Message> {
    Message(Box<M>, Vec<OwnedFd>),
    /// The peer has shut down writing or closed the connection.
    Closed,
    /// The peer sent nothing for the timeout in this side's `hello`.
    Timeout,
}

/// Takes the body of the next message if it is of the expected kind; otherwise returns a violation of the rule.
macro_rules! receive {
    ($peer:expr, $rule:expr, $name:expr, $pattern:pat => $value:expr) => {
        match $peer.next_message($rule, $name)? {
            $pattern => $value,
            (other, _) => {
                return $crate::conform::case_end::violation(
                    $rule,
                    format!("sent {} instead of {}", other.name(), $name),
                )
            }
        }
    };
}
pub(super) use receive;

/// The longest peer timeout, in milliseconds, for which cases wait. Cases of slower peers are skipped.
pub(super) const MAX_WAITED_MS: u64 = 3000;

/// How long the peer may take to close the connection after a case.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// The limit on a single wait, in timeouts, for a peer that keeps sending `busy` or other messages.
const MAX_TIMEOUTS: u32 = 10;

pub(super) struct Peer {
    socket: RecordSocket,
    process: PeerInfo,
    buffer: Vec<u8>,
    timeout: Duration,
    /// Whether the peer has sent a record.
    pub(super) responded: bool,
}

impl Peer {
    pub(super) fn new(socket: OwnedFd, timeout: Duration, cancel: &Cancel) -> Result<Self> {
        let (process, socket) = (peer_of(&socket)?, RecordSocket::new(socket, timeout, cancel)?);
        // One byte more than the longest record, to detect longer ones.
        let buffer = vec![0; HEADER_LENGTH + MAX_BODY + 1];
        Ok(Self { socket, process, buffer, timeout, responded: false })
    }

    pub(super) fn process(&self) -> PeerInfo {
        self.process
    }

    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// This side's `hello`.
    pub(super) fn own_hello(&self, capabilities: &[&str]) -> Hello {
        let capabilities = capabilities.iter().map(ToString::to_string).collect();
        let timeout_ms = u64::try_from(self.timeout.as_millis()).unwrap_or(u64::MAX).max(1);
        Hello { version: VERSION, capabilities, backend: "host".to_owned(), pid: process::id(), timeout_ms }
    }

    pub(super) fn send<M: WireMessage>(&self, message: &M) -> CaseResult {
        self.send_with(message, &[])
    }

    /// Sends a message with descriptors. Succeeds if the peer has closed the connection: the next receive reports it.
    pub(super) fn send_with<M: WireMessage>(&self, message: &M, fds: &[BorrowedFd<'_>]) -> CaseResult {
        let mut record = Vec::new();
        message.encode_into(&mut record).map_err(|error| CaseEnd::Internal(error.into()))?;
        self.send_record(&record, fds)
    }

    /// Sends a record that may be invalid.
    pub(super) fn send_record(&self, record: &[u8], fds: &[BorrowedFd<'_>]) -> CaseResult {
        match self.socket.send("a record", record, fds) {
            Ok(()) | Err(Error::Peer(PeerError::Gone { .. })) => Ok(()),
            Err(Error::Peer(PeerError::Timeout { .. })) => violation("H3", "neither received nor sent a record"),
            Err(error) => Err(CaseEnd::Internal(error)),
        }
    }

    pub(super) fn shut_down_writing(&self) {
        // Fails if the peer has closed the connection.
        let _ = self.socket.shut_down_writing();
    }

    /// Receives the next message, including `busy`.
    pub(super) fn receive_any<M: WireMessage>(&mut self) -> CaseResult<Incoming<M>> {
        let received = self.socket.receive_by(&mut self.buffer, deadline_after(self.timeout), "for a record");
        self.responded |= received.is_ok();
        match received {
            Ok(record) => {
                let message = M::decode(&self.buffer[..record.length], record.fds.len())?;
                Ok(Incoming::Message(Box::new(message), record.fds))
            }
            Err(Error::Peer(PeerError::Gone { .. })) => Ok(Incoming::Closed),
            Err(Error::Peer(PeerError::Timeout { .. })) => Ok(Incoming::Timeout),
            Err(Error::Peer(PeerError::Protocol(error))) => Err(error.into()),
            Err(error) => Err(CaseEnd::Internal(error)),
        }
    }

    /// Receives the next message, skipping `busy`. Times out if only `busy` arrives for [`MAX_TIMEOUTS`].
    pub(super) fn receive<M: WireMessage>(&mut self) -> CaseResult<Incoming<M>> {
        let deadline = deadline_after(self.timeout.saturating_mul(MAX_TIMEOUTS));
        loop {
            match self.receive_any()? {
                Incoming::Message(message, _) if M::is_busy(&message) => {
                    if Instant::now() >= deadline {
                        return Ok(Incoming::Timeout);
                    }
                }
                incoming => return Ok(incoming),
            }
        }
    }

    /// The next message other than `busy`. `expected` names it. An `error`, a close or silence violates the rule.
    pub(super) fn next_message(&mut self, rule: &'static str, expected: &str) -> CaseResult<(Message, Vec<OwnedFd>)> {
        let incoming = self.receive()?;
        self.require(incoming, rule, expected)
    }

    /// As [`Peer::next_message`], for a message that must not be preceded by `busy`.
    pub(super) fn first_message(&mut self, rule: &'static str, expected: &str) -> CaseResult<(Message, Vec<OwnedFd>)> {
        let incoming = self.receive_any()?;
        self.require(incoming, rule, expected)
    }

    /// The received message; an `error`, a close or silence violates the rule.
    pub(super) fn require<M: WireMessage>(
        &self,
        incoming: Incoming<M>,
        rule: &'static str,
        expected: &str,
    ) -> CaseResult<(M, Vec<OwnedFd>)> {
        match incoming {
            Incoming::Message(message, fds) => match message.as_error() {
                Some(Failure { code, message }) if M::UNAVAILABLE.contains(code) => {
                    Err(CaseEnd::NoPeer(format!("the peer accepts no more connections: {message} ({code})")))
                }
                Some(Failure { code, message }) => {
                    violation(rule, format!("sent error `{code}` instead of {expected}: {message}"))
                }
                None => Ok((*message, fds)),
            },
            Incoming::Closed => {
                violation(rule, format!("closed the connection without an error instead of {expected}"))
            }
            Incoming::Timeout => violation(
                M::SILENCE.unwrap_or(rule),
                format!("sent neither {expected} nor `busy` for {:?}", self.timeout),
            ),
        }
    }

    /// By this rule, the peer must report this error and shut down writing. Earlier messages are ignored.
    pub(super) fn expect_error<M: WireMessage>(
        &mut self,
        rule: &'static str,
        code: ErrorCode,
        provoked_by: &str,
    ) -> CaseResult {
        let deadline = deadline_after(self.timeout.saturating_mul(MAX_TIMEOUTS));
        let found = loop {
            if Instant::now() >= deadline {
                break "other messages kept arriving".to_owned();
            }
            match self.receive::<M>()? {
                Incoming::Message(message, _) => match message.as_error() {
                    Some(failure) if failure.code == code => return self.expect_silence_after_error::<M>(),
                    Some(Failure { code, message }) => break format!("got `{code}`: {message}"),
                    None => {
                        if let Some(answer) = message.as_answer() {
                            break answer;
                        }
                    }
                },
                Incoming::Closed => break "the peer closed the connection".to_owned(),
                Incoming::Timeout => break "nothing arrived".to_owned(),
            }
        };
        violation(rule, format!("{provoked_by}: expected error `{code}`, but {found}"))
    }

    fn expect_silence_after_error<M: WireMessage>(&mut self) -> CaseResult {
        match self.receive_any::<M>()? {
            Incoming::Closed => Ok(()),
            Incoming::Message(message, _) => violation("H5", format!("sent {} after its error", message.name())),
            Incoming::Timeout => violation("H5", "did not shut down writing after its error"),
        }
    }

    /// The peer must shut down writing and send nothing more, not even an `error`. `when` completes the violation's text.
    pub(super) fn expect_close<M: WireMessage>(&mut self, rule: &'static str, when: &str) -> CaseResult {
        match self.receive::<M>()? {
            Incoming::Closed => Ok(()),
            Incoming::Message(message, _) => violation(rule, format!("sent {} {when}", message.name())),
            Incoming::Timeout => violation(rule, format!("did not shut down writing {when}")),
        }
    }

    /// Sends a message that the peer must answer with `error`.
    pub(super) fn provoke<M: WireMessage>(
        &mut self,
        message: &M,
        rule: &'static str,
        code: ErrorCode,
        provoked_by: &str,
    ) -> CaseResult {
        self.send(message)?;
        self.expect_error::<M>(rule, code, provoked_by)
    }

    /// Sends nothing until the peer reports a timeout.
    pub(super) fn expect_timeout(&mut self, hello: &Hello, situation: &str) -> CaseResult {
        skip_if_slow(hello)?;
        thread::sleep(Duration::from_millis(hello.timeout_ms));
        self.expect_error::<Message>("H6", ErrorCode::Timeout, situation)
    }

    /// Closes the connection after the peer has received the last record.
    pub(super) fn close(mut self) {
        self.shut_down_writing();
        let _ = self.socket.drain_until(&mut self.buffer, deadline_after(CLOSE_TIMEOUT.min(self.timeout)));
    }
}

/// Checks the peer's `hello`.
pub(super) fn check_hello(hello: Hello) -> CaseResult<Hello> {
    match hello {
        Hello { version: 0, .. } => violation("H1", "sent version 0 in hello"),
        Hello { ref backend, .. } if backend != "host" => {
            Err(CaseEnd::NoPeer(format!("its backend is {backend}; only the backend host can be tested")))
        }
        hello => Ok(hello),
    }
}

/// Skips a case that would wait too long for the peer's timeout.
pub(super) fn skip_if_slow(hello: &Hello) -> CaseResult {
    match hello.timeout_ms {
        0..=MAX_WAITED_MS => Ok(()),
        timeout => skip(format!("the peer's timeout is {timeout} ms; timeouts are tested up to {MAX_WAITED_MS} ms")),
    }
}
