//! The reason why a case stopped before its last step.

use vmmfd::error::{BodyCause, Error, PeerError, ProtocolError, SocketError};

/// The result of a case or step.
pub(super) type CaseResult<T = ()> = Result<T, CaseEnd>;

/// The reason why a case stopped early.
#[derive(Debug)]
pub(super) enum CaseEnd {
    /// The peer violated a rule.
    Violation { rule: &'static str, found: String },
    /// The peer lacks an optional feature that the case needs.
    Skipped(String),
    /// No peer connected or listened, or the peer serves no more connections.
    NoPeer(String),
    /// This side failed.
    Internal(Error),
}

pub(super) fn violation<T>(rule: &'static str, found: impl Into<String>) -> CaseResult<T> {
    Err(CaseEnd::Violation { rule, found: found.into() })
}

pub(super) fn skip<T>(reason: impl Into<String>) -> CaseResult<T> {
    Err(CaseEnd::Skipped(reason.into()))
}

/// `Ok` if a condition holds, else a violation.
pub(super) fn check(holds: bool, rule: &'static str, found: impl FnOnce() -> String) -> CaseResult {
    if holds { Ok(()) } else { violation(rule, found()) }
}

impl From<Error> for CaseEnd {
    fn from(error: Error) -> Self {
        match error {
            Error::Socket(
                SocketError::Absent { .. }
                | SocketError::NotAccepted { .. }
                | SocketError::Denied { .. }
                | SocketError::ClosedFolder { .. },
            )
            | Error::Peer(PeerError::NoConsumer { .. } | PeerError::NotAllowed { .. }) => Self::NoPeer(error.in_full()),
            error => Self::Internal(error),
        }
    }
}

/// A record that can't be decoded.
impl From<ProtocolError> for CaseEnd {
    fn from(error: ProtocolError) -> Self {
        Self::Violation { rule: rule_of(&error), found: format!("sent a record that can't be decoded: {error}") }
    }
}

/// The rule that a record violates.
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
