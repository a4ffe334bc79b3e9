//! Rate limit for log lines that clients can trigger: the first line per kind and user, then a count.

use std::{collections::HashMap, time::Duration};

/// Interval at which repetitions are logged. Afterwards, the next line of each kind is logged in full again.
pub(crate) const INTERVAL: Duration = Duration::from_secs(60);

/// The most tracked pairs of user and kind. Each subordinate user counts.
const MAX: usize = 1024;

/// How often each user's kinds of lines occurred in this minute.
#[derive(Debug, Default)]
pub(crate) struct RepeatLimiter(HashMap<(u32, &'static str), u64>);

impl RepeatLimiter {
    /// Whether to log this line in full: the first of its kind and user in a minute.
    pub(crate) fn should_log(&mut self, uid: u32, kind: &'static str) -> bool {
        if self.0.len() >= MAX && !self.0.contains_key(&(uid, kind)) {
            return false;
        }
        let count = self.0.entry((uid, kind)).or_default();
        *count += 1;
        *count == 1
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Logs the repetitions of the last minute.
    pub(crate) fn log(&mut self) {
        for ((uid, kind), count) in self.0.drain().filter(|(_, count)| *count > 1) {
            tracing::info!(uid, count = count - 1, "repeated in the last minute: {kind}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repetitions_are_counted_and_bounded() {
        let mut repeats = RepeatLimiter::default();
        assert!(repeats.should_log(1, "a") && repeats.should_log(1, "b") && repeats.should_log(2, "a"));
        assert!(!repeats.should_log(1, "a") && !repeats.should_log(1, "a"));
        assert_eq!(repeats.0[&(1, "a")], 3);
        repeats.log();
        assert!(repeats.is_empty() && repeats.should_log(1, "a"));
        let logged = (2..10 * MAX as u32).filter(|uid| repeats.should_log(*uid, "c")).count();
        assert_eq!(logged, MAX - 1);
    }
}
