//! The other end: what is said to it, and what it says.

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    process, thread,
    time::{Duration, Instant},
};

use vmmfd::{
    channel::{Cancel, Peer as Who},
    error::{Error, ErrorCode, PeerError, ProtocolError, Result},
    internals::{RecordSocket, deadline_after, peer_of},
    wire::{Failure, HEADER_LENGTH, Hello, MAX_BODY, Message, VERSION},
};

use super::fault::Fault;

/// One connection.
pub(super) struct Peer {
    socket: RecordSocket,
    who: Who,
    record: Vec<u8>,
    timeout: Duration,
    /// Whether it has said anything at all.
    pub(super) spoke: bool,
}

/// A message of one of the two protocols.
pub(super) trait Speech: Sized {
    fn read(record: &[u8], fds: usize) -> Result<Self, ProtocolError>;
    fn kind(&self) -> &'static str;
    fn is_busy(&self) -> bool;
    fn as_error(&self) -> Option<&Failure>;
    /// The words for an answer that ends the wait for an `error`.
    fn as_answer(&self) -> Option<String>;
}

impl Speech for Message {
    fn read(record: &[u8], fds: usize) -> Result<Self, ProtocolError> {
        Self::decode(record, fds)
    }

    fn kind(&self) -> &'static str {
        self.name()
    }

    fn is_busy(&self) -> bool {
        matches!(self, Self::Busy(_))
    }

    fn as_error(&self) -> Option<&Failure> {
        if let Self::Error(failure) = self { Some(failure) } else { None }
    }

    fn as_answer(&self) -> Option<String> {
        matches!(self, Self::Result(_)).then(|| "got a result".to_owned())
    }
}

/// What was heard.
pub(super) enum Heard<M = Message> {
    Message(Box<M>, Vec<OwnedFd>),
    /// It has shut down writing, or is gone.
    End,
    /// Nothing, for as long as this side said that it waits.
    Silence,
}

/// Silences are tried of other ends that give up within this time, in milliseconds.
pub(super) const PATIENT: u64 = 3000;

/// How long the other end has to leave when a case is through.
const FAREWELL: Duration = Duration::from_secs(1);

/// How many timeouts the other end has in all, whatever it sends.
const PATIENCE: u32 = 10;

impl Peer {
    pub(super) fn new(socket: OwnedFd, timeout: Duration, cancel: &Cancel) -> Result<Self> {
        let (who, socket) = (peer_of(&socket)?, RecordSocket::new(socket, timeout, cancel)?);
        // A byte more than the longest record, so that a longer one shows.
        Ok(Self { socket, who, record: vec![0; HEADER_LENGTH + MAX_BODY + 1], timeout, spoke: false })
    }

    pub(super) fn who(&self) -> Who {
        self.who
    }

    /// This side's `hello`.
    pub(super) fn own_hello(&self, capabilities: &[&str]) -> Hello {
        let capabilities = capabilities.iter().map(ToString::to_string).collect();
        let timeout_ms = u64::try_from(self.timeout.as_millis()).unwrap_or(u64::MAX).max(1);
        Hello { version: VERSION, capabilities, backend: "host".to_owned(), pid: process::id(), timeout_ms }
    }

