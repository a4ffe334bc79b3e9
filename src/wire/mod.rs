#![doc = include_str!("../../docs/protocol.md")]

#[macro_use]
mod frame;

pub mod broker;
mod messages;
#[cfg(feature = "schema")]
pub(crate) mod schema;
pub(crate) mod strict;
#[cfg(test)]
mod tests;

use self::frame::{Head, parse};
pub(crate) use self::frame::{claimed_fds, is_error};
pub(crate) use self::messages::milliseconds;
pub use self::messages::{
    Busy, ByteRange, Check, Done, End, Failure, Format, Hello, Leave, Memory, NamedArray, Offer, Policy, PoolNumber,
    Ready, Received, Request, Segments, Stream, Subscribe, Verdict,
};
pub use crate::base::strict::is_unsafe_on_terminals;
pub use crate::base::{DeviceIdentity, Mechanism, Placement, Pointer, Run};
pub use crate::error::{ErrorCode, ProtocolError, UnknownCode};
use crate::{
    array::ArrayDescriptor,
    base::{
        Access,
        strict::{Clean, no_texts},
    },
};

/// The protocol version of this build.
pub const VERSION: u16 = 1;

/// The length of a record's header, in bytes.
pub const HEADER_LENGTH: usize = 16;

/// The longest body, in bytes.
pub const MAX_BODY: usize = 64 * 1024;

/// The largest number of descriptors in one record: the kernel's limit (`SCM_MAX_FD`).
pub const MAX_FDS: usize = 253;

/// The longest name of an object, backend, device or capability, in bytes.
pub const MAX_NAME: usize = 255;

/// The largest number of capabilities in a `hello`.
pub const MAX_CAPABILITIES: usize = 64;

/// The longest message of an `error`, in bytes. Sender and receiver shorten longer messages.
pub const MAX_MESSAGE: usize = 1024;

/// The most buffers that a subscriber may have at a time. All its records about them fit into a socket's buffer.
pub const MAX_HELD: u64 = 64;

/// The longest queue of a subscriber at the publisher.
pub const MAX_QUEUE: u64 = 1024;

/// The most arrays in a stream's format.
pub const MAX_ARRAYS: usize = 64;

/// The longest blob of a stream's format, in bytes.
pub const MAX_BLOB: usize = 64 * 1024;

/// The most user bytes of a publication.
pub const MAX_USER_BYTES: usize = 4096;

/// The longest reported reason for an invalid body, in bytes. The parser's reason quotes the peer.
const MAX_REASON: usize = 256;

/// The size of the words of a stream with turns, in bytes.
pub const TURNS_SIZE: usize = 8192;

/// The turns of one direction use this many words in turn.
pub const TURNS: usize = 256;

/// The index of the word of turn 0 of the publisher's streams.
pub const READY_WORDS: usize = 256;

/// The index of the word of turn 0 of the subscriber's streams.
pub const DONE_WORDS: usize = 512;

/// The largest turn: the value with which a subscriber ends its waits.
pub const MAX_TURN: u64 = i64::MAX as u64;

/// The default name of a producer's object.
pub const DEFAULT_OBJECT: &str = "default";

/// The capability of stream publishers and subscribers.
pub const STREAM: &str = "stream";

messages! {
    1 "hello" Hello(Hello),
    2 "request" Request(Request),
    3 "offer" Offer(Box<Offer>),
    #[doc = "One descriptor for each segment."]
    4 "segments" Segments(Segments),
    5 "received" Received(Received),
    6 "result" Result(Verdict),
    7 "busy" Busy(Busy),
    8 "error" Error(Failure),
    #[doc = "The pool's descriptor."]
    9 "pool" Pool(PoolNumber),
    10 "subscribe" Subscribe(Subscribe),
    #[doc = "The descriptor of the words, if there are any."]
    11 "stream" Stream(Stream),
    #[doc = "The descriptor of the blob, if there is one."]
    12 "format" Format(Format),
    13 "ready" Ready(Ready),
    14 "done" Done(Done),
    15 "end" End(End),
    16 "leave" Leave(Leave),
}

no_texts!(Access, ArrayDescriptor, Check, ErrorCode, Mechanism, Placement, Pointer, Policy);

impl Message {
    /// The number of descriptors that the message carries. No other code knows which messages carry descriptors.
    pub fn fd_count(&self) -> usize {
        match self {
            Self::Segments(segments) => segments.sizes.len(),
            Self::Stream(Stream { turns: Some(_), .. })
            | Self::Format(Format { length: Some(_), .. })
            | Self::Pool(_) => 1,
            _ => 0,
        }
    }

    /// Encodes the message as a record.
    ///
    /// # Errors
    /// [`ProtocolError::LongRecord`] or [`ProtocolError::Content`] if the message is larger than the protocol allows.
    pub fn encode(&self) -> Result<Vec<u8>, ProtocolError> {
        let mut record = Vec::new();
        self.encode_into(&mut record).map(|()| record)
    }

    /// Like [`Message::encode`], into a buffer, whose contents are replaced.
    ///
    /// # Errors
    /// See [`Message::encode`].
    pub fn encode_into(&self, record: &mut Vec<u8>) -> Result<(), ProtocolError> {
        self.check()?;
        if let Self::Error(failure) = self
            && failure.message.len() > MAX_MESSAGE
        {
            let mut shorter = failure.clone();
            shorten(&mut shorter.message, MAX_MESSAGE);
            return Self::Error(shorter).encode_into(record);
        }
        self.write(record)
    }

