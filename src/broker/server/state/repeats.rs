//! Log lines that clients can cause at will: the first of a kind and user, and then how many more there were.

use std::{collections::HashMap, time::Duration};

/// How often the number of repetitions is logged, and after how long without any the next one counts as the first again.
pub(crate) const EVERY: Duration = Duration::from_secs(60);

/// The most users and kinds that are told apart: each of a user's subordinate users counts.
const MOST: usize = 1024;

/// What was logged in the last minute.
#[derive(Debug, Default)]
pub(crate) struct Repeats {
    /// How often each kind was repeated since it was logged.
    counts: HashMap<(u32, &'static str), u64>,
    /// Those of users and kinds beyond the most that are told apart.
    others: u64,
}

impl Repeats {
    /// Whether something is to be logged in full: the first of its kind and user for a minute. Others are counted.
    pub(crate) fn is_first(&mut self, uid: u32, kind: &'static str) -> bool {
        if let Some(count) = self.counts.get_mut(&(uid, kind)) {
            *count += 1;
            return false;
        }
        let has_room = self.counts.len() < MOST;
        if has_room {
            self.counts.insert((uid, kind), 0);
        } else {
            self.others += 1;
        }
        has_room
    }

    /// Whether nothing was logged in the last minute.
    pub(crate) fn is_empty(&self) -> bool {
        self.counts.is_empty() && self.others == 0
    }

    /// Logs the counts of the last minute, and forgets the kinds without any.
    pub(crate) fn log(&mut self) {
        self.counts.retain(|(uid, kind), count| {
            let count = std::mem::take(count);
            if count > 0 {
                tracing::info!(uid, count, "the same again in the last minute: {kind}");
            }
            count > 0
        });
        let count = std::mem::take(&mut self.others);
        if count > 0 {
            tracing::info!(count, "events of other users in the last minute, which are not logged one by one");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repetitions_are_counted_and_bounded() {
        let mut repeats = Repeats::default();
        assert!(repeats.is_first(1, "a") && repeats.is_first(1, "b") && repeats.is_first(2, "a"));
        assert!(!repeats.is_first(1, "a") && !repeats.is_first(1, "a"));
        assert_eq!(repeats.counts[&(1, "a")], 2);
        // A kind that goes on is logged as a count, and no longer in full.
        repeats.log();
        assert_eq!(repeats.counts, HashMap::from([((1, "a"), 0)]));
        assert!(!repeats.is_first(1, "a") && repeats.is_first(1, "b"));
        repeats.log();
        repeats.log();
        assert!(repeats.is_empty() && repeats.is_first(1, "a"));
        let logged = (0..10 * MOST as u32).filter(|uid| repeats.is_first(*uid, "c")).count();
        assert!(logged < MOST && repeats.counts.len() == MOST && repeats.others > 0);
        repeats.log();
        repeats.log();
        assert!(repeats.is_empty());
    }
}
