//! Shapes and orders as text.

use std::str::FromStr;

use super::quote;

/// The most dimensions of an array: numpy's own limit.
pub const MAX_DIMENSIONS: usize = 64;

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