    /// Decodes a record that was received with `fds` descriptors.
    ///
    /// Control characters in names and sentences become spaces, so that none reaches a terminal. A `check` is not changed.
    ///
    /// # Errors
    /// A [`ProtocolError`] for each kind of fault.
    pub fn decode(record: &[u8], fds: usize) -> Result<Self, ProtocolError> {
        let Head { kind, fds: claimed, body } = frame::read(record)?;
        let mut message = Self::parse(kind, body)?;
        message.check()?;
        frame::check_fds(message.name(), message.fd_count(), claimed, fds)?;
        if let Self::Error(failure) = &mut message {
            shorten(&mut failure.message, MAX_MESSAGE);
        }
        message.clean();
        Ok(message)
    }

    /// Checks the limits that types don't express: counts, lengths of names, and minimums.
    fn check(&self) -> Result<(), ProtocolError> {
        match self {
            Self::Segments(segments) if !(1..=MAX_FDS).contains(&segments.sizes.len()) => {
                Err(ProtocolError::SizeCount { kind: "segments", got: segments.sizes.len(), least: 1, most: MAX_FDS })
            }
            Self::Hello(hello) => check_hello(hello),
            Self::Request(Request { object: name, .. }) => bounded(name),
            Self::Subscribe(subscribe) => check_subscribe(subscribe),
            Self::Format(Format { arrays, length }) => {
                let (most, length) = (MAX_ARRAYS, length.unwrap_or(1));
                if arrays.len() > most || length == 0 || length > MAX_BLOB as u64 {
                    let message = format!("a format has {} arrays and a blob of {length} bytes", arrays.len());
                    return Err(ProtocolError::Content(message));
                }
                arrays.iter().try_for_each(|array| bounded(&array.name))
            }
            Self::Stream(Stream { turns: Some(turns), .. }) if *turns != TURNS as u64 => {
                Err(ProtocolError::Content(format!("{turns} turns in a stream: there are {TURNS} or none")))
            }
            Self::Ready(Ready { ready_at: Some(turn), .. }) | Self::Done(Done { done_at: Some(turn), .. })
                if !(1..=MAX_TURN).contains(turn) =>
            {
                Err(ProtocolError::Content(format!("a turn of {turn}: 1 to {MAX_TURN} are allowed")))
            }
            Self::Ready(Ready { user: Some(user), .. }) => most("digits of user bytes", user.len(), 2 * MAX_USER_BYTES),
            Self::Leave(leave) => most("buffers in a leave", leave.held.len(), MAX_HELD as usize),
            Self::Offer(offer) => [offer.object.as_str(), &offer.memory.device.name].into_iter().try_for_each(bounded),
            _ => Ok(()),
        }
    }
}

fn check_hello(hello: &Hello) -> Result<(), ProtocolError> {
    let Hello { timeout_ms, capabilities, backend, .. } = hello;
    if *timeout_ms == 0 {
        return Err(ProtocolError::Content("hello has a timeout_ms of 0".to_owned()));
    }
    most("capabilities in a hello", capabilities.len(), MAX_CAPABILITIES)?;
    capabilities.iter().chain([backend]).try_for_each(|name| bounded(name))
}

fn most(what: &str, got: usize, most: usize) -> Result<(), ProtocolError> {
    match got <= most {
        true => Ok(()),
        false => Err(ProtocolError::Content(format!("{got} {what}: at most {most} are allowed"))),
    }
}

fn check_subscribe(subscribe: &Subscribe) -> Result<(), ProtocolError> {
    let Subscribe { policy, queue, held, .. } = *subscribe;
    let problem = match (policy, queue) {
        (Policy::Queue, None) => "a subscription with the policy `queue` has no length of the queue".to_owned(),
        (Policy::Queue, Some(length)) if !(1..=MAX_QUEUE).contains(&length) => {
            format!("a subscription has a queue of {length}: 1 to {MAX_QUEUE} are allowed")
        }
        (Policy::Latest | Policy::Every, Some(length)) => {
            format!("a subscription has a queue of {length}, and another policy than `queue`")
        }
        _ if !(1..=MAX_HELD).contains(&held) => {
            format!("a subscription holds {held} buffers: 1 to {MAX_HELD} are allowed")
        }
        _ => return Ok(()),
    };
    Err(ProtocolError::Content(problem))
}

fn bounded(name: &str) -> Result<(), ProtocolError> {
    match name.len() {
        0..=MAX_NAME => Ok(()),
        length => Err(ProtocolError::Content(format!("a name has {length} bytes: at most {MAX_NAME} are allowed"))),
    }
}

/// Shortens a text to at most `most` bytes, at a character boundary.
pub fn shorten(text: &mut String, most: usize) {
    const CUT: &str = "...";
    if text.len() > most {
        let end = (0..=most - CUT.len()).rev().find(|at| text.is_char_boundary(*at));
        text.truncate(end.unwrap_or(0));
        text.push_str(CUT);
        // The text may be kept for a long time.
        text.shrink_to_fit();
    }
}

/// Replaces characters that must not reach a terminal with spaces.
pub fn clean(text: &mut String) {
    text.clean();
}
