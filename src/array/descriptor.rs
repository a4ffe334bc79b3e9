//! The layout of an array in memory.

use std::{fmt, ops::Range};

use serde::{Deserialize, Serialize};

use super::{ElementType, MAX_DIMENSIONS, Order, json::PlainArray};
use crate::error::{Error, MemoryError, Result};

/// Describes an n-dimensional array in memory. Plain data, without access to the memory itself.
///
/// As JSON: `{"dtype": "float32", "shape": [768, 1024], "strides": null, "offset": 0}`. `dtype` must be the name in NumPy or ml_dtypes
/// (see [`ElementType::name`]). Big-endian elements have `"byte_order": "big"`, which is refused for types without a byte order. If absent
/// or null, the byte order is `"little"`, the strides follow C order, and the offset is 0. Unknown fields are ignored. Parsing stops
/// with an error at lists of more than [`MAX_DIMENSIONS`] numbers, and checks nothing else: every method fails for an invalid descriptor,
/// and [`ArrayDescriptor::check`] compares it with the size of the memory.
///
/// A shape without dimensions has one element. If a dimension is 0, the array has no elements and needs no memory. A stride of 0 repeats
/// the same elements (a broadcast), so an array may have far more elements than its memory has bytes.
///
/// ```
/// use vmmfd::array::{ArrayDescriptor, Order};
///
/// let array = ArrayDescriptor::new("f32".parse()?, [2, 3], Order::C)?;
/// assert_eq!((array.elements()?, array.span()?), (6, 0..24));
/// array.check(24)?;  // It is inside 24 bytes of memory.
/// assert!(array.check(23).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "PlainArray", into = "PlainArray")]
#[cfg_attr(
    feature = "schema",
    derive(schemars::JsonSchema),
    schemars(description = "Describes an n-dimensional array in memory.")
)]
pub struct ArrayDescriptor {
    /// The type of each element.
    pub dtype: ElementType,
    /// The length of each dimension, in elements.
    pub shape: Vec<u64>,
    /// The distance between neighbouring elements along each dimension, in bytes; `None` if the array is contiguous in C order.
    pub strides: Option<Vec<i64>>,
    /// The position of the element with all indices 0, in bytes from the start of the memory.
    pub offset: u64,
}

impl ArrayDescriptor {
    /// Describes a contiguous array at the start of the memory. `strides` is `None` if the array is contiguous in C order.
    ///
    /// # Errors
    /// [`MemoryError::Array`] if there are more than [`MAX_DIMENSIONS`], if the size in bytes overflows 64 bits, or if an explicit stride
    /// is 2⁶³ bytes or more.
    pub fn new(dtype: ElementType, shape: impl Into<Vec<u64>>, order: Order) -> Result<Self> {
        let array = Self { dtype, shape: shape.into(), strides: None, offset: 0 };
        array.bytes()?;
        let steps = array.contiguous(order);
        array.with(0, array.shape.clone(), steps)
    }

    /// The number of elements; 0 if any dimension is 0.
    ///
    /// # Errors
    /// [`MemoryError::Array`] if the descriptor is malformed, or if the number overflows 64 bits (possible for a large broadcast).
    pub fn elements(&self) -> Result<u64> {
        self.well_formed()?;
        if self.is_empty() {
            return Ok(0);
        }
        let count = self.shape.iter().try_fold(1u64, |count, length| count.checked_mul(*length));
        count.ok_or_else(|| problem(format!("the number of elements of shape {:?} overflows 64 bits", self.shape)))
    }

    /// The total size of the elements in bytes: the size of a contiguous copy.
    ///
    /// # Errors
    /// The errors of [`ArrayDescriptor::elements`], for the number of bytes.
    pub fn bytes(&self) -> Result<u64> {
        self.elements()?
            .checked_mul(self.dtype.size())
            .ok_or_else(|| problem(format!("the bytes of shape {:?} of {} overflow 64 bits", self.shape, self.dtype)))
    }

    /// The strides in bytes, computed if they are `None`. As in NumPy, a dimension of length 0 counts as 1.
    ///
    /// # Errors
    /// [`MemoryError::Array`] if the descriptor is malformed, or a stride is 2⁶³ bytes or more.
    pub fn strides_in_bytes(&self) -> Result<Vec<i64>> {
        explicit(self.steps()?)
    }

