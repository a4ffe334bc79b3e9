//! How a buffer is served.

use std::time::Duration;

/// How a buffer is served.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ServeOptions {
    /// How many consumers to serve, or 0 for any number until it is cancelled: 1 by default.
    pub consumers: u64,
    /// Whether each consumer has the buffer to itself and replies into it, if the content expects that: not by default, and never
    /// into a sealed buffer.
    pub round_trip: bool,
    /// How long a consumer may have the buffer to itself in a round trip, however often it says that it is busy; by default ten
    /// times the timeout. Then its conversation ends with [`PeerError::TurnTooLong`](crate::error::PeerError::TurnTooLong), and it is
    /// the next one's turn.
    pub turn: Option<Duration>,
}

impl Default for ServeOptions {
    fn default() -> Self {
        Self { consumers: 1, round_trip: false, turn: None }
    }
}

impl ServeOptions {
    /// Sets the number of consumers.
    pub fn consumers(self, consumers: u64) -> Self {
        Self { consumers, ..self }
    }

    /// Sets whether each consumer has the buffer to itself.
    pub fn round_trip(self, round_trip: bool) -> Self {
        Self { round_trip, ..self }
    }

    /// Sets the longest turn.
    pub fn turn(self, turn: Duration) -> Self {
        Self { turn: Some(turn), ..self }
    }
}
