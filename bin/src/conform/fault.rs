//! Why a case ended early.

use vmmfd::error::{BodyCause, Error, ProtocolError};

/// What ends a case before its end.
#[derive(Debug)]
pub(super) enum Fault {
    /// The other end broke a rule.
    Broken {
        rule: &'static str,
        /// What it did, where what belongs.
        found: String,
    },
    /// The other end does not do what the case is about, and need not.
    LeftOut(String),
    /// There is no other end to meet, or not any more.
    Absent(String),
    /// This side failed.
    Failed(Error),
}

impl Fault {
    pub(super) fn broken<T>(rule: &'static str, found: impl Into<String>) -> Result<T, Self> {
        Err(Self::Broken { rule, found: found.into() })
    }

    pub(super) fn left_out<T>(why: impl Into<String>) -> Result<T, Self> {
        Err(Self::LeftOut(why.into()))
    }

    /// A record that can't be read.
    pub(super) fn of_record(error: &ProtocolError) -> Self {
        Self::Broken { rule: rule_of(error), found: format!("sent a record that can't be read: {error}") }
    }
}

/// The rule that a record breaks.
fn rule_of(error: &ProtocolError) -> &'static str {
    match error {
        ProtocolError::Kind { .. } | ProtocolError::Unexpected { .. } => "R2",
        ProtocolError::FdCount { .. } | ProtocolError::FdsTruncated { .. } | ProtocolError::SizeCount { .. } => "R3",
        ProtocolError::Body { fault, .. } => match (fault.cause, fault.field.as_deref()) {
            (BodyCause::Missing, _) => "R6",
            (BodyCause::Duplicate, _) => "R8",
            (BodyCause::Value, Some("uuid")) => "M4",
            (BodyCause::Variant, _) => "M3",
            (BodyCause::Number, _) => "R7",
            _ => "R4",
        },
        ProtocolError::UnreadableError { source } => rule_of(source),
        ProtocolError::Content(_) => "R9",
        _ => "R1",
    }
}
