//! The protocol: messages as bytes, version 1.
//!
//! This page is enough to write a client in another language.
//!
//! # Transport
//!
//! `AF_UNIX`, `SOCK_SEQPACKET`. One message is one record; descriptors travel beside it as `SCM_RIGHTS`. A record without
//! a single byte means that the sender hung up, as does the end of the stream. A reset (`ECONNRESET`) is told once, before
//! what the peer had still sent: read on behind it. Either side may refuse a user that it does not trust (`SO_PEERCRED`) with
//! the code `refused`.
//!
//! # Record
//!
//! | bytes | field | value |
//! |---|---|---|
//! | 0 to 3 | magic | the ASCII letters `VMFD` |
//! | 4, 5 | version | `u16`: 1 |
//! | 6, 7 | kind | `u16`: see Messages |
//! | 8 to 11 | body length | `u32`: at most 65536, and exactly the rest of the record |
//! | 12 to 15 | fd count | `u32`: how many descriptors come with the record |
//! | from 16 | body | one JSON object in UTF-8 |
//!
//! Integers are little-endian. Unknown fields of a body are ignored; a field whose type ends in `?` may be null or absent. A
//! kind that is not in the table breaks the protocol, as does whatever contradicts this page: the code is `protocol`. Names and
//! digests have at most 255 bytes.
//! Descriptors come with `segments` and with a `ready` that has `sizes`, as many as those list, and with `pool`, which has one; with
//! anything else the fd count is 0.
//!
//! # Messages
//!
//! | kind | name | sent by | body |
//! |---|---|---|---|
//! | 1 | `hello` | both | `version` u16, `capabilities` \[string\] (`"stream"` from both ends of a stream), `backend` string (`"cuda"` or `"host"`), `pid` u32 |
//! | 2 | `request` | consumer | `object` string (`"default"`), `access` `"ro"` or `"rw"`? (null: what the offer says), `range` {`offset` u64, `length` u64}? (null: all of it), `have` u64? (how many segments it holds from earlier requests) |
//! | 3 | `offer` | producer | `object` string, `memory` memory, `array` array?, `access` `"ro"` or `"rw"`, `part` {`first` u64, `segments` u64, `offset` u64, `size` u64}?, `salt` u32?, `digest` string?, `reply_salt` u32?, `buffer` u64? (in a stream, and only there) |
//! | 4 | `segments` | producer | `first` u64 (index of the first listed), `sizes` \[u64\], 1 to 253 of them |
//! | 5 | `received` | consumer | `segments` u64: how many of this offer's arrived so far |
//! | 6 | `result` | both | `verified` bool, `words` u64, `mismatches` u64, `first_mismatch` {`index` u64, `expected` u32, `found` u32}?, `digest` string? |
//! | 7 | `busy` | both | empty: `{}` |
//! | 8 | `error` | both | `code` string, `message` string |
//! | 9 | `pool` | producer | `pool` u64 |
//! | 10 | `subscribe` | consumer | `keep` u64: how many buffers it keeps open at most, at least 1 |
//! | 11 | `ready` | producer | `buffer` u64, `generation` u64, `sizes` \[u64\]? (as in `segments`) |
//! | 12 | `done` | consumer | `buffer` u64, `generation` u64 |
//! | 13 | `withdraw` | producer | `buffer` u64 |
//! | 14 | `gone` | consumer | `buffer` u64 |
//!
//! `memory` says what is shared, and how: `mechanism` `"vmm"`, `"pool"` or `"legacy"`, `device` {`uuid` string, `name` string},
//! `location` `"device"` or `"host"`, `size` u64 (bytes of data), `mapped_size` u64 (bytes of memory), `segments` u64 (how many
//! allocations; 0 unless the mechanism is `vmm`), `capacity` u64? (to how many bytes of memory it may grow), `pool` u64?
//! (a number of this connection), `pointer` string? (128 hexadecimal digits: the 64 bytes of `CUmemPoolPtrExportData` or
//! `CUipcMemHandle`), `offset` u64? (where the data begins behind the pointer; absent: 0), `immutable` bool? (nobody writes any
//! more; absent: false). `size` is at least 1 and at most `mapped_size`.
//!
//! `array` describes the data as an array. `dtype` string: the name of the elements' type in NumPy or ml_dtypes, one of `bool`,
//! `int8`, `int16`, `int32`, `int64`, `uint8`, `uint16`, `uint32`, `uint64`, `float16`, `float32`, `float64`, `complex64`,
//! `complex128`, `bfloat16`, `float8_e3m4`, `float8_e4m3`, `float8_e4m3b11fnuz`, `float8_e4m3fn`, `float8_e4m3fnuz`, `float8_e5m2`,
//! `float8_e5m2fnuz`, `float8_e8m0fnu`, or `void` and a number of bits, for that many raw bits in whole bytes (`void128`: 16 bytes);
//! `byte_order` `"little"` or `"big"`? (null: little; `"big"` only for elements of several bytes that are not raw), `shape` \[u64\],
//! `strides` \[i64\]? (bytes; null: C order), `offset` u64? (of the element \[0, ..., 0\], in bytes; null: 0).
//!
//! Codes of `error`: `version`, `protocol`, `refused` (user), `backend`, `device`, `object`, `access`, `range`, `full`,
//! `timeout`, `interrupted`, `failed`. A receiver takes any other code for an error of a kind that it does not know.
//!
//! A `uuid` is 32 hexadecimal digits in groups of 8, 4, 4, 4 and 12 with hyphens between, and no prefix. In a consumer's
//! `result`, `words` is how many 32-bit words the range asked for touches if there is a `salt`, and else 0. `verified` is true
//! exactly if `mismatches` is 0, except that with `words` 0 it may still be false: in a consumer's `result` on an offer without
//! a `salt`, and in a producer's. The bytes of a word that lie outside the range count as zeros in `expected` and `found`. If
//! the offer has a `digest`, `digest` is what was found.
//!
//! # Conversation
//!
//! 1. The consumer connects and sends `hello`; the producer answers with its own. A `hello` always has version 1 in its header
//!    and the newest version that its sender speaks in its body: the lower of the two counts from then on.
//! 2. The consumer sends `request`, of a `range` that is not empty. Any number of requests may follow one another on a
//!    connection, each with all that follows here. Whoever sends one counts as one of the consumers that the producer serves,
//!    also when it is refused: for another backend, too, which is told only now.
//! 3. The producer answers `offer`, with the `object` and, if one was asked for, the `access` of the request. What follows it
//!    depends on the mechanism.
//!    - `vmm`: `part`, which must be there, names the segments that cover the range asked for, less the first `have`: how
//!      many come before them, how many they are, how many bytes lie before the first, and how many bytes they are. If
//!      none are left, `first` is `have` and `offset` the end of those. They follow in one `segments` after another, each
//!      answered with `received` before the next is sent, the last one perhaps only when the memory is open. Each size is
//!      the exact size of the allocation behind the descriptor of the same place; all of the object's together are
//!      `mapped_size`.
//!    - `pool`: the first offer of a connection that names a `pool` is followed by the message `pool` with its descriptor,
//!      answered with `received` of 0 segments.
//!    - `legacy`: nothing.
//! 4. The consumer opens the memory. `vmm`: it imports the descriptors, maps the segments side by side in their order,
//!    behind those that it has, and closes the descriptors. `pool`: it imports the pool, then the pointer. `legacy`: it
//!    opens the handle. The device that it uses is its own of that UUID, or another that can reach it.
//! 5. It checks the range asked for: against the pattern of `salt`, or against `digest`, if there is one. If all was right and
//!    there is a `reply_salt`, which is never `salt` and comes with `rw` alone, it writes the pattern of that salt over the range.
//! 6. When all its work on the buffer is done it sends `result`. The producer checks the reply, if there was to be one, and
//!    sends its own `result`: `words` is what it checked itself, and `verified` is false if either side found a mismatch.
//! 7. The consumer sends another `request`, or shuts down writing. It lets go of `pool` and `legacy` memory before it does so:
//!    the producer frees that memory when every connection that it was offered on has ended. The producer closes when it sees
//!    the end.
//!
//! Whoever works instead of answering (filling, checking, waiting for a turn) sends `busy` once a second, or three times in its
//! own timeout where that is shorter: it is no answer, and restarts the receiver's deadline. Before its first `request` a
//! consumer has nothing to be busy with. `error` ends the conversation at any point: its sender shuts down writing, reads to
//! the end or its deadline, and closes. Whoever can't send because of `EPIPE` or `ECONNRESET` reads once more before it gives
//! up, for the reason may still be there.
//!
//! # Streams
//!
//! In a stream a producer publishes buffers again and again, and a consumer that stays connected receives each when its turn
//! comes. What a consumer has open it gets no more descriptors of.
//!
//! 1. Both say `hello` with the capability `stream`, and the consumer sends `subscribe` where a `request` would be. A
//!    producer of a stream refuses a `request`, and one without streams a `subscribe`: the code is `object`. From then on
//!    nobody owes anybody an answer but those named here; silence is no error.
//! 2. The producer numbers its buffers, and gives no number twice on a connection. It describes each in an `offer` with its
//!    number as `buffer`, of all the segments, with no salts and no `digest`; nothing follows that and nothing answers it. There
//!    are at most 64 at a time. The generation of a buffer counts its publications on this connection from 1. To publish one
//!    is to give the consumer a turn on it, when all the producer's work on it is done:
//!    - The consumer has it open: `ready`, without `sizes`.
//!    - It has not: `ready` too, and if it is shared by `vmm` that brings the first segments, at least one and at most 253: `sizes`
//!      and the descriptors are as in `segments`. What else belongs to it follows as for a request, but `pool` also comes again if
//!      the consumer has no buffer of that pool open that was neither let go of nor withdrawn by then. The consumer opens the
//!      memory, then answers with `received`: the last `segments`, `pool`, or the `ready` itself if nothing follows it. The
//!      producer publishes nothing and
//!      withdraws nothing before that.
//! 3. When all the consumer's work on the buffer is done it sends `done`, with the generation of the turn. Turns of
//!    several buffers may overlap: they begin in the order in which they were published, and end in any order. A buffer
//!    has one turn at a time.
//! 4. A consumer that has as many buffers open as it likes lets go of one that is not its turn, when another one is
//!    published and before it opens that: it sends `gone` before `received`, and at no other time of its own accord. The
//!    producer, which waits for `received`, so knows of it before it could send a `ready` that crosses it.
//! 5. `withdraw` takes a buffer out, whose number and description are forgotten. If the consumer has it open it lets go of it, and
//!    then sends `gone`: at once, or behind the `done` of the turn.
//! 6. Either side ends the stream by shutting down writing. The consumer then lets go of all buffers; of `pool` and
//!    `legacy` memory before it shuts down writing itself, as in any conversation.
//!
//! # Host memory
//!
//! On the backend `host` a segment's descriptor is a memfd, exactly as long as its size, which is a multiple of 2 MiB, and sealed
//! against shrinking (`F_SEAL_SHRINK`): one that its owner could cut would be a SIGBUS to whoever reads it. Memory that is sealed
//! against writing (`F_SEAL_WRITE`) is mapped `MAP_PRIVATE`: before Linux 6.7 nothing else is allowed. The one device of a
//! machine has the version 5 UUID of its boot id (`/proc/sys/kernel/random/boot_id`, as text) in the namespace
//! `8a4f2d0e-6c1b-4f0d-9a53-6d1e0c6f7b21`.
//!
//! # Digest
//!
//! The algorithm's name, a colon and lower-case hexadecimal digits, over the bytes of the range asked for: `blake3:` and 64
//! digits. A consumer that does not know the algorithm ends the conversation with the code `failed`.
//!
//! # Pattern
//!
//! With a `salt` the data is a sequence of little-endian 32-bit words, whatever the array's type. In wrapping 32-bit arithmetic,
//!
//! ```text
//! word[i] = (i * 2 + 1337) ^ 0xDEADBEEF ^ salt ^ mix(i >> 31)
//! mix(h):   h ^= h >> 16;  h *= 0x85EBCA6B;  h ^= h >> 13;  h *= 0xC2B2AE35;  h ^= h >> 16
//! ```
//!
//! If `size` is no multiple of 4, the last word is cut to the bytes that there are.

