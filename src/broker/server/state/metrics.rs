//! Request counts and durations, and a rate limit for log lines that clients can trigger: the first line per kind and user, then a count.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use crate::wire::broker::{Durations, RequestCount};

/// Upper bounds of the histogram buckets, in microseconds.
const BOUNDS: [u64; 12] = [25, 50, 100, 250, 500, 1_000, 2_500, 10_000, 100_000, 1_000_000, 10_000_000, 60_000_000];

#[derive(Debug)]
pub(crate) struct Metrics {
    pub(crate) started_ms: u64,
    requests: BTreeMap<(&'static str, String), u64>,
    durations: BTreeMap<&'static str, ([u64; BOUNDS.len() + 1], u64)>,
}

impl Metrics {
    pub(crate) fn new(started_ms: u64) -> Self {
        Self { started_ms, requests: BTreeMap::new(), durations: BTreeMap::new() }
    }

    /// Counts an answered request.
    pub(crate) fn count(&mut self, verb: &'static str, outcome: String, took: Duration) {
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        *self.requests.entry((verb, outcome)).or_default() += 1;
        let (classes, sum) = self.durations.entry(verb).or_default();
        classes[BOUNDS.partition_point(|bound| *bound < micros)] += 1;
        *sum = sum.saturating_add(micros);
    }

    /// Answered requests, by verb and outcome.
    pub(crate) fn requests(&self) -> impl Iterator<Item = RequestCount> {
        self.requests.iter().map(|((verb, outcome), count)| RequestCount {
            verb: (*verb).to_owned(),
            outcome: outcome.clone(),
            count: *count,
        })
    }

    /// Durations, by verb.
    pub(crate) fn durations(&self) -> impl Iterator<Item = Durations> {
        self.durations.iter().map(|(verb, (counts, sum_us))| Durations {
            verb: (*verb).to_owned(),
            bounds_us: BOUNDS.to_vec(),
            counts: counts.to_vec(),
            sum_us: *sum_us,
        })
    }
}

/// Interval at which repetitions are logged. Afterwards, the next line of each kind is logged in full again.
pub(crate) const REPEATS_LOGGED_EACH: Duration = Duration::from_secs(60);

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
