//! Walks two arrays of one shape side by side: the matching byte ranges, and whether they overlap.

use std::ops::Range;

use crate::{error::Outcome, signals::SignalPoll};

/// The most bytes to copy between two checks for signals.
const PIECE: u64 = 16 << 20;

/// Two arrays of one shape, walked together: the longest runs of bytes that are contiguous in both.
pub(crate) struct Walk {
    /// The length of a run, in bytes.
    pub(crate) bytes: u64,
    /// For each remaining dimension, outermost first: its length, and its strides in both.
    outer: Vec<(u64, i64, i64)>,
}

impl Walk {
    pub(crate) fn new(shape: &[u64], item: u64, a: &[i64], b: &[i64]) -> Self {
        if shape.contains(&0) {
            return Self { bytes: 0, outer: Vec::new() };
        }
        let (mut bytes, mut outer) = (item, Vec::new());
        for ((length, a), b) in shape.iter().zip(a).zip(b).rev() {
            match *length {
                1 => {}
                length if outer.is_empty() && *a == bytes as i64 && *b == bytes as i64 => bytes *= length,
                length => outer.push((length, *a, *b)),
            }
        }
        outer.reverse();
        Self { bytes, outer }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Calls a function for each run, in C order, with its offsets in both arrays from the element with all indices 0, and its length.
    /// Splits long runs. Stops when a signal handler raises.
    pub(crate) fn each_run(&self, mut call: impl FnMut(i64, i64, u64) -> Outcome<()>) -> Outcome<()> {
        let mut index = vec![0; self.outer.len()];
        let (mut a, mut b) = (0i64, 0i64);
        let mut looks = SignalPoll::new();
        loop {
            let mut done = 0;
            while done < self.bytes {
                let size = (self.bytes - done).min(PIECE);
                call(a + done as i64, b + done as i64, size)?;
                done += size;
                looks.step(size)?;
            }
            let mut axis = self.outer.len();
            loop {
                if axis == 0 {
                    return Ok(());
                }
                axis -= 1;
                let (length, step_a, step_b) = self.outer[axis];
                index[axis] += 1;
                if index[axis] < length {
                    (a, b) = (a + step_a, b + step_b);
                    break;
                }
                let back = length as i64 - 1;
                (a, b) = (a - back * step_a, b - back * step_b);
                index[axis] = 0;
            }
        }
    }
}

/// How the addresses of two arrays of one shape overlap.
pub(crate) enum Overlap {
    Apart,
    /// Each element has its counterpart's address.
    Same,
    /// An element may be overwritten before it is read.
    Partial,
}

/// Compares a source and a destination, each by the address of its first element and its strides.
pub(crate) fn overlap(from: (u64, &[i64]), to: (u64, &[i64]), shape: &[u64], item: u64) -> Outcome<Overlap> {
    if from == to {
        return Ok(Overlap::Same);
    }
    let (Some(a), Some(b)) = (span(from.0, shape, from.1, item), span(to.0, shape, to.1, item)) else {
        return Ok(Overlap::Apart);
    };
    Ok(if a.start < b.end && b.start < a.end { Overlap::Partial } else { Overlap::Apart })
}

/// Returns the addresses from an array's first byte to its last. `None` for an array without elements.
pub(crate) fn span(first: u64, shape: &[u64], steps: &[i64], item: u64) -> Option<Range<i128>> {
    if shape.contains(&0) {
        return None;
    }
    let mut span = i128::from(first)..i128::from(first) + i128::from(item);
    for (length, step) in shape.iter().zip(steps) {
        // 64 bits by 63 bits: one product fits in 127 bits. The sum saturates for impossible arrays.
        let reach = i128::from(*length - 1).saturating_mul(i128::from(*step));
        if reach < 0 {
            span.start = span.start.saturating_add(reach);
        } else {
            span.end = span.end.saturating_add(reach);
        }
    }
    Some(span)
}

pub(crate) fn offset_by(address: u64, by: i64) -> u64 {
    address.wrapping_add_signed(by)
}
