//! Two arrays of a shape side by side: which bytes belong together, and whether they meet.

use std::ops::Range;

use crate::{error::Outcome, signals::Looks};

/// How many bytes are copied at a time: between two of them a signal is looked for.
const PIECE: u64 = 16 << 20;

/// Two arrays of one shape, walked together: the longest runs of bytes that follow one another in both.
pub(crate) struct Walk {
    /// The length of a run, in bytes.
    pub(crate) bytes: u64,
    /// For each dimension that is left, from the outermost: its length, and the steps in both.
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

    /// Calls a function with where each run begins in both, relative to the element with all indices 0, and its bytes, in C order. Long
    /// runs come in pieces. Ends when a signal's handler raised.
    pub(crate) fn each(&self, mut call: impl FnMut(i64, i64, u64) -> Outcome<()>) -> Outcome<()> {
        let mut index = vec![0; self.outer.len()];
        let (mut a, mut b) = (0i64, 0i64);
        let mut looks = Looks::new();
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

/// How the addresses of two arrays of a shape meet.
pub(crate) enum Meeting {
    Apart,
    /// Each element is where its counterpart is.
    Same,
    /// An element may be overwritten before it is read.
    Overlap,
}

/// How a source and a destination meet: each by the address of its first element and its steps.
pub(crate) fn meeting(from: (u64, &[i64]), to: (u64, &[i64]), shape: &[u64], item: u64) -> Outcome<Meeting> {
    if from == to {
        return Ok(Meeting::Same);
    }
    let (Some(a), Some(b)) = (span(from.0, shape, from.1, item), span(to.0, shape, to.1, item)) else {
        return Ok(Meeting::Apart);
    };
    Ok(if a.start < b.end && b.start < a.end { Meeting::Overlap } else { Meeting::Apart })
}

/// The addresses from an array's first byte to its last. `None` if it has no elements.
pub(crate) fn span(first: u64, shape: &[u64], steps: &[i64], item: u64) -> Option<Range<i128>> {
    if shape.contains(&0) {
        return None;
    }
    let mut span = i128::from(first)..i128::from(first) + i128::from(item);
    for (length, step) in shape.iter().zip(steps) {
        // 64 bits by 63 bits: 127 bits hold one; what holds no array saturates.
        let reach = i128::from(*length - 1).saturating_mul(i128::from(*step));
        if reach < 0 {
            span.start = span.start.saturating_add(reach);
        } else {
            span.end = span.end.saturating_add(reach);
        }
    }
    Some(span)
}

pub(crate) fn moved(address: u64, by: i64) -> u64 {
    address.wrapping_add_signed(by)
}
