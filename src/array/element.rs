//! Element types, and their names in NumPy, ml_dtypes, PyTorch, Rust and the array interface.

use std::{borrow::Cow, fmt, str::FromStr};

use crate::error::ParseError;

/// The largest element, in bytes: NumPy stores the size in a C `int`.
const MAX_SIZE: u32 = i32::MAX as u32;

/// The meaning of an element's bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    /// One byte, 0 or 1.
    Bool,
    /// An integer in two's complement.
    Signed,
    /// An integer without a sign.
    Unsigned,
    /// An IEEE 754 number.
    Float,
    /// The upper half of a 32-bit IEEE 754 number.
    BFloat,
    /// A number of one byte.
    Float8(Float8),
    /// Two IEEE 754 numbers, the real part first.
    Complex,
    /// Uninterpreted bytes.
    Raw,
}

/// The layouts of 8-bit floats, named after the bits of exponent and mantissa. `Fn`: no infinity; `Uz`: no negative zero; `B11`: a bias
/// of 11.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Float8 {
    E3M4,
    E4M3,
    E4M3B11FnUz,
    E4M3Fn,
    E4M3FnUz,
    E5M2,
    E5M2FnUz,
    /// A power of two, without sign and zero: the scale of a block.
    E8M0FnU,
}

/// The type of an array's elements: NumPy's numbers, `bool` and `void`, and the `bfloat16` and 8-bit floats of ml_dtypes. Types without
/// a fixed layout (objects, strings), times, and types of less than 8 bits are not supported.
///
/// Parses from
///
/// - the name in NumPy or ml_dtypes, optionally with a prefix `<` or `>` for the byte order: `float32`, `bfloat16`, `float8_e4m3fn`,
///   `>int16`;
/// - the name in Rust style, with the size in bits: `f32`, `bf16`, `i8`, `u64`, `f8e4m3fn`, `c64`. (NumPy counts bytes instead: its `i8`
///   is `int64`, written here as `i64` or `<i8`.)
/// - the name in PyTorch: `half`, `float`, `double`, `short`, `int`, `long`, `cfloat`, `cdouble`. (`float` and `int` have 32 bits, as in
///   PyTorch and C; in NumPy they have 64.)
/// - a typestr of the array interface: `<f4`, `>i2`, `|b1`, `|V16`.
///
/// Prints the name in NumPy or ml_dtypes, with the prefix `>` for big-endian elements. The text parses to the same type.
///
/// ```
/// use vmmfd::array::ElementType;
///
/// # fn main() -> Result<(), vmmfd::error::ParseError> {
/// assert_eq!("bf16".parse::<ElementType>()?, ElementType::BF16);
/// assert_eq!("|V16".parse::<ElementType>()?.to_string(), "void128");
/// assert_eq!(">i2".parse::<ElementType>()?.to_string(), ">int16");
/// assert_eq!((ElementType::F32.typestr(), ElementType::BF16.typestr()), (Some("<f4".to_owned()), None));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ElementType {
    pub(super) kind: Kind,
    pub(super) size: u32,
    /// Always false for types without a byte order, so that equal types compare equal.
    pub(super) big_endian: bool,
}

/// All types except raw bytes, with their name in NumPy or ml_dtypes and their other names.
pub(super) const NAMES: [(ElementType, &str, &[&str]); 23] = [
    (ElementType::BOOL, "bool", &[]),
    (ElementType::I8, "int8", &["i8"]),
    (ElementType::I16, "int16", &["i16", "short"]),
    (ElementType::I32, "int32", &["i32", "int"]),
    (ElementType::I64, "int64", &["i64", "long"]),
    (ElementType::U8, "uint8", &["u8"]),
    (ElementType::U16, "uint16", &["u16"]),
    (ElementType::U32, "uint32", &["u32"]),
    (ElementType::U64, "uint64", &["u64"]),
    (ElementType::F16, "float16", &["f16", "half"]),
    (ElementType::F32, "float32", &["f32", "float"]),
    (ElementType::F64, "float64", &["f64", "double"]),
    (ElementType::C64, "complex64", &["c64", "cfloat"]),
    (ElementType::C128, "complex128", &["c128", "cdouble"]),
    (ElementType::BF16, "bfloat16", &["bf16"]),
    (ElementType::F8E3M4, "float8_e3m4", &["f8e3m4"]),
    (ElementType::F8E4M3, "float8_e4m3", &["f8e4m3"]),
    (ElementType::F8E4M3B11FNUZ, "float8_e4m3b11fnuz", &["f8e4m3b11fnuz"]),
    (ElementType::F8E4M3FN, "float8_e4m3fn", &["f8e4m3fn"]),
    (ElementType::F8E4M3FNUZ, "float8_e4m3fnuz", &["f8e4m3fnuz"]),
    (ElementType::F8E5M2, "float8_e5m2", &["f8e5m2"]),
    (ElementType::F8E5M2FNUZ, "float8_e5m2fnuz", &["f8e5m2fnuz"]),
    (ElementType::F8E8M0FNU, "float8_e8m0fnu", &["f8e8m0fnu"]),
];

