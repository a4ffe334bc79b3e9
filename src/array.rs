//! Typed arrays in shared memory, described in the words of `__cuda_array_interface__` version 3.
//!
//! A descriptor says which bytes of some memory are the elements of an n-dimensional array. It owns nothing and reads
//! nothing: who gets one from a peer calls [`ArrayDescriptor::check`] with the size of the memory before any use.
//!
//! ```
//! use vmmfd::array::{ArrayDescriptor, ElementType, Order};
//!
//! # fn main() -> vmmfd::Result<()> {
//! let image = ArrayDescriptor::new(ElementType::F32, [768, 1024], Order::C)?;
//! image.check(4 << 20)?;
//! let upside_down = image.slice(0, 0..768, -1)?;
//! assert_eq!(upside_down.offset_of(&[0, 5])?, image.offset_of(&[767, 5])?);
//! # Ok(())
//! # }
//! ```

use std::{fmt, iter::FusedIterator, marker::PhantomData, ops::Range, str::FromStr};

use serde::{
    Deserialize, Deserializer, Serialize,
    de::{SeqAccess, Visitor},
};

use crate::error::{Error, Result};

/// The most dimensions of an array: numpy's own limit.
pub const MAX_DIMENSIONS: usize = 64;

/// What an element is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ElementKind {
    /// One byte, 0 or 1.
    Bool,
    /// An integer in two's complement.
    Signed,
    /// An integer without a sign.
    Unsigned,
    /// An IEEE 754 number.
    Float,
    /// Two IEEE 754 numbers, the real part first.
    Complex,
    /// Bytes that mean nothing here.
    Raw,
}

impl ElementKind {
    /// Its letter in a typestr.
    fn letter(self) -> char {
        match self {
            Self::Bool => 'b',
            Self::Signed => 'i',
            Self::Unsigned => 'u',
            Self::Float => 'f',
            Self::Complex => 'c',
            Self::Raw => 'V',
        }
    }
}

/// The type of an array's elements: a typestr of the array interface, such as `<f4`, `>i2`, `|b1` or `|V16`.
///
/// It is also read by name: `bool`, `i8` to `i64`, `u8` to `u64`, `f16` to `f64`, `c64`, `c128`, with the size in bits as
/// Rust has it, in little-endian order. (numpy's short names count bytes: its `i8` is `i64` here.) Objects, strings and times
/// are no types of shared memory: they are refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ElementType {
    kind: ElementKind,
    size: u32,
    /// Never set where the order means nothing, so that equal types are equal.
    big_endian: bool,
}

const NAMES: [(&str, ElementType); 14] = [
    ("bool", ElementType::BOOL),
    ("i8", ElementType::I8),
    ("i16", ElementType::I16),
    ("i32", ElementType::I32),
    ("i64", ElementType::I64),
    ("u8", ElementType::U8),
    ("u16", ElementType::U16),
    ("u32", ElementType::U32),
    ("u64", ElementType::U64),
    ("f16", ElementType::F16),
    ("f32", ElementType::F32),
    ("f64", ElementType::F64),
    ("c64", ElementType::C64),
    ("c128", ElementType::C128),
];

impl ElementType {
    /// `|b1`
    pub const BOOL: Self = Self::little(ElementKind::Bool, 1);
    /// `|i1`
    pub const I8: Self = Self::little(ElementKind::Signed, 1);
    /// `<i2`
    pub const I16: Self = Self::little(ElementKind::Signed, 2);
    /// `<i4`
    pub const I32: Self = Self::little(ElementKind::Signed, 4);
    /// `<i8`
    pub const I64: Self = Self::little(ElementKind::Signed, 8);
    /// `|u1`
    pub const U8: Self = Self::little(ElementKind::Unsigned, 1);
    /// `<u2`
    pub const U16: Self = Self::little(ElementKind::Unsigned, 2);
    /// `<u4`
    pub const U32: Self = Self::little(ElementKind::Unsigned, 4);
    /// `<u8`
    pub const U64: Self = Self::little(ElementKind::Unsigned, 8);
    /// `<f2`
    pub const F16: Self = Self::little(ElementKind::Float, 2);
    /// `<f4`
    pub const F32: Self = Self::little(ElementKind::Float, 4);
    /// `<f8`
    pub const F64: Self = Self::little(ElementKind::Float, 8);
    /// `<c8`
    pub const C64: Self = Self::little(ElementKind::Complex, 8);
    /// `<c16`
    pub const C128: Self = Self::little(ElementKind::Complex, 16);

    const fn little(kind: ElementKind, size: u32) -> Self {
        Self { kind, size, big_endian: false }
    }

    /// What an element is made of.
    pub fn kind(self) -> ElementKind {
        self.kind
    }

    /// The size of an element, in bytes: from 1 to 2³¹ - 1.
    pub fn size(self) -> u64 {
        self.size.into()
    }

    /// Whether the most significant byte comes first. False where the order means nothing.
    pub fn is_big_endian(self) -> bool {
        self.big_endian
    }

    /// An element's bytes as a person reads them: `-7`, `0.5`, `1.0-2.0j`, `true`. Raw elements are hexadecimal, in the
    /// order of memory; so are bytes that are not as many as [`ElementType::size`], and a bool that is neither 0 nor 1.
    pub fn format(self, bytes: &[u8]) -> String {
        let value = match self.kind {
            _ if bytes.len() as u64 != self.size() => None,
            ElementKind::Raw => None,
            ElementKind::Bool => match bytes {
                [0] => Some("false".to_owned()),
                [1] => Some("true".to_owned()),
                _ => None,
            },
            ElementKind::Unsigned => Some(self.bits(bytes).to_string()),
            ElementKind::Signed => {
                let unused = 64 - 8 * self.size; // A shift up and down again extends the sign.
                Some((((self.bits(bytes) << unused) as i64) >> unused).to_string())
            }
            ElementKind::Float => Some(self.float(bytes)),
            ElementKind::Complex => {
                let (real, imaginary) = bytes.split_at(bytes.len() / 2);
                let (real, imaginary) = (self.float(real), self.float(imaginary));
                let plus = if imaginary.starts_with('-') { "" } else { "+" };
                Some(format!("{real}{plus}{imaginary}j"))
            }
        };
        value.unwrap_or_else(|| format!("0x{}", hex::encode(bytes)))
    }

    /// At most 8 bytes as a number.
    fn bits(self, bytes: &[u8]) -> u64 {
        let push = |bits: u64, byte: &u8| bits << 8 | u64::from(*byte);
        if self.big_endian { bytes.iter().fold(0, push) } else { bytes.iter().rev().fold(0, push) }
    }

    /// A float of 2, 4 or 8 bytes. `{:?}` is the shortest that reads back, with an exponent where it is very large or small.
    fn float(self, bytes: &[u8]) -> String {
        let bits = self.bits(bytes);
        match bytes.len() {
            2 => format!("{:?}", widen(bits as u16)),
            4 => format!("{:?}", f32::from_bits(bits as u32)),
            _ => format!("{:?}", f64::from_bits(bits)),
        }
    }
}

/// A half-precision float: each one is also an `f32`.
fn widen(half: u16) -> f32 {
    let (exponent, fraction) = (u32::from(half >> 10 & 0x1f), half & 0x3ff);
    let power = |exponent: u32| f32::from_bits(exponent << 23); // 2^(exponent - 127)
    let magnitude = match exponent {
        0 => f32::from(fraction) * power(127 - 24),
        31 if fraction == 0 => f32::INFINITY,
        31 => f32::NAN,
        _ => f32::from(0x400 | fraction) * power(exponent + 127 - 25),
    };
    if half >> 15 == 1 { -magnitude } else { magnitude }
}

impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let order = match self {
            _ if !has_order(self.kind, self.size) => '|',
            Self { big_endian: true, .. } => '>',
            _ => '<',
        };
        write!(f, "{order}{}{}", self.kind.letter(), self.size)
    }
}

fn has_order(kind: ElementKind, size: u32) -> bool {
    size > 1 && kind != ElementKind::Raw
}

impl FromStr for ElementType {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let named = NAMES.iter().find(|(name, _)| *name == text).map(|(_, known)| *known);
        named.or_else(|| parse_typestr(text)).ok_or_else(|| {
            let text = quote(text);
            format!(
                "{text} is no element type: write bool, i8 to i64, u8 to u64, f16 to f64, c64 or c128, or a typestr such \
                 as <f4, >i2, |u1 or |V16"
            )
        })
    }
}

fn parse_typestr(text: &str) -> Option<ElementType> {
    let (order, rest) = text.split_at_checked(1)?;
    let (letter, digits) = rest.split_at_checked(1)?;
    let plain = digits.bytes().all(|byte| byte.is_ascii_digit()) && !digits.starts_with('0');
    let size = digits.parse().ok().filter(|size| plain && *size <= i32::MAX as u32)?;
    let kind = match (letter, size) {
        ("b", 1) => ElementKind::Bool,
        ("i", 1 | 2 | 4 | 8) => ElementKind::Signed,
        ("u", 1 | 2 | 4 | 8) => ElementKind::Unsigned,
        ("f", 2 | 4 | 8) => ElementKind::Float,
        ("c", 8 | 16) => ElementKind::Complex,
        ("V", _) => ElementKind::Raw,
        _ => return None,
    };
    let big_endian = match order {
        "<" | ">" | "|" if !has_order(kind, size) => false,
        "<" => false,
        ">" => true,
        _ => return None,
    };
    Some(ElementType { kind, size, big_endian })
}

/// The text in a message. It may be a peer's: the message stays short, and shows what would be invisible.
fn quote(text: &str) -> String {
    match text.char_indices().nth(32) {
        Some((end, _)) => format!("`{}...`", text[..end].escape_debug()),
        None => format!("`{}`", text.escape_debug()),
    }
}

impl TryFrom<String> for ElementType {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<ElementType> for String {
    fn from(element: ElementType) -> Self {
        element.to_string()
    }
}

/// The order of a contiguous array's elements. Read as `C` or `F`, in either case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Order {
    /// The last index varies fastest: rows, as in C.
    C,
    /// The first index varies fastest: columns, as in Fortran.
    F,
}

impl FromStr for Order {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "C" | "c" => Ok(Self::C),
            "F" | "f" => Ok(Self::F),
            _ => Err(format!("{} is no order of elements: write C for rows or F for columns", quote(text))),
        }
    }
}

/// An n-dimensional array somewhere in a piece of memory.
///
/// As JSON: `{"typestr": "<f4", "shape": [768, 1024], "strides": null, "offset": 0}`. Absent strides are null, an absent
/// offset is 0, unknown fields are ignored; lists of more than [`MAX_DIMENSIONS`] are refused while they are read. Nothing
/// else is checked then: every method answers with an error where a descriptor makes no sense, and
/// [`ArrayDescriptor::check`] is the one that knows the memory.
///
/// A shape of no dimensions has one element; a dimension of length 0 makes an array without any, which needs no memory. A
/// stride of 0 repeats the same elements (a broadcast), so an array may have many more elements than its memory has bytes.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ArrayDescriptor {
    /// The type of each element.
    pub typestr: ElementType,
    /// The length of each dimension, in elements.
    #[serde(deserialize_with = "dimensions")]
    pub shape: Vec<u64>,
    /// The step from an element to the next along each dimension, in bytes; null if the array is contiguous in C order.
    #[serde(default, deserialize_with = "optional_dimensions")]
    pub strides: Option<Vec<i64>>,
    /// Where the element with all indices 0 begins, in bytes from the start of the memory.
    #[serde(default)]
    pub offset: u64,
}

impl ArrayDescriptor {
    /// A contiguous array at the start of the memory. Its strides are null where C order says the same.
    ///
    /// # Errors
    /// [`Error::Array`] if there are more than [`MAX_DIMENSIONS`], if 64 bits can't count its bytes, or if a stride that has to
    /// be given is 2⁶³ bytes or more.
    pub fn new(typestr: ElementType, shape: impl Into<Vec<u64>>, order: Order) -> Result<Self> {
        let array = Self { typestr, shape: shape.into(), strides: None, offset: 0 };
        array.bytes()?;
        let steps = array.contiguous(order);
        array.with(0, array.shape.clone(), steps)
    }

