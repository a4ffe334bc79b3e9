//! The bodies of the messages that put, get and delete, with the protocol's field names.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Serialize};

use super::table::Attached;
use crate::{
    error::RefusalCode,
    wire::{
        ByteRange, Check, Memory, Run,
        strict::{self, or_default},
    },
};

/// 128 random bits that identify a lease or a claim, as 32 hexadecimal digits. Only its holder knows them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(transparent)]
pub struct Token(
    #[serde(with = "hex::serde")]
    #[cfg_attr(feature = "schema", schemars(with = "String", regex(pattern = "^[0-9a-fA-F]{32}$")))]
    pub [u8; 16],
);

impl fmt::Debug for Token {
    /// Hides the secret, which must not be logged.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// JSON of a message: in the message, or in a memfd.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Table {
    /// In the message.
    Inline(#[cfg_attr(feature = "schema", schemars(with = "serde_json::Value"))] Attached),
    /// In a sealed memfd of this many bytes. The message carries its descriptor.
    Length(u64),
}

/// The lifetime of a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase", tag = "kind")]
#[non_exhaustive]
pub enum Lifetime {
    /// Until it is deleted.
    #[default]
    Deleted,
    /// Until the connection that put it closes.
    Maker,
    /// Until this time has passed since its last lease was released, or since it was put if there was no lease.
    Idle {
        /// The time, in milliseconds.
        ms: u64,
    },
    /// Until the connection that put it has closed and no lease is held.
    Leased,
}

/// A user and a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Owner {
    /// The user's ID.
    pub uid: u32,
    /// The group's ID.
    pub gid: u32,
}

/// The process that put a part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Maker {
    /// The process ID in the server's PID namespace, or 0.
    pub pid: i32,
    /// The process's user.
    pub uid: u32,
    /// The process's command (`/proc/PID/comm`), if the server can read it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
}

/// Puts memory under a name. Carries descriptors: for the tables in field order, then for the first segments.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PutHeader {
    /// The object's name.
    pub name: String,
    /// Whether the name may exist. If it does, the put adds its next version.
    #[serde(default, deserialize_with = "or_default")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<bool>"))]
    pub replace: bool,
    /// Requires this version to be current.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub if_version: Option<u64>,
    /// The names of all parts of the version. Empty if this put has all parts.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<Vec<String>>"))]
    pub announced: Vec<String>,
    /// Identifies the puts that together make one version, if there are several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// How long to wait for the parts of other puts, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_ms: Option<u64>,
    /// The backend of the memory.
    pub backend: String,
    /// The parts in this put.
    #[serde(deserialize_with = "strict::objects")]
    pub parts: Vec<PutPartHeader>,
    /// The version's metadata: a JSON object.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<Table>,
    /// The permissions of a new name, as a file mode without `x`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<u16>,
    /// The lifetime of the name. `None` keeps the current lifetime.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "strict::optional_object")]
    pub lifetime: Option<Lifetime>,
    /// The number of earlier versions to keep. `None` keeps the current number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<u32>,
    /// Identifies the request. If it is repeated, the server answers with the version that it published before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<Token>,
    /// Restores a version that the server has lost.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "strict::optional_object")]
    pub restore: Option<Restore>,
    /// The exact sizes of the first segments of all parts in bytes, part after part.
    pub sizes: Vec<u64>,
}

/// The properties of a lost version that a client restores.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Restore {
    /// The version's number.
    pub version: u64,
    /// The version's UUID.
    pub id: String,
    /// When it was published, in milliseconds since 1970.
    pub created_ms: u64,
    /// The owner of the name.
    #[serde(deserialize_with = "strict::object")]
    pub owner: Owner,
    /// The client's leases of the version.
    pub leases: Vec<Token>,
}

/// A part of a version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PutPartHeader {
    /// The part's name.
    pub name: String,
    /// The part's memory.
    #[serde(deserialize_with = "strict::object")]
    pub memory: Memory,
    /// The arrays in the part: a JSON array of [`ArrayEntry`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arrays: Option<Table>,
    /// The digest of the part's bytes, in a form that the putting client defines: `blake3:...`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
}

/// The server has checked a put and has room for it. The client sends the remaining segments.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Send {}

/// A version is published.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Published {
    /// The version's number.
    pub version: u64,
    /// The version's UUID.
    pub id: String,
}

/// Requests leases of one or more objects: all or none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Get {
    /// The objects.
    #[serde(deserialize_with = "strict::objects")]
    pub objects: Vec<GetObject>,
    /// How long to wait for them to exist, in milliseconds. `None` does not wait.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_ms: Option<u64>,
    /// If the object does not exist, requests the claim to create it.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "strict::optional_object")]
    pub claim: Option<Claim>,
}

