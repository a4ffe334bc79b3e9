//! The bodies of the messages that put, get and delete: plain data, in the words of the protocol.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Deserializer, Serialize};

use super::table::Attached;
use crate::{
    error::RefusalCode,
    wire::{ByteRange, Check, Memory, Part, strict},
};

/// 128 random bits that name a lease or a claim, and that only its holder knows. Written as 32 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Token(#[serde(with = "hex::serde")] pub [u8; 16]);

impl fmt::Debug for Token {
    /// Nothing of the secret: it would be in a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// JSON that belongs to a message: in it, or in a memfd beside it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Table {
    /// In the message.
    Inline(Attached),
    /// In a sealed memfd of so many bytes, whose descriptor comes with the message.
    Length(u64),
}

/// How long a name stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "kind")]
#[non_exhaustive]
pub enum Lifetime {
    /// Until it is deleted.
    #[default]
    Deleted,
    /// While the connection lives that put it.
    Maker,
    /// For a time after the last lease of it ended, or after it was put.
    Idle {
        /// That time, in milliseconds.
        ms: u64,
    },
    /// While the connection lives that put it, or a lease of it is held.
    Leased,
}

/// A user and a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
}

/// The process that put a part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Maker {
    /// Its number in the server's PID namespace, or 0.
    pub pid: i32,
    /// Its user.
    pub uid: u32,
    /// Its command (`/proc/PID/comm`), where the server could read it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
}

/// Hands memory over. Its descriptors: the tables' in the order in which they are named here, then the first segments'.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Put {
    /// The name.
    pub name: String,
    /// Whether the name may exist: then this is its next version.
    #[serde(default, deserialize_with = "or_default")]
    pub replace: bool,
    /// The current version must be this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub if_version: Option<u64>,
    /// The names of all parts of the version; empty if there are no others than here.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub announced: Vec<String>,
    /// What the puts of one version have in common, where there are several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// How long to wait for the parts of others, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_ms: Option<u64>,
    /// The backend of the memory.
    pub backend: String,
    /// The parts that come with this.
    #[serde(deserialize_with = "strict::objects")]
    pub parts: Vec<PutPart>,
    /// What the version's maker says of it: a JSON object.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<Table>,
    /// The permissions of a new name: as of a file, without `x`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<u16>,
    /// How long the name stays; `None` keeps what it has.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "strict::optional_object")]
    pub lifetime: Option<Lifetime>,
    /// How many versions before the current one stay; `None` keeps what the name has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<u32>,
    /// What the client calls this request: sent again, it is answered with what it published before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<Token>,
    /// The version is one that the server had, and lost.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "strict::optional_object")]
    pub restore: Option<Restore>,
    /// The exact sizes of the first segments of all parts, one after the other.
    pub sizes: Vec<u64>,
}

/// What a version was that a client offers back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restore {
    /// Its number.
    pub version: u64,
    /// Its UUID.
    pub id: String,
    /// When it was published, in milliseconds since 1970.
    pub created_ms: u64,
    /// Whose the name was.
    #[serde(deserialize_with = "strict::object")]
    pub owner: Owner,
    /// The leases of it that this client held.
    pub leases: Vec<Token>,
}

/// A part of a version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PutPart {
    /// Its name.
    pub name: String,
    /// What it is.
    #[serde(deserialize_with = "strict::object")]
    pub memory: Memory,
    /// The arrays in it: a JSON array of [`ArrayEntry`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arrays: Option<Table>,
    /// The digest of its bytes, in the maker's words: `blake3:...`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
}

/// The server has checked a put and has room for it: the rest of its segments may come.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Send {}

/// A version is published.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Published {
    /// Its number.
    pub version: u64,
    /// Its UUID.
    pub id: String,
}

/// Asks for leases of one or several objects, all or none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Get {
    /// Of which.
    #[serde(deserialize_with = "strict::objects")]
    pub objects: Vec<GetObject>,
    /// How long to wait for them to exist, in milliseconds; `None` does not wait.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_ms: Option<u64>,
    /// Where the object does not exist: asks to be the one that makes it.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "strict::optional_object")]
    pub claim: Option<Claim>,
}

