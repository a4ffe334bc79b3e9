//! Parsing of shapes and orders.

use std::str::FromStr;

use crate::error::ParseError;

/// The maximum number of dimensions, which is also NumPy's limit.
pub const MAX_DIMENSIONS: usize = 64;

/// The order of a contiguous array's elements. Parses from `C` or `F`, in either case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Order {
    /// The last index varies fastest: rows, as in C.
    C,
    /// The first index varies fastest: columns, as in Fortran.
    F,
}

impl FromStr for Order {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        match text {
            "C" | "c" => Ok(Self::C),
            "F" | "f" => Ok(Self::F),
            _ => Err(ParseError::new(text, "an order of elements", "C for rows or F for columns")),
        }
    }
}

/// Parses a shape with `x` or commas between the lengths: `5`, `1024x768`, `3,4`, `2x0x3`.
///
/// # Errors
/// [`ParseError`], which contains the expected form.
pub fn parse_shape(text: &str) -> Result<Vec<u64>, ParseError> {
    let separator = if text.contains(',') { ',' } else { 'x' };
    if text.split(separator).count() > MAX_DIMENSIONS {
        return Err(ParseError::new(text, "a shape of at most 64 dimensions", "fewer"));
    }
    let lengths = text.split(separator).map(|digits| {
        if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            let expected = "whole numbers separated by x or commas, such as 5, 1024x768 or 3,4";
            return Err(ParseError::new(text, "a shape", expected));
        }
        digits.parse().map_err(|_| ParseError::new(text, "a shape of lengths below 2⁶⁴", "smaller numbers"))
    });
    lengths.collect()
}
