//! Request counts and durations.

use std::{collections::BTreeMap, time::Duration};

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