use std::{fmt, ops::Range, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, de::DeserializeOwned};

use crate::{
    array::ArrayDescriptor,
    driver::{Access, DeviceUuid},
};

pub use crate::error::{ErrorCode, ProtocolError};

/// The version of the protocol that this build speaks.
pub const VERSION: u16 = 1;

/// The length of a record's header, in bytes.
pub const HEADER_LENGTH: usize = 16;

/// The longest body, in bytes.
pub const MAX_BODY: usize = 64 * 1024;

/// The most descriptors in one record: the kernel's own limit (`SCM_MAX_FD`).
pub const MAX_FDS: usize = 253;

/// The longest name of an object, a backend or a device, and the longest digest, in bytes.
pub const MAX_NAME: usize = 255;

/// The name of the object that a producer serves unless told otherwise.
pub const DEFAULT_OBJECT: &str = "default";

/// The capability of both ends of a stream.
pub const STREAM: &str = "stream";

const MAGIC: [u8; 4] = *b"VMFD";

/// The first message of either side.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The newest version that the sender speaks.
    pub version: u16,
    /// What the sender can do beyond the version's minimum: [`STREAM`], or nothing.
    #[serde(default)]
    pub capabilities: Vec<String>,
    /// The name of the sender's backend. Both must be the same.
    pub backend: String,
    /// The sender's process, in its own PID namespace: for people, not for trust.
    pub pid: u32,
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
    #[serde(default)]
    pub range: Option<ByteRange>,
    /// How many of its segments, from the first on, the consumer holds already.
    #[serde(default)]
    pub have: Option<u64>,
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

