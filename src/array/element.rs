//! The types of elements.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use super::quote;

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
