//! What many measurements say together.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// Into how many parts a run is cut to see how much it wanders.
const PARTS: usize = 5;

/// How far apart the medians of those may be, as a part of the whole run's, before nothing should be concluded.
const TOO_NOISY: f64 = 0.2;

/// Measurements of one thing, in microseconds, in the order in which they were made.
#[derive(Debug, Clone, Default)]
pub(super) struct Samples(pub(super) Vec<f64>);

/// What they come to, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// How many they are.
    pub count: usize,
    /// The least.
    pub min_us: f64,
    /// Half of them are no larger.
    pub p50_us: f64,
    /// Nine of ten are no larger.
    pub p90_us: f64,
    /// 99 of 100 are no larger.
    pub p99_us: f64,
    /// The largest.
    pub max_us: f64,
    /// How far apart the medians of the run's five fifths are, as a part of the median; of few samples there is no telling.
    pub noise: Option<f64>,
}

impl Summary {
    /// Whether the run wandered too much for its median to mean much.
    pub fn is_too_noisy(&self) -> bool {
        self.noise.is_some_and(|noise| noise > TOO_NOISY)
    }
}

impl Samples {
    /// `None` of nothing.
    pub(super) fn summary(&self) -> Option<Summary> {
        let all = sorted(&self.0);
        let p50 = quantile(&all, 0.5)?;
        // A fifth of few samples has no median worth the name.
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

/// Nanoseconds of the clock that all processes of a machine share.
pub(super) fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}

/// Microseconds, as samples are.
pub(super) fn us(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

pub(super) fn sorted(samples: &[f64]) -> Vec<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

/// The smallest sample that so large a part of them does not exceed (nearest rank).
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
    fn a_run_that_wanders_is_too_noisy_and_one_with_a_few_late_samples_is_not() {
        let steady = (0..100).map(|at| if at % 20 == 0 { 90.0 } else { 10.0 }).collect();
        assert!(!Samples(steady).summary().unwrap().is_too_noisy());
        let wandering = (0..100).map(|at| 10.0 + f64::from(at) / 10.0).collect();
        assert!(Samples(wandering).summary().unwrap().is_too_noisy());
        // Of too few there is no telling.
        assert_eq!(Samples(vec![1.0, 100.0, 1.0]).summary().unwrap().noise, None);
    }
}
