//! What is wrong with memory, or with a request for it.

use super::Error;

/// Memory can not be had, or a range, size or array does not fit it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// Memory that was opened read-only is not written.
    #[error("memory that was opened read-only can't be written")]
    ReadOnly,

    /// A legacy handle was opened by the process that made it.
    #[error("a legacy handle can't be opened in the process that made it, which has the memory already")]
    OwnHandle,

    /// This process may not hold as many descriptors as there are allocations, or as come at once.
    #[error("{needed} open files are needed, and this process may have {limit}")]
    TooManyDescriptors {
        /// How many it would have.
        needed: u64,
        /// How many it may have.
        limit: u64,
    },

    /// More memory than the device has free.
    #[error("{size} bytes are more than the {free} bytes that {device} has free")]
    OutOfMemory {
        /// The device's name.
        device: String,
        /// What was asked for, in bytes, rounded up to the granularity.
        size: u64,
        /// What was free at that moment, in bytes.
        free: u64,
    },

    /// A size of zero, or one that no longer fits 64 bits once rounded up.
    #[error("a buffer of {size} bytes can't be made: the size must be from 1 to {max} bytes")]
    InvalidSize {
        /// What was asked for, in bytes.
        size: u64,
        /// The largest that rounds up without overflow, in bytes.
        max: u64,
    },

    /// A size that the driver would refuse, caught before calling it.
    #[error("size {size} is not a positive multiple of the granularity, {granularity} bytes")]
    Unaligned {
        /// The size, in bytes.
        size: u64,
        /// The granularity, in bytes.
        granularity: u64,
    },

    /// A descriptor of which the driver knows no memory: it is of something else, or its memory is lost.
    #[error("the descriptor can't be imported as memory: {reason}")]
    NotImported {
        /// What is wrong with it, as far as is known.
        reason: String,
        /// The driver's answer.
        source: Box<Error>,
    },

    /// A range that is not inside its mapping or reservation.
    #[error("{length} bytes at offset {offset} are not inside {size} bytes")]
    OutOfRange {
        /// First byte of the range.
        offset: u64,
        /// Its length, in bytes.
        length: u64,
        /// The size of what it should lie in, in bytes.
        size: u64,
    },

    /// Other memory could not be put at the addresses of what was mapped there. `source` says why.
    #[error("the memory was not exchanged, and {}", what_is_there(.back.as_deref()))]
    NotExchanged {
        /// Why what was there could not be mapped again either. Then nothing is mapped, and the addresses stay reserved. `None` if it
        /// is mapped, as before.
        back: Option<Box<Error>>,
        /// Why the other memory could not be mapped.
        source: Box<Error>,
    },

    /// The description of an array contradicts itself, or leaves what 64 bits can count; or an index, slice or order of
    /// axes does not belong to it.
    #[error("{problem}")]
    Array {
        /// What is wrong, with the values: one sentence.
        problem: String,
    },
}

fn what_is_there(back: Option<&Error>) -> String {
    match back {
        None => "what was mapped before is mapped as it was".to_owned(),
        Some(error) => format!(
            "what was mapped before could not be mapped again ({}): nothing is mapped, and the addresses stay reserved",
            error.in_full()
        ),
    }
}
