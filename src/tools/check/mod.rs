//! What the commands put into memory and how they check it: a pattern, or a file's bytes.
//!
//! To the session this is the caller's content: [`Exercise`] at the producer, [`DataVerifier`] at the consumer. What they say to
//! each other is the protocol's extension "Pattern and digest".

mod exercise;
pub mod figures;
pub mod files;
pub mod pattern;
mod verifier;

use std::{path::Path, time::Duration};

use self::pattern::Work;
pub use self::{exercise::Exercise, figures::Figures, verifier::DataVerifier};
use crate::array::ArrayDescriptor;

/// A step on the data that was taken.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// The pattern is written.
    Filled {
        /// How many words of it.
        words: u64,
        /// Its salt.
        salt: u32,
        /// Which engine did it, and how long that took alone.
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
    /// Some of a long piece of work is done.
    Progress {
        /// How many bytes.
        done: u64,
        /// Of how many.
        all: u64,
    },
    /// The consumer sees what the memory holds.
    Array {
        /// What it is made of.
        array: &'a ArrayDescriptor,
        /// Its first elements, as text.
        first: &'a [String],
    },
    /// The data was checked.
    Verified {
        /// Whether it was right.
        verified: bool,
        /// What was found.
        figures: &'a Figures,
        /// Which engine checked the pattern, if it was the pattern, and how long that took alone.
        work: Option<&'a Work>,
        /// How long it took.
        elapsed: Duration,
    },
    /// The data is in a file.
    Saved {
        /// Which one.
        path: &'a Path,
        /// How many bytes.
        size: u64,
        /// How long it took.
        elapsed: Duration,
    },
}

/// Receives events, perhaps from several threads at once.
pub type Observer<'a> = &'a (dyn Fn(Event<'_>) + Sync);