/// The requested content of an object.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct GetObject {
    /// The object's name.
    pub name: String,
    /// The version. `None` requests the current one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u64>,
    /// Requests the current version only if it is newer than this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub newer_than: Option<u64>,
    /// The parts. `None` requests all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parts: Option<Vec<String>>,
    /// Requests only the segments with these bytes, of a single part.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "strict::optional_object")]
    pub range: Option<ByteRange>,
    /// Requests only the segments with these arrays, and only the parts that contain them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arrays: Option<Vec<String>>,
    /// Fields that the metadata must contain with equal values.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expect: Option<Check>,
    /// The required digest of each named part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digests: Option<BTreeMap<String, String>>,
}

/// Requests the exclusive right to create an object.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Claim {
    /// The part to create. `None` claims the whole object.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part: Option<String>,
    /// Identifies the claims for one version, if there are several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
}

/// Grants a claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Claimed {
    /// Identifies the claim.
    pub token: Token,
}

/// A lease. Carries descriptors: for the tables in field order, then for the first segments.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LeaseHeader {
    /// Identifies the lease.
    pub token: Token,
    /// The object's name.
    pub name: String,
    /// The version.
    pub version: u64,
    /// The version's UUID.
    pub id: String,
    /// When the version was published, in milliseconds since 1970.
    pub created_ms: u64,
    /// The owner of the name.
    #[serde(deserialize_with = "strict::object")]
    pub owner: Owner,
    /// The backend of the memory.
    pub backend: String,
    /// The version's metadata.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<Table>,
    /// The permissions of the name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<u16>,
    /// The lifetime of the name.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "strict::optional_object")]
    pub lifetime: Option<Lifetime>,
    /// The number of earlier versions that the name keeps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<u32>,
    /// Whether the lease covers the whole version, so that the client can restore it.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "std::ops::Not::not")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<bool>"))]
    pub whole: bool,
    /// The requested parts.
    #[serde(deserialize_with = "strict::objects")]
    pub parts: Vec<LeasePartHeader>,
    /// The exact sizes of the first segments of all runs in bytes, run after run.
    pub sizes: Vec<u64>,
}

/// A part of a lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LeasePartHeader {
    /// The part's name.
    pub name: String,
    /// The part's memory. The sizes are as claimed in the put.
    #[serde(deserialize_with = "strict::object")]
    pub memory: Memory,
    /// The segments that follow, in runs of adjacent segments.
    #[serde(deserialize_with = "strict::objects")]
    pub runs: Vec<Run>,
    /// The arrays in the part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arrays: Option<Table>,
    /// The digest of the part's bytes, in a form that the putting client defines.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
}

/// A named array in a part.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct ArrayEntry {
    /// The array's name.
    pub name: String,
    /// The array's layout and offset.
    #[serde(deserialize_with = "strict::object")]
    pub array: crate::array::ArrayDescriptor,
    /// The array's attributes: a JSON object.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<Check>"))]
    pub attributes: Option<Attached>,
}

impl ArrayEntry {
    /// An array without attributes.
    pub fn new(name: impl Into<String>, array: crate::array::ArrayDescriptor) -> Self {
        Self { name: name.into(), array, attributes: None }
    }

    /// Sets the attributes.
    pub fn attributes(self, attributes: Attached) -> Self {
        Self { attributes: Some(attributes), ..self }
    }
}

/// Deletes a name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Delete {
    /// The object's name.
    pub name: String,
    /// Identifies the request. If it is repeated, the server repeats the first answer, and deletes nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<Token>,
}

/// Confirms a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Done {}

/// Refuses a request. The session continues.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Refusal {
    /// The class of the refusal.
    #[cfg_attr(feature = "schema", schemars(with = "String", regex(pattern = "^[A-Za-z0-9_-]{1,32}$")))]
    pub code: RefusalCode,
    /// A human-readable sentence of at most [`crate::wire::MAX_MESSAGE`] bytes.
    pub message: String,
}

/// Releases a lease or a claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Release {
    /// The token of the lease or claim.
    pub token: Token,
}

/// A reader's report that leased memory differs from its description.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Report {
    /// The token of the lease.
    pub token: Token,
    /// The fault: one sentence.
    pub message: String,
}

/// Stops the wait of the unanswered request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Stop {}

/// Takes over the leases and puts of a closed connection.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Resume {
    /// The leases.
    #[serde(default, deserialize_with = "or_default")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<Vec<Token>>"))]
    pub leases: Vec<Token>,
    /// The puts, by request. Names that end with their connection then depend on this one.
    #[serde(default, deserialize_with = "or_default")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<Vec<Token>>"))]
    pub puts: Vec<Token>,
}

/// The result of a [`Resume`], and the broker's identity.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Resumed {
    /// The UUID of the broker's state. It changes if the broker has lost its objects.
    pub instance: String,
    /// Tokens that the broker does not know, or that belong to another user.
    pub lost: Vec<Token>,
}
