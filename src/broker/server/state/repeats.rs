//! Rate limit for log lines that clients can trigger: the first line per kind and user, then a count.

use std::{collections::HashMap, time::Duration};

/// Interval at which repetitions are logged. A kind without repetitions in one interval is logged in full again.
pub(crate) const INTERVAL: Duration = Duration::from_secs(60);

/// The most tracked pairs of user and kind. Each subordinate user counts.
const MAX: usize = 1024;

/// Log lines of the last minute.
#[derive(Debug, Default)]
pub(crate) struct RepeatLimiter {
    /// Repetitions of each kind since it was last logged.
    counts: HashMap<(u32, &'static str), u64>,
    /// Repetitions of untracked users and kinds.
    others: u64,
}

impl RepeatLimiter {
    /// Whether to log this line in full: the first of its kind and user in a minute. Further lines are counted.
    pub(crate) fn should_log(&mut self, uid: u32, kind: &'static str) -> bool {
        if let Some(count) = self.counts.get_mut(&(uid, kind)) {
            *count += 1;
            return false;
        }
        let has_room = self.counts.len() < MAX;
        if has_room {
            self.counts.insert((uid, kind), 0);
        } else {
            self.others += 1;
        }
        has_room
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.counts.is_empty() && self.others == 0
    }

    /// Logs the repetitions of the last minute, and forgets kinds without repetitions.
    pub(crate) fn log(&mut self) {
        self.counts.retain(|(uid, kind), count| {
            let count = std::mem::take(count);
            if count > 0 {
                tracing::info!(uid, count, "repeated in the last minute: {kind}");
            }
            count > 0
        });
        let count = std::mem::take(&mut self.others);
        if count > 0 {
            tracing::info!(count, "events of other users in the last minute, not logged individually");
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
        assert_eq!(repeats.counts[&(1, "a")], 2);
        // A kind that keeps repeating is logged as a count.
        repeats.log();
        assert_eq!(repeats.counts, HashMap::from([((1, "a"), 0)]));
        assert!(!repeats.should_log(1, "a") && repeats.should_log(1, "b"));
        repeats.log();
        repeats.log();
        assert!(repeats.is_empty() && repeats.should_log(1, "a"));
        let logged = (0..10 * MAX as u32).filter(|uid| repeats.should_log(*uid, "c")).count();
        assert!(logged < MAX && repeats.counts.len() == MAX && repeats.others > 0);
        repeats.log();
        repeats.log();
        assert!(repeats.is_empty());
    }
}
