//! The options of serving a buffer.

use std::time::Duration;

/// The options of serving a buffer.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ServeOptions {
    /// Number of consumers to serve, by default 1. 0 serves any number until the service is cancelled.
    pub consumers: u64,
    /// Whether each consumer in turn has the buffer alone and may reply into it, if the content expects a reply. Off by default. A sealed
    /// buffer takes no reply.
    pub round_trip: bool,
    /// Longest time that a consumer may have the buffer alone in a round trip; `busy` does not extend it. By default, ten times the
    /// timeout. After that the session fails with [`PeerError::TurnTooLong`](crate::error::PeerError::TurnTooLong), and the next
    /// consumer's turn starts.
    pub turn: Option<Duration>,
}

impl Default for ServeOptions {
    fn default() -> Self {
        Self { consumers: 1, round_trip: false, turn: None }
    }
}

impl ServeOptions {
    /// Sets the number of consumers to serve.
    pub fn consumers(self, consumers: u64) -> Self {
        Self { consumers, ..self }
    }

    /// Sets whether each consumer in turn has the buffer alone.
    pub fn round_trip(self, round_trip: bool) -> Self {
        Self { round_trip, ..self }
    }

    /// Sets the longest turn.
    pub fn turn(self, turn: Duration) -> Self {
        Self { turn: Some(turn), ..self }
    }
}