    /// How many elements it has: none if any dimension is 0.
    ///
    /// # Errors
    /// [`Error::Array`] if it is malformed, or 64 bits can't count them (as of a large broadcast).
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
        self.elements()?.checked_mul(self.typestr.size()).ok_or_else(|| {
            problem(format!("shape {:?} of {} has more bytes than 64 bits can count", self.shape, self.typestr))
        })
    }

    /// Its strides in bytes, also where they are null. A dimension of length 0 counts as 1 in them, as numpy has it.
    ///
    /// # Errors
    /// [`Error::Array`] if it is malformed, or a stride is 2⁶³ bytes or more.
    pub fn strides_in_bytes(&self) -> Result<Vec<i64>> {
        explicit(self.steps()?)
    }

    /// The bytes that it reaches, from the lowest to one past the highest, counted from the start of the memory. For an array
    /// without elements, the empty range at its offset.
    ///
    /// # Errors
    /// [`Error::Array`] if it is malformed, begins before the memory, or reaches further than 64 bits can count.
    pub fn span(&self) -> Result<Range<u64>> {
        let steps = self.steps()?;
        if self.is_empty() {
            return Ok(self.offset..self.offset);
        }
        let mut low = i128::from(self.offset);
        let mut high = low + i128::from(self.typestr.size());
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
    /// [`Error::OutOfRange`] if a byte of it, or the offset of an array without elements, lies outside; [`Error::Array`] as for
    /// [`ArrayDescriptor::span`].
    pub fn check(&self, extent: u64) -> Result<()> {
        let Range { start, end } = self.span()?;
        if end > extent {
            return Err(Error::OutOfRange { offset: start, length: end - start, size: extent });
        }
        Ok(())
    }

    /// Whether its elements lie side by side in this order. Strides of dimensions of length 1 don't matter, and an array
    /// without elements is contiguous in either order; a malformed one in none.
    pub fn is_contiguous(&self, order: Order) -> bool {
        self.steps().is_ok_and(|steps| self.steps_are(order, &steps))
    }

    /// Where the element of an index begins, in bytes from the start of the memory.
    ///
    /// # Errors
    /// [`Error::Array`] if there is no such element, and as for [`ArrayDescriptor::span`].
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
    /// [`Error::Array`] if there is no such axis, the range is not inside it, the step is 0, or a stride comes to 2⁶³ bytes or
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
    /// [`Error::Array`] if there is no such axis or index, or a stride that has to be given is 2⁶³ bytes or more; and as for
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
    /// [`Error::Array`] if `axes` does not name each axis once, or a stride that has to be given is 2⁶³ bytes or more; and as
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

    /// What `__cuda_array_interface__` says of the array in memory that is mapped at `address`.
    ///
    /// # Errors
    /// [`Error::Array`] if it passes the end of the address space, and as for [`ArrayDescriptor::span`].
    pub fn interface(&self, address: u64, read_only: bool) -> Result<Interface> {
        let span = self.span()?;
        // The interface wants a null pointer where there is nothing to point at.
        let pointer = match address.checked_add(span.end) {
            _ if self.is_empty() => 0,
            Some(_) => address + self.offset,
            None => {
                return Err(problem(format!("an array of bytes {span:?} passes the end of memory at {address:#x}")));
            }
        };
        Ok(Interface {
            shape: self.shape.clone(),
            typestr: self.typestr,
            data: (pointer, read_only),
            version: 3,
            strides: self.strides.clone(),
            stream: None,
        })
    }

    /// Where each element begins, in bytes from the start of the memory, in C order of the index whatever the strides are.
    /// Takes no memory in proportion to the elements.
    ///
    /// # Errors
    /// As for [`ArrayDescriptor::span`].
    pub fn offsets(&self) -> Result<Offsets> {
        self.span()?;
        Ok(Offsets {
            shape: self.shape.clone(),
            steps: self.steps()?,
            index: vec![0; self.shape.len()],
            next: (!self.is_empty()).then_some(self.offset.into()),
        })
    }

    fn is_empty(&self) -> bool {
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
    fn steps(&self) -> Result<Vec<i128>> {
        self.well_formed()?;
        Ok(match &self.strides {
            Some(strides) => strides.iter().map(|stride| i128::from(*stride)).collect(),
            None => self.contiguous(Order::C),
        })
    }

    /// The strides of a contiguous array of this shape. What would overflow stays at the largest value: that is further than
    /// any span may reach, or nothing where there are no elements.
    fn contiguous(&self, order: Order) -> Vec<i128> {
        let mut step = i128::from(self.typestr.size());
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

    fn steps_are(&self, order: Order, steps: &[i128]) -> bool {
        let mut each = self.shape.iter().zip(steps).zip(self.contiguous(order));
        self.is_empty() || each.all(|((length, step), want)| *length == 1 || *step == want)
    }

    /// Another array of the same memory. Its strides are null if they may be: readers of the interface like that best.
    fn with(&self, offset: u64, shape: Vec<u64>, steps: Vec<i128>) -> Result<Self> {
        let mut array = Self { typestr: self.typestr, shape, strides: None, offset };
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
        let Self { typestr, shape, strides, offset } = self;
        let strides = strides.as_ref().map_or("no strides".to_owned(), |strides| format!("strides {strides:?}"));
        problem(format!(
            "an array of {typestr} with shape {shape:?}, {strides} and offset {offset} reaches further than 64 bits can count"
        ))
    }
}

fn problem(problem: String) -> Error {
    Error::Array { problem }
}

fn explicit(steps: Vec<i128>) -> Result<Vec<i64>> {
    let fit = |step| {
        i64::try_from(step).map_err(|_| problem("the array needs a stride of more bytes than 63 bits can count".into()))
    };
    steps.into_iter().map(fit).collect()
}

/// The type, the shape, and the strides unless they are those of C order: `<f4 1024x768, strides 4x4096`.
impl fmt::Display for ArrayDescriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fn joined<T: ToString>(numbers: &[T]) -> String {
            numbers.iter().map(T::to_string).collect::<Vec<_>>().join("x")
        }
        write!(f, "{} {}", self.typestr, joined(&self.shape))?;
        self.strides.iter().try_for_each(|strides| write!(f, ", strides {}", joined(strides)))
    }
}

/// The dictionary of `__cuda_array_interface__`, version 3. Serialises to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Interface {
    /// The length of each dimension, in elements.
    pub shape: Vec<u64>,
    /// The type of each element.
    pub typestr: ElementType,
    /// The address of the first element (0 if there is none), and whether it may only be read.
    pub data: (u64, bool),
    /// 3.
    pub version: u32,
    /// The strides in bytes; null for C order.
    pub strides: Option<Vec<i64>>,
    /// Null: nobody has to wait for a stream, since all work is finished before memory is handed on.
    pub stream: Option<u64>,
}

/// Where the elements of an array begin, in C order of the index: see [`ArrayDescriptor::offsets`].
#[derive(Debug, Clone)]
pub struct Offsets {
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

/// Reads a list that is no longer than there may be dimensions, and stops at the first number too many.
fn dimensions<'de, D: Deserializer<'de>, T: Deserialize<'de>>(input: D) -> Result<Vec<T>, D::Error> {
    struct Bounded<T>(PhantomData<T>);

    impl<'de, T: Deserialize<'de>> Visitor<'de> for Bounded<T> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "a list of at most {MAX_DIMENSIONS} numbers, one for each dimension")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<T>, A::Error> {
            let mut numbers = Vec::new();
            while let Some(number) = list.next_element()? {
                if numbers.len() == MAX_DIMENSIONS {
                    return Err(serde::de::Error::invalid_length(MAX_DIMENSIONS + 1, &self));
                }
                numbers.push(number);
            }
            Ok(numbers)
        }
    }

    input.deserialize_seq(Bounded(PhantomData))
}