/// A device, as both sides can know it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfferedDevice {
    /// Its identity.
    pub uuid: DeviceUuid,
    /// Its name, for people.
    pub name: String,
}

impl fmt::Display for OfferedDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name, self.uuid)
    }
}

/// A way of sharing memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Mechanism {
    /// Virtual memory management: a descriptor for each allocation.
    #[default]
    Vmm,
    /// A memory pool's descriptor, and 64 bytes for each buffer in it.
    Pool,
    /// `cuIpcMemHandle`: 64 bytes and no descriptor.
    Legacy,
    /// One that this version does not know.
    #[serde(other)]
    Unknown,
}

impl fmt::Display for Mechanism {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

impl FromStr for Mechanism {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "vmm" => Ok(Self::Vmm),
            "pool" => Ok(Self::Pool),
            "legacy" => Ok(Self::Legacy),
            _ => Err(format!("no mechanism is called `{text}`: write vmm, pool or legacy")),
        }
    }
}

/// In whose memory it is: the device's own, or the host's next to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Placement {
    /// The device's own.
    #[default]
    Device,
    /// The host's, of the NUMA node next to the device: the CPU and the device reach it alike.
    Host,
    /// One that this version does not know.
    #[serde(other)]
    Unknown,
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

impl FromStr for Placement {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "device" => Ok(Self::Device),
            "host" => Ok(Self::Host),
            _ => Err(format!("no location is called `{text}`: write device or host")),
        }
    }
}

