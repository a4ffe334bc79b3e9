//! A broker's refusal.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{UnknownCode, protocol::named_codes};

/// A broker refused a request. The connection remains open.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct BrokerError {
    /// The class of the refusal.
    pub code: RefusalCode,
    /// The reason in one sentence, usually the broker's.
    pub message: String,
}

impl BrokerError {
    pub(crate) fn new(code: RefusalCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}

/// The class of a refusal, in snake case on the wire. A code of a later version parses as [`RefusalCode::Unknown`], which keeps its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RefusalCode {
    /// The object or version does not exist, or the caller may not see it.
    Absent,
    /// An object of that name exists.
    Exists,
    /// The current version differs from the version in the request.
    Version,
    /// The object's metadata, digest or size differ from the caller's expectation.
    Differs,
    /// The object has no such part or array.
    Lacks,
    /// The caller lacks the permission.
    Denied,
    /// The caller's user has reached a quota.
    Quota,
    /// The server has reached a limit, usually the open-file limit.
    Full,
    /// The caller's deadline passed.
    Timeout,
    /// The caller cancelled the wait.
    Stopped,
    /// The request contradicts itself, or is larger than the protocol allows.
    Invalid,
    /// A descriptor does not refer to the described memory, or to memory that a broker can keep.
    Memory,
    /// A system call of the server failed.
    Failed,
    /// A code that this version does not know.
    Unknown(UnknownCode),
}

const CODES: [(RefusalCode, &str); 13] = [
    (RefusalCode::Absent, "absent"),
    (RefusalCode::Exists, "exists"),
    (RefusalCode::Version, "version"),
    (RefusalCode::Differs, "differs"),
    (RefusalCode::Lacks, "lacks"),
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
