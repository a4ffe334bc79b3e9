//! Which bytes of some memory are the elements of an array.

use std::{fmt, ops::Range};

use serde::{Deserialize, Serialize};

use super::{ElementType, MAX_DIMENSIONS, Order, json::PlainArray};
use crate::error::{Error, MemoryError, Result};

/// An n-dimensional array somewhere in a piece of memory. Plain data: it owns no memory and reads none.
///
/// As JSON: `{"dtype": "float32", "shape": [768, 1024], "strides": null, "offset": 0}`. `dtype` is the name in NumPy or
/// ml_dtypes (see [`ElementType::name`]) and no other; `"byte_order": "big"` is there for big-endian elements, and refused
/// where the order means nothing. An absent or null byte order is `"little"`, strides are those of C order, and an offset is 0.
/// Unknown fields are ignored. Lists of more than [`MAX_DIMENSIONS`] fail while they are read. Nothing else is checked then:
/// every method fails where a descriptor makes no sense, and [`ArrayDescriptor::check`] is the one that knows the memory.
///
/// A shape of no dimensions has one element; a dimension of length 0 makes an array without any, which needs no memory. A
/// stride of 0 repeats the same elements (a broadcast), so an array may have many more elements than its memory has bytes.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "PlainArray", into = "PlainArray")]
pub struct ArrayDescriptor {
    /// The type of each element.
    pub dtype: ElementType,
    /// The length of each dimension, in elements.
    pub shape: Vec<u64>,
    /// The step from an element to the next along each dimension, in bytes; `None` if the array is contiguous in C order.
    pub strides: Option<Vec<i64>>,
    /// Where the element with all indices 0 begins, in bytes from the start of the memory.
    pub offset: u64,
}

impl ArrayDescriptor {
    /// A contiguous array at the start of the memory. Its strides are null where C order says the same.
    ///
    /// # Errors
    /// [`MemoryError::Array`] if there are more than [`MAX_DIMENSIONS`], if 64 bits can't count its bytes, or if a stride that
    /// has to
    /// be given is 2⁶³ bytes or more.
    pub fn new(dtype: ElementType, shape: impl Into<Vec<u64>>, order: Order) -> Result<Self> {
        let array = Self { dtype, shape: shape.into(), strides: None, offset: 0 };
        array.bytes()?;
        let steps = array.contiguous(order);
        array.with(0, array.shape.clone(), steps)
    }

    /// How many elements it has: none if any dimension is 0.
    ///
    /// # Errors
    /// [`MemoryError::Array`] if it is malformed, or 64 bits can't count them (as of a large broadcast).
    pub fn elements(&self) -> Result<u64> {
        self.well_formed()?;
        if self.is_empty() {
            return Ok(0);
        }
        let count = self.shape.iter().try_fold(1u64, |count, length| count.checked_mul(*length));
        count.ok_or_else(|| problem(format!("shape {:?} has more elements than 64 bits can count", self.shape)))
    }

    /// The size of all its elements together, in bytes: what a contiguous copy of it takes.
    ///
    /// # Errors
    /// As [`ArrayDescriptor::elements`], for bytes.
    pub fn bytes(&self) -> Result<u64> {
        self.elements()?.checked_mul(self.dtype.size()).ok_or_else(|| {
            problem(format!("shape {:?} of {} has more bytes than 64 bits can count", self.shape, self.dtype))
        })
    }

    /// Its strides in bytes, also where they are null. A dimension of length 0 counts as 1 in them, as numpy has it.
    ///
    /// # Errors
    /// [`MemoryError::Array`] if it is malformed, or a stride is 2⁶³ bytes or more.
    pub fn strides_in_bytes(&self) -> Result<Vec<i64>> {
        explicit(self.steps()?)
    }

    /// The bytes that it reaches, from the lowest to one past the highest, counted from the start of the memory. For an array
    /// without elements, the empty range at its offset.
    ///
    /// # Errors
    /// [`MemoryError::Array`] if it is malformed, begins before the memory, or reaches further than 64 bits can count.
    pub fn span(&self) -> Result<Range<u64>> {
        let steps = self.steps()?;
        if self.is_empty() {
            return Ok(self.offset..self.offset);
        }
        let mut low = i128::from(self.offset);
        let mut high = low + i128::from(self.dtype.size());
        for (length, step) in self.shape.iter().zip(steps) {
            let reach = i128::from(length - 1).checked_mul(step).ok_or_else(|| self.too_far())?;
            let end = if reach < 0 { &mut low } else { &mut high };
            *end = end.checked_add(reach).ok_or_else(|| self.too_far())?;
        }
        // `low` only ever falls: what does not fit is negative.
        let low = u64::try_from(low).map_err(|_| {
            problem(format!("the array's lowest byte lies {} bytes before the start of its memory", low.unsigned_abs()))
        })?;
        Ok(low..u64::try_from(high).map_err(|_| self.too_far())?)
    }