/// The 64 bytes by which a pool's buffer or a legacy allocation is opened: opaque, and written as hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Pointer(#[serde(with = "hex::serde")] pub [u8; 64]);

/// What is shared, and how: with the descriptors that belong to it, all that is needed to open it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Description {
    /// The way it is shared.
    pub mechanism: Mechanism,
    /// The device that owns it, or next to which it is.
    pub device: OfferedDevice,
    /// In whose memory it is.
    pub location: Placement,
    /// How many bytes of it hold data.
    pub size: u64,
    /// How many bytes it has: with [`Mechanism::Vmm`] the sum of the segments.
    pub mapped_size: u64,
    /// How many allocations it consists of; 0 unless the mechanism is [`Mechanism::Vmm`].
    pub segments: u64,
    /// To how many bytes it may grow.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity: Option<u64>,
    /// Which pool it is of, by a number of the sender's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<u64>,
    /// What opens it, of a pool's buffer and a legacy allocation.
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
    pub memory: Description,
    /// What the data is made of, if it is more than bytes.
    #[serde(default)]
    pub array: Option<ArrayDescriptor>,
    /// The access that the consumer is to use.
    pub access: Access,
    /// Which segments follow; `None` unless the mechanism is [`Mechanism::Vmm`].
    #[serde(default)]
    pub part: Option<Part>,
    /// The salt of the pattern that it holds, if it holds one.
    #[serde(default)]
    pub salt: Option<u32>,
    /// The digest of the bytes asked for, if they are other data and it is known.
    #[serde(default)]
    pub digest: Option<String>,
    /// In a round trip the salt of the pattern to write into it: never the same as `salt`.
    #[serde(default)]
    pub reply_salt: Option<u32>,
    /// In a stream the number of the buffer, and only there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub buffer: Option<u64>,
}

/// A memory pool, with its descriptor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfferedPool {
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

/// A word that is not what it should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mismatch {
    /// Its index, counted in words.
    pub index: u64,
    /// What belongs there.
    pub expected: u32,
    /// What is there.
    pub found: u32,
}

/// What a side found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// Whether all was right, as far as the sender knows.
    pub verified: bool,
    /// How many words the sender checked itself.
    pub words: u64,
    /// How many of them were wrong.
    pub mismatches: u64,
    /// The first of those.
    #[serde(default)]
    pub first_mismatch: Option<Mismatch>,
    /// The digest that the sender found, where the offer has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
}

impl Outcome {
    /// What a side says that counted nothing itself.
    pub fn of_verdict(verified: bool) -> Self {
        Self { verified, words: 0, mismatches: 0, first_mismatch: None, digest: None }
    }