    /// Sends a message. That the other end has left is seen with what it says.
    pub(super) fn send(&self, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<(), Fault> {
        let record = message.encode().map_err(|error| Fault::Failed(error.into()))?;
        self.send_record(&record, fds)
    }

    /// Sends a record as it is.
    pub(super) fn send_record(&self, record: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Fault> {
        match self.socket.send("a record", record, fds) {
            Ok(()) | Err(Error::Peer(PeerError::Gone { .. })) => Ok(()),
            Err(Error::Peer(PeerError::Timeout { .. })) => Fault::broken("H3", "reads nothing, and says nothing"),
            Err(error) => Err(Fault::Failed(error)),
        }
    }

    /// This side has no more to say.
    pub(super) fn shut_down_writing(&self) {
        // Fails if it has left.
        let _ = self.socket.shut_down_writing();
    }

    /// What comes next, `busy` included.
    pub(super) fn hear_all<M: Speech>(&mut self) -> Result<Heard<M>, Fault> {
        let received = self.socket.receive_by(&mut self.record, deadline_after(self.timeout), "for a record");
        self.spoke |= received.is_ok();
        match received {
            Ok(record) => match M::read(&self.record[..record.length], record.fds.len()) {
                Ok(message) => Ok(Heard::Message(Box::new(message), record.fds)),
                Err(error) => Err(Fault::of_record(&error)),
            },
            Err(Error::Peer(PeerError::Gone { .. })) => Ok(Heard::End),
            Err(Error::Peer(PeerError::Timeout { .. })) => Ok(Heard::Silence),
            Err(Error::Peer(PeerError::Protocol(error))) => Err(Fault::of_record(&error)),
            Err(error) => Err(Fault::Failed(error)),
        }
    }

    /// How long each silence may last.
    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// What comes next that is not `busy`. One that says nothing else for ten times the timeout is taken for silent.
    pub(super) fn hear<M: Speech>(&mut self) -> Result<Heard<M>, Fault> {
        let deadline = deadline_after(self.timeout.saturating_mul(PATIENCE));
        loop {
            match self.hear_all()? {
                Heard::Message(message, _) if M::is_busy(&message) => {
                    if Instant::now() >= deadline {
                        return Ok(Heard::Silence);
                    }
                }
                heard => return Ok(heard),
            }
        }
    }

    /// The next message, which must be there: `what` belongs by the rule.
    pub(super) fn next(&mut self, rule: &'static str, what: &str) -> Result<(Message, Vec<OwnedFd>), Fault> {
        let heard = self.hear()?;
        self.must(heard, rule, what)
    }

    /// What was heard, if it is a message and no `error`.
    pub(super) fn must(&self, heard: Heard, rule: &'static str, what: &str) -> Result<(Message, Vec<OwnedFd>), Fault> {
        match heard {
            Heard::Message(message, fds) => match *message {
                Message::Error(Failure { code, message }) => match code {
                    ErrorCode::Full | ErrorCode::Refused | ErrorCode::Interrupted => {
                        Err(Fault::Absent(format!("the other end takes no more connections: {message} ({code})")))
                    }
                    code => Fault::broken(rule, format!("sent error `{code}` where {what} belongs: {message}")),
                },
                message => Ok((message, fds)),
            },
            Heard::End => Fault::broken(rule, format!("hung up without an error where {what} belongs")),
            Heard::Silence => Fault::broken("H3", format!("sent neither {what} nor `busy` for {:?}", self.timeout)),
        }
    }

    /// The other end must end the conversation with one of these codes, because of the rule, and shut down writing. What it had said
    /// before it could know is passed over.
    pub(super) fn ends_with(&mut self, rule: &'static str, codes: &[ErrorCode], fault: &str) -> Result<(), Fault> {
        self.ends_with_in::<Message>(rule, codes, fault)
    }

    /// As [`Peer::ends_with`], in either protocol.
    pub(super) fn ends_with_in<M: Speech>(
        &mut self,
        rule: &'static str,
        codes: &[ErrorCode],
        fault: &str,
    ) -> Result<(), Fault> {
        let deadline = deadline_after(self.timeout.saturating_mul(PATIENCE));
        let found = loop {
            if Instant::now() >= deadline {
                break "other records came without end".to_owned();
            }
            match self.hear::<M>()? {
                Heard::Message(message, _) => match message.as_error() {
                    Some(failure) if codes.contains(&failure.code) => return self.is_silent_after_error::<M>(),
                    Some(Failure { code, message }) => break format!("got `{code}`: {message}"),
                    None => {
                        if let Some(answer) = message.as_answer() {
                            break answer;
                        }
                    }
                },
                Heard::End => break "it hung up".to_owned(),
                Heard::Silence => break "nothing came".to_owned(),
            }
        };
        let codes = codes.iter().map(ToString::to_string).collect::<Vec<_>>().join("` or `");
        Fault::broken(rule, format!("{fault}: expected error `{codes}`, and {found}"))
    }

    fn is_silent_after_error<M: Speech>(&mut self) -> Result<(), Fault> {
        match self.hear_all::<M>()? {
            Heard::End => Ok(()),
            Heard::Message(message, _) => Fault::broken("H5", format!("sent {} after its error", message.kind())),
            Heard::Silence => Fault::broken("H5", "did not shut down writing after its error"),
        }
    }

    /// The other end must shut down writing, having said nothing more; `error` is no answer to an `error`.
    pub(super) fn leaves(&mut self, rule: &'static str, when: &str) -> Result<(), Fault> {
        self.leaves_in::<Message>(rule, when)
    }

    /// As [`Peer::leaves`], in either protocol.
    pub(super) fn leaves_in<M: Speech>(&mut self, rule: &'static str, when: &str) -> Result<(), Fault> {
        match self.hear::<M>()? {
            Heard::End => Ok(()),
            Heard::Message(message, _) => Fault::broken(rule, format!("sent {} {when}", message.kind())),
            Heard::Silence => Fault::broken(rule, format!("did not shut down writing {when}")),
        }
    }

    /// Ends the connection so that the last record arrives.
    pub(super) fn leave(mut self) {
        self.shut_down_writing();
        let _ = self.socket.drain_until(&mut self.record, deadline_after(FAREWELL.min(self.timeout)));
    }
}

/// Checks a `hello` of the other end.
pub(super) fn checked(hello: Hello) -> Result<Hello, Fault> {
    match hello {
        Hello { version: 0, .. } => Fault::broken("H1", "said hello with version 0"),
        Hello { ref backend, .. } if backend != "host" => {
            Err(Fault::Absent(format!("it is on backend {backend}, and only the backend host can be tested")))
        }
        hello => Ok(hello),
    }
}

/// Leaves a case out if the other end would take too long to give up.
pub(super) fn impatient(hello: &Hello) -> Result<(), Fault> {
    match hello.timeout_ms {
        0..=PATIENT => Ok(()),
        patience => Fault::left_out(format!("it waits {patience} ms, and silences are tried up to {PATIENT} ms")),
    }
}

/// Waits without a word until the other end gives up.
pub(super) fn gives_up(peer: &mut Peer, hello: &Hello, when: &str) -> Result<(), Fault> {
    thread::sleep(Duration::from_millis(hello.timeout_ms));
    peer.ends_with("H6", &[ErrorCode::Timeout], when)
}