impl ElementType {
    /// `bool`: one byte, 0 or 1.
    pub const BOOL: Self = Self::little(Kind::Bool, 1);
    /// `int8`
    pub const I8: Self = Self::little(Kind::Signed, 1);
    /// `int16`
    pub const I16: Self = Self::little(Kind::Signed, 2);
    /// `int32`
    pub const I32: Self = Self::little(Kind::Signed, 4);
    /// `int64`
    pub const I64: Self = Self::little(Kind::Signed, 8);
    /// `uint8`
    pub const U8: Self = Self::little(Kind::Unsigned, 1);
    /// `uint16`
    pub const U16: Self = Self::little(Kind::Unsigned, 2);
    /// `uint32`
    pub const U32: Self = Self::little(Kind::Unsigned, 4);
    /// `uint64`
    pub const U64: Self = Self::little(Kind::Unsigned, 8);
    /// `float16`: IEEE 754 binary16.
    pub const F16: Self = Self::little(Kind::Float, 2);
    /// `float32`: IEEE 754 binary32.
    pub const F32: Self = Self::little(Kind::Float, 4);
    /// `float64`: IEEE 754 binary64.
    pub const F64: Self = Self::little(Kind::Float, 8);
    /// `complex64`: two `float32`, the real part first.
    pub const C64: Self = Self::little(Kind::Complex, 8);
    /// `complex128`: two `float64`, the real part first.
    pub const C128: Self = Self::little(Kind::Complex, 16);
    /// `bfloat16`: the upper half of a `float32`.
    pub const BF16: Self = Self::little(Kind::BFloat, 2);
    /// `float8_e3m4`: with infinities.
    pub const F8E3M4: Self = Self::little(Kind::Float8(Float8::E3M4), 1);
    /// `float8_e4m3`: with infinities. For the E4M3 of the OCP specification see `F8E4M3FN`.
    pub const F8E4M3: Self = Self::little(Kind::Float8(Float8::E4M3), 1);
    /// `float8_e4m3b11fnuz`: a bias of 11, no infinity, no negative zero.
    pub const F8E4M3B11FNUZ: Self = Self::little(Kind::Float8(Float8::E4M3B11FnUz), 1);
    /// `float8_e4m3fn`: no infinity; E4M3 of the OCP specification, and NVIDIA's `__nv_fp8_e4m3`.
    pub const F8E4M3FN: Self = Self::little(Kind::Float8(Float8::E4M3Fn), 1);
    /// `float8_e4m3fnuz`: no infinity, no negative zero.
    pub const F8E4M3FNUZ: Self = Self::little(Kind::Float8(Float8::E4M3FnUz), 1);
    /// `float8_e5m2`: with infinities; E5M2 of the OCP specification, and NVIDIA's `__nv_fp8_e5m2`.
    pub const F8E5M2: Self = Self::little(Kind::Float8(Float8::E5M2), 1);
    /// `float8_e5m2fnuz`: no infinity, no negative zero.
    pub const F8E5M2FNUZ: Self = Self::little(Kind::Float8(Float8::E5M2FnUz), 1);
    /// `float8_e8m0fnu`: a power of two or NaN; E8M0 of the OCP specification, the scale of a block.
    pub const F8E8M0FNU: Self = Self::little(Kind::Float8(Float8::E8M0FnU), 1);

    const fn little(kind: Kind, size: u32) -> Self {
        Self { kind, size, big_endian: false }
    }

    /// The size of an element in bytes: 1 to 2³¹ - 1.
    pub fn size(self) -> u64 {
        self.size.into()
    }

    /// Whether the most significant byte comes first. False for types without a byte order.
    pub fn is_big_endian(self) -> bool {
        self.big_endian
    }

