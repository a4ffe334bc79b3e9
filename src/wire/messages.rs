//! The messages' bodies, with the protocol's field names.

use std::{ops::Range, process, time::Duration};

use serde::{Deserialize, Serialize};

use super::{
    VERSION,
    strict::{self, or_default},
};
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

    /// Subscribes to a stream.
    pub struct Subscribe {
        /// What happens to buffers that the subscriber has no room for.
        pub policy: Policy,
        /// The most buffers that wait at the publisher: with [`Policy::Queue`], and only there.
        #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 1024)))]
        pub queue: Option<u64>,
        /// The most buffers that the subscriber has at a time: given to it and not given back.
        #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 64)))]
        pub held: u64,
        /// The most earlier buffers that the subscriber wants at once.
        pub history: u64,
    }

    /// Accepts a subscriber. The offer of the pool follows.
    #[derive(Copy)]
    pub struct Stream {
        /// Identifies the publisher's run: another publisher has another epoch.
        pub epoch: u64,
        /// The size of each buffer in bytes. `None` if the sizes vary.
        pub size: Option<u64>,
        /// How long the publisher waits for a subscriber with [`Policy::Every`], in milliseconds.
        pub deadline_ms: Option<u64>,
        /// The number of words in each direction by which the two sides order GPU work: [`super::TURNS`]. The record carries the
        /// descriptor of the words. `None`: GPU work is not ordered.
        pub turns: Option<u64>,
    }

    /// Describes the buffers that follow. The record carries the descriptor of the blob, if there is one.
    pub struct Format {
        /// The arrays in each buffer.
        pub arrays: Vec<NamedArray>,
        /// The length of the program's blob in bytes.
        #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 65536)))]
        pub length: Option<u64>,
    }

    /// An array in each buffer.
    pub struct NamedArray {
        /// The array's name.
        pub name: String,
        /// Its layout. The offset counts from the start of the buffer.
        pub array: ArrayDescriptor,
    }

    /// Gives a buffer to a subscriber.
    pub struct Ready {
        /// The number of the publication in the epoch, counted from 1.
        pub number: u64,
        /// The time of the publication: nanoseconds of `CLOCK_MONOTONIC`.
        pub time: u64,
        /// The offset of the buffer in the pool, in bytes.
        pub offset: u64,
        /// Bytes of data. `None` for the stream's fixed size.
        pub size: Option<u64>,
        /// The publisher's own bytes, in hexadecimal.
        #[cfg_attr(feature = "schema", schemars(length(max = 8192)))]
        pub user: Option<String>,
        /// The turn after which a stream of the publisher has written the buffer. `None`: it is written. Only if the stream has `turns`.
        #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 9_223_372_036_854_775_807u64)))]
        pub ready_at: Option<u64>,
    }

    /// Gives a buffer back.
    #[derive(Copy)]
    pub struct Done {
        /// The number of the publication.
        pub number: u64,
        /// The turn after which no stream of the subscriber reads the buffer. `None`: none reads it. Only if the stream has `turns`.
        #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 9_223_372_036_854_775_807u64)))]
        pub done_at: Option<u64>,
    }

    /// The stream is complete.
    #[derive(Copy)]
    pub struct End {
        /// The number of publications in the epoch.
        pub published: u64,
    }

    /// Ends a subscription. Gives all buffers back except those listed.
    pub struct Leave {
        /// The numbers of the publications that the subscriber still uses.
        #[cfg_attr(feature = "schema", schemars(length(max = 64)))]
        pub held: Vec<u64>,
    }
}

impl Hello {
    /// The hello of this process.
    pub(crate) fn new(capabilities: &[&str], backend: &str, timeout: Duration) -> Self {
        Self {
            version: VERSION,
            capabilities: capabilities.iter().map(ToString::to_string).collect(),
            backend: backend.to_owned(),
            pid: process::id(),
            timeout_ms: milliseconds(timeout).max(1),
        }
    }
}

/// A time as messages state it.
pub(crate) fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// What happens to buffers that a subscriber has no room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    /// The newest waits, and replaces an older one.
    Latest,
    /// The newest `queue` wait.
    Queue,
    /// The publisher waits.
    Every,
}
