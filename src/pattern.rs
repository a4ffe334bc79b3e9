//! What is written into a buffer, and how it is checked.
//!
//! The formula is part of the protocol: see [`crate::wire`]. Without its last term the pattern would repeat every 2³¹ words
//! (8 GiB), and exchanged pieces of a larger buffer would pass; `mix` is the finalizer of MurmurHash3, a bijection with
//! `mix(0) = 0`, so that below 8 GiB and with salt 0 it is the classic pattern.

use crate::{
    error::{Error, Result},
    memory::Mapping,
};

pub use crate::wire::Mismatch;

/// Host memory that [`fill`] and [`verify`] use at a time, in bytes, however large the buffer is. A multiple of 4.
pub const SLICE: usize = 8 << 20;

/// The pattern of one salt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pattern {
    salt: u32,
}

impl Pattern {
    /// The pattern of this salt; of salt 0 below 8 GiB, the classic one without the last two terms.
    pub fn new(salt: u32) -> Self {
        Self { salt }
    }

    /// The salt.
    pub fn salt(self) -> u32 {
        self.salt
    }

    /// The word at an index.
    pub fn word(self, index: u64) -> u32 {
        sequence(index) ^ self.constant(index)
    }

    /// What all words of one run of 2³¹ have in common.
    fn constant(self, index: u64) -> u32 {
        0xDEAD_BEEF ^ self.salt ^ mix((index >> 31) as u32)
    }

    /// Writes the words from `first` on into `to`, to its last byte.
    pub fn write(self, first: u64, to: &mut [u8]) {
        let mut words = to.chunks_exact_mut(4);
        let count = words.len() as u64;
        // One constant serves a whole slice unless it crosses into the next run: then word by word is fast enough.
        if self.constant(first) == self.constant(first + count) {
            let constant = self.constant(first);
            for (word, at) in words.by_ref().zip(first..) {
                word.copy_from_slice(&(sequence(at) ^ constant).to_le_bytes());
            }
        } else {
            for (word, at) in words.by_ref().zip(first..) {
                word.copy_from_slice(&self.word(at).to_le_bytes());
            }
        }
        let tail = words.into_remainder();
        tail.copy_from_slice(&self.word(first + count).to_le_bytes()[..tail.len()]);
    }
}

fn sequence(index: u64) -> u32 {
    (index as u32).wrapping_mul(2).wrapping_add(1337)
}

fn mix(mut h: u32) -> u32 {
    h = (h ^ (h >> 16)).wrapping_mul(0x85EB_CA6B);
    h = (h ^ (h >> 13)).wrapping_mul(0xC2B2_AE35);
    h ^ (h >> 16)
}

/// How many words `size` bytes are, the last one perhaps cut.
pub fn words(size: u64) -> u64 {
    size.div_ceil(4)
}

/// What a check found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Verification {
    /// How many words were checked.
    pub words: u64,
    /// How many of them were wrong.
    pub mismatches: u64,
    /// The first of those.
    pub first: Option<Mismatch>,
}

impl Verification {
    /// Whether nothing was wrong.
    pub fn passed(&self) -> bool {
        self.mismatches == 0
    }

    /// Takes in the words from `first` on, as found and as expected.
    fn add(&mut self, first: u64, found: &[u8], expected: &[u8]) {
        self.words += words(found.len() as u64);
        if found == expected {
            return;
        }
        for ((at, found), expected) in (first..).zip(found.chunks(4)).zip(expected.chunks(4)) {
            if found != expected {
                self.mismatches += 1;
                self.first.get_or_insert_with(|| Mismatch { index: at, expected: word(expected), found: word(found) });
            }
        }
    }
}

fn word(bytes: &[u8]) -> u32 {
    let mut word = [0; 4];
    word[..bytes.len()].copy_from_slice(bytes);
    u32::from_le_bytes(word)
}

/// Fills the first `size` bytes of a mapping with the pattern, and the rest of it with zeros, so that nothing that the
/// memory held before travels with it. All GPU work is done when it returns.
///
/// `progress` is called after each [`SLICE`] with the bytes done so far; its error ends the work.
///
/// # Errors
/// [`Error::OutOfRange`] if `size` is more than the mapping; what the copies or `progress` fail with.
///
/// Driver calls: `cuMemcpyHtoD`, `cuStreamSynchronize`, `cuCtxSynchronize`.
pub fn fill(mapping: &Mapping, size: u64, pattern: Pattern, progress: &mut dyn FnMut(u64) -> Result<()>) -> Result<()> {
    let mut slice = slice_for(mapping, mapping.size(), size)?;
    for (offset, length) in slices(mapping.size()) {
        let slice = &mut slice[..length];
        let data = size.saturating_sub(offset).min(length as u64) as usize;
        pattern.write(offset / 4, &mut slice[..data]);
        slice[data..].fill(0);
        mapping.copy_in(offset, slice)?;
        progress(offset + length as u64)?;
    }
    mapping.synchronize()
}