    /// The name in NumPy or ml_dtypes, without the byte order. The name of raw bytes contains their size in bits, as in NumPy's
    /// `dtype.name`: `void128` for `|V16`.
    pub fn name(self) -> Cow<'static, str> {
        let little = Self { big_endian: false, ..self };
        match NAMES.iter().find(|(known, ..)| *known == little) {
            Some((_, name, _)) => Cow::Borrowed(name),
            None => Cow::Owned(format!("void{}", 8 * self.size())),
        }
    }

    /// The typestr in the array interface, such as `<f4`. `None` for `bfloat16` and the 8-bit floats, which have no typestr.
    pub fn typestr(self) -> Option<String> {
        let letter = match self.kind {
            Kind::Bool => 'b',
            Kind::Signed => 'i',
            Kind::Unsigned => 'u',
            Kind::Float => 'f',
            Kind::Complex => 'c',
            Kind::Raw => 'V',
            Kind::BFloat | Kind::Float8(_) => return None,
        };
        let order = match self {
            _ if !self.has_order() => '|',
            Self { big_endian: true, .. } => '>',
            _ => '<',
        };
        Some(format!("{order}{letter}{}", self.size))
    }

    /// Returns the type's DLPack 1.1 code (`DLDataTypeCode`) and bits; `None` for raw and big-endian elements, which DLPack lacks.
    pub fn dlpack(self) -> Option<(u8, u8)> {
        let code = match self.kind {
            Kind::Signed => 0,
            Kind::Unsigned => 1,
            Kind::Float => 2,
            Kind::BFloat => 4,
            Kind::Complex => 5,
            Kind::Bool => 6,
            Kind::Float8(Float8::E3M4) => 7,
            Kind::Float8(Float8::E4M3) => 8,
            Kind::Float8(Float8::E4M3B11FnUz) => 9,
            Kind::Float8(Float8::E4M3Fn) => 10,
            Kind::Float8(Float8::E4M3FnUz) => 11,
            Kind::Float8(Float8::E5M2) => 12,
            Kind::Float8(Float8::E5M2FnUz) => 13,
            Kind::Float8(Float8::E8M0FnU) => 14,
            Kind::Raw => return None,
        };
        (!self.big_endian).then_some((code, (8 * self.size) as u8))
    }

    /// Returns the type of a DLPack code and bits, for one lane; `None` if no type has them.
    pub fn from_dlpack(code: u8, bits: u8) -> Option<Self> {
        NAMES.iter().map(|(element, ..)| *element).find(|element| element.dlpack() == Some((code, bits)))
    }

    /// All names of all types except raw bytes.
    pub(crate) fn names() -> impl Iterator<Item = &'static str> {
        NAMES.iter().flat_map(|(_, name, others)| [*name].into_iter().chain(others.iter().copied()))
    }

    /// Parses a name in NumPy or ml_dtypes as a little-endian type.
    pub(crate) fn of_name(name: &str) -> Option<Self> {
        if let Some(digits) = name.strip_prefix("void") {
            let bits: u64 = plain_number(digits)?;
            let size =
                u32::try_from(bits / 8).ok().filter(|size| bits.is_multiple_of(8) && (1..=MAX_SIZE).contains(size))?;
            return Some(Self::little(Kind::Raw, size));
        }
        NAMES.iter().find(|(_, known, _)| *known == name).map(|(element, ..)| *element)
    }

    /// Whether the type has a byte order.
    pub(super) fn has_order(self) -> bool {
        self.size > 1 && self.kind != Kind::Raw
    }

    /// The type with the byte order of a NumPy prefix. `|` is only for types without a byte order.
    fn with_order(self, order: &str) -> Option<Self> {
        match order {
            "<" | ">" | "|" if !self.has_order() => Some(self),
            "<" => Some(self),
            ">" => Some(Self { big_endian: true, ..self }),
            _ => None,
        }
    }

    fn of_typestr(order: &str, rest: &str) -> Option<Self> {
        let (letter, digits) = rest.split_at_checked(1)?;
        let size: u32 = plain_number(digits)?;
        let kind = match (letter, size) {
            ("b", 1) => Kind::Bool,
            ("i", 1 | 2 | 4 | 8) => Kind::Signed,
            ("u", 1 | 2 | 4 | 8) => Kind::Unsigned,
            ("f", 2 | 4 | 8) => Kind::Float,
            ("c", 8 | 16) => Kind::Complex,
            ("V", 1..=MAX_SIZE) => Kind::Raw,
            _ => return None,
        };
        Self::little(kind, size).with_order(order)
    }
}

/// Parses a number without a sign, spaces or leading zeros.
fn plain_number<T: FromStr>(digits: &str) -> Option<T> {
    let plain = digits.bytes().all(|byte| byte.is_ascii_digit()) && !digits.starts_with('0');
    digits.parse().ok().filter(|_| plain)
}

impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", if self.big_endian { ">" } else { "" }, self.name())
    }
}

impl FromStr for ElementType {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let alias = || NAMES.iter().find(|(.., others)| others.contains(&text)).map(|(element, ..)| *element);
        let ordered = || {
            let (order, rest) = text.split_at_checked(1)?;
            Self::of_typestr(order, rest).or_else(|| Self::of_name(rest)?.with_order(order))
        };
        let element = Self::of_name(text).or_else(alias).or_else(ordered);
        element.ok_or_else(|| {
            let expected = "a name such as float32, f32, bf16, int8, bool, complex64 or float8_e4m3fn, or a typestr such as \
                            <f4, >i2 or |V16";
            ParseError::new(text, "an element type", expected)
        })
    }
}
