#![doc = include_str!("../../docs/protocol.md")]

pub mod broker;
mod fault;
mod frame;
mod messages;
pub(crate) mod strict;
#[cfg(test)]
mod tests;

pub use self::frame::is_error;
use self::frame::{Head, parse};
pub use self::messages::{
    BufferNumber, BufferTurn, Busy, ByteRange, Check, Device, Failure, Hello, Location, Mechanism, Memory, Offer, Part,
    Pointer, PoolNumber, Ready, Received, Request, Segments, Subscribe, Verdict,
};
pub use crate::error::{ErrorCode, ProtocolError, UnknownCode};

/// The version of the protocol that this build speaks.
pub const VERSION: u16 = 1;

/// The length of a record's header, in bytes.
pub const HEADER_LENGTH: usize = 16;

/// The longest body, in bytes.
pub const MAX_BODY: usize = 64 * 1024;

/// The most descriptors in one record: the kernel's own limit (`SCM_MAX_FD`).
pub const MAX_FDS: usize = 253;

/// The longest name of an object, a backend, a device or a capability, in bytes.
pub const MAX_NAME: usize = 255;

/// The most capabilities in a `hello`.
pub const MAX_CAPABILITIES: usize = 64;

/// The longest message of an `error`, in bytes. A longer one is sent shortened, and shortened where it is received.
pub const MAX_MESSAGE: usize = 1024;

/// How much of what is wrong with a body is reported, in bytes: the parser repeats what a peer sent.
const MAX_REASON: usize = 256;

/// The name of the object that a producer serves by default.
pub const DEFAULT_OBJECT: &str = "default";

/// The capability of both ends of a stream.
pub const STREAM: &str = "stream";

/// One record's content.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Message {
    /// Kind 1.
    Hello(Hello),
    /// Kind 2.
    Request(Request),
    /// Kind 3.
    Offer(Box<Offer>),
    /// Kind 4, with a descriptor for each.
    Segments(Segments),
    /// Kind 5.
    Received(Received),
    /// Kind 6.
    Result(Verdict),
    /// Kind 7.
    Busy(Busy),
    /// Kind 8.
    Error(Failure),
    /// Kind 9, with the pool's descriptor.
    Pool(PoolNumber),
    /// Kind 10.
    Subscribe(Subscribe),
    /// Kind 11.
    Ready(Ready),
    /// Kind 12.
    Done(BufferTurn),
    /// Kind 13.
    Withdraw(BufferNumber),
    /// Kind 14.
    Gone(BufferNumber),
}

