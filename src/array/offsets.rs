//! Iteration over the offsets of an array's elements.

use std::iter::FusedIterator;

use super::ArrayDescriptor;
use crate::error::Result;

/// The offsets of an array's elements: see [`ArrayDescriptor::offsets`].
#[derive(Debug, Clone)]
pub(crate) struct Offsets {
    shape: Vec<u64>,
    steps: Vec<i128>,
    index: Vec<u64>,
    next: Option<i128>,
}

impl Iterator for Offsets {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        let current = self.next.take()?;
        let mut offset = current;
        for ((at, length), step) in self.index.iter_mut().zip(&self.shape).zip(&self.steps).rev() {
            if *at + 1 < *length {
                *at += 1;
                self.next = Some(offset + step);
                break;
            }
            offset -= i128::from(*at) * step;
            *at = 0;
        }
        u64::try_from(current).ok()
    }
}

impl FusedIterator for Offsets {}

impl ArrayDescriptor {
    /// Iterates over the offset of each element, in bytes from the start of the memory, in C order of the index for any strides. The memory
    /// use does not depend on the number of elements.
    ///
    /// # Errors
    /// The errors of [`ArrayDescriptor::span`].
    pub(crate) fn offsets(&self) -> Result<Offsets> {
        self.span()?;
        Ok(Offsets {
            shape: self.shape.clone(),
            steps: self.steps()?,
            index: vec![0; self.shape.len()],
            next: (!self.is_empty()).then_some(self.offset.into()),
        })
    }
}
