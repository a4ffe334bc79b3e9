//! The time of a request. Only the event loop reads the clock, so everything below it is a function of its arguments.

use std::time::{Duration, Instant, SystemTime};

/// A time on both clocks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Time {
    /// Monotonic.
    pub(crate) at: Instant,
    /// Milliseconds since 1970.
    pub(crate) ms: u64,
}

impl Time {
    pub(crate) fn now() -> Self {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Self { at: Instant::now(), ms: u64::try_from(since.as_millis()).unwrap_or(u64::MAX) }
    }

    /// The time after `wait`, which a client chose: it may be centuries.
    pub(crate) fn after(self, wait: Duration) -> Instant {
        self.at.checked_add(wait).unwrap_or_else(|| self.at + Duration::from_secs(u32::MAX.into()))
    }
}
