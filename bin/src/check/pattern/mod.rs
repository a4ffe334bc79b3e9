//! The pattern: how a buffer is filled and checked.
//!
//! Two engines write and check it: GPU kernels, at the speed of device memory, and the host's CPUs, on any memory. [`fill`], [`write()`]
//! and [`verify`] use the CPUs; the methods of [`EngineChoice`] use either.
//!
//! The formula is part of a protocol extension: see [`vmmfd::wire`]. Without its last term the pattern would repeat every 2³¹ words (8
//! GiB), and swapped parts of a larger buffer would go unnoticed. `mix` is the finalizer of MurmurHash3, a bijection with `mix(0) = 0`:
//! below 8 GiB with salt 0 the last two terms vanish.

mod engine;
mod host;

use std::{io, ops::Range};

use rand::{TryRng, rngs::SysRng};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use vmmfd::error::{Error, Result};

pub use self::{
    engine::{Engine, EngineChoice, Work},
    host::{SLICE, fill, verify, write},
};

/// A wrong word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Mismatch {
    /// Its index in words.
    pub index: u64,
    pub expected: u32,
    pub found: u32,
}

/// A random salt.
///
/// # Errors
/// [`Error::System`] if the operating system has no random numbers. See getrandom(2).
pub fn random_salt() -> Result<u32> {
    SysRng.try_next_u32().map_err(|error| Error::system("read random numbers", io::Error::other(error)))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pattern {
    salt: u32,
}

impl Pattern {
    pub fn new(salt: u32) -> Self {
        Self { salt }
    }

    pub fn salt(self) -> u32 {
        self.salt
    }

    /// The word at an index.
    pub fn word(self, index: u64) -> u32 {
        sequence(index) ^ self.constant(index)
    }

    /// The terms that are constant within a run of 2³¹ words.
    fn constant(self, index: u64) -> u32 {
        0xDEAD_BEEF ^ self.salt ^ mix((index >> 31) as u32)
    }

    /// Writes the pattern's bytes from offset `start` into `to`.
    pub fn write(self, start: u64, to: &mut [u8]) {
        let first = start / 4;
        let skip = (start % 4) as usize;
        let (head, to) = to.split_at_mut(if skip == 0 { 0 } else { (4 - skip).min(to.len()) });
        head.copy_from_slice(&self.word(first).to_le_bytes()[skip..][..head.len()]);
        self.write_words(if skip == 0 { first } else { first + 1 }, to);
    }

    /// Whether the bytes at offset `start` match the pattern, by a fast comparison of whole words. Also false if that comparison is not
    /// possible.
    fn holds(self, start: u64, found: &[u8]) -> bool {
        let first = start / 4;
        let (words, rest) = found.as_chunks::<4>();
        if !start.is_multiple_of(4)
            || !rest.is_empty()
            || self.constant(first) != self.constant(first + words.len() as u64)
        {
            return false;
        }
        let mut next = sequence(first);
        let mut wrong = 0;
        let constant = self.constant(first);
        for word in words {
            wrong |= u32::from_le_bytes(*word) ^ next ^ constant;
            next = next.wrapping_add(STEP);
        }
        wrong == 0
    }

    fn write_words(self, first: u64, to: &mut [u8]) {
        let (words, tail) = to.as_chunks_mut::<4>();
        let count = words.len() as u64;
        // The constant holds for the whole slice unless it crosses into the next run.
        if self.constant(first) == self.constant(first + count) {
            let constant = self.constant(first);
            let mut next = sequence(first);
            for word in words {
                *word = (next ^ constant).to_le_bytes();
                next = next.wrapping_add(STEP);
            }
        } else {
            for (word, at) in words.iter_mut().zip(first..) {
                *word = self.word(at).to_le_bytes();
            }
        }
        tail.copy_from_slice(&self.word(first + count).to_le_bytes()[..tail.len()]);
    }
}

/// The increment of `sequence`.
const STEP: u32 = 2;

fn sequence(index: u64) -> u32 {
    (index as u32).wrapping_mul(STEP).wrapping_add(1337)
}

fn mix(mut h: u32) -> u32 {
    h = (h ^ (h >> 16)).wrapping_mul(0x85EB_CA6B);
    h = (h ^ (h >> 13)).wrapping_mul(0xC2B2_AE35);
    h ^ (h >> 16)
}

/// The number of words that a byte range touches.
pub fn words(range: &Range<u64>) -> u64 {
    let touched = touched(range);
    touched.end - touched.start
}

/// The words that a byte range touches.
pub(crate) fn touched(range: &Range<u64>) -> Range<u64> {
    let start = range.start / 4;
    start..if range.is_empty() { start } else { range.end.div_ceil(4) }
}

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Verification {
    /// The number of checked words.
    pub words: u64,
    /// The number of wrong words.
    pub mismatches: u64,
    /// The first wrong word.
    pub first: Option<Mismatch>,
}

impl Verification {
    pub fn passed(&self) -> bool {
        self.mismatches == 0
    }

    /// Adds the result for other words.
    fn join(&mut self, other: Self) {
        self.words += other.words;
        self.mismatches += other.mismatches;
        let both = self.first.into_iter().chain(other.first);
        self.first = both.min_by_key(|mismatch| mismatch.index);
    }

    /// Compares the bytes at offset `start`.
    fn add(&mut self, start: u64, found: &[u8], expected: &[u8]) {
        self.words += words(&(start..start + found.len() as u64));
        if found == expected {
            return;
        }
        let mut at = start;
        let end = start + found.len() as u64;
        while at < end {
            let next = (at / 4 * 4).saturating_add(4).min(end);
            let inside = (at - start) as usize..(next - start) as usize;
            let found = &found[inside.clone()];
            let expected = &expected[inside];
            if found != expected {
                let skip = (at % 4) as usize;
                self.mismatches += 1;
                self.first.get_or_insert_with(|| Mismatch {
                    index: at / 4,
                    expected: word(skip, expected),
                    found: word(skip, found),
                });
            }
            at = next;
        }
    }
}

/// A word of which only the bytes from index `skip` are known; the others are zero.
fn word(skip: usize, bytes: &[u8]) -> u32 {
    let mut word = [0; 4];
    word[skip..][..bytes.len()].copy_from_slice(bytes);
    u32::from_le_bytes(word)
}

/// Checks data piece by piece.
pub(crate) struct Checker {
    pattern: Pattern,
    expected: Vec<u8>,
    pub(crate) verification: Verification,
}

impl Checker {
    pub(crate) fn new(pattern: Pattern) -> Self {
        Self { pattern, expected: Vec::new(), verification: Verification::default() }
    }

    /// Checks the bytes at offset `start`. A word must not be split between two calls.
    pub(crate) fn check(&mut self, start: u64, found: &[u8]) {
        if self.pattern.holds(start, found) {
            self.verification.words += (found.len() / 4) as u64;
            return;
        }
        if self.expected.len() < found.len() {
            self.expected = vec![0; found.len()];
        }
        let expected = &mut self.expected[..found.len()];
        self.pattern.write(start, expected);
        self.verification.add(start, found, expected);
    }
}

/// Splits a range at multiples of `length`, which is a multiple of 4, so that no word is split.
pub(crate) fn slices(range: Range<u64>, length: usize) -> impl Iterator<Item = Range<u64>> {
    let mut at = range.start;
    let length = length as u64;
    std::iter::from_fn(move || {
        let part = at..(at / length * length).saturating_add(length).min(range.end);
        at = part.end;
        (!part.is_empty()).then_some(part)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The formula as documented, word by word.
    fn by_the_formula(salt: u32, index: u64) -> u32 {
        let i = (index % (1 << 32)) as u32;
        let base = i.wrapping_mul(2).wrapping_add(1337) ^ 0xDEADBEEF ^ salt;
        let mut h = u32::try_from(index >> 31).unwrap();
        h ^= h >> 16;
        h = h.wrapping_mul(0x85EBCA6B);
        h ^= h >> 13;
        h = h.wrapping_mul(0xC2B2AE35);
        h ^= h >> 16;
        base ^ h
    }

    #[test]
    fn words_match_the_formula() {
        assert_eq!(Pattern::new(0).word(0), 1337 ^ 0xDEADBEEF);
        assert_eq!(Pattern::new(0).word(1), 1339 ^ 0xDEADBEEF);
        assert_eq!(mix(0), 0);
        for salt in [0, 1, 0x1234_5678, u32::MAX] {
            for index in [0, 1, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 33) + 5, u64::from(u32::MAX) << 31] {
                assert_eq!(Pattern::new(salt).word(index), by_the_formula(salt, index), "{salt} {index}");
            }
        }
    }

    #[test]
    fn writes_any_offset_and_length() {
        let pattern = Pattern::new(99);
        for first in [0, 7, (1 << 31) - 3, (1 << 32) - 1] {
            let whole: Vec<u8> = (first..first + 8).flat_map(|at| by_the_formula(99, at).to_le_bytes()).collect();
            for start in 0..whole.len() {
                for end in start..=whole.len() {
                    let mut bytes = vec![0xAA; end - start];
                    pattern.write(first * 4 + start as u64, &mut bytes);
                    assert_eq!(bytes, whole[start..end], "bytes {start} to {end} from word {first}");
                }
            }
        }
    }

    #[test]
    fn partial_words_are_checked() {
        let pattern = Pattern::new(7);
        for (range, count) in [(0..0, 0), (1..2, 1), (3..5, 2), (4..8, 1), (2..11, 3), (7..7, 0)] {
            assert_eq!(words(&range), count, "{range:?}");
            let mut expected = vec![0; (range.end - range.start) as usize];
            pattern.write(range.start, &mut expected);
            for wrong in 0..expected.len() {
                let mut found = expected.clone();
                found[wrong] ^= 0xFF;
                let mut verification = Verification::default();
                verification.add(range.start, &found, &expected);
                let first = verification.first.unwrap();
                let at = range.start + wrong as u64;
                assert_eq!((verification.words, verification.mismatches, first.index), (count, 1, at / 4));
                assert_eq!(first.expected ^ first.found, 0xFF << (at % 4 * 8));
            }
        }
    }

    #[test]
    fn slices_cover_a_range_once() {
        let slice = SLICE as u64;
        for start in [0, 1, slice - 1, slice, 3 * slice + 5] {
            for length in [0, 1, slice, slice + 1, 3 * slice - 1] {
                let mut reached = start;
                for part in slices(start..start + length, SLICE) {
                    assert!(part.start == reached && part.end - part.start <= slice);
                    assert!(part.start == start || part.start % 4 == 0);
                    reached = part.end;
                }
                assert_eq!(reached, start + length);
            }
        }
    }
}
