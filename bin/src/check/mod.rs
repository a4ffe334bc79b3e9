//! The content that the commands share and check: a pattern, or a file's bytes.
//!
//! In a session it is the caller's content: [`Exercise`] for the producer, [`DataVerifier`] for the consumer. Checks use the protocol's
//! extension "Pattern and digest".

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

/// A completed step.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// The pattern was written.
    Filled {
        words: u64,
        salt: u32,
        /// The engine, and its time without overhead.
        work: &'a Work,
        elapsed: Duration,
    },
    /// A file was loaded.
    Loaded {
        /// In bytes.
        size: u64,
        digest: &'a str,
        elapsed: Duration,
    },
    /// Progress of a long operation, in bytes.
    Progress { done: u64, all: u64 },
    /// The consumer has read the array in the memory.
    Array {
        array: &'a ArrayDescriptor,
        /// Its first elements as text.
        first: &'a [String],
    },
    Verified {
        verified: bool,
        /// The computed counts or digest.
        figures: &'a Figures,
        /// The engine that checked a pattern, and its time without overhead.
        work: Option<&'a Work>,
        elapsed: Duration,
    },
    /// The data was saved to a file.
    Saved {
        path: &'a Path,
        /// In bytes.
        size: u64,
        elapsed: Duration,
    },
}

/// Receives events, possibly from several threads at once.
pub type Observer<'a> = &'a (dyn Fn(Event<'_>) + Sync);

/// Checks that a range of an object lies in memory that starts at the object's offset `start`.
fn check_range(region: &dyn Region, start: u64, range: &Range<u64>) -> Result<()> {
    let size = region.size();
    let inside = start <= range.start && range.start <= range.end && range.end - start <= size;
    if inside {
        return Ok(());
    }
    let offset = range.start.saturating_sub(start);
    let length = range.end.saturating_sub(range.start);
    Err(Error::Memory(MemoryError::OutOfRange { offset, length, size }))
}
