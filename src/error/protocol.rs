//! Errors of a conversation: what breaks the protocol, and the codes that either side sends.

use std::fmt;

use serde::{Deserialize, Serialize};

/// How the peer broke the protocol. Nothing of such a record is used, and its descriptors are closed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProtocolError {
    /// Fewer bytes than a header.
    #[error("a record of {got} bytes is shorter than the header of {header}")]
    ShortRecord {
        /// The record's length.
        got: usize,
        /// The header's.
        header: usize,
    },
    /// More bytes than the longest record.
    #[error("a record is longer than {most} bytes")]
    LongRecord {
        /// The longest there is.
        most: usize,
    },
    /// Not this protocol.
    #[error("a record begins with `{}` where `VMFD` belongs", got.escape_ascii())]
    Magic {
        /// The first four bytes.
        got: [u8; 4],
    },
    /// Another version of it.
    #[error("the peer speaks version {got} of the protocol and this side version {own}")]
    Version {
        /// The peer's.
        got: u16,
        /// This side's.
        own: u16,
    },
    /// A kind of message that this version does not have.
    #[error("there is no kind of message with the number {got}")]
    Kind {
        /// The number.
        got: u16,
    },
    /// The header's length is not the body's.
    #[error("the header claims a body of {claimed} bytes and {got} came")]
    BodyLength {
        /// What the header says.
        claimed: u32,
        /// What came.
        got: usize,
    },
    /// The body is not the JSON object that the kind calls for.
    #[error("the body of {kind} is wrong: {reason}")]
    Body {
        /// The kind of message.
        kind: &'static str,
        /// What the parser says.
        reason: String,
    },
    /// The number of descriptors is not what the header and the kind call for.
    #[error("{kind} must carry {want} descriptors, its header claims {claimed} and {got} came")]
    FdCount {
        /// The kind of message.
        kind: &'static str,
        /// How many the message calls for.
        want: usize,
        /// What the header says.
        claimed: u32,
        /// How many came.
        got: usize,
    },
    /// Descriptors were lost on the way in.
    #[error("descriptors were cut off: more than {most} were sent, or this process may open no more files")]
    FdsTruncated {
        /// The most that a record carries.
        most: usize,
    },
    /// A message of a kind that does not belong here.
    #[error("{got} came where {want} belongs")]
    Unexpected {
        /// What came.
        got: &'static str,
        /// What belongs there.
        want: &'static str,
    },
    /// The content of a message contradicts itself or another message.
    #[error("{0}")]
    Content(String),
}

/// Why a side ends the conversation, as it is sent to the other; in snake case on the wire. Codes of the future read as
/// [`ErrorCode::Unknown`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ErrorCode {
    /// The versions differ.
    Version,
    /// A record broke the protocol.
    Protocol,
    /// The receiver's user is not allowed.
    Refused,
    /// The backends differ.
    Backend,
    /// The device is not to be had on the other side.
    Device,
    /// There is no object of that name.
    Object,
    /// The access asked for is not given: the buffer is sealed.
    Access,
    /// The object has no such bytes or segments.
    Range,
    /// All the consumers that were to come have come.
    Full,
    /// The sender waited too long.
    Timeout,
    /// The sender was interrupted.
    Interrupted,
    /// The sender's driver or system failed.
    Failed,
    /// A code that this version does not know.
    #[serde(other)]
    Unknown,
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}