    /// Checks it against memory of `extent` bytes: whatever else is asked of it then stays inside.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`] if a byte of it, or the offset of an array without elements, lies outside;
    /// [`MemoryError::Array`] as for
    /// [`ArrayDescriptor::span`].
    pub fn check(&self, extent: u64) -> Result<()> {
        // Most arrays are contiguous and inside, which takes no list of strides to see.
        let bytes = || self.shape.iter().try_fold(self.dtype.size(), |bytes, length| bytes.checked_mul(*length));
        if self.strides.is_none()
            && self.shape.len() <= MAX_DIMENSIONS
            && bytes().and_then(|bytes| bytes.checked_add(self.offset)).is_some_and(|end| end <= extent)
        {
            return Ok(());
        }
        let Range { start, end } = self.span()?;
        if end > extent {
            return Err(Error::Memory(MemoryError::OutOfRange { offset: start, length: end - start, size: extent }));
        }
        Ok(())
    }

    /// Where the element of an index begins, in bytes from the start of the memory.
    ///
    /// # Errors
    /// [`MemoryError::Array`] if there is no such element, and as for [`ArrayDescriptor::span`].
    pub fn offset_of(&self, index: &[u64]) -> Result<u64> {
        self.span()?;
        if index.len() != self.shape.len() {
            let (given, dimensions) = (index.len(), self.shape.len());
            return Err(problem(format!("an index of {given} numbers is none of an array of {dimensions} dimensions")));
        }
        // All before any product: only where there are elements do those stay small.
        index.iter().enumerate().try_for_each(|(axis, at)| self.inside(axis, *at))?;
        let reach: i128 = index.iter().zip(self.steps()?).map(|(at, step)| i128::from(*at) * step).sum();
        self.whole(i128::from(self.offset) + reach)
    }

    /// The part of it whose index along `axis` lies in a range: each `step`-th, from the range's first on; from its last
    /// backwards if the step is negative. (In numpy: `a[start:end][::step]`.)
    ///
    /// # Errors
    /// [`MemoryError::Array`] if there is no such axis, the range is not inside it, the step is 0, or a stride comes to 2⁶³ bytes
    /// or
    /// more; and as for [`ArrayDescriptor::span`].
    pub fn slice(&self, axis: usize, range: Range<u64>, step: i64) -> Result<Self> {
        self.span()?;
        let length = self.length(axis)?;
        if step == 0 {
            return Err(problem("a slice can't have a step of 0".to_owned()));
        }
        if range.start > range.end || range.end > length {
            return Err(problem(format!("{range:?} is no range in dimension {axis}, of length {length}")));
        }
        let (mut shape, mut steps) = (self.shape.clone(), self.steps()?);
        shape[axis] = (range.end - range.start).div_ceil(step.unsigned_abs());
        let first = if step > 0 { range.start } else { range.end.saturating_sub(1) };
        let offset = self.first_at(first, steps[axis], &shape)?;
        // One element takes no step: a product that nothing uses must not be refused for its size.
        if shape[axis] > 1 {
            steps[axis] = steps[axis].saturating_mul(step.into());
        }
        self.with(offset, shape, steps)
    }

    /// The part of it with one index along `axis`, which is no dimension of it any more.
    ///
    /// # Errors
    /// [`MemoryError::Array`] if there is no such axis or index, or a stride that has to be given is 2⁶³ bytes or more; and as for
    /// [`ArrayDescriptor::span`].
    pub fn index(&self, axis: usize, at: u64) -> Result<Self> {
        self.span()?;
        self.inside(axis, at)?;
        let (mut shape, mut steps) = (self.shape.clone(), self.steps()?);
        shape.remove(axis);
        let offset = self.first_at(at, steps.remove(axis), &shape)?;
        self.with(offset, shape, steps)
    }

    /// The same elements with the axes in another order: axis `i` of the result is `axes[i]` of this one.
    ///
    /// # Errors
    /// [`MemoryError::Array`] if `axes` does not name each axis once, or a stride that has to be given is 2⁶³ bytes or more; and as
    /// for [`ArrayDescriptor::span`].
    pub fn permute(&self, axes: &[usize]) -> Result<Self> {
        self.span()?;
        let mut sorted = axes.to_vec();
        sorted.sort_unstable();
        if !sorted.into_iter().eq(0..self.shape.len()) {
            let dimensions = self.shape.len();
            return Err(problem(format!("{axes:?} does not name each of {dimensions} axes once")));
        }
        let steps = self.steps()?;
        let shape = axes.iter().map(|axis| self.shape[*axis]).collect();
        self.with(self.offset, shape, axes.iter().map(|axis| steps[*axis]).collect())
    }

