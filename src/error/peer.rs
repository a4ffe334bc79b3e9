//! Errors about the peer of a connection.

use std::{path::PathBuf, time::Duration};

use super::{ErrorCode, ProtocolError};

/// The peer is absent, silent, gone or refused, or its messages do not fit.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PeerError {
    /// No consumer connected in time.
    #[error("no consumer within {waited:?}")]
    NoConsumer {
        /// The time limit.
        waited: Duration,
    },

    /// The peer sent nothing in time.
    #[error("the peer was silent for {waited:?} while this side was waiting {purpose}")]
    Timeout {
        /// The purpose of the wait: `for the offer`.
        purpose: &'static str,
        /// The time limit.
        waited: Duration,
    },

    /// The peer reported `busy` for longer than the limit of a turn.
    #[error("the peer kept the buffer longer than its turn of {granted:?}")]
    TurnTooLong {
        /// The time limit of a turn.
        granted: Duration,
    },

    /// The peer ended, was killed, or closed the connection.
    #[error("{} ended or closed the connection while this side was waiting {purpose}", process(*.pid))]
    Gone {
        /// The peer's process ID, or 0 if it is not known.
        pid: i32,
        /// The purpose of the wait: `for the offer`.
        purpose: &'static str,
    },

    /// The broker of a connection ended, and no broker listens at its path again.
    #[error("the broker at {} is gone, and none has listened there within {waited:?}", path.display())]
    BrokerGone {
        /// The path of the broker's socket.
        path: PathBuf,
        /// The time limit.
        waited: Duration,
    },

    /// The peer reported an error and closed the session.
    #[error("the peer reported: {message} ({code})")]
    Reported {
        /// The class of the error.
        code: ErrorCode,
        /// The peer's sentence.
        message: String,
    },

    /// The peer's user is not allowed to connect.
    #[error("the peer, pid {pid}, runs as uid {uid}, which is not allowed here")]
    NotAllowed {
        /// The peer's process.
        pid: i32,
        /// The peer's user.
        uid: u32,
    },

    /// The peer's offer or request does not fit this side.
    #[error("{message}")]
    Mismatch {
        /// The code that is sent to the peer.
        code: ErrorCode,
        /// The reason in one sentence.
        message: String,
    },

    /// The peer broke the protocol; the connection is closed.
    #[error("the peer broke the protocol")]
    Protocol(#[from] ProtocolError),
}

fn process(pid: i32) -> String {
    if pid == 0 { "the peer".to_owned() } else { format!("pid {pid}") }
}
