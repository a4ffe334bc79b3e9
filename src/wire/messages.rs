//! The messages' bodies, with the protocol's field names.

use std::ops::Range;

use super::strict::{self, or_default};
use crate::{
    array::ArrayDescriptor,
    base::{Access, DeviceIdentity, Mechanism, Placement, Pointer, Run, strict::objects},
    error::ErrorCode,
};

objects! {
    /// The first message of each peer.
    pub struct Hello {
        /// The newest version that the sender supports.
        pub version: u16,
        /// The sender's optional capabilities: [`super::STREAM`] or none.
        pub capabilities: Vec<String>,
        /// The name of the sender's backend. Both peers must use the same.
        pub backend: String,
        /// The sender's process, in its own PID namespace. Only informative: it is not verified.
        pub pid: u32,
        /// The longest time that the sender waits for a message, in milliseconds: at least 1.
        #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
        pub timeout_ms: u64,
    }

    /// Requests an object.
    pub struct Request {
        /// The object's name.
        pub object: String,
        /// The requested access. `None` accepts the offered access.
        pub access: Option<Access> => null,
        /// The requested bytes of the data. `None` requests all of them.
        pub range: Option<ByteRange> => null,
    }

    /// A byte range of an object's data.
    #[derive(Copy)]
    pub struct ByteRange {
        /// The offset of the first byte.
        pub offset: u64,
        /// The number of bytes.
        pub length: u64,
    }
}

impl ByteRange {
    /// Converts to a [`Range`], if it is not empty and does not exceed `size`.
    pub fn within(self, size: u64) -> Option<Range<u64>> {
        let end = self.offset.checked_add(self.length).filter(|&end| end <= size && self.length > 0)?;
        Some(self.offset..end)
    }
}

objects! {
    /// Shared memory. The mechanism determines which optional fields are present.
    pub struct Memory {
        /// The mechanism.
        pub mechanism: Mechanism,
        /// The device that owns the memory. For host memory, the device near it.
        pub device: DeviceIdentity,
        /// Where the memory is.
        pub location: Placement,
        /// Size of the data, in bytes.
        pub size: u64,
        /// Size of the memory, in bytes. With [`Mechanism::Vmm`], the sum of the segments.
        pub mapped_size: u64,
        /// The number of allocations. 0 unless the mechanism is [`Mechanism::Vmm`].
        pub segments: u64,
        /// The memory's pool, by a number of the sender's choice.
        pub pool: Option<u64>,
        /// Opens a pool's buffer or a legacy allocation.
        pub pointer: Option<Pointer>,
        /// Offset of the data from `pointer`, in bytes.
        #[serde(default, deserialize_with = "or_default")]
        #[cfg_attr(feature = "schema", schemars(with = "Option<u64>"))]
        pub offset: u64,
        /// Whether the memory is never written again.
        #[serde(default, deserialize_with = "or_default")]
        #[cfg_attr(feature = "schema", schemars(with = "Option<bool>"))]
        pub immutable: bool,
    }

    /// Describes a buffer. Its segments follow.
    pub struct Offer {
        /// The object's name.
        pub object: String,
        /// The shared memory.
        pub memory: Memory,
        /// The array layout of the data, if it has one.
        pub array: Option<ArrayDescriptor> => null,
        /// The access to use for the mapping.
        pub access: Access,
        /// The segments that follow. `None` unless the mechanism is [`Mechanism::Vmm`].
        pub part: Option<Run> => null,
        /// A check of the data, defined by an extension. Consumers without the extension ignore it.
        #[serde(default, deserialize_with = "strict::optional_check")]
        pub check: Option<Check>,
        /// The buffer's number, in a stream only.
        pub buffer: Option<u64>,
    }

    /// A memory pool. The record carries its descriptor.
    pub struct PoolNumber {
        /// The number of the pool in this connection's offers.
        pub pool: u64,
    }

    /// Segments. The record carries a descriptor for each.
    pub struct Segments {
        /// The index of the first segment.
        pub first: u64,
        /// The exact size of each allocation, in bytes.
        #[cfg_attr(feature = "schema", schemars(length(min = 1, max = 253)))]
        pub sizes: Vec<u64>,
    }

    /// Acknowledges segments.
    pub struct Received {
        /// The number of segments received so far for the current offer.
        pub segments: u64,
    }
}

/// A JSON object that the protocol does not interpret: a check of the data, or the result of a check.
pub type Check = serde_json::Map<String, serde_json::Value>;

objects! {
    /// A peer's result.
    #[non_exhaustive]
    pub struct Verdict {
        /// Whether the data was right, as far as the sender knows.
        pub verified: bool,
        /// The result of the sender's check. `None` if the sender checked nothing.
        #[serde(default, deserialize_with = "strict::optional_check")]
        pub check: Option<Check>,
    }
}

impl Verdict {
    /// The verdict of a peer that checked nothing.
    pub fn unchecked(verified: bool) -> Self {
        Self { verified, check: None }
    }

    /// A verdict with the result of the sender's check.
    pub fn new(verified: bool, check: Option<Check>) -> Self {
        Self { verified, check }
    }
}

objects! {
    /// The sender is still working: restarts the receiver's timeout.
    pub struct Busy {}

    /// The error that closes the session.
    pub struct Failure {
        /// The class of the error.
        #[cfg_attr(feature = "schema", schemars(with = "String", regex(pattern = "^[A-Za-z0-9_-]{1,32}$")))]
        pub code: ErrorCode,
        /// A human-readable sentence of at most [`super::MAX_MESSAGE`] bytes.
        pub message: String,
    }

    /// Subscribes to all buffers of a stream.
    pub struct Subscribe {
        /// The largest number of buffers that the consumer keeps open.
        pub keep: u64,
    }

    /// Publishes a buffer of a stream.
    pub struct Ready {
        /// The buffer's number.
        pub buffer: u64,
        /// The number of publications of the buffer, including this one.
        pub generation: u64,
        /// The exact sizes of the first segments in bytes, if the consumer does not have the buffer open. The record carries their
        /// descriptors.
        #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
        #[cfg_attr(feature = "schema", schemars(with = "Option<Vec<u64>>"))]
        pub sizes: Vec<u64>,
    }

    /// Gives a stream's buffer back.
    #[derive(Copy)]
    pub struct BufferTurn {
        /// The buffer's number.
        pub buffer: u64,
        /// The generation of the publication.
        pub generation: u64,
    }

    /// Identifies a stream's buffer.
    #[derive(Copy)]
    pub struct BufferNumber {
        /// The buffer's number.
        pub buffer: u64,
    }
}
