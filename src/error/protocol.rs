//! Errors of a session: violations of the protocol, and the codes that the two sides send.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A violation of the protocol by the peer. The record is discarded, and its descriptors are closed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProtocolError {
    /// The record is shorter than a header.
    #[error("a record of {got} bytes is shorter than the header of {header}")]
    ShortRecord {
        /// Bytes of the record.
        got: usize,
        /// Bytes of a header.
        header: usize,
    },
    /// The record is longer than the protocol allows.
    #[error("a record is longer than {most} bytes")]
    LongRecord {
        /// Bytes of the longest valid record.
        most: usize,
    },
    /// The record belongs to another protocol.
    #[error("a record starts with `{}` instead of `VMFD`", got.escape_ascii())]
    Magic {
        /// The first four bytes.
        got: [u8; 4],
    },
    /// The peer speaks another version of the protocol.
    #[error("the peer speaks version {got} of the protocol, this side version {own}")]
    Version {
        /// The peer's version.
        got: u16,
        /// This side's version.
        own: u16,
    },
    /// The kind of message is unknown to this version.
    #[error("unknown kind of message: {got}")]
    Kind {
        /// The kind's number.
        got: u16,
    },
    /// The length in the header differs from the length of the body.
    #[error("the header claims a body of {claimed} bytes, but the record has {got}")]
    BodyLength {
        /// Bytes according to the header.
        claimed: u32,
        /// Bytes received.
        got: usize,
    },
    /// The body is not the kind's JSON object.
    #[error("the body of {kind} is invalid: {reason}")]
    Body {
        /// The kind of message.
        kind: &'static str,
        /// The parser's message.
        reason: String,
    },
    /// The number of sizes is outside of the kind's range.
    #[error("{kind} lists {got} sizes, expected {}", if *least == 0 { format!("at most {most}") } else { format!("{least} to {most}") })]
    SizeCount {
        /// The kind of message.
        kind: &'static str,
        /// Sizes in the message.
        got: usize,
        /// The minimum.
        least: usize,
        /// The maximum.
        most: usize,
    },
    /// The number of descriptors differs from the header or from the number that the message requires.
    #[error("{kind} must carry {want} descriptors, but its header claims {claimed} and {got} arrived")]
    FdCount {
        /// The kind of message.
        kind: &'static str,
        /// Descriptors that the message requires.
        want: usize,
        /// Descriptors according to the header.
        claimed: u32,
        /// Descriptors received.
        got: usize,
    },
    /// The kernel dropped descriptors of the record.
    #[error("descriptors were cut off: the peer sent more than {most}, or this process reached its open-file limit")]
    FdsTruncated {
        /// The maximum for a record.
        most: usize,
    },
    /// The peer closed the session with an `error` that itself breaks the protocol. This side does not reply.
    #[error("the peer closed the conversation with an invalid error record")]
    UnreadableError {
        /// The fault of the record.
        source: Box<ProtocolError>,
    },
    /// The kind of message is not allowed at this point.
    #[error("received {got}, expected {want}")]
    Unexpected {
        /// The received kind.
        got: &'static str,
        /// The expected kind.
        want: &'static str,
    },
    /// The content of a message contradicts itself or another message.
    #[error("{0}")]
    Content(String),
}

/// Why a side closes the session, in snake case on the wire. A code of a later version parses as
/// [`ErrorCode::Unknown`], which keeps its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
    /// The other side has no such device.
    Device,
    /// There is no object of that name.
    Object,
    /// The requested access is not granted: the buffer is sealed.
    Access,
    /// The requested range exceeds the object.
    Range,
    /// All expected consumers are served, or too many connections are idle.
    Full,
    /// The sender waited too long.
    Timeout,
    /// The sender was interrupted.
    Interrupted,
    /// The sender's driver or system failed.
    Failed,
    /// A code that this version does not know.
    Unknown(UnknownCode),
}

const CODES: [(ErrorCode, &str); 12] = [
    (ErrorCode::Version, "version"),
    (ErrorCode::Protocol, "protocol"),
    (ErrorCode::Refused, "refused"),
    (ErrorCode::Backend, "backend"),
    (ErrorCode::Device, "device"),
    (ErrorCode::Object, "object"),
    (ErrorCode::Access, "access"),
    (ErrorCode::Range, "range"),
    (ErrorCode::Full, "full"),
    (ErrorCode::Timeout, "timeout"),
    (ErrorCode::Interrupted, "interrupted"),
    (ErrorCode::Failed, "failed"),
];

/// Conversions between a code and its name, on the wire and in text. `$codes` lists the names; any other name becomes `Unknown`.
macro_rules! named_codes {
    ($code:ident, $codes:ident) => {
        impl $code {
            /// Parses the name of a code.
            pub fn of(name: &str) -> Self {
                let known = $codes.iter().find(|(_, known)| *known == name);
                known.map_or_else(|| Self::Unknown(UnknownCode::of(name)), |(code, _)| *code)
            }

            /// The code's name on the wire.
            pub fn as_str(&self) -> &str {
                match self {
                    Self::Unknown(unknown) => unknown.as_str(),
                    known => $codes.iter().find(|(code, _)| code == known).map_or("", |(_, name)| name),
                }
            }
        }

        impl fmt::Display for $code {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.as_str())
            }
        }

        impl Serialize for $code {
            fn serialize<S: Serializer>(&self, output: S) -> Result<S::Ok, S::Error> {
                output.serialize_str(self.as_str())
            }
        }

        impl<'de> Deserialize<'de> for $code {
            fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
                String::deserialize(input).map(|name| Self::of(&name))
            }
        }
    };
}
pub(super) use named_codes;

named_codes!(ErrorCode, CODES);

/// The name of a code that this version does not know, safe to print: its first [`UnknownCode::LONGEST`] bytes, with `?` in place of
/// every byte that is not an ASCII letter, digit, hyphen or underscore.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UnknownCode {
    name: [u8; Self::LONGEST],
    length: u8,
}

impl UnknownCode {
    /// The maximum length in bytes.
    pub const LONGEST: usize = 32;

    pub(super) fn of(text: &str) -> Self {
        let mut name = [0; Self::LONGEST];
        let printable = |byte: u8| if byte.is_ascii_alphanumeric() || b"-_".contains(&byte) { byte } else { b'?' };
        let length = text.len().min(Self::LONGEST);
        name[..length].iter_mut().zip(text.bytes()).for_each(|(to, byte)| *to = printable(byte));
        Self { name, length: length as u8 }
    }

    /// The sanitised name.
    pub fn as_str(&self) -> &str {
        str::from_utf8(&self.name[..usize::from(self.length)]).unwrap_or_default()
    }
}

impl fmt::Debug for UnknownCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_str().fmt(f)
    }
}
