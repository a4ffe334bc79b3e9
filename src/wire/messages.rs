//! The bodies of the messages: plain data, in the words of the protocol.

use std::ops::Range;

use serde::{Deserialize, Deserializer, Serialize};

use super::strict;
use crate::{
    array::ArrayDescriptor,
    base::{Access, DeviceUuid},
    error::ErrorCode,
};

/// The first message of either side.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The newest version that the sender speaks.
    pub version: u16,
    /// What the sender can do beyond the version's minimum: [`super::STREAM`], or nothing.
    pub capabilities: Vec<String>,
    /// The name of the sender's backend. Both must be the same.
    pub backend: String,
    /// The sender's process, in its own PID namespace: for people, not for trust.
    pub pid: u32,
    /// The longest silence of the receiver that the sender waits through, in milliseconds: at least 1.
    pub timeout_ms: u64,
}

/// Asks for an object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Its name.
    pub object: String,
    /// The access wanted; `None` takes what the offer says.
    #[serde(default)]
    pub access: Option<Access>,
    /// Which bytes of the data; `None` is all of them.
    #[serde(default, deserialize_with = "strict::optional_object")]
    pub range: Option<ByteRange>,
}

/// Bytes of an object's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ByteRange {
    /// The first.
    pub offset: u64,
    /// How many.
    pub length: u64,
}

impl ByteRange {
    /// As Rust's own, if it does not reach beyond `size`.
    pub fn within(self, size: u64) -> Option<Range<u64>> {
        let end = self.offset.checked_add(self.length).filter(|&end| end <= size && self.length > 0)?;
        Some(self.offset..end)
    }
}

/// A device, as both sides can name it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// Its UUID.
    #[serde(deserialize_with = "strict::uuid")]
    pub uuid: DeviceUuid,
    /// Its name, for people.
    pub name: String,
}

/// A way of sharing memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Mechanism {
    /// Virtual memory management.
    Vmm,
    /// A memory pool.
    Pool,
    /// A legacy handle.
    Legacy,
}

/// Which memory it is: the device's own, or the host's next to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Location {
    /// The device's own.
    Device,
    /// The host's.
    Host,
}

/// The 64 bytes that open a pool's buffer or a legacy allocation, written as hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Pointer(#[serde(with = "hex::serde")] pub [u8; 64]);

/// What is shared, and how. Which of the optional fields belong to it depends on the mechanism.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// The way it is shared.
    pub mechanism: Mechanism,
    /// The device that owns it, or next to which it is.
    #[serde(deserialize_with = "strict::object")]
    pub device: Device,
    /// Which memory it is.
    pub location: Location,
    /// How many bytes of it hold data.
    pub size: u64,
    /// How many bytes it has: with [`Mechanism::Vmm`] the sum of the segments.
    pub mapped_size: u64,
    /// How many allocations it consists of; 0 unless the mechanism is [`Mechanism::Vmm`].
    pub segments: u64,
    /// The pool that it is of, by a number that the sender chose.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<u64>,
    /// What opens a pool's buffer or a legacy allocation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pointer: Option<Pointer>,
    /// Where the data begins behind that pointer, in bytes.
    #[serde(default, deserialize_with = "or_default")]
    pub offset: u64,
    /// Whether it is never written any more.
    #[serde(default, deserialize_with = "or_default")]
    pub immutable: bool,
}

/// The segments that an offer is followed by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// The index of the first of them.
    pub first: u64,
    /// How many they are.
    pub segments: u64,
    /// How many bytes of the object lie before them.
    pub offset: u64,
    /// How many bytes they are together.
    pub size: u64,
}

/// Describes the buffer whose segments follow.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// The object's name.
    pub object: String,
    /// What is shared, and how.
    #[serde(deserialize_with = "strict::object")]
    pub memory: Memory,
    /// What the data is made of, if it is more than bytes.
    #[serde(default, deserialize_with = "strict::optional_object")]
    pub array: Option<ArrayDescriptor>,
    /// The access that the consumer is to use.
    pub access: Access,
    /// Which segments follow; `None` unless the mechanism is [`Mechanism::Vmm`].
    #[serde(default, deserialize_with = "strict::optional_object")]
    pub part: Option<Part>,
    /// What the consumer may check the data against, in the words of an extension. Receivers that do not know it ignore it.
    #[serde(default, deserialize_with = "strict::optional_check", skip_serializing_if = "Option::is_none")]
    pub check: Option<Check>,
    /// In a stream the number of the buffer, and only there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub buffer: Option<u64>,
}

/// A memory pool, with its descriptor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolNumber {
    /// The number by which offers of this connection name it.
    pub pool: u64,
}

/// Some of the segments, with a descriptor for each.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segments {
    /// The index of the first of them.
    pub first: u64,
    /// The exact size of each allocation, in bytes.
    pub sizes: Vec<u64>,
}

/// Acknowledges segments.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Received {
    /// How many arrived so far, of the current offer.
    pub segments: u64,
}

/// A JSON object that the protocol carries and does not interpret: what to check data against, or what a check found.
pub type Check = serde_json::Map<String, serde_json::Value>;

/// What a side says of the data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Verdict {
    /// Whether all was right, as far as the sender knows.
    pub verified: bool,
    /// What its check found; `None` if it checked nothing.
    #[serde(default, deserialize_with = "strict::optional_check", skip_serializing_if = "Option::is_none")]
    pub check: Option<Check>,
}

impl Verdict {
    /// The verdict of a side that checked nothing itself.
    pub fn unchecked(verified: bool) -> Self {
        Self { verified, check: None }
    }

    /// A verdict, with what the sender's check found.
    pub fn new(verified: bool, check: Option<Check>) -> Self {
        Self { verified, check }
    }
}

/// The sender is working: wait on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Busy {}

/// Why the sender ends the conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The class of it.
    pub code: ErrorCode,
    /// One sentence for a person, of at most [`super::MAX_MESSAGE`] bytes.
    pub message: String,
}

/// Asks for all buffers of a stream, each when its turn comes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Subscribe {
    /// How many buffers the consumer keeps open at most.
    pub keep: u64,
}

/// The turn of a stream's buffer begins.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ready {
    /// The buffer's number.
    pub buffer: u64,
    /// How often it was published, with this time.
    pub generation: u64,
    /// The exact sizes of the first segments of a buffer that is not open there, whose descriptors come with this.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub sizes: Vec<u64>,
}

/// The turn of a stream's buffer ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BufferTurn {
    /// The buffer's number.
    pub buffer: u64,
    /// How often it was published, with this time.
    pub generation: u64,
}

/// Names a buffer of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BufferNumber {
    /// Its number.
    pub buffer: u64,
}

/// A field that may be null, which is as if it were absent.
fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(from: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}