/// Checks the first `size` bytes of a mapping against the pattern.
///
/// `progress` is called after each [`SLICE`] with the bytes done so far; its error ends the work.
///
/// # Errors
/// [`Error::OutOfRange`] if `size` is more than the mapping; what the copies or `progress` fail with. Wrong data is no
/// error: see [`Verification`].
///
/// Driver call: `cuMemcpyDtoH`.
pub fn verify(
    mapping: &Mapping,
    size: u64,
    pattern: Pattern,
    progress: &mut dyn FnMut(u64) -> Result<()>,
) -> Result<Verification> {
    let mut found = slice_for(mapping, size, size)?;
    let mut expected = found.clone();
    let mut verification = Verification::default();
    for (offset, length) in slices(size) {
        let (found, expected) = (&mut found[..length], &mut expected[..length]);
        mapping.copy_out(offset, found)?;
        pattern.write(offset / 4, expected);
        verification.add(offset / 4, found, expected);
        progress(offset + length as u64)?;
    }
    Ok(verification)
}

/// Room for a slice of `range` bytes, if `size` bytes fit the mapping.
fn slice_for(mapping: &Mapping, range: u64, size: u64) -> Result<Vec<u8>> {
    if size > mapping.size() {
        return Err(Error::OutOfRange { offset: 0, length: size, size: mapping.size() });
    }
    Ok(vec![0; range.min(SLICE as u64) as usize])
}

/// The offsets and lengths of the slices of a range.
fn slices(range: u64) -> impl Iterator<Item = (u64, usize)> {
    (0..range).step_by(SLICE).map(move |offset| (offset, (range - offset).min(SLICE as u64) as usize))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The words as the documentation writes them, one by one.
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
    fn the_words_are_those_of_the_formula() {
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
    fn every_length_and_place_is_written_to_its_last_byte() {
        let pattern = Pattern::new(99);
        for first in [0, 7, (1 << 31) - 3, (1 << 32) - 1] {
            let whole: Vec<u8> = (first..first + 8).flat_map(|at| by_the_formula(99, at).to_le_bytes()).collect();
            for length in 0..=whole.len() {
                let mut bytes = vec![0xAA; length];
                pattern.write(first, &mut bytes);
                assert_eq!(bytes, whole[..length], "{length} bytes from word {first}");
            }
        }
    }

    #[test]
    fn pieces_8_gib_apart_differ_in_every_word() {
        let pattern = Pattern::new(0);
        let piece = |run: u64| -> Vec<u32> { (0..64).map(|i| pattern.word((run << 31) + i)).collect() };
        for (a, b) in [(0, 1), (1, 2), (0, 7), (3, 12)] {
            assert!(piece(a).iter().zip(piece(b)).all(|(x, y)| *x != y), "runs {a} and {b}");
        }
    }

    #[test]
    fn a_check_counts_the_wrong_words_and_names_the_first() {
        let pattern = Pattern::new(5);
        let mut expected = vec![0; 4 * 10 + 3];
        pattern.write(100, &mut expected);
        let mut found = expected.clone();
        let mut clean = Verification::default();
        clean.add(100, &found, &expected);
        assert!(clean.passed() && clean.words == 11 && clean.first.is_none());
        found[4 * 3 + 1] ^= 1;
        found[4 * 3 + 2] ^= 1;
        found[42] ^= 0x80;
        let mut verification = Verification::default();
        verification.add(100, &found, &expected);
        assert_eq!(verification.mismatches, 2);
        let expected = pattern.word(103);
        assert_eq!(verification.first, Some(Mismatch { index: 103, expected, found: expected ^ 0x0001_0100 }));
    }

    #[test]
    fn slices_cover_a_range_once_and_stay_small() {
        for range in [0, 1, SLICE as u64, SLICE as u64 + 1, 3 * SLICE as u64 - 1] {
            let mut reached = 0;
            for (offset, length) in slices(range) {
                assert!(offset == reached && length <= SLICE && offset % 4 == 0);
                reached += length as u64;
            }
            assert_eq!(reached, range);
        }
    }
}