    /// Checks what a peer says it found against itself, and against which words it was to check.
    ///
    /// # Errors
    /// [`ProtocolError::Content`].
    pub fn check(&self, words: Range<u64>) -> Result<(), ProtocolError> {
        let count = words.end.saturating_sub(words.start);
        // Whoever checked nothing may still know that all is not well.
        let verdict = self.verified == (self.mismatches == 0) || (self.words == 0 && !self.verified);
        let counts = self.words == count && self.mismatches <= count && verdict;
        let first = match self.first_mismatch {
            Some(first) => self.mismatches > 0 && words.contains(&first.index) && first.expected != first.found,
            None => true,
        };
        if counts && first {
            Ok(())
        } else {
            let Self { verified, words: claimed, mismatches, .. } = self;
            let first = self.first_mismatch.map_or_else(String::new, |first| format!(", the first at {}", first.index));
            Err(ProtocolError::Content(format!(
                "a result says verified: {verified}, {claimed} words, {mismatches} wrong{first}, where words {words:?} were to check"
            )))
        }
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
    /// One sentence for a person.
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

/// One record's content.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Message {
    /// Kind 1.
    Hello(Hello),
    /// Kind 2.
    Request(Request),
    /// Kind 3.
    Offer(Box<Offer>),
    /// Kind 4, with a descriptor for each.
    Segments(Segments),
    /// Kind 5.
    Received(Received),
    /// Kind 6.
    Result(Outcome),
    /// Kind 7.
    Busy(Busy),
    /// Kind 8.
    Error(Failure),
    /// Kind 9, with the pool's descriptor.
    Pool(OfferedPool),
    /// Kind 10.
    Subscribe(Subscribe),
    /// Kind 11.
    Ready(Ready),
    /// Kind 12.
    Done(BufferTurn),
    /// Kind 13.
    Withdraw(BufferNumber),
    /// Kind 14.
    Gone(BufferNumber),
}

impl Message {
    /// The name of its kind.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Hello(_) => "hello",
            Self::Request(_) => "request",
            Self::Offer(_) => "offer",
            Self::Segments(_) => "segments",
            Self::Received(_) => "received",
            Self::Result(_) => "result",
            Self::Busy(_) => "busy",
            Self::Error(_) => "error",
            Self::Pool(_) => "pool",
            Self::Subscribe(_) => "subscribe",
            Self::Ready(_) => "ready",
            Self::Done(_) => "done",
            Self::Withdraw(_) => "withdraw",
            Self::Gone(_) => "gone",
        }
    }

    /// How many descriptors belong to it: the one place that says which messages carry any.
    pub fn fd_count(&self) -> usize {
        match self {
            Self::Segments(segments) => segments.sizes.len(),
            Self::Ready(ready) => ready.sizes.len(),
            Self::Pool(_) => 1,
            _ => 0,
        }
    }

    /// The record.
    ///
    /// # Errors
    /// [`ProtocolError::LongRecord`] or [`ProtocolError::Content`] if the message is larger than the protocol allows.
    pub fn encode(&self) -> Result<Vec<u8>, ProtocolError> {
        let mut record = Vec::new();
        self.encode_into(&mut record).map(|()| record)
    }

    /// As [`Message::encode`], into memory that is used again and again: what it held is gone.
    ///
    /// # Errors
    /// As [`Message::encode`].
    pub fn encode_into(&self, record: &mut Vec<u8>) -> Result<(), ProtocolError> {
        self.check()?;
        record.clear();
        record.resize(HEADER_LENGTH, 0);
        let (kind, written): (u16, _) = match self {
            Self::Hello(body) => (1, serde_json::to_writer(&mut *record, body)),
            Self::Request(body) => (2, serde_json::to_writer(&mut *record, body)),
            Self::Offer(body) => (3, serde_json::to_writer(&mut *record, body)),
            Self::Segments(body) => (4, serde_json::to_writer(&mut *record, body)),
            Self::Received(body) => (5, serde_json::to_writer(&mut *record, body)),
            Self::Result(body) => (6, serde_json::to_writer(&mut *record, body)),
            Self::Busy(body) => (7, serde_json::to_writer(&mut *record, body)),
            Self::Error(body) => (8, serde_json::to_writer(&mut *record, body)),
            Self::Pool(body) => (9, serde_json::to_writer(&mut *record, body)),
            Self::Subscribe(body) => (10, serde_json::to_writer(&mut *record, body)),
            Self::Ready(body) => (11, serde_json::to_writer(&mut *record, body)),
            Self::Done(body) => (12, serde_json::to_writer(&mut *record, body)),
            Self::Withdraw(body) => (13, serde_json::to_writer(&mut *record, body)),
            Self::Gone(body) => (14, serde_json::to_writer(&mut *record, body)),
        };
        written.map_err(|error| ProtocolError::Content(error.to_string()))?;
        let length = record.len() - HEADER_LENGTH;
        if length > MAX_BODY {
            return Err(ProtocolError::LongRecord { most: HEADER_LENGTH + MAX_BODY });
        }
        record[0..4].copy_from_slice(&MAGIC);
        record[4..6].copy_from_slice(&VERSION.to_le_bytes());
        record[6..8].copy_from_slice(&kind.to_le_bytes());
        record[8..12].copy_from_slice(&(length as u32).to_le_bytes());
        record[12..16].copy_from_slice(&(self.fd_count() as u32).to_le_bytes());
        Ok(())
    }

    /// Reads a record that came with `fds` descriptors.
    ///
    /// Control characters in a peer's text become spaces, so that none reaches a terminal.
    ///
    /// # Errors
    /// Each thing that can be wrong with it has its own [`ProtocolError`].
    pub fn decode(record: &[u8], fds: usize) -> Result<Self, ProtocolError> {
        let Some((header, body)) = record.split_first_chunk::<HEADER_LENGTH>() else {
            return Err(ProtocolError::ShortRecord { got: record.len(), header: HEADER_LENGTH });
        };
        let [m0, m1, m2, m3, v0, v1, k0, k1, l0, l1, l2, l3, f0, f1, f2, f3] = *header;
        let magic = [m0, m1, m2, m3];
        if magic != MAGIC {
            return Err(ProtocolError::Magic { got: magic });
        }
        match u16::from_le_bytes([v0, v1]) {
            VERSION => {}
            got => return Err(ProtocolError::Version { got, own: VERSION }),
        }
        let length = u32::from_le_bytes([l0, l1, l2, l3]);
        if body.len() > MAX_BODY {
            return Err(ProtocolError::LongRecord { most: HEADER_LENGTH + MAX_BODY });
        }
        if length as usize != body.len() {
            return Err(ProtocolError::BodyLength { claimed: length, got: body.len() });
        }
        let mut message = match u16::from_le_bytes([k0, k1]) {
            1 => Self::Hello(parse("hello", body)?),
            2 => Self::Request(parse("request", body)?),
            3 => Self::Offer(parse("offer", body)?),
            4 => Self::Segments(parse("segments", body)?),
            5 => Self::Received(parse("received", body)?),
            6 => Self::Result(parse("result", body)?),
            7 => Self::Busy(parse("busy", body)?),
            8 => Self::Error(parse("error", body)?),
            9 => Self::Pool(parse("pool", body)?),
            10 => Self::Subscribe(parse("subscribe", body)?),
            11 => Self::Ready(parse("ready", body)?),
            12 => Self::Done(parse("done", body)?),
            13 => Self::Withdraw(parse("withdraw", body)?),
            14 => Self::Gone(parse("gone", body)?),
            got => return Err(ProtocolError::Kind { got }),
        };
        message.check()?;
        let (want, claimed) = (message.fd_count(), u32::from_le_bytes([f0, f1, f2, f3]));
        if claimed as usize != want || fds != want {
            return Err(ProtocolError::FdCount { kind: message.name(), want, claimed, got: fds });
        }
        match &mut message {
            Self::Hello(hello) => clean(&mut hello.backend),
            Self::Request(request) => clean(&mut request.object),
            Self::Offer(offer) => {
                let texts = [&mut offer.object, &mut offer.memory.device.name];
                texts.into_iter().chain(&mut offer.digest).for_each(clean);
            }
            Self::Result(outcome) => outcome.digest.iter_mut().for_each(clean),
            Self::Error(failure) => clean(&mut failure.message),
            _ => {}
        }
        Ok(message)
    }

    /// What types can't say: how many segments a record may hold, and how long a name may be.
    fn check(&self) -> Result<(), ProtocolError> {
        match self {
            Self::Segments(segments) if !(1..=MAX_FDS).contains(&segments.sizes.len()) => Err(ProtocolError::Content(
                format!("segments lists {} sizes where 1 to {MAX_FDS} belong", segments.sizes.len()),
            )),
            Self::Hello(Hello { backend: name, .. }) | Self::Request(Request { object: name, .. }) => bounded(name),
            Self::Ready(ready) if ready.sizes.len() > MAX_FDS => {
                let got = ready.sizes.len();
                Err(ProtocolError::Content(format!("ready lists {got} sizes where at most {MAX_FDS} belong")))
            }
            Self::Offer(offer) => {
                let digest = offer.digest.as_deref().unwrap_or_default();
                [offer.object.as_str(), &offer.memory.device.name, digest].into_iter().try_for_each(bounded)
            }
            Self::Result(outcome) => bounded(outcome.digest.as_deref().unwrap_or_default()),
            _ => Ok(()),
        }
    }
}