    /// The range of bytes from the lowest to one past the highest that the array uses, relative to the start of the memory. For an array
    /// without elements, the empty range at its offset.
    ///
    /// # Errors
    /// [`MemoryError::Array`] if the descriptor is malformed, or if the range starts before the memory or overflows 64 bits.
    pub fn span(&self) -> Result<Range<u64>> {
        let steps = self.steps()?;
        if self.is_empty() {
            return Ok(self.offset..self.offset);
        }
        let mut low = i128::from(self.offset);
        let mut high = low + i128::from(self.dtype.size());
        for (length, step) in self.shape.iter().zip(steps) {
            let reach = i128::from(length - 1).checked_mul(step).ok_or_else(|| self.overflow())?;
            let end = if reach < 0 { &mut low } else { &mut high };
            *end = end.checked_add(reach).ok_or_else(|| self.overflow())?;
        }
        // `low` only decreases, so a value that does not fit is negative.
        let low = u64::try_from(low)
            .map_err(|_| problem(format!("the array starts {} bytes before its memory", low.unsigned_abs())))?;
        Ok(low..u64::try_from(high).map_err(|_| self.overflow())?)
    }

    /// Checks that the array is inside memory of `extent` bytes. The results of all other methods are then inside too.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`] if a byte of the array, or the offset of an array without elements, is outside; [`MemoryError::Array`]
    /// as for [`ArrayDescriptor::span`].
    pub fn check(&self, extent: u64) -> Result<()> {
        // Fast path for contiguous arrays: no list of strides is needed.
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

    /// The position of the element at an index, in bytes from the start of the memory.
    ///
    /// # Errors
    /// [`MemoryError::Array`] if there is no such element; the errors of [`ArrayDescriptor::span`].
    pub fn offset_of(&self, index: &[u64]) -> Result<u64> {
        self.span()?;
        if index.len() != self.shape.len() {
            let given = index.len();
            let dimensions = self.shape.len();
            return Err(problem(format!(
                "an index of {given} numbers does not fit an array of {dimensions} dimensions"
            )));
        }
        // Check every number before multiplying: `span` bounds only the products of existing elements.
        index.iter().enumerate().try_for_each(|(axis, at)| self.inside(axis, *at))?;
        let reach: i128 = index.iter().zip(self.steps()?).map(|(at, step)| i128::from(*at) * step).sum();
        self.whole(i128::from(self.offset) + reach)
    }

    /// Slices the array along `axis`: every `step`-th index of the range, from its start, or from its end backwards if the step is
    /// negative. (In NumPy: `a[start:end][::step]`.)
    ///
    /// # Errors
    /// [`MemoryError::Array`] if there is no such axis, the range exceeds it, the step is 0, or a stride is 2⁶³ bytes or more; the errors of
    /// [`ArrayDescriptor::span`].
    pub fn slice(&self, axis: usize, range: Range<u64>, step: i64) -> Result<Self> {
        self.span()?;
        let length = self.length(axis)?;
        if step == 0 {
            return Err(problem("a slice can't have a step of 0".to_owned()));
        }
        if range.start > range.end || range.end > length {
            return Err(problem(format!("{range:?} is not a range in dimension {axis} of length {length}")));
        }
        let mut shape = self.shape.clone();
        let mut steps = self.steps()?;
        shape[axis] = (range.end - range.start).div_ceil(step.unsigned_abs());
        let first = if step > 0 { range.start } else { range.end.saturating_sub(1) };
        let offset = self.first_at(first, steps[axis], &shape)?;
        // A single element uses no stride, so an overflow of its stride must not be an error.
        if shape[axis] > 1 {
            steps[axis] = steps[axis].saturating_mul(step.into());
        }
        self.with(offset, shape, steps)
    }

    /// Selects one index along `axis`. The result does not have this axis.
    ///
    /// # Errors
    /// [`MemoryError::Array`] if there is no such axis or index, or an explicit stride is 2⁶³ bytes or more; the errors of
    /// [`ArrayDescriptor::span`].
    pub fn index(&self, axis: usize, at: u64) -> Result<Self> {
        self.span()?;
        self.inside(axis, at)?;
        let mut shape = self.shape.clone();
        let mut steps = self.steps()?;
        shape.remove(axis);
        let offset = self.first_at(at, steps.remove(axis), &shape)?;
        self.with(offset, shape, steps)
    }

    /// Permutes the axes: axis `i` of the result is axis `axes[i]` of this array.
    ///
    /// # Errors
    /// [`MemoryError::Array`] if `axes` does not name each axis once, or an explicit stride is 2⁶³ bytes or more; the errors of
    /// [`ArrayDescriptor::span`].
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

    /// Reverses the order of the axes.
    ///
    /// # Errors
    /// The errors of [`ArrayDescriptor::permute`].
    pub fn transpose(&self) -> Result<Self> {
        self.permute(&(0..self.shape.len()).rev().collect::<Vec<_>>())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    fn well_formed(&self) -> Result<()> {
        let dimensions = self.shape.len();
        if dimensions > MAX_DIMENSIONS {
            return Err(problem(format!("an array of {dimensions} dimensions exceeds the limit of {MAX_DIMENSIONS}")));
        }
        match &self.strides {
            Some(strides) if strides.len() != dimensions => {
                Err(problem(format!("{} strides do not fit {dimensions} dimensions", strides.len())))
            }
            _ => Ok(()),
        }
    }

    /// The strides in a type that is wide enough for every product of a valid span.
    pub(super) fn steps(&self) -> Result<Vec<i128>> {
        self.well_formed()?;
        Ok(match &self.strides {
            Some(strides) => strides.iter().map(|stride| i128::from(*stride)).collect(),
            None => self.contiguous(Order::C),
        })
    }

    /// The strides of a contiguous array of this shape. They saturate on overflow: the maximum exceeds every valid span, and is unused if
    /// there are no elements.
    fn contiguous(&self, order: Order) -> Vec<i128> {
        let mut step = i128::from(self.dtype.size());
        let mut next = |length: &u64| {
            let current = step;
            step = step.saturating_mul((*length).max(1).into());
            current
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

    /// Whether an array of this shape with these strides is contiguous. Ignores unused strides: along dimensions of length 1, and in
    /// arrays without elements.
    pub(super) fn steps_are(&self, order: Order, steps: &[i128]) -> bool {
        let mut each = self.shape.iter().zip(steps).zip(self.contiguous(order));
        self.is_empty() || each.all(|((length, step), want)| *length == 1 || *step == want)
    }

    /// Creates an array in the same memory. Its strides are `None` if it is contiguous, which readers of the array interface support best.
    fn with(&self, offset: u64, shape: Vec<u64>, steps: Vec<i128>) -> Result<Self> {
        let mut array = Self { dtype: self.dtype, shape, strides: None, offset };
        if !array.steps_are(Order::C, &steps) {
            array.strides = Some(explicit(steps)?);
        }
        Ok(array)
    }

    /// The offset of a part of this shape that starts `at` steps along an axis. A part without elements keeps the offset, because those
    /// steps may be outside of the memory.
    fn first_at(&self, at: u64, step: i128, shape: &[u64]) -> Result<u64> {
        if shape.contains(&0) {
            return Ok(self.offset);
        }
        self.whole(i128::from(self.offset) + i128::from(at) * step)
    }

    fn whole(&self, offset: i128) -> Result<u64> {
        u64::try_from(offset).map_err(|_| self.overflow())
    }

    fn length(&self, axis: usize) -> Result<u64> {
        let dimensions = self.shape.len();
        let length = self.shape.get(axis).copied();
        length.ok_or_else(|| problem(format!("there is no axis {axis} in an array of {dimensions} dimensions")))
    }

    fn inside(&self, axis: usize, at: u64) -> Result<()> {
        match self.length(axis)? {
            length if at < length => Ok(()),
            length => Err(problem(format!("index {at} exceeds dimension {axis} of length {length}"))),
        }
    }

    fn overflow(&self) -> Error {
        let Self { dtype, shape, strides, offset } = self;
        let strides = strides.as_ref().map_or("no strides".to_owned(), |strides| format!("strides {strides:?}"));
        problem(format!("an array of {dtype} with shape {shape:?}, {strides} and offset {offset} overflows 64 bits"))
    }
}

pub(super) fn problem(problem: String) -> Error {
    Error::Memory(MemoryError::Array { problem })
}

fn explicit(steps: Vec<i128>) -> Result<Vec<i64>> {
    let fit = |step| i64::try_from(step).map_err(|_| problem("the array needs a stride of 2⁶³ bytes or more".into()));
    steps.into_iter().map(fit).collect()
}

/// The type, the shape, and any explicit strides: `float32 1024x768, strides 4x4096`.
impl fmt::Display for ArrayDescriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fn joined<T: ToString>(numbers: &[T]) -> String {
            numbers.iter().map(T::to_string).collect::<Vec<_>>().join("x")
        }
        write!(f, "{} {}", self.dtype, joined(&self.shape))?;
        self.strides.iter().try_for_each(|strides| write!(f, ", strides {}", joined(strides)))
    }
}
