//! The number of a kept descriptor, and its name in the keeper.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// The digits of a segment's name.
const DIGITS: &[u8; 36] = b"0123456789abcdefghijklmnopqrstuvwxyz";

/// The longest name.
const MAX_NAME: u32 = 4;

/// The number of a kept descriptor. Numbers are reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub(in crate::broker) struct SegmentId(u32);

impl SegmentId {
    /// The number of possible ids: one for each name.
    pub(in crate::broker) const COUNT: u32 = 36u32.pow(MAX_NAME);

    /// The id at an index, if the index is below [`SegmentId::COUNT`].
    pub(in crate::broker) fn at(index: usize) -> Option<Self> {
        u32::try_from(index).ok().filter(|&number| number < Self::COUNT).map(Self)
    }

    /// The index: the inverse of [`SegmentId::at`].
    pub(in crate::broker) fn index(self) -> usize {
        self.0 as usize
    }

    /// The name in the keeper: 1 to 4 digits and lower-case letters (base 36).
    pub(in crate::broker) fn name(self) -> String {
        let mut name = Vec::with_capacity(MAX_NAME as usize);
        let mut rest = self.0;
        loop {
            name.push(DIGITS[(rest % 36) as usize]);
            rest /= 36;
            if rest == 0 {
                break;
            }
        }
        name.iter().rev().copied().map(char::from).collect()
    }
}

impl From<SegmentId> for u32 {
    fn from(id: SegmentId) -> Self {
        id.0
    }
}

impl TryFrom<u32> for SegmentId {
    type Error = NoSegment;

    fn try_from(number: u32) -> Result<Self, NoSegment> {
        if number < Self::COUNT { Ok(Self(number)) } else { Err(NoSegment) }
    }
}

impl fmt::Display for SegmentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.name())
    }
}

impl FromStr for SegmentId {
    type Err = NoSegment;

    /// Accepts only the canonical form that [`SegmentId::name`] returns.
    fn from_str(name: &str) -> Result<Self, NoSegment> {
        let digits = (1..=MAX_NAME as usize).contains(&name.len())
            && name.bytes().all(|byte| byte.is_ascii_digit() || byte.is_ascii_lowercase());
        let id = u32::from_str_radix(name, 36).ok().filter(|_| digits).map(Self);
        id.filter(|id| id.name() == name).ok_or(NoSegment)
    }
}

/// The error of an invalid name or number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "not a segment: its name has 1 to 4 digits and lower-case letters and no leading zero, its number is below {}",
    SegmentId::COUNT
)]
pub(in crate::broker) struct NoSegment;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for index in (0..2000).chain((36 * 36 * 36 - 2)..(36 * 36 * 36 + 2)).chain([1_679_615]) {
            let id = SegmentId::at(index).unwrap();
            assert_eq!(id.name().parse(), Ok(id));
            assert_eq!(id.index(), index);
            assert!(id.name().len() <= 4, "{id}");
        }
        assert_eq!(SegmentId::at(0).unwrap().name(), "0");
        assert_eq!(SegmentId::at(35).unwrap().name(), "z");
        assert_eq!(SegmentId::at(1_679_615).unwrap().name(), "zzzz");
        assert_eq!(SegmentId::at(1_679_616), None);
        for other in ["", "00", "01", "A", "+1", "-", "10000", "é", "a b", "0\n"] {
            assert_eq!(other.parse::<SegmentId>(), Err(NoSegment), "{other:?}");
        }
    }

    #[test]
    fn number_beyond_the_limit_is_refused() {
        assert_eq!(serde_json::from_str::<SegmentId>("1679615").unwrap().name(), "zzzz");
        assert!(serde_json::from_str::<SegmentId>("1679616").is_err());
    }
}
