//! Elements as text.

use super::{
    ElementType,
    element::{Float8, Kind},
};

impl ElementType {
    /// Formats the value of an element: `-7`, `0.5`, `1.0-2.0j`, `true`. Raw elements, a wrong number of bytes, and bools other than 0 and 1
    /// are hexadecimal, in memory order.
    pub(crate) fn format(self, bytes: &[u8]) -> String {
        let value = match self.kind {
            _ if bytes.len() as u64 != self.size() => None,
            Kind::Raw => None,
            Kind::Bool => match bytes {
                [0] => Some("false".to_owned()),
                [1] => Some("true".to_owned()),
                _ => None,
            },
            Kind::Unsigned => Some(self.bits(bytes).to_string()),
            Kind::Signed => {
                let unused = 64 - 8 * self.size; // Shifting up and down again extends the sign.
                Some((((self.bits(bytes) << unused) as i64) >> unused).to_string())
            }
            Kind::Float => Some(self.float(bytes)),
            Kind::BFloat => Some(format!("{:?}", bfloat16(self.bits(bytes) as u16))),
            Kind::Float8(layout) => Some(format!("{:?}", layout.value(self.bits(bytes) as u8))),
            Kind::Complex => {
                let (real, imaginary) = bytes.split_at(bytes.len() / 2);
                let real = self.float(real);
                let imaginary = self.float(imaginary);
                let plus = if imaginary.starts_with('-') { "" } else { "+" };
                Some(format!("{real}{plus}{imaginary}j"))
            }
        };
        value.unwrap_or_else(|| format!("0x{}", hex::encode(bytes)))
    }

    /// Converts at most 8 bytes to a number.
    fn bits(self, bytes: &[u8]) -> u64 {
        let push = |bits: u64, byte: &u8| bits << 8 | u64::from(*byte);
        if self.big_endian { bytes.iter().fold(0, push) } else { bytes.iter().rev().fold(0, push) }
    }

    /// Formats an IEEE 754 number of 2, 4 or 8 bytes. `{:?}` gives the shortest text that parses to the same value, with an exponent if the
    /// value is very large or small.
    fn float(self, bytes: &[u8]) -> String {
        let bits = self.bits(bytes);
        match bytes.len() {
            2 => format!("{:?}", float16(bits as u16)),
            4 => format!("{:?}", f32::from_bits(bits as u32)),
            _ => format!("{:?}", f64::from_bits(bits)),
        }
    }
}

/// Converts a `float16`. The result is exact.
pub(super) fn float16(code: u16) -> f32 {
    Layout { exponent: 5, mantissa: 10, bias: 15, specials: Specials::Ieee }.value(code.into())
}

/// Converts a `bfloat16`. The result is exact.
pub(super) fn bfloat16(code: u16) -> f32 {
    f32::from_bits(u32::from(code) << 16)
}

impl Float8 {
    /// Converts a code. The result is exact.
    pub(super) fn value(self, code: u8) -> f32 {
        let (exponent, bias, specials) = match self {
            Self::E3M4 => (3, 3, Specials::Ieee),
            Self::E4M3 => (4, 7, Specials::Ieee),
            Self::E4M3B11FnUz => (4, 11, Specials::NegativeZeroIsNan),
            Self::E4M3Fn => (4, 7, Specials::AllOnesIsNan),
            Self::E4M3FnUz => (4, 8, Specials::NegativeZeroIsNan),
            Self::E5M2 => (5, 15, Specials::Ieee),
            Self::E5M2FnUz => (5, 16, Specials::NegativeZeroIsNan),
            Self::E8M0FnU => return power_of_two(code),
        };
        Layout { exponent, mantissa: 7 - exponent, bias, specials }.value(code.into())
    }
}

/// 2^(code - 127), or NaN for the last code.
fn power_of_two(code: u8) -> f32 {
    match code {
        0 => f32::from_bits(1 << 22), // 2^-127 is subnormal in an `f32`.
        255 => f32::NAN,
        _ => f32::from_bits(u32::from(code) << 23),
    }
}

/// A binary float format with a sign and these numbers of bits. An `f32` must be able to represent all its values.
struct Layout {
    exponent: u32,
    mantissa: u32,
    bias: i32,
    specials: Specials,
}

/// The codes that are not finite numbers.
enum Specials {
    /// Codes with the largest exponent: infinity if the mantissa is 0, otherwise NaN.
    Ieee,
    /// Codes with all bits set except the sign: NaN.
    AllOnesIsNan,
    /// The code of negative zero: NaN.
    NegativeZeroIsNan,
}

impl Layout {
    fn value(self, code: u32) -> f32 {
        let largest = (1 << self.exponent) - 1;
        let exponent = code >> self.mantissa & largest;
        let mantissa = code & ((1 << self.mantissa) - 1);
        let negative = code >> (self.exponent + self.mantissa) == 1;
        let full = mantissa == (1 << self.mantissa) - 1;
        let magnitude = match self.specials {
            Specials::Ieee if exponent == largest && mantissa == 0 => f32::INFINITY,
            Specials::Ieee if exponent == largest => f32::NAN,
            Specials::AllOnesIsNan if exponent == largest && full => f32::NAN,
            Specials::NegativeZeroIsNan if negative && exponent == 0 && mantissa == 0 => f32::NAN,
            // Subnormal: no leading 1, and the exponent of the smallest normal number.
            _ if exponent == 0 => mantissa as f32 * self.power(1),
            _ => (1 << self.mantissa | mantissa) as f32 * self.power(exponent),
        };
        if negative { -magnitude } else { magnitude }
    }

    /// The value of the mantissa's lowest bit at an exponent.
    fn power(&self, exponent: u32) -> f32 {
        let power = exponent as i32 - self.bias - self.mantissa as i32;
        f32::from_bits(((power + 127) as u32) << 23)
    }
}
