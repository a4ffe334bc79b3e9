//! Errors about the peer of a connection.

use std::{fmt, path::PathBuf, time::Duration};

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

    /// A publisher got no buffer in time, because subscribers have them.
    #[error("no buffer of {size} bytes is free after {waited:?}: {}", list(.holders))]
    Starved {
        /// The size of the buffer in bytes.
        size: u64,
        /// The time limit.
        waited: Duration,
        /// The processes that have buffers.
        holders: Vec<Holder>,
    },

    /// GPU work of the peer was not done in time, or never will be. Streams that waited for it were released, and what they read behind the
    /// wait is undefined.
    #[error("the peer's GPU work is lost: {reason}")]
    WorkLost {
        /// The reason.
        reason: Loss,
    },

    /// The peer broke the protocol; the connection is closed.
    #[error("the peer broke the protocol")]
    Protocol(#[from] ProtocolError),
}

/// Why a wait for a peer's GPU work was released.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Loss {
    /// The peer's process ended, or closed the connection.
    Gone,
    /// The work was not done in time.
    Late {
        /// The time limit.
        limit: Duration,
    },
    /// A process released the waits.
    Released,
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gone => f.write_str("its process ended or closed the connection first"),
            Self::Late { limit } => write!(f, "it was not done within {limit:?}"),
            Self::Released => f.write_str("the waits for it were released"),
        }
    }
}

/// A process that has buffers of a publisher.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holder {
    /// Its process ID, or 0 if it is not known.
    pub pid: i32,
    /// The number of its buffers.
    pub buffers: usize,
    /// The bytes of these buffers.
    pub bytes: u64,
}

fn list(holders: &[Holder]) -> String {
    let one = |Holder { pid, buffers, bytes }: &Holder| {
        let s = if *buffers == 1 { "" } else { "s" };
        format!("{} has {buffers} buffer{s} with {bytes} bytes", process(*pid))
    };
    match holders {
        [] => "this process has all loans".to_owned(),
        all => all.iter().map(one).collect::<Vec<_>>().join(", "),
    }
}

fn process(pid: i32) -> String {
    if pid == 0 { "the peer".to_owned() } else { format!("pid {pid}") }
}