/// A field that may be null, which is as if it were absent.
fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(from: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

fn bounded(name: &str) -> Result<(), ProtocolError> {
    match name.len() {
        0..=MAX_NAME => Ok(()),
        length => {
            Err(ProtocolError::Content(format!("a name has {length} bytes where at most {MAX_NAME} are allowed")))
        }
    }
}

fn parse<T: DeserializeOwned>(kind: &'static str, body: &[u8]) -> Result<T, ProtocolError> {
    // serde would take an array for a struct too; the protocol knows objects alone.
    if !body.trim_ascii_start().starts_with(b"{") {
        return Err(ProtocolError::Body { kind, reason: "it is no JSON object".to_owned() });
    }
    serde_json::from_slice(body).map_err(|error| {
        let mut reason = error.to_string();
        clean(&mut reason);
        ProtocolError::Body { kind, reason }
    })
}

/// Makes a text from outside fit for a terminal.
pub(crate) fn clean(text: &mut String) {
    // Controls, and what turns or hides text: those of Unicode's category Cf that terminals heed.
    let unfit = |c: char| {
        c.is_control()
            || matches!(c, '\u{00AD}' | '\u{061C}' | '\u{180E}' | '\u{200B}'..='\u{200F}' | '\u{2028}'..='\u{202E}' | '\u{2060}'..='\u{206F}' | '\u{FEFF}')
    };
    if text.contains(unfit) {
        *text = text.replace(unfit, " ");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::array::Order;

    fn every_message() -> Vec<Message> {
        let uuid = DeviceUuid::from_bytes(*b"0123456789abcdef");
        let first_mismatch = Some(Mismatch { index: u64::MAX, expected: 1, found: u32::MAX });
        vec![
            Message::Hello(Hello { version: 1, capabilities: vec!["x".into()], backend: "cuda".into(), pid: 7 }),
            Message::Request(Request {
                object: DEFAULT_OBJECT.into(),
                access: Some(Access::ReadOnly),
                range: Some(ByteRange { offset: 1, length: u64::MAX }),
                have: Some(3),
            }),
            Message::Offer(Box::new(Offer {
                object: "weights".into(),
                memory: Description {
                    mechanism: Mechanism::Pool,
                    device: OfferedDevice { uuid, name: "a device".into() },
                    location: Placement::Host,
                    size: 5,
                    mapped_size: 2 << 20,
                    segments: 1,
                    capacity: Some(u64::MAX),
                    pool: Some(2),
                    pointer: Some(Pointer([0xA5; 64])),
                    offset: 4096,
                    immutable: true,
                },
                array: Some(ArrayDescriptor::new("<f4".parse().unwrap(), vec![5, 7], Order::F).unwrap()),
                access: Access::ReadWrite,
                part: Some(Part { first: 1, segments: 2, offset: 3, size: 4 }),
                salt: Some(0xffff_ffff),
                digest: Some("blake3:00".into()),
                reply_salt: Some(3),
                buffer: Some(4),
            })),
            Message::Segments(Segments { first: 0, sizes: vec![2 << 20, 4 << 20] }),
            Message::Received(Received { segments: 2 }),
            Message::Result(Outcome {
                verified: false,
                words: 9,
                mismatches: 4,
                first_mismatch,
                digest: Some("x".into()),
            }),
            Message::Busy(Busy {}),
            Message::Error(Failure { code: ErrorCode::Refused, message: "no".into() }),
            Message::Pool(OfferedPool { pool: 7 }),
            Message::Subscribe(Subscribe { keep: 4 }),
            Message::Ready(Ready { buffer: 2, generation: 9, sizes: vec![2 << 20, 1] }),
            Message::Done(BufferTurn { buffer: u64::MAX, generation: 1 }),
            Message::Withdraw(BufferNumber { buffer: 2 }),
            Message::Gone(BufferNumber { buffer: 0 }),
        ]
    }

    fn record(kind: u16, body: &str, fds: u32) -> Vec<u8> {
        let mut record = b"VMFD\x01\x00".to_vec();
        record.extend(kind.to_le_bytes());
        record.extend((body.len() as u32).to_le_bytes());
        record.extend(fds.to_le_bytes());
        record.extend(body.as_bytes());
        record
    }

    #[test]
    fn every_message_comes_back_as_it_was_sent() {
        for message in every_message() {
            let bytes = message.encode().unwrap();
            assert_eq!(Message::decode(&bytes, message.fd_count()), Ok(message));
        }
    }

    #[test]
    fn the_bytes_are_those_of_the_documentation() {
        let bytes = Message::Busy(Busy {}).encode().unwrap();
        assert_eq!(bytes, b"VMFD\x01\x00\x07\x00\x02\x00\x00\x00\x00\x00\x00\x00{}");
        let sent = Message::Segments(Segments { first: 0, sizes: vec![1, 2, 3] }).encode().unwrap();
        assert_eq!(sent, record(4, r#"{"first":0,"sizes":[1,2,3]}"#, 3));
    }

    #[test]
    fn a_record_cut_anywhere_is_refused() {
        for message in every_message() {
            let bytes = message.encode().unwrap();
            for length in 0..bytes.len() {
                assert!(Message::decode(&bytes[..length], message.fd_count()).is_err(), "{message:?} cut to {length}");
            }
            let longer = [bytes, b" ".to_vec()].concat();
            assert!(matches!(Message::decode(&longer, 0), Err(ProtocolError::BodyLength { .. })));
        }
    }

    #[test]
    fn a_record_changed_in_any_byte_never_panics() {
        for message in every_message() {
            let bytes = message.encode().unwrap();
            for index in 0..bytes.len() {
                for value in [0, 1, 0x22, 0x7f, 0xff] {
                    let mut changed = bytes.clone();
                    changed[index] = value;
                    let _ = Message::decode(&changed, message.fd_count());
                }
            }
        }
    }

    #[test]
    fn descriptors_must_be_as_many_as_the_message_calls_for() {
        for message in every_message() {
            let (bytes, want) = (message.encode().unwrap(), message.fd_count());
            for fds in [0, 1, want + 1, MAX_FDS] {
                let decoded = Message::decode(&bytes, fds);
                let refused = matches!(decoded, Err(ProtocolError::FdCount { got, .. }) if got == fds);
                assert_eq!(refused, fds != want, "{message:?} with {fds}");
            }
        }
        let lying = record(4, r#"{"first":0,"sizes":[1]}"#, 2);
        assert!(matches!(Message::decode(&lying, 1), Err(ProtocolError::FdCount { claimed: 2, .. })));
    }

    #[test]
    fn each_fault_is_named() {
        let decode = |bytes: &[u8]| Message::decode(bytes, 0).unwrap_err();
        assert_eq!(decode(b""), ProtocolError::ShortRecord { got: 0, header: 16 });
        assert_eq!(decode(b"GET / HTTP/1.1\r\n"), ProtocolError::Magic { got: *b"GET " });
        let mut newer = record(7, "{}", 0);
        newer[4] = 2;
        assert_eq!(decode(&newer), ProtocolError::Version { got: 2, own: 1 });
        assert_eq!(decode(&record(99, "{}", 0)), ProtocolError::Kind { got: 99 });
        for body in ["", "[]", "{", "null", r#"["default",null]"#, r#"{"object":7}"#, "\u{0}"] {
            let refused = decode(&record(2, body, 0));
            assert!(matches!(refused, ProtocolError::Body { kind: "request", .. }), "{body:?}: {refused}");
        }
        let many = format!(r#"{{"first":0,"sizes":[{}]}}"#, vec!["1"; MAX_FDS + 1].join(","));
        for body in [many.as_str(), r#"{"first":0,"sizes":[]}"#] {
            assert!(matches!(decode(&record(4, body, 0)), ProtocolError::Content(_)));
        }
        let long = "x".repeat(MAX_NAME + 1);
        let asked = format!(r#"{{"object":"{long}"}}"#);
        assert!(matches!(decode(&record(2, &asked, 0)), ProtocolError::Content(_)));
        let found = format!(r#"{{"verified":true,"words":0,"mismatches":0,"digest":"{long}"}}"#);
        assert!(matches!(decode(&record(6, &found, 0)), ProtocolError::Content(_)));
        let mut offers = every_message();
        offers.retain(|message| matches!(message, Message::Offer(_)));
        for mut message in offers {
            let Message::Offer(offer) = &mut message else { continue };
            offer.memory.device.name = long.clone();
            assert!(matches!(message.encode(), Err(ProtocolError::Content(_))));
        }
    }

    #[test]
    fn fields_and_codes_of_the_future_are_ignored() {
        let request = Message::decode(&record(2, r#"{"object":"x","colour":"red"}"#, 0), 0);
        assert_eq!(
            request,
            Ok(Message::Request(Request { object: "x".into(), access: None, range: None, have: None }))
        );
        let error = Message::decode(&record(8, r#"{"code":"new","message":"y"}"#, 0), 0);
        assert_eq!(error, Ok(Message::Error(Failure { code: ErrorCode::Unknown, message: "y".into() })));
    }

    #[test]
    fn what_may_be_absent_may_be_null() {
        let ready = Message::decode(&record(11, r#"{"buffer":1,"generation":2,"sizes":null}"#, 0), 0);
        assert_eq!(ready, Ok(Message::Ready(Ready { buffer: 1, generation: 2, sizes: Vec::new() })));
        for message in every_message() {
            let Message::Offer(_) = &message else { continue };
            let record = message.encode().unwrap();
            let mut body: serde_json::Value = serde_json::from_slice(&record[HEADER_LENGTH..]).unwrap();
            let optional = ["array", "part", "salt", "digest", "reply_salt", "buffer"];
            optional.iter().for_each(|field| body[field] = serde_json::Value::Null);
            let optional = ["capacity", "pool", "pointer", "offset", "immutable"];
            optional.iter().for_each(|field| body["memory"][field] = serde_json::Value::Null);
            let body = body.to_string();
            assert!(matches!(Message::decode(&self::record(3, &body, 0), 0), Ok(Message::Offer(_))), "{body}");
        }
    }

    #[test]
    fn control_characters_of_a_peer_do_not_reach_a_terminal() {
        let body = r#"{"code":"failed","message":"\u001b[31mred\n\u202e"}"#;
        let Ok(Message::Error(failure)) = Message::decode(&record(8, body, 0), 0) else { panic!() };
        assert_eq!(failure.message, " [31mred  ");
    }

    #[test]
    fn a_result_that_contradicts_itself_is_refused() {
        let result = |verified, words, mismatches, first: Option<u64>| Outcome {
            verified,
            words,
            mismatches,
            first_mismatch: first.map(|index| Mismatch { index, expected: 1, found: 2 }),
            digest: None,
        };
        for sound in [
            result(true, 9, 0, None),
            result(false, 9, 1, None),
            result(false, 9, 1, Some(8)),
            result(false, 9, 9, Some(0)),
        ] {
            assert_eq!(sound.check(0..9), Ok(()), "{sound:?}");
        }
        assert_eq!((result(true, 0, 0, None).check(0..0), result(false, 0, 0, None).check(5..5)), (Ok(()), Ok(())));
        for lie in [
            result(true, 8, 0, None),
            result(true, u64::MAX, 7, Some(0)),
            result(true, 9, 1, Some(0)),
            result(false, 9, 0, None),
            result(false, 9, 10, Some(0)),
            result(false, 9, 1, Some(9)),
            result(true, 9, 0, Some(0)),
        ] {
            assert!(lie.check(0..9).is_err(), "{lie:?}");
        }
        // Of a part, the index is still the object's.
        assert_eq!(result(false, 9, 1, Some(100)).check(100..109), Ok(()));
        assert!(result(false, 9, 1, Some(8)).check(100..109).is_err());
        assert!(result(false, 9, 1, Some(109)).check(100..109).is_err());
    }

    #[test]
    fn what_is_too_long_is_not_sent() {
        let message = Message::Error(Failure { code: ErrorCode::Failed, message: "x".repeat(MAX_BODY) });
        assert_eq!(message.encode(), Err(ProtocolError::LongRecord { most: HEADER_LENGTH + MAX_BODY }));
    }
}