fn optional_dimensions<'de, D: Deserializer<'de>>(input: D) -> Result<Option<Vec<i64>>, D::Error> {
    #[derive(Deserialize)]
    struct Strides(#[serde(deserialize_with = "dimensions")] Vec<i64>);

    Ok(Option::<Strides>::deserialize(input)?.map(|Strides(strides)| strides))
}

/// Reads a shape: `5`, `1024x768`, `2x0x3`.
///
/// # Errors
/// One sentence that says what to write instead.
pub fn parse_shape(text: &str) -> Result<Vec<u64>, String> {
    let dimensions = text.split('x').count();
    if dimensions > MAX_DIMENSIONS {
        return Err(format!("{} has {dimensions} dimensions: write at most {MAX_DIMENSIONS}", quote(text)));
    }
    let lengths = text.split('x').map(|digits| {
        if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(format!("{} is no shape: write whole numbers with x between, as 5 or 1024x768", quote(text)));
        }
        let too_long = |_| format!("{} has a dimension longer than 64 bits can count: write less", quote(text));
        digits.parse().map_err(too_long)
    });
    lengths.collect()
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*, sample::select};
    use serde_json::json;

    use super::*;

    const F4: ElementType = ElementType::F32;
    const U1: ElementType = ElementType::U8;

    fn element(text: &str) -> ElementType {
        text.parse().unwrap()
    }

    fn array(text: &str, shape: &[u64], strides: Option<&[i64]>, offset: u64) -> ArrayDescriptor {
        let strides = strides.map(<[i64]>::to_vec);
        ArrayDescriptor { typestr: element(text), shape: shape.to_vec(), strides, offset }
    }

    /// A contiguous array of floats.
    fn floats(shape: &[u64]) -> ArrayDescriptor {
        ArrayDescriptor::new(F4, shape, Order::C).unwrap()
    }

    #[track_caller]
    fn refused<T: fmt::Debug>(result: Result<T>, part: &str) {
        match result {
            Err(Error::Array { problem }) => assert!(problem.contains(part), "{problem}"),
            other => panic!("{other:?} where an error was due: {part}"),
        }
    }

    #[test]
    fn element_types_are_read_as_typestrs_and_by_name() {
        for (text, typestr, size) in [
            ("<f4", "<f4", 4),
            (">i2", ">i2", 2),
            ("|u1", "|u1", 1),
            ("<u1", "|u1", 1),
            (">b1", "|b1", 1),
            ("|b1", "|b1", 1),
            ("<c8", "<c8", 8),
            (">c16", ">c16", 16),
            ("|V16", "|V16", 16),
            (">V1", "|V1", 1),
            ("|V2147483647", "|V2147483647", (1 << 31) - 1),
            ("bool", "|b1", 1),
            ("i8", "|i1", 1),
            ("i16", "<i2", 2),
            ("i32", "<i4", 4),
            ("i64", "<i8", 8),
            ("u8", "|u1", 1),
            ("u16", "<u2", 2),
            ("u32", "<u4", 4),
            ("u64", "<u8", 8),
            ("f16", "<f2", 2),
            ("f32", "<f4", 4),
            ("f64", "<f8", 8),
            ("c64", "<c8", 8),
            ("c128", "<c16", 16),
        ] {
            let read = element(text);
            assert_eq!((read.to_string().as_str(), read.size()), (typestr, size), "{text}");
            assert_eq!(read, element(typestr));
        }
        assert!(element(">i2").is_big_endian() && !element(">i1").is_big_endian() && !element("i16").is_big_endian());
        assert_eq!(element("|V3").kind(), ElementKind::Raw);
    }

    #[test]
    fn what_is_no_element_type_is_refused_in_one_sentence() {
        for text in [
            "",
            "<",
            "|",
            "f4",
            "f8",
            "F32",
            "<f",
            "<f3",
            "<f16",
            "<f04",
            "<f+4",
            "<f 4",
            "<f4 ",
            " <f4",
            "<<f4",
            "=f4",
            "=u1",
            "?b1",
            "|f4",
            "|i8",
            "<b2",
            "|b4",
            "|O",
            "|O8",
            "|S5",
            "<U5",
            "|V",
            "|V0",
            "|V2147483648",
            "|V99999999999999999999",
            "<M8[ns]",
            "<m8",
            "<t4",
            "<c4",
            "é4",
            "<é",
            "<fé",
            "\u{1b}[31m",
            "float32",
        ] {
            let error = text.parse::<ElementType>().unwrap_err();
            assert!(error.contains(" is no element type: write ") && !error.contains('\u{1b}'), "{text}: {error}");
        }
        for letter in ["é", "\u{1b}"] {
            let long = letter.repeat(1 << 20).parse::<ElementType>().unwrap_err();
            assert!(long.len() < 400 && !long.contains('\u{1b}'), "{long}");
        }
    }

    #[test]
    fn orders_are_read_in_either_case() {
        assert_eq!(
            ["C", "c", "F", "f"].map(|text| text.parse::<Order>().unwrap()),
            [Order::C, Order::C, Order::F, Order::F]
        );
        for text in ["", "A", "CF", "rows"] {
            assert!(text.parse::<Order>().unwrap_err().contains("write C "), "{text}");
        }
    }

    #[test]
    fn a_descriptor_is_read_as_numpy_would_write_it() {
        let interface = json!({
            "shape": [2, 3], "typestr": "<f8", "descr": [["", "<f8"]], "data": [140_000_000, false], "version": 3,
            "strides": [-24, 8], "offset": 24,
        });
        let read: ArrayDescriptor = serde_json::from_value(interface).unwrap();
        assert_eq!(read, array("<f8", &[2, 3], Some(&[-24, 8]), 24));
        for text in [
            r#"{"typestr":"|u1","shape":[]}"#,
            r#"{"typestr":"<u1","shape":[],"strides":null,"offset":0,"colour":"red"}"#,
        ] {
            assert_eq!(serde_json::from_str::<ArrayDescriptor>(text).unwrap(), array("|u1", &[], None, 0));
        }
        let written = serde_json::to_string(&floats(&[768, 1024])).unwrap();
        assert_eq!(written, r#"{"typestr":"<f4","shape":[768,1024],"strides":null,"offset":0}"#);
    }

    #[test]
    fn what_is_no_descriptor_is_not_read() {
        for text in [
            r#"{"shape":[1]}"#,
            r#"{"typestr":"<f4"}"#,
            r#"{"typestr":"<f4","shape":null}"#,
            r#"{"typestr":"<f4","shape":5}"#,
            r#"{"typestr":"<f4","shape":[-1]}"#,
            r#"{"typestr":"<f4","shape":[1.0]}"#,
            r#"{"typestr":"<f4","shape":["1"]}"#,
            r#"{"typestr":"<f4","shape":[18446744073709551616]}"#,
            r#"{"typestr":"<f4","shape":[1],"strides":[9223372036854775808]}"#,
            r#"{"typestr":"<f4","shape":[1],"strides":"C"}"#,
            r#"{"typestr":"<f4","shape":[1],"offset":-1}"#,
            r#"{"typestr":"<f4","shape":[1],"offset":null}"#,
            r#"{"typestr":"|O8","shape":[1]}"#,
            r#"{"typestr":4,"shape":[1]}"#,
        ] {
            assert!(serde_json::from_str::<ArrayDescriptor>(text).is_err(), "{text}");
        }
    }

    #[test]
    fn more_than_64_dimensions_are_refused_also_while_they_are_read() {
        let most = array("|u1", &[1; 64], Some(&[0; 64]), 0);
        let text = serde_json::to_string(&most).unwrap();
        assert_eq!(serde_json::from_str::<ArrayDescriptor>(&text).unwrap(), most);
        most.check(1).unwrap();
        let sixty_five = vec!["1"; 65].join(",");
        // The list goes on with nonsense: it must not be read that far.
        for lists in [format!(r#""shape":[{sixty_five},!"#), format!(r#""shape":[1],"strides":[{sixty_five},!"#)] {
            let error = serde_json::from_str::<ArrayDescriptor>(&format!(r#"{{"typestr":"<f4",{lists}"#)).unwrap_err();
            assert!(error.to_string().contains("at most 64"), "{error}");
        }
        let made = ArrayDescriptor { shape: vec![1; 65], strides: None, ..most };
        refused(ArrayDescriptor::new(U1, [1; 65], Order::C), "65 dimensions");
        refused(made.elements(), "65 dimensions");
        refused(made.check(u64::MAX), "65 dimensions");
        refused(made.offset_of(&[0; 65]), "65 dimensions");
        assert!(!made.is_contiguous(Order::C));
    }

    #[test]
    fn strides_must_be_as_many_as_dimensions() {
        for strides in [&[][..], &[1], &[1, 1, 1]] {
            let made = array("|u1", &[1, 0], Some(strides), 0);
            refused(made.check(u64::MAX), &format!("{} strides can't belong to 2 dimensions", strides.len()));
            refused(made.elements(), "strides");
            refused(made.strides_in_bytes(), "strides");
            refused(made.interface(0, false), "strides");
            assert!(!made.is_contiguous(Order::C) && !made.is_contiguous(Order::F));
        }
    }

    #[test]
    fn contiguous_arrays_have_the_strides_of_their_order() {
        let c = ArrayDescriptor::new(F4, [2, 3, 4], Order::C).unwrap();
        assert_eq!((c.strides.clone(), c.strides_in_bytes().unwrap()), (None, vec![48, 16, 4]));
        let f = ArrayDescriptor::new(F4, [2, 3, 4], Order::F).unwrap();
        assert_eq!(f.strides, Some(vec![4, 8, 24]));
        for made in [&c, &f] {
            assert_eq!((made.elements().unwrap(), made.bytes().unwrap(), made.span().unwrap()), (24, 96, 0..96));
        }
        // One order or the other is the same for a line, and for nothing.
        for shape in [&[][..], &[5], &[1, 5, 1], &[5, 0, 7]] {
            assert_eq!(ArrayDescriptor::new(F4, shape, Order::F).unwrap().strides, None, "{shape:?}");
        }
        assert_eq!(floats(&[3, 0, 4]).strides_in_bytes().unwrap(), [16, 16, 4]);
    }

    #[test]
    fn a_count_beyond_64_bits_is_an_error_unless_there_is_nothing_to_count() {
        let huge = u64::MAX;
        for order in [Order::C, Order::F] {
            refused(ArrayDescriptor::new(U1, [huge, 2], order), "more elements than 64 bits");
            refused(ArrayDescriptor::new(F4, [1 << 62], order), "more bytes than 64 bits");
            let made = ArrayDescriptor::new(U1, [huge, 1], order).unwrap();
            assert_eq!((made.bytes().unwrap(), made.span().unwrap()), (huge, 0..huge));
            let nothing = ArrayDescriptor::new(F4, [huge, huge, 0, huge], order).unwrap();
            assert_eq!((nothing.elements().unwrap(), nothing.bytes().unwrap()), (0, 0));
            nothing.check(0).unwrap();
        }
        refused(array("<f4", &[huge, huge, 0, huge], None, 0).strides_in_bytes(), "stride");
        refused(ArrayDescriptor::new(U1, [2, 1 << 62, 1], Order::F), "stride of more bytes");
        refused(array("|u1", &[1, 1 << 63], None, 0).strides_in_bytes(), "stride of more bytes");
        refused(array("|u1", &[2, huge, huge, huge], None, 0).span(), "further than 64 bits");
    }

    #[test]
    fn a_broadcast_may_have_more_elements_than_can_be_counted() {
        let made = array("<f8", &[u64::MAX, 3, u64::MAX], Some(&[0, 8, 0]), 8);
        assert_eq!(made.span().unwrap(), 8..32);
        made.check(32).unwrap();
        refused(made.elements(), "more elements than 64 bits");
        assert_eq!(made.offset_of(&[u64::MAX - 1, 2, 7]).unwrap(), 24);
        assert_eq!(made.offsets().unwrap().take(3).collect::<Vec<_>>(), [8, 8, 8]);
        assert_eq!(
            made.index(0, 1 << 63).unwrap().index(1, 0).unwrap().offsets().unwrap().collect::<Vec<_>>(),
            [8, 16, 24]
        );
    }

    #[test]
    fn a_byte_outside_the_memory_is_an_error_that_says_which() {
        let made = array("<f4", &[3, 2], Some(&[-8, 4]), 16);
        assert_eq!(made.span().unwrap(), 0..24);
        made.check(24).unwrap();
        let error = made.check(23).unwrap_err();
        assert!(matches!(error, Error::OutOfRange { offset: 0, length: 24, size: 23 }), "{error}");
        assert_eq!((error.kind(), problem(String::new()).kind()), (crate::ErrorKind::Usage, crate::ErrorKind::Usage));
        let before = ArrayDescriptor { offset: 15, ..made.clone() };
        refused(before.check(u64::MAX), "lowest byte lies 1 bytes before");
        let end = ArrayDescriptor { offset: u64::MAX - 8, ..made };
        assert_eq!(end.span().unwrap(), u64::MAX - 24..u64::MAX);
        refused(ArrayDescriptor { offset: u64::MAX - 7, ..end }.span(), "further than 64 bits");
        // Sums of 2¹²⁸ bytes, which are nothing to who counts in 128 bits.
        for (last, strides) in [(5, [i64::MIN; 3]), (17, [i64::MAX, i64::MAX, 1 << 62])] {
            let around = array("|V8", &[u64::MAX, u64::MAX, last], Some(&strides), 0);
            refused(around.check(u64::MAX), "further than 64 bits");
        }
    }

    #[test]
    fn an_array_without_elements_needs_no_memory() {
        let wild = array("|V2147483647", &[u64::MAX, 0, 5], Some(&[i64::MAX, i64::MIN, -1]), 0);
        wild.check(0).unwrap();
        assert_eq!(wild.interface(4096, true).unwrap().data, (0, true));
        assert_eq!(wild.offsets().unwrap().next(), None);
        let wider = array("<f4", &[9, u64::MAX, u64::MAX, u64::MAX, 0], None, 0);
        refused(wider.offset_of(&[8, 8, 8, 8, 0]), "index 0 is not inside dimension 4, of length 0");
        assert_eq!(wider.slice(0, 0..9, 2).unwrap().shape[0], 5);
        let behind = ArrayDescriptor { offset: 9, ..wild };
        assert_eq!(behind.span().unwrap(), 9..9);
        behind.check(9).unwrap();
        assert!(matches!(behind.check(8), Err(Error::OutOfRange { offset: 9, length: 0, size: 8 })));
        for part in [behind.slice(0, 3..9, -2), behind.index(0, 7), behind.index(2, 4), behind.transpose()] {
            assert_eq!(part.unwrap().span().unwrap(), 9..9);
        }
        // Cutting everything away leaves nothing that could lie outside.
        for range in [0..0, 3..3] {
            assert_eq!(array("|u1", &[3], Some(&[-7]), 14).slice(0, range, -1).unwrap(), array("|u1", &[0], None, 14));
        }
    }

    #[test]
    fn a_shape_of_no_dimensions_is_one_element() {
        let made = array("<c16", &[], Some(&[]), 7);
        assert_eq!((made.elements().unwrap(), made.span().unwrap()), (1, 7..23));
        assert_eq!(made.offset_of(&[]).unwrap(), 7);
        assert_eq!(made.offsets().unwrap().collect::<Vec<_>>(), [7]);
        assert!(made.is_contiguous(Order::C) && made.is_contiguous(Order::F));
        assert_eq!(made.transpose().unwrap().span().unwrap(), 7..23);
        refused(made.index(0, 0), "no axis 0 among 0");
    }

    #[test]
    fn parts_are_those_of_numpy() {
        let made = floats(&[4, 5]);
        let part = made.slice(0, 1..4, 2).unwrap();
        assert_eq!(part, array("<f4", &[2, 5], Some(&[40, 4]), 20));
        assert_eq!(part.slice(1, 0..5, -3).unwrap(), array("<f4", &[2, 2], Some(&[40, -12]), 36));
        assert_eq!(made.slice(0, 1..3, 1).unwrap(), array("<f4", &[2, 5], None, 20), "whole rows are contiguous");
        assert_eq!(made.slice(1, 2..5, i64::MIN).unwrap(), array("<f4", &[4, 1], Some(&[20, 4]), 16));
        assert_eq!(made.slice(1, 2..5, i64::MAX).unwrap(), array("<f4", &[4, 1], Some(&[20, 4]), 8));
        assert_eq!(made.index(0, 3).unwrap(), array("<f4", &[5], None, 60));
        assert_eq!(made.index(1, 3).unwrap(), array("<f4", &[4], Some(&[20]), 12));
        assert_eq!(made.transpose().unwrap(), array("<f4", &[5, 4], Some(&[4, 20]), 0));
        assert_eq!(made.transpose().unwrap().transpose().unwrap(), made);
        let three = floats(&[2, 3, 4]).permute(&[2, 0, 1]).unwrap();
        assert_eq!((three.shape, three.strides), (vec![4, 2, 3], Some(vec![4, 48, 16])));
    }

    #[test]
    fn what_does_not_belong_to_the_array_is_refused() {
        let made = floats(&[4, 5]);
        refused(made.slice(2, 0..1, 1), "no axis 2 among 2");
        refused(made.slice(1, 0..5, 0), "step of 0");
        refused(made.slice(1, 0..6, 1), "0..6 is no range in dimension 1, of length 5");
        #[expect(clippy::reversed_empty_ranges, reason = "it is what must be refused")]
        refused(made.slice(1, 3..2, 1), "3..2 is no range");
        refused(made.index(0, 4), "index 4 is not inside dimension 0, of length 4");
        refused(made.index(9, 0), "no axis 9");
        refused(made.offset_of(&[1]), "1 numbers");
        refused(made.offset_of(&[3, 5]), "index 5 is not inside dimension 1, of length 5");
        refused(floats(&[4, 0]).offset_of(&[0, 0]), "index 0 is not inside dimension 1, of length 0");
        for axes in [&[][..], &[0], &[0, 0], &[1, 2], &[0, 1, 2], &[0, 1, 1], &[usize::MAX, 0]] {
            refused(made.permute(axes), "does not name each of 2 axes once");
        }
        let outside = array("<f4", &[4, 5], Some(&[-20, 4]), 0);
        refused(outside.slice(0, 0..1, 1), "before the start");
        refused(outside.index(0, 0), "before the start");
        refused(outside.transpose(), "before the start");
        refused(outside.offset_of(&[0, 0]), "before the start");
        refused(outside.offsets(), "before the start");
        refused(outside.interface(1 << 40, false), "before the start");
        refused(array("|u1", &[3], Some(&[1 << 62]), 0).slice(0, 0..3, 2), "stride of more bytes");
    }

    #[test]
    fn contiguity_looks_at_the_dimensions_that_matter() {
        let both = |made: &ArrayDescriptor| (made.is_contiguous(Order::C), made.is_contiguous(Order::F));
        for (shape, strides, want) in [
            (&[2, 3][..], Some(&[12, 4][..]), (true, false)),
            (&[2, 3], None, (true, false)),
            (&[2, 3], Some(&[4, 8]), (false, true)),
            (&[2, 3], Some(&[16, 4]), (false, false)),
            (&[2, 3], Some(&[-12, 4]), (false, false)),
            (&[2, 3], Some(&[0, 4]), (false, false)),
            (&[3], Some(&[4]), (true, true)),
            (&[3], Some(&[8]), (false, false)),
            (&[1, 3, 1], Some(&[-99, 4, 0]), (true, true)),
            (&[2, 0], Some(&[77, -5]), (true, true)),
        ] {
            assert_eq!(both(&array("<f4", shape, strides, 4)), want, "{shape:?} {strides:?}");
        }
    }

    #[test]
    fn the_interface_is_the_dictionary_of_version_3() {
        let made = floats(&[2, 3]).slice(0, 0..2, -1).unwrap();
        assert_eq!(
            serde_json::to_value(made.interface(0x7f00_0000_0000, true).unwrap()).unwrap(),
            json!({
                "shape": [2, 3], "typestr": "<f4", "data": [0x7f00_0000_000cu64, true], "version": 3, "strides": [-12, 4],
                "stream": null,
            })
        );
        let whole = serde_json::to_value(floats(&[2]).interface(256, false).unwrap()).unwrap();
        assert_eq!((&whole["strides"], &whole["data"]), (&json!(null), &json!([256, false])));
        floats(&[2]).interface(u64::MAX - 8, false).unwrap();
        refused(floats(&[2]).interface(u64::MAX - 7, false), "passes the end of memory");
        assert_eq!(array("<f4", &[0], None, 5).interface(u64::MAX, false).unwrap().data, (0, false));
    }

    #[test]
    fn elements_are_shown_as_people_write_them() {
        for (typestr, bytes, shown) in [
            ("|b1", &[0][..], "false"),
            ("|b1", &[1], "true"),
            ("|b1", &[2], "0x02"),
            ("|i1", &[0xff], "-1"),
            ("<i2", &[0xfe, 0xff], "-2"),
            (">i2", &[0xff, 0xfe], "-2"),
            ("<i4", &[1, 2, 0, 0], "513"),
            ("<i8", &i64::MIN.to_le_bytes(), "-9223372036854775808"),
            ("|u1", &[0xff], "255"),
            (">u4", &[0, 0, 1, 2], "258"),
            ("<u8", &u64::MAX.to_le_bytes(), "18446744073709551615"),
            ("<f4", &0.1f32.to_le_bytes(), "0.1"),
            (">f4", &(-1f32).to_be_bytes(), "-1.0"),
            ("<f8", &1e300f64.to_le_bytes(), "1e300"),
            (">f8", &f64::NAN.to_be_bytes(), "NaN"),
            ("<f4", &f32::NEG_INFINITY.to_le_bytes(), "-inf"),
            ("<f2", &[0x00, 0x3c], "1.0"),
            (">f2", &[0xc0, 0x00], "-2.0"),
            ("<f2", &[0xff, 0x7b], "65504.0"),
            ("<f2", &[0x01, 0x00], "5.9604645e-8"),
            ("<f2", &[0xff, 0x03], "6.097555e-5"),
            ("<f2", &[0x00, 0x04], "6.1035156e-5"),
            ("<f2", &[0x00, 0x80], "-0.0"),
            ("<f2", &[0x00, 0x7c], "inf"),
            ("<f2", &[0x01, 0x7c], "NaN"),
            ("<c8", &[1f32.to_le_bytes(), (-2f32).to_le_bytes()].concat(), "1.0-2.0j"),
            (">c16", &[1.5f64.to_be_bytes(), 0f64.to_be_bytes()].concat(), "1.5+0.0j"),
            ("<c8", &[f32::NAN.to_le_bytes(), f32::NAN.to_le_bytes()].concat(), "NaN+NaNj"),
            ("|V3", &[0, 0xab, 0x10], "0x00ab10"),
            ("<f4", &[1, 2], "0x0102"),
            ("<i8", &[1; 9], "0x010101010101010101"),
            ("|b1", &[], "0x"),
        ] {
            assert_eq!(element(typestr).format(bytes), shown, "{typestr} {bytes:?}");
        }
    }

    #[test]
    fn shapes_are_read_with_an_x_between() {
        for (text, shape) in [
            ("5", &[5][..]),
            ("1024x768", &[1024, 768]),
            ("2x0x3", &[2, 0, 3]),
            ("18446744073709551615x007", &[u64::MAX, 7]),
        ] {
            assert_eq!(parse_shape(text).unwrap(), shape);
        }
        assert_eq!(parse_shape(&vec!["1"; 64].join("x")).unwrap(), [1; 64]);
    }

    #[test]
    fn what_is_no_shape_is_refused_in_one_sentence() {
        for text in [
            "", " ", "x", "5x", "x5", "2xx3", "2X3", "2 x 3", " 5", "5\n", "-1", "+1", "2x-3", "1.5", "1e3", "0x10x",
            "2,3", "(2)", "2×3", "٣",
        ] {
            let error = parse_shape(text).unwrap_err();
            assert!(error.starts_with(&quote(text)) && error.contains(" is no shape: write "), "{text:?}: {error}");
        }
        assert!(parse_shape("2x18446744073709551616").unwrap_err().contains("than 64 bits can count: write less"));
        let many = parse_shape(&vec!["1"; 65].join("x")).unwrap_err();
        assert!(many.contains("has 65 dimensions: write at most 64") && many.len() < 100, "{many}");
    }

    /// Many cases in little time; no file of failures in the tree: what fails becomes a test with a name.
    fn cases(cases: u32) -> ProptestConfig {
        ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
    }

    fn any_element() -> impl Strategy<Value = ElementType> {
        select(vec!["|b1", "|u1", ">i2", "<f4", ">f8", "<c16", "|V3", "|V2147483647"]).prop_map(element)
    }

    /// Numbers near which something overflows, and small ones.
    fn edges() -> impl Strategy<Value = u64> {
        let near = (select(vec![1 << 31, 1 << 32, 1 << 62, 1 << 63, u64::MAX]), 0..3u64);
        prop_oneof![4 => 0..6u64, 3 => near.prop_map(|(edge, off)| edge - off), 1 => any::<u64>()]
    }

    fn signed_edges() -> impl Strategy<Value = i64> {
        let near = (select(vec![i64::MIN + 1, -(1 << 32), 1 << 32, 1 << 62, i64::MAX - 1]), -1..2i64);
        prop_oneof![4 => -9..9i64, 3 => near.prop_map(|(edge, off)| edge + off), 1 => any::<i64>()]
    }

    /// Any descriptor that its type allows.
    fn anything() -> impl Strategy<Value = ArrayDescriptor> {
        let strides = prop_oneof![Just(None), vec(signed_edges(), 0..5).prop_map(Some)];
        (any_element(), vec(edges(), 0..5), strides, edges())
            .prop_map(|(typestr, shape, strides, offset)| ArrayDescriptor { typestr, shape, strides, offset })
    }

    /// A well-formed one whose numbers may be of any size.
    fn large() -> impl Strategy<Value = ArrayDescriptor> {
        let dimensions = vec((edges(), signed_edges()), 0..5);
        (any_element(), dimensions, any::<bool>(), edges()).prop_map(|(typestr, dimensions, explicit, offset)| {
            let (shape, strides): (Vec<_>, Vec<_>) = dimensions.into_iter().unzip();
            ArrayDescriptor { typestr, shape, strides: explicit.then_some(strides), offset }
        })
    }

    /// A well-formed one that can be walked through; it may begin before its memory.
    fn small() -> impl Strategy<Value = ArrayDescriptor> {
        let element = select(vec!["|u1", ">i2", "<f4", "|V3"]).prop_map(element);
        let dimensions = vec((prop_oneof![9 => 1..5u64, 1 => Just(0)], -20..20i64), 0..4);
        (element, dimensions, any::<bool>(), 0..150u64).prop_map(|(typestr, dimensions, explicit, offset)| {
            let (shape, strides): (Vec<_>, Vec<_>) = dimensions.into_iter().unzip();
            ArrayDescriptor { typestr, shape, strides: explicit.then_some(strides), offset }
        })
    }

    /// One that lies in 64 bits by the way it is made, as far apart as there is room for.
    fn large_and_sound() -> impl Strategy<Value = ArrayDescriptor> {
        let dimensions = vec((signed_edges(), edges()), 1..5);
        (any_element(), dimensions, edges()).prop_map(|(typestr, dimensions, place)| {
            let mut room = u64::MAX - typestr.size();
            let (mut below, mut shape, mut strides) = (0, vec![], vec![]);
            for (stride, wish) in dimensions {
                let most = room.checked_div(stride.unsigned_abs()).unwrap_or(u64::MAX - 1);
                let last = if wish <= most { wish.min(u64::MAX - 1) } else { wish % (most + 1) };
                let reach = last * stride.unsigned_abs();
                room -= reach;
                below += if stride < 0 { reach } else { 0 };
                shape.push(last + 1);
                strides.push(stride);
            }
            let offset = below + if place <= room { place } else { room };
            ArrayDescriptor { typestr, shape, strides: Some(strides), offset }
        })
    }

    /// What a caller may ask for a part with, and what it means, index by index.
    #[derive(Debug, Clone, Copy)]
    enum Cut {
        Slice { axis: usize, ends: (u64, u64), step: i64 },
        Index { axis: usize, at: u64 },
        Swap { one: usize, other: usize },
    }

    fn cut() -> impl Strategy<Value = Cut> {
        let axis = 0..5usize;
        let step = prop_oneof![4 => -4..5i64, 1 => signed_edges()];
        prop_oneof![
            3 => (axis.clone(), (edges(), edges()), step).prop_map(|(axis, ends, step)| Cut::Slice { axis, ends, step }),
            1 => (axis.clone(), edges()).prop_map(|(axis, at)| Cut::Index { axis, at }),
            1 => (axis.clone(), axis).prop_map(|(one, other)| Cut::Swap { one, other }),
        ]
    }

    impl Cut {
        /// Brought into an array: none if there is nothing to cut.
        fn fit(self, shape: &[u64]) -> Option<Self> {
            let axes = shape.len();
            let into = |number: u64, limit: u64| if number <= limit { number } else { number % limit.max(1) };
            if axes == 0 {
                return None;
            }
            Some(match self {
                Self::Slice { axis, ends: (one, other), step } => {
                    let axis = axis % axes;
                    let (one, other) = (into(one, shape[axis]), into(other, shape[axis]));
                    let step = if step == 0 { 1 } else { step };
                    Self::Slice { axis, ends: (one.min(other), one.max(other)), step }
                }
                Self::Index { axis, .. } if shape[axis % axes] == 0 => return None,
                Self::Index { axis, at } => {
                    let axis = axis % axes;
                    Self::Index { axis, at: into(at, shape[axis] - 1) }
                }
                Self::Swap { one, other } => Self::Swap { one: one % axes, other: other % axes },
            })
        }

        fn of(self, array: &ArrayDescriptor) -> Result<ArrayDescriptor> {
            match self {
                Self::Slice { axis, ends: (start, end), step } => array.slice(axis, start..end, step),
                Self::Index { axis, at } => array.index(axis, at),
                Self::Swap { one, other } => {
                    let mut axes: Vec<_> = (0..array.shape.len()).collect();
                    axes.swap(one, other);
                    array.permute(&axes)
                }
            }
        }

        /// The index in the whole of an index in the part.
        fn back(self, index: &[u64]) -> Vec<u64> {
            let mut index = index.to_vec();
            match self {
                Self::Slice { axis, ends: (start, end), step } => {
                    let walked = u64::try_from(i128::from(index[axis]) * i128::from(step.unsigned_abs())).unwrap();
                    index[axis] = if step > 0 { start + walked } else { end - 1 - walked };
                }
                Self::Index { axis, at } => index.insert(axis, at),
                Self::Swap { one, other } => index.swap(one, other),
            }
            index
        }

        /// How long each dimension of the part is, counted where it can be.
        fn shape(self, whole: &[u64]) -> Vec<u64> {
            let mut shape = whole.to_vec();
            match self {
                Self::Slice { axis, ends: (start, end), step } => {
                    let step = usize::try_from(step.unsigned_abs()).unwrap();
                    shape[axis] = (start..end).step_by(step).count() as u64;
                }
                Self::Index { axis, .. } => drop(shape.remove(axis)),
                Self::Swap { one, other } => shape.swap(one, other),
            }
            shape
        }
    }

    /// Every index of a small shape, in C order.
    fn indices(shape: &[u64]) -> Vec<Vec<u64>> {
        shape.iter().fold(vec![vec![]], |all, length| {
            let longer =
                |index: &Vec<u64>| (0..*length).map(|at| [index.as_slice(), &[at]].concat()).collect::<Vec<_>>();
            all.iter().flat_map(longer).collect()
        })
    }

    /// Where every element of a small array begins, one by one.
    fn by_walking(array: &ArrayDescriptor) -> Vec<i128> {
        let place = |index: &Vec<u64>| {
            let step = |axis: usize| match &array.strides {
                Some(strides) => i128::from(strides[axis]),
                None => {
                    array.shape[axis + 1..].iter().map(|n| i128::from(*n)).product::<i128>()
                        * i128::from(array.typestr.size())
                }
            };
            (0..index.len()).fold(i128::from(array.offset), |at, axis| at + i128::from(index[axis]) * step(axis))
        };
        indices(&array.shape).iter().map(place).collect()
    }

    /// The span of an array of any size: takes from the room that is left on either side, and never adds up.
    fn by_the_room_left(array: &ArrayDescriptor) -> Option<Range<u64>> {
        if array.shape.contains(&0) {
            return Some(array.offset..array.offset);
        }
        let mut below = u128::from(array.offset);
        let mut above = u128::from(u64::MAX - array.offset).checked_sub(array.typestr.size.into())?;
        match &array.strides {
            Some(strides) => {
                for (length, stride) in array.shape.iter().zip(strides) {
                    let reach = u128::from(length - 1) * u128::from(stride.unsigned_abs());
                    let side = if *stride < 0 { &mut below } else { &mut above };
                    *side = side.checked_sub(reach)?;
                }
            }
            None => {
                let mut bytes = u128::from(array.typestr.size);
                for length in &array.shape {
                    bytes = u64::try_from(bytes * u128::from(*length)).ok()?.into();
                }
                above = (above + u128::from(array.typestr.size)).checked_sub(bytes)?;
            }
        }
        Some(u64::try_from(below).unwrap()..u64::MAX - u64::try_from(above).unwrap())
    }

    proptest! {
        #![proptest_config(cases(512))]

        #[test]
        fn the_span_of_a_small_array_is_that_of_all_its_elements(made in small()) {
            let places = by_walking(&made);
            let size = i128::from(made.typestr.size);
            let (low, high) = (places.iter().min(), places.iter().max().map(|last| last + size));
            match (low, high) {
                (Some(low), Some(_)) if *low < 0 => {
                    refused(made.span(), "before the start");
                    prop_assert!(made.offsets().is_err() && made.check(u64::MAX).is_err());
                }
                (Some(low), Some(high)) => {
                    let (low, high) = (u64::try_from(*low).unwrap(), u64::try_from(high).unwrap());
                    prop_assert_eq!(made.span().unwrap(), low..high);
                    prop_assert!(made.check(high).is_ok() && made.check(high - 1).is_err());
                }
                _ => prop_assert_eq!(made.span().unwrap(), made.offset..made.offset),
            }
            prop_assert_eq!(made.elements().unwrap(), places.len() as u64);
            if let Ok(offsets) = made.offsets() {
                prop_assert_eq!(offsets.map(i128::from).collect::<Vec<_>>(), &*places);
                for (index, place) in indices(&made.shape).iter().zip(places) {
                    prop_assert_eq!(i128::from(made.offset_of(index).unwrap()), place);
                }
            }
            let explicit = ArrayDescriptor { strides: Some(made.strides_in_bytes().unwrap()), ..made.clone() };
            prop_assert_eq!(explicit.span().ok(), made.span().ok());
        }

        #[test]
        fn contiguous_is_what_a_new_array_of_that_order_is(made in small(), order in select(vec![Order::C, Order::F])) {
            let fresh = ArrayDescriptor::new(made.typestr, &*made.shape, order).unwrap();
            prop_assert!(fresh.is_contiguous(order));
            prop_assert_eq!(fresh.span().unwrap(), 0..fresh.bytes().unwrap());
            let moved = |array: &ArrayDescriptor| {
                by_walking(array).iter().map(|place| place - i128::from(array.offset)).collect::<Vec<_>>()
            };
            prop_assert_eq!(made.is_contiguous(order), moved(&made) == moved(&fresh));
        }

        #[test]
        fn parts_of_a_small_array_are_inside_it_and_name_the_same_elements(made in small(), cuts in vec(cut(), 1..4)) {
            prop_assume!(made.span().is_ok());
            let mut whole = made;
            for cut in cuts {
                let Some(cut) = cut.fit(&whole.shape) else { continue };
                let part = cut.of(&whole).unwrap();
                prop_assert_eq!(&part.shape, &cut.shape(&whole.shape));
                let named = indices(&part.shape).into_iter().map(|index| whole.offset_of(&cut.back(&index)).unwrap());
                prop_assert_eq!(part.offsets().unwrap().collect::<Vec<_>>(), named.collect::<Vec<_>>());
                part.check(whole.span().unwrap().end).unwrap();
                prop_assert!(part.span().unwrap().start >= whole.span().unwrap().start);
                whole = part;
            }
        }
    }

    proptest! {
        #![proptest_config(cases(4096))]

        #[test]
        fn the_span_of_an_array_of_any_size_is_that_of_its_corners(made in large(), extent in edges()) {
            let span = by_the_room_left(&made);
            prop_assert_eq!(made.span().ok(), span.clone());
            prop_assert_eq!(made.check(extent).is_ok(), span.as_ref().is_some_and(|span| span.end <= extent));
            if let Some(span) = span {
                prop_assert!(made.check(span.end).is_ok());
                prop_assert!(span.end == 0 || made.check(span.end - 1).is_err());
            }
        }

        #[test]
        fn parts_of_an_array_of_any_size_are_inside_it_and_have_its_corners(made in large_and_sound(), cut in cut()) {
            let span = made.span().unwrap();
            prop_assert_eq!(Some(span.clone()), by_the_room_left(&made));
            let Some(cut) = cut.fit(&made.shape) else { return Ok(()) };
            let part = match cut.of(&made) {
                Ok(part) => part,
                Err(Error::Array { problem }) if problem.contains("stride of more bytes") => return Ok(()),
                Err(error) => return Err(TestCaseError::fail(error.to_string())),
            };
            part.check(span.end).unwrap();
            prop_assert!(part.span().unwrap().start >= span.start);
            if !part.shape.contains(&0) {
                let first = vec![0; part.shape.len()];
                let last: Vec<_> = part.shape.iter().map(|length| length - 1).collect();
                for corner in [first, last] {
                    prop_assert_eq!(part.offset_of(&corner).unwrap(), made.offset_of(&cut.back(&corner)).unwrap());
                }
            }
        }

        #[test]
        fn no_descriptor_makes_any_method_panic(
            made in anything(), cut in cut(), extent in edges(), index in vec(edges(), 0..5)
        ) {
            let _ = (made.elements(), made.bytes(), made.strides_in_bytes(), made.span(), made.check(extent));
            let _ = (made.is_contiguous(Order::C), made.is_contiguous(Order::F), made.offset_of(&index));
            let _ = (made.interface(extent, true), made.offsets().map(|all| all.take(3).count()), made.transpose());
            let _ = [Order::C, Order::F].map(|order| ArrayDescriptor::new(made.typestr, &*made.shape, order));
            if let Cut::Slice { axis, ends: (start, end), step } = cut {
                let _ = (made.slice(axis, start..end, step), made.index(axis, start), made.permute(&[axis, 0]));
            }
        }

        #[test]
        fn a_descriptor_comes_back_from_json_as_it_was(made in anything()) {
            let text = serde_json::to_string(&made).unwrap();
            prop_assert_eq!(serde_json::from_str::<ArrayDescriptor>(&text).unwrap(), made);
        }

        #[test]
        fn any_text_is_read_or_refused_in_one_sentence(
            text in "[<>|=]?[biufcVO]?[0-9]{0,3}|[0-9xX]{0,8}|.{0,40}", bytes in vec(any::<u8>(), 0..20)
        ) {
            match text.parse::<ElementType>() {
                Ok(read) => {
                    prop_assert_eq!(read, element(&read.to_string()));
                    prop_assert!(!read.format(&bytes).is_empty());
                }
                Err(error) => prop_assert!(error.contains("write ") && error.len() < 600),
            }
            if let Err(error) = parse_shape(&text) {
                prop_assert!(error.contains("write ") && error.len() < 600);
            }
        }
    }
}