    /// The same elements with the axes in reverse order.
    ///
    /// # Errors
    /// As for [`ArrayDescriptor::permute`].
    pub fn transpose(&self) -> Result<Self> {
        self.permute(&(0..self.shape.len()).rev().collect::<Vec<_>>())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    fn well_formed(&self) -> Result<()> {
        let dimensions = self.shape.len();
        if dimensions > MAX_DIMENSIONS {
            return Err(problem(format!("an array of {dimensions} dimensions has more than {MAX_DIMENSIONS}")));
        }
        match &self.strides {
            Some(strides) if strides.len() != dimensions => {
                Err(problem(format!("{} strides can't belong to {dimensions} dimensions", strides.len())))
            }
            _ => Ok(()),
        }
    }

    /// The strides as they are computed with: wide enough that no product of a span that fits overflows.
    pub(super) fn steps(&self) -> Result<Vec<i128>> {
        self.well_formed()?;
        Ok(match &self.strides {
            Some(strides) => strides.iter().map(|stride| i128::from(*stride)).collect(),
            None => self.contiguous(Order::C),
        })
    }

    /// The strides of a contiguous array of this shape. What would overflow stays at the largest value: that is further than
    /// any span may reach, or nothing where there are no elements.
    fn contiguous(&self, order: Order) -> Vec<i128> {
        let mut step = i128::from(self.dtype.size());
        let mut next = |length: &u64| {
            let this = step;
            step = step.saturating_mul((*length).max(1).into());
            this
        };
        match order {
            Order::F => self.shape.iter().map(&mut next).collect(),
            Order::C => {
                let mut steps: Vec<_> = self.shape.iter().rev().map(&mut next).collect();
                steps.reverse();
                steps
            }
        }
    }

    /// Whether these strides are those of a contiguous array of this shape, where they matter: not along dimensions of length 1,
    /// and not without elements.
    pub(super) fn steps_are(&self, order: Order, steps: &[i128]) -> bool {
        let mut each = self.shape.iter().zip(steps).zip(self.contiguous(order));
        self.is_empty() || each.all(|((length, step), want)| *length == 1 || *step == want)
    }

    /// Another array of the same memory. Its strides are null if they may be: readers of the interface like that best.
    fn with(&self, offset: u64, shape: Vec<u64>, steps: Vec<i128>) -> Result<Self> {
        let mut array = Self { dtype: self.dtype, shape, strides: None, offset };
        if !array.steps_are(Order::C, &steps) {
            array.strides = Some(explicit(steps)?);
        }
        Ok(array)
    }

    /// Where a part of this shape begins, `at` steps along. A part without elements stays where it was, as nothing says that
    /// those steps are inside.
    fn first_at(&self, at: u64, step: i128, shape: &[u64]) -> Result<u64> {
        if shape.contains(&0) {
            return Ok(self.offset);
        }
        self.whole(i128::from(self.offset) + i128::from(at) * step)
    }

    fn whole(&self, offset: i128) -> Result<u64> {
        u64::try_from(offset).map_err(|_| self.too_far())
    }

    fn length(&self, axis: usize) -> Result<u64> {
        let dimensions = self.shape.len();
        let length = self.shape.get(axis).copied();
        length.ok_or_else(|| problem(format!("there is no axis {axis} among {dimensions}, counted from 0")))
    }

    fn inside(&self, axis: usize, at: u64) -> Result<()> {
        match self.length(axis)? {
            length if at < length => Ok(()),
            length => Err(problem(format!("index {at} is not inside dimension {axis}, of length {length}"))),
        }
    }

    fn too_far(&self) -> Error {
        let Self { dtype, shape, strides, offset } = self;
        let strides = strides.as_ref().map_or("no strides".to_owned(), |strides| format!("strides {strides:?}"));
        problem(format!(
            "an array of {dtype} with shape {shape:?}, {strides} and offset {offset} reaches further than 64 bits can count"
        ))
    }
}

pub(super) fn problem(problem: String) -> Error {
    Error::Memory(MemoryError::Array { problem })
}

fn explicit(steps: Vec<i128>) -> Result<Vec<i64>> {
    let fit = |step| {
        i64::try_from(step).map_err(|_| problem("the array needs a stride of more bytes than 63 bits can count".into()))
    };
    steps.into_iter().map(fit).collect()
}

/// The type, the shape, and the strides unless they are those of C order: `float32 1024x768, strides 4x4096`.
impl fmt::Display for ArrayDescriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fn joined<T: ToString>(numbers: &[T]) -> String {
            numbers.iter().map(T::to_string).collect::<Vec<_>>().join("x")
        }
        write!(f, "{} {}", self.dtype, joined(&self.shape))?;
        self.strides.iter().try_for_each(|strides| write!(f, ", strides {}", joined(strides)))
    }
}
