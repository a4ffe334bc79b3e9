//! Walks two arrays of one shape side by side: the matching byte ranges, and whether they overlap.

use std::ops::Range;

use vmmfd::bindings::Walk;

use crate::{error::Outcome, signals::SignalPoll};

/// The most bytes to copy between two checks for signals.
const PIECE: u64 = 16 << 20;

/// Calls a function for each run, in C order, with its offsets in both arrays from the element with all indices 0, and its length. Splits
/// long runs. Stops when a signal handler raises.
pub(crate) fn each_run(walk: &Walk, mut call: impl FnMut(i64, i64, u64) -> Outcome<()>) -> Outcome<()> {
    let mut looks = SignalPoll::new();
    walk.each_run(|a, b| {
        let mut done = 0;
        while done < walk.bytes {
            let size = (walk.bytes - done).min(PIECE);
            call(a + done as i64, b + done as i64, size)?;
            done += size;
            looks.step(size)?;
        }
        Ok(())
    })
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
