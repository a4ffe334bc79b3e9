//! What is wrong with the process at the other end.

use std::time::Duration;

use super::{ErrorCode, ProtocolError};

/// The process at the other end is absent, silent, gone or refused, or what it says does not fit.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PeerError {
    /// No consumer came in time.
    #[error("no consumer within {waited:?}")]
    NoConsumer {
        /// How long was waited.
        waited: Duration,
    },

    /// The peer said nothing in time.
    #[error("the peer was silent for {waited:?} while this side was waiting {purpose}")]
    Timeout {
        /// What was waited for: `for the offer`.
        purpose: &'static str,
        /// How long.
        waited: Duration,
    },

    /// The peer kept saying that it is busy, for longer than it may have the buffer to itself.
    #[error("the peer kept the buffer for longer than its turn of {granted:?}")]
    TurnTooLong {
        /// How long a turn may last.
        granted: Duration,
    },

    /// The peer hung up, or died.
    #[error("the peer hung up while this side was waiting {purpose}")]
    Gone {
        /// What was waited for: `for the offer`.
        purpose: &'static str,
    },

    /// The peer reported an error and ended the conversation.
    #[error("the peer reported: {message} ({code})")]
    Reported {
        /// Which: its class.
        code: ErrorCode,
        /// The peer's sentence.
        message: String,
    },

    /// The process at the other end belongs to a user who is not allowed here.
    #[error("the peer, pid {pid}, runs as uid {uid}, which is not allowed here")]
    NotAllowed {
        /// The peer's process.
        pid: i32,
        /// The peer's user.
        uid: u32,
    },

    /// What the peer offers or asks does not fit this side.
    #[error("{message}")]
    Mismatch {
        /// The code that is sent to the peer.
        code: ErrorCode,
        /// What does not fit.
        message: String,
    },

    /// The peer broke the protocol; the connection is closed.
    #[error("the peer broke the protocol")]
    Protocol(#[from] ProtocolError),
}
