//! The data that the commands share, and how they check it: a pattern, or a file's bytes.
//!
//! For a session this is the caller's content: [`Exercise`] at the producer, [`DataVerifier`] at the consumer. They use the
//! protocol's extension "Pattern and digest".

mod exercise;
pub mod figures;
pub mod files;
pub mod pattern;
mod verifier;

use std::{ops::Range, path::Path, time::Duration};

use vmmfd::{
    array::ArrayDescriptor,
    error::{Error, MemoryError, Result},
    memory::Region,
};

use self::pattern::Work;
pub use self::{exercise::Exercise, figures::Figures, verifier::DataVerifier};

/// A step on the data that is done.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// The pattern is written.
    Filled {
        /// The number of words.
        words: u64,
        /// Its salt.
        salt: u32,
        /// The engine, and its time alone.
        work: &'a Work,
        /// How long it took.
        elapsed: Duration,
    },
    /// A file is read in.
    Loaded {
        /// How many bytes.
        size: u64,
        /// Their digest.
        digest: &'a str,
        /// How long it took.
        elapsed: Duration,
    },
    /// A part of long work is done.
    Progress {
        /// How many bytes.
        done: u64,
        /// Of how many.
        all: u64,
    },
    /// The consumer has read the array in the memory.
    Array {
        /// Its description.
        array: &'a ArrayDescriptor,
        /// Its first elements, as text.
        first: &'a [String],
    },
    /// The data was checked.
    Verified {
        /// Whether it is correct.
        verified: bool,
        /// The counts or the digest that were found.
        figures: &'a Figures,
        /// The engine that checked the pattern, if it is the pattern, and its time alone.
        work: Option<&'a Work>,
        /// How long it took.
        elapsed: Duration,
    },
    /// The data is in a file.
    Saved {
        /// Its path.
        path: &'a Path,
        /// How many bytes.
        size: u64,
        /// How long it took.
        elapsed: Duration,
    },
}

/// Receives events, perhaps from several threads at once.
pub type Observer<'a> = &'a (dyn Fn(Event<'_>) + Sync);

/// Checks that a range of an object's bytes is in memory that begins with the object's byte `start`.
fn check_range(region: &dyn Region, start: u64, range: &Range<u64>) -> Result<()> {
    let size = region.size();
    let inside = start <= range.start && range.start <= range.end && range.end - start <= size;
    if inside {
        return Ok(());
    }
    let (offset, length) = (range.start.saturating_sub(start), range.end.saturating_sub(range.start));
    Err(Error::Memory(MemoryError::OutOfRange { offset, length, size }))
}