/// What of an object is asked for.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct GetObject {
    /// Its name.
    pub name: String,
    /// This version; `None` is the current one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u64>,
    /// The current version, if it is newer than this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub newer_than: Option<u64>,
    /// These parts; `None` is all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parts: Option<Vec<String>>,
    /// The segments of these bytes of the one part alone.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "strict::optional_object")]
    pub range: Option<ByteRange>,
    /// The segments of these arrays alone, and of those only the parts in which they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arrays: Option<Vec<String>>,
    /// Fields of the metadata that must be there and equal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expect: Option<Check>,
    /// The digest that each of these parts must have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digests: Option<BTreeMap<String, String>>,
}

/// Asks to be the one process that makes an object.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Claim {
    /// The part to make; `None` is all of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part: Option<String>,
    /// What the claims of one version have in common, where there are several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
}

/// The claim is granted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claimed {
    /// What names it.
    pub token: Token,
}

/// A lease. Its descriptors: the tables' in the order in which they are named here, then the first segments'.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseHeader {
    /// What names it.
    pub token: Token,
    /// The object's name.
    pub name: String,
    /// Its version.
    pub version: u64,
    /// The version's UUID.
    pub id: String,
    /// When it was published, in milliseconds since 1970.
    pub created_ms: u64,
    /// Whose it is.
    #[serde(deserialize_with = "strict::object")]
    pub owner: Owner,
    /// The backend of the memory.
    pub backend: String,
    /// What its maker says of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<Table>,
    /// The permissions of the name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<u16>,
    /// How long the name stays.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "strict::optional_object")]
    pub lifetime: Option<Lifetime>,
    /// How many versions before the current one stay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<u32>,
    /// Whether all of the version was handed out: a client can offer it back.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "std::ops::Not::not")]
    pub whole: bool,
    /// The parts that were asked for.
    #[serde(deserialize_with = "strict::objects")]
    pub parts: Vec<LeasePart>,
    /// The exact sizes of the first segments of all runs, one after the other.
    pub sizes: Vec<u64>,
}

/// A part of a lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeasePart {
    /// Its name.
    pub name: String,
    /// What it is. Its sizes are as its maker claimed them.
    #[serde(deserialize_with = "strict::object")]
    pub memory: Memory,
    /// The segments that follow, in runs of adjacent ones.
    #[serde(deserialize_with = "strict::objects")]
    pub runs: Vec<Part>,
    /// The arrays in it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arrays: Option<Table>,
    /// The digest of its bytes, in its maker's words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
}

/// A named array in a part.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ArrayEntry {
    /// Its name.
    pub name: String,
    /// What it is made of, and where.
    #[serde(deserialize_with = "strict::object")]
    pub array: crate::array::ArrayDescriptor,
    /// What its maker says of it: a JSON object.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attributes: Option<Attached>,
}

impl ArrayEntry {
    /// An array without attributes.
    pub fn new(name: impl Into<String>, array: crate::array::ArrayDescriptor) -> Self {
        Self { name: name.into(), array, attributes: None }
    }

    /// Sets what its maker says of it.
    pub fn attributes(self, attributes: Attached) -> Self {
        Self { attributes: Some(attributes), ..self }
    }
}

/// Takes a name away.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Delete {
    /// Which.
    pub name: String,
    /// What the client calls this request: sent again, it is answered as the first time, and deletes nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<Token>,
}

/// It is done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Done {}

/// The answer to a request that is refused. The conversation goes on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// The class of it.
    pub code: RefusalCode,
    /// One sentence for a person, of at most [`crate::wire::MAX_MESSAGE`] bytes.
    pub message: String,
}

/// Ends a lease or a claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Release {
    /// Which.
    pub token: Token,
}

/// What a reader found out about memory that it leases: that it is not as claimed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// The lease.
    pub token: Token,
    /// What: one sentence.
    pub message: String,
}

/// Ends the wait of the request that is not answered yet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stop {}

/// Takes up what a connection held that ended.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Resume {
    /// Leases.
    #[serde(default, deserialize_with = "or_default")]
    pub leases: Vec<Token>,
    /// Puts, by their requests: names that go with their maker go with this connection then.
    #[serde(default, deserialize_with = "or_default")]
    pub puts: Vec<Token>,
}

/// What was taken up, and by which broker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resumed {
    /// The UUID of what the broker holds: another one if it lost what it had.
    pub instance: String,
    /// What it does not know, or what is another user's.
    pub lost: Vec<Token>,
}

/// A field that may be null, which is as if it were absent.
pub(super) fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(from: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}