impl Message {
    /// The name of its kind.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Hello(_) => "hello",
            Self::Request(_) => "request",
            Self::Offer(_) => "offer",
            Self::Segments(_) => "segments",
            Self::Received(_) => "received",
            Self::Result(_) => "result",
            Self::Busy(_) => "busy",
            Self::Error(_) => "error",
            Self::Pool(_) => "pool",
            Self::Subscribe(_) => "subscribe",
            Self::Ready(_) => "ready",
            Self::Done(_) => "done",
            Self::Withdraw(_) => "withdraw",
            Self::Gone(_) => "gone",
        }
    }

    /// How many descriptors belong to it: the one place that says which messages carry any.
    pub fn fd_count(&self) -> usize {
        match self {
            Self::Segments(segments) => segments.sizes.len(),
            Self::Ready(ready) => ready.sizes.len(),
            Self::Pool(_) => 1,
            _ => 0,
        }
    }

    /// The record.
    ///
    /// # Errors
    /// [`ProtocolError::LongRecord`] or [`ProtocolError::Content`] if the message is larger than the protocol allows.
    pub fn encode(&self) -> Result<Vec<u8>, ProtocolError> {
        let mut record = Vec::new();
        self.encode_into(&mut record).map(|()| record)
    }

    /// As [`Message::encode`], into memory that is used again and again: what it held is gone.
    ///
    /// # Errors
    /// As [`Message::encode`].
    pub fn encode_into(&self, record: &mut Vec<u8>) -> Result<(), ProtocolError> {
        self.check()?;
        if let Self::Error(failure) = self
            && failure.message.len() > MAX_MESSAGE
        {
            let mut shorter = failure.clone();
            shorten(&mut shorter.message, MAX_MESSAGE);
            return Self::Error(shorter).encode_into(record);
        }
        let fds = self.fd_count();
        match self {
            Self::Hello(body) => frame::write(record, 1, fds, body),
            Self::Request(body) => frame::write(record, 2, fds, body),
            Self::Offer(body) => frame::write(record, 3, fds, body),
            Self::Segments(body) => frame::write(record, 4, fds, body),
            Self::Received(body) => frame::write(record, 5, fds, body),
            Self::Result(body) => frame::write(record, 6, fds, body),
            Self::Busy(body) => frame::write(record, 7, fds, body),
            Self::Error(body) => frame::write(record, 8, fds, body),
            Self::Pool(body) => frame::write(record, 9, fds, body),
            Self::Subscribe(body) => frame::write(record, 10, fds, body),
            Self::Ready(body) => frame::write(record, 11, fds, body),
            Self::Done(body) => frame::write(record, 12, fds, body),
            Self::Withdraw(body) => frame::write(record, 13, fds, body),
            Self::Gone(body) => frame::write(record, 14, fds, body),
        }
    }

    /// Reads a record that came with `fds` descriptors.
    ///
    /// Control characters in a peer's names and sentences become spaces, so that none reaches a terminal. A `check` is left as it
    /// is.
    ///
    /// # Errors
    /// Each thing that can be wrong with it has its own [`ProtocolError`].
    pub fn decode(record: &[u8], fds: usize) -> Result<Self, ProtocolError> {
        let Head { kind, fds: claimed, body } = frame::read(record)?;
        let mut message = match kind {
            1 => Self::Hello(parse("hello", body)?),
            2 => Self::Request(parse("request", body)?),
            3 => Self::Offer(parse("offer", body)?),
            4 => Self::Segments(parse("segments", body)?),
            5 => Self::Received(parse("received", body)?),
            6 => Self::Result(parse("result", body)?),
            7 => Self::Busy(parse("busy", body)?),
            8 => Self::Error(parse("error", body)?),
            9 => Self::Pool(parse("pool", body)?),
            10 => Self::Subscribe(parse("subscribe", body)?),
            11 => Self::Ready(parse("ready", body)?),
            12 => Self::Done(parse("done", body)?),
            13 => Self::Withdraw(parse("withdraw", body)?),
            14 => Self::Gone(parse("gone", body)?),
            got => return Err(ProtocolError::Kind { got }),
        };
        message.check()?;
        frame::check_fds(message.name(), message.fd_count(), claimed, fds)?;
        match &mut message {
            Self::Hello(hello) => clean(&mut hello.backend),
            Self::Request(request) => clean(&mut request.object),
            Self::Offer(offer) => [&mut offer.object, &mut offer.memory.device.name].into_iter().for_each(clean),
            Self::Error(failure) => {
                shorten(&mut failure.message, MAX_MESSAGE);
                clean(&mut failure.message);
            }
            _ => {}
        }
        Ok(message)
    }

    /// What types can't say: how many of something a record may hold, how long a name may be, and the smallest of a number.
    fn check(&self) -> Result<(), ProtocolError> {
        match self {
            Self::Segments(segments) if !(1..=MAX_FDS).contains(&segments.sizes.len()) => {
                Err(ProtocolError::SizeCount { kind: "segments", got: segments.sizes.len(), least: 1, most: MAX_FDS })
            }
            Self::Hello(Hello { timeout_ms: 0, .. }) => {
                Err(ProtocolError::Content("hello has a timeout_ms of 0".to_owned()))
            }
            Self::Hello(Hello { capabilities, .. }) if capabilities.len() > MAX_CAPABILITIES => {
                let got = capabilities.len();
                Err(ProtocolError::Content(format!(
                    "hello lists {got} capabilities where at most {MAX_CAPABILITIES} belong"
                )))
            }
            Self::Hello(Hello { backend, capabilities, .. }) => {
                capabilities.iter().chain([backend]).try_for_each(|name| bounded(name))
            }
            Self::Request(Request { object: name, .. }) => bounded(name),
            Self::Ready(ready) if ready.sizes.len() > MAX_FDS => {
                Err(ProtocolError::SizeCount { kind: "ready", got: ready.sizes.len(), least: 0, most: MAX_FDS })
            }
            Self::Offer(offer) => [offer.object.as_str(), &offer.memory.device.name].into_iter().try_for_each(bounded),
            _ => Ok(()),
        }
    }
}

fn bounded(name: &str) -> Result<(), ProtocolError> {
    match name.len() {
        0..=MAX_NAME => Ok(()),
        length => {
            Err(ProtocolError::Content(format!("a name has {length} bytes where at most {MAX_NAME} are allowed")))
        }
    }
}

/// Cuts a text to so many bytes, between two characters.
pub fn shorten(text: &mut String, most: usize) {
    const CUT: &str = "...";
    if text.len() > most {
        let end = (0..=most - CUT.len()).rev().find(|at| text.is_char_boundary(*at));
        text.truncate(end.unwrap_or(0));
        text.push_str(CUT);
        // It may be kept for long.
        text.shrink_to_fit();
    }
}

/// Makes a text from outside fit for a terminal.
pub fn clean(text: &mut String) {
    // Controls, and what turns or hides text: those of Unicode's category Cf that terminals heed.
    let unfit = |c: char| {
        c.is_control()
            || matches!(c, '\u{00AD}' | '\u{061C}' | '\u{180E}' | '\u{200B}'..='\u{200F}' | '\u{2028}'..='\u{202E}' | '\u{2060}'..='\u{206F}' | '\u{FEFF}')
    };
    if text.contains(unfit) {
        *text = text.replace(unfit, " ");
    }
}
