//! Errors about memory.

use super::{
    Error,
    units::{about, bytes},
};

/// Memory can't be allocated or opened, or a range, size or array does not fit it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The memory is read-only in this process.
    #[error("the memory is read-only in this process and can't be written")]
    ReadOnly,

    /// This process tried to open a legacy handle that it created itself.
    #[error("a legacy handle can't be opened in the process that created it: use the memory itself")]
    OwnHandle,

    /// The open-file limit is too low for the descriptors of all allocations, or of one record.
    #[error("{needed} open files are needed, but the limit of this process is {limit}")]
    TooManyDescriptors {
        /// The number of open files that the operation would need.
        needed: u64,
        /// The limit of this process (`RLIMIT_NOFILE`).
        limit: u64,
    },

    /// The device has less free memory than requested.
    #[error("{} were requested, but {device} has only {} free", bytes(*size), bytes(*free))]
    OutOfMemory {
        /// The device's name.
        device: String,
        /// The requested bytes, rounded up to the granularity.
        size: u64,
        /// The free bytes at the time of the failure.
        free: u64,
    },

    /// The size is zero, or rounding it up exceeds 64 bits.
    #[error("can't create a buffer of {}: the size must be between 1 byte and {}", bytes(*size), about(*max))]
    InvalidSize {
        /// The requested bytes.
        size: u64,
        /// The largest size that rounds up without overflow, in bytes.
        max: u64,
    },

    /// The size is zero or not a multiple of the granularity. Detected before any driver call.
    #[error("size {} is not a positive multiple of the granularity, {}", bytes(*size), bytes(*granularity))]
    Unaligned {
        /// The size, in bytes.
        size: u64,
        /// The granularity, in bytes.
        granularity: u64,
    },

    /// The driver can't import the descriptor: it does not refer to GPU memory, or the memory was lost.
    #[error("the descriptor can't be imported as memory: {reason}")]
    NotImported {
        /// The likely reason.
        reason: String,
        /// The driver's error.
        source: Box<Error>,
    },

    /// Memory of another allocator can't be exported.
    #[error("the memory at {address:#x} can't be shared: {reason}")]
    NotShareable {
        /// An address in the allocation.
        address: u64,
        /// The reason.
        reason: String,
    },

    /// Sharing would expose memory beside the requested ranges.
    #[error(
        "sharing these {} would expose {} of other data in the same allocations, which receivers could read and write",
        bytes(*size),
        bytes(*exposed)
    )]
    Neighbours {
        /// The bytes of the ranges.
        size: u64,
        /// The other bytes of their allocations.
        exposed: u64,
    },

    /// A range exceeds its memory, mapping or reservation.
    #[error("{} at offset {offset} exceed the size of {}", bytes(*length), bytes(*size))]
    OutOfRange {
        /// First byte of the range.
        offset: u64,
        /// Length of the range, in bytes.
        length: u64,
        /// Size of the memory, mapping or reservation, in bytes.
        size: u64,
    },

    /// Replacing the memory at an address range failed. `source` gives the reason.
    #[error("the memory was not replaced: {}", mapped_now(.back.as_deref()))]
    NotExchanged {
        /// `None` if the old memory is mapped again. Otherwise the error of that attempt: then nothing is mapped, and the addresses
        /// stay reserved.
        back: Option<Box<Error>>,
        /// The error of mapping the new memory.
        source: Box<Error>,
    },

    /// An object has no array of this name.
    #[error("there is no array `{name}`: {known}")]
    NoArray {
        /// The name.
        name: String,
        /// The end of the sentence: the names of the first arrays.
        known: String,
    },

    /// Several parts of an object have an array of this name.
    #[error("array `{name}` is ambiguous: parts {} have it", parts.join(", "))]
    AmbiguousArray {
        /// The name.
        name: String,
        /// The names of the parts.
        parts: Vec<String>,
    },

    /// The description of an array contradicts itself or overflows 64 bits; or an index, slice or order of axes does not fit it.
    #[error("{problem}")]
    Array {
        /// The problem in one sentence, with the values.
        problem: String,
    },
}

fn mapped_now(back: Option<&Error>) -> String {
    match back {
        None => "the old memory is still mapped".to_owned(),
        Some(error) => format!(
            "the old memory could not be mapped again ({}), nothing is mapped, and the addresses stay reserved",
            error.in_full()
        ),
    }
}
