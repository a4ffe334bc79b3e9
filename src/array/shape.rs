//! Shapes and orders as text.

use std::str::FromStr;

use super::quote;

/// The most dimensions of an array: NumPy's limit.
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
    type Err = ParseOrderError;

    fn from_str(text: &str) -> Result<Self, ParseOrderError> {
        match text {
            "C" | "c" => Ok(Self::C),
            "F" | "f" => Ok(Self::F),
            _ => Err(ParseOrderError { text: quote(text) }),
        }
    }
}

/// The text names no [`Order`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text} is not an order of elements: write C for rows or F for columns")]
pub struct ParseOrderError {
    /// Quoted, and not long.
    text: String,
}

/// Parses a shape, with `x` or commas between the lengths: `5`, `1024x768`, `3,4`, `2x0x3`.
///
/// # Errors
/// [`ParseShapeError`] says what to write instead.
pub fn parse_shape(text: &str) -> Result<Vec<u64>, ParseShapeError> {
    let error = |problem| ParseShapeError { text: quote(text), problem };
    let separator = if text.contains(',') { ',' } else { 'x' };
    let dimensions = text.split(separator).count();
    if dimensions > MAX_DIMENSIONS {
        return Err(error(ShapeProblem::Dimensions(dimensions)));
    }
    let lengths = text.split(separator).map(|digits| {
        if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(error(ShapeProblem::Syntax));
        }
        digits.parse().map_err(|_| error(ShapeProblem::Length))
    });
    lengths.collect()
}

/// The text is not the shape of an array.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text} {problem}")]
pub struct ParseShapeError {
    /// Quoted, and not long.
    text: String,
    problem: ShapeProblem,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
enum ShapeProblem {
    #[error("is not a shape: write whole numbers with x or commas between, as 5, 1024x768 or 3,4")]
    Syntax,
    #[error("has a dimension longer than 64 bits can count: write less")]
    Length,
    #[error("has {0} dimensions: write at most {MAX_DIMENSIONS}")]
    Dimensions(usize),
}
