//! Statistics of samples.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A run is split into this many parts to compare their medians.
const PARTS: usize = 5;

/// The maximum spread of these medians, relative to the median of the whole run. A larger spread makes the run too noisy.
pub(super) const TOO_NOISY: f64 = 0.2;

/// The samples of one measurement, in microseconds, in the order of measurement.
#[derive(Debug, Clone, Default)]
pub(super) struct Samples(pub(super) Vec<f64>);

/// The statistics of samples, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Summary {
    /// The number of samples.
    pub count: usize,
    /// The smallest.
    pub min_us: f64,
    /// The median.
    pub p50_us: f64,
    /// The 90th percentile.
    pub p90_us: f64,
    /// The 99th percentile.
    pub p99_us: f64,
    /// The largest.
    pub max_us: f64,
    /// The spread of the medians of the run's fifths, relative to its median; `None` for few samples.
    pub noise: Option<f64>,
}

impl Summary {
    /// Reports whether the run is too noisy for conclusions from its median.
    pub fn is_too_noisy(&self) -> bool {
        self.noise.is_some_and(|noise| noise > TOO_NOISY)
    }
}

impl Samples {
    /// Returns the statistics; `None` without samples.
    pub(super) fn summary(&self) -> Option<Summary> {
        let all = sorted(&self.0);
        let p50 = quantile(&all, 0.5)?;
        // The median of a fifth needs a few samples.
        let length = self.0.len() / PARTS;
        let medians = self.0.chunks_exact(length.max(1)).take(PARTS);
        let medians: Vec<f64> = medians.filter_map(|part| quantile(&sorted(part), 0.5)).collect();
        let (low, high) = medians.iter().fold((f64::MAX, f64::MIN), |(low, high), &m| (low.min(m), high.max(m)));
        let noise = (length >= 4 && p50 > 0.0).then(|| (high - low) / p50);
        Some(Summary {
            count: all.len(),
            min_us: quantile(&all, 0.0)?,
            p50_us: p50,
            p90_us: quantile(&all, 0.9)?,
            p99_us: quantile(&all, 0.99)?,
            max_us: quantile(&all, 1.0)?,
            noise,
        })
    }
}

/// Returns the time in nanoseconds on the clock that all processes of a machine share (`CLOCK_MONOTONIC`).
pub(super) fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}

/// Converts to microseconds, the unit of samples.
pub(super) fn us(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

pub(super) fn sorted(samples: &[f64]) -> Vec<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

/// Returns a quantile of sorted samples, by nearest rank.
pub(super) fn quantile(sorted: &[f64], part: f64) -> Option<f64> {
    let rank = (part * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.max(1) - 1).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_samples_by_nearest_rank() {
        let samples = Samples((1..=200).rev().map(f64::from).collect());
        let summary = samples.summary().unwrap();
        assert_eq!(
            (summary.count, summary.min_us, summary.p50_us, summary.p90_us, summary.p99_us, summary.max_us),
            (200, 1.0, 100.0, 180.0, 198.0, 200.0)
        );
        assert_eq!(Samples(vec![7.0]).summary().unwrap().p99_us, 7.0);
        assert_eq!(Samples::default().summary(), None);
    }

    #[test]
    fn only_a_drifting_run_is_too_noisy() {
        let steady = (0..100).map(|at| if at % 20 == 0 { 90.0 } else { 10.0 }).collect();
        assert!(!Samples(steady).summary().unwrap().is_too_noisy());
        let drifting = (0..100).map(|at| 10.0 + f64::from(at) / 10.0).collect();
        assert!(Samples(drifting).summary().unwrap().is_too_noisy());
        // Too few samples.
        assert_eq!(Samples(vec![1.0, 100.0, 1.0]).summary().unwrap().noise, None);
    }
}
