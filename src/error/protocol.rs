//! Errors of a conversation: what breaks the protocol, and the codes that either side sends.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

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
        /// The cause, for decisions.
        fault: BodyFault,
        /// What the parser says, for people.
        reason: String,
    },
    /// The number of sizes is outside of the kind's range.
    #[error("{kind} lists {got} sizes where {} belong", if *least == 0 { format!("at most {most}") } else { format!("{least} to {most}") })]
    SizeCount {
        /// The kind of message.
        kind: &'static str,
        /// How many it lists.
        got: usize,
        /// The fewest it may list.
        least: usize,
        /// The most it may list.
        most: usize,
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
    /// The peer ended the conversation with an `error` that breaks the protocol itself. It is not answered.
    #[error("the peer ended the conversation with an error that can't be read")]
    UnreadableError {
        /// What is wrong with the record.
        source: Box<ProtocolError>,
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

/// Why a body can't be read.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct BodyFault {
    /// The field, if the fault is in one.
    pub field: Option<String>,
    /// The cause.
    pub cause: BodyCause,
}

/// The causes for which a body can't be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum BodyCause {
    /// The body is not JSON in UTF-8.
    Syntax,
    /// A required field is absent or null.
    Missing,
    /// An object has a name twice.
    Duplicate,
    /// A field has a value of another JSON type.
    Type,
    /// A number is not an integer in the field's range.
    Number,
    /// A field does not know a name.
    Variant,
    /// A value does not have the field's form.
    Value,
}

/// Why a side ends the conversation, as it is sent to the other; in snake case on the wire. Codes of the future read as
/// [`ErrorCode::Unknown`], which keeps their name.
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
    /// The device is not to be had on the other side.
    Device,
    /// There is no object of that name.
    Object,
    /// The access asked for is not given: the buffer is sealed.
    Access,
    /// The object has no such bytes.
    Range,
    /// All the consumers that were to come have come, or too many connections ask for nothing.
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

/// The codes and their names.
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

/// A code's name and back, on the wire as in a sentence: `$codes` lists each with its name, and what is not in it is `Unknown`.
macro_rules! named_codes {
    ($code:ident, $codes:ident) => {
        impl $code {
            /// The code of a name.
            pub fn of(name: &str) -> Self {
                let known = $codes.iter().find(|(_, known)| *known == name);
                known.map_or_else(|| Self::Unknown(UnknownCode::of(name)), |(code, _)| *code)
            }

            /// Its name, as it is sent.
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

/// The name of a code that this version does not know, fit to be shown: its first [`UnknownCode::LONGEST`] bytes, with `?` for
/// whatever is no letter, digit, hyphen or underscore of ASCII.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UnknownCode {
    name: [u8; Self::LONGEST],
    length: u8,
}

impl UnknownCode {
    /// The longest name of a code, in bytes.
    pub const LONGEST: usize = 32;

    pub(super) fn of(text: &str) -> Self {
        let mut name = [0; Self::LONGEST];
        let plain = |byte: u8| if byte.is_ascii_alphanumeric() || b"-_".contains(&byte) { byte } else { b'?' };
        let length = text.len().min(Self::LONGEST);
        name[..length].iter_mut().zip(text.bytes()).for_each(|(to, byte)| *to = plain(byte));
        Self { name, length: length as u8 }
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        str::from_utf8(&self.name[..usize::from(self.length)]).unwrap_or_default()
    }
}

impl fmt::Debug for UnknownCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_str().fmt(f)
    }
}
