//! What a broker answers instead of what was asked for.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{UnknownCode, protocol::named_codes};

/// A broker refused a request. The connection goes on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct BrokerError {
    /// The class of it.
    pub code: RefusalCode,
    /// Why: one sentence, most often the broker's.
    pub message: String,
}

impl BrokerError {
    /// A refusal with its sentence.
    pub(crate) fn new(code: RefusalCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}

/// Why a broker refuses a request, as it is sent; in snake case on the wire. Codes of the future read as
/// [`RefusalCode::Unknown`], which keeps their name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RefusalCode {
    /// There is no such object or version, or the caller may not know of it.
    Absent,
    /// An object of that name exists.
    Exists,
    /// The current version is another than the caller named.
    Version,
    /// The object's metadata, digest, parts or arrays are not what the caller expects.
    Differs,
    /// The caller has not the right to do it.
    Denied,
    /// A quota of the caller's user is used up.
    Quota,
    /// The server has no room: descriptors, most often.
    Full,
    /// The wait that the caller allowed is over.
    Timeout,
    /// The caller asked that the wait ends.
    Stopped,
    /// The request contradicts itself, or is larger than the protocol allows.
    Invalid,
    /// A descriptor is not of the memory that was claimed, or of no memory that a broker can keep.
    Memory,
    /// The server's system failed.
    Failed,
    /// A code that this version does not know.
    Unknown(UnknownCode),
}

/// The codes and their names.
const CODES: [(RefusalCode, &str); 12] = [
    (RefusalCode::Absent, "absent"),
    (RefusalCode::Exists, "exists"),
    (RefusalCode::Version, "version"),
    (RefusalCode::Differs, "differs"),
    (RefusalCode::Denied, "denied"),
    (RefusalCode::Quota, "quota"),
    (RefusalCode::Full, "full"),
    (RefusalCode::Timeout, "timeout"),
    (RefusalCode::Stopped, "stopped"),
    (RefusalCode::Invalid, "invalid"),
    (RefusalCode::Memory, "memory"),
    (RefusalCode::Failed, "failed"),
];

named_codes!(RefusalCode, CODES);
