//! The bodies of the messages that put, get and delete, with the protocol's field names.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Serialize};

use super::table::Attached;
use crate::{
    base::strict::objects,
    error::RefusalCode,
    wire::{ByteRange, Memory, Run, strict::or_default},
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

impl Table {
    /// The length of the JSON, in bytes.
    pub fn length(&self) -> u64 {
        match self {
            Self::Inline(text) => text.as_str().len() as u64,
            Self::Length(length) => *length,
        }
    }

    /// Whether the JSON is in a memfd.
    pub fn is_attached(&self) -> bool {
        matches!(self, Self::Length(_))
    }
}

/// The lifetime of a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase", tag = "kind", remote = "Self")]
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

objects!(@object Lifetime);

objects! {
    /// A user and a group.
    #[derive(Copy)]
    pub struct Owner {
        /// The user's ID.
        pub uid: u32,
        /// The group's ID.
        pub gid: u32,
    }

    /// The process that put a part.
    pub struct Maker {
        /// The process ID in the server's PID namespace, or 0.
        pub pid: i32,
        /// The process's user.
        pub uid: u32,
        /// The process's command (`/proc/PID/comm`), if the server can read it.
        pub command: Option<String>,
    }

    /// Puts memory under a name. Carries descriptors: for the tables in field order, then for the first segments.
    #[derive(Default)]
    pub struct PutHeader {
        /// The object's name.
        pub name: String,
        /// Whether the name may exist. If it does, the put adds its next version.
        #[serde(default, deserialize_with = "or_default")]
        #[cfg_attr(feature = "schema", schemars(with = "Option<bool>"))]
        pub replace: bool,
        /// Requires this version to be current.
        pub if_version: Option<u64>,
        /// The names of all parts of the version. Empty if this put has all parts.
        #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
        #[cfg_attr(feature = "schema", schemars(with = "Option<Vec<String>>"))]
        pub announced: Vec<String>,
        /// Identifies the puts that together make one version, if there are several.
        pub group: Option<String>,
        /// How long to wait for the parts of other puts, in milliseconds.
        pub wait_ms: Option<u64>,
        /// The backend of the memory.
        pub backend: String,
        /// The parts in this put.
        pub parts: Vec<PutPartHeader>,
        /// The version's metadata: a JSON object.
        pub metadata: Option<Table>,
        /// The permissions of a new name, as a file mode without `x`.
        pub mode: Option<u16>,
        /// The lifetime of the name. `None` keeps the current lifetime.
        pub lifetime: Option<Lifetime>,
        /// The number of earlier versions to keep. `None` keeps the current number.
        pub keep: Option<u32>,
        /// Identifies the request. If it is repeated, the server answers with the version that it published before.
        pub request: Option<Token>,
        /// Restores a version that the server has lost.
        pub restore: Option<Restore>,
        /// The exact sizes of the first segments of all parts in bytes, part after part.
        pub sizes: Vec<u64>,
    }

    /// The properties of a lost version that a client restores.
    pub struct Restore {
        /// The version's number.
        pub version: u64,
        /// The version's UUID.
        pub id: String,
        /// When it was published, in milliseconds since 1970.
        pub created_ms: u64,
        /// The owner of the name.
        pub owner: Owner,
        /// The client's leases of the version.
        pub leases: Vec<Token>,
    }

    /// A part of a version.
    pub struct PutPartHeader {
        /// The part's name.
        pub name: String,
        /// The part's memory.
        pub memory: Memory,
        /// The arrays in the part: a JSON array of [`ArrayEntry`]. The server does not read it.
        pub arrays: Option<Table>,
        /// The number of arrays in the table, for listings. Present with `arrays`.
        pub array_count: Option<u64>,
        /// The digest of the part's bytes, in a form that the putting client defines: `blake3:...`.
        pub digest: Option<String>,
    }

    /// The server has checked a put and has room for it. The client sends the remaining segments.
    pub struct Send {}

    /// A version is published.
    pub struct Published {
        /// The version's number.
        pub version: u64,
        /// The version's UUID.
        pub id: String,
    }

    /// Requests leases of one or more objects: all or none.
    pub struct GetHeader {
        /// The objects.
        pub objects: Vec<GetObject>,
        /// How long to wait for them to exist, in milliseconds. `None` does not wait.
        pub wait_ms: Option<u64>,
        /// If the object does not exist, requests the claim to create it.
        pub claim: Option<ClaimHeader>,
    }

    /// The requested content of an object.
    #[derive(Default)]
    pub struct GetObject {
        /// The object's name.
        pub name: String,
        /// The version. `None` requests the current one.
        pub version: Option<u64>,
        /// Requests the current version only if it is newer than this one.
        pub newer_than: Option<u64>,
        /// The parts, and the bytes of each: no range requests the whole part. `None` requests all parts, `{}` only their description.
        pub parts: Option<BTreeMap<String, Vec<ByteRange>>>,
        /// Selects from the version of this lease, which the connection holds. The answer is the same lease, with these segments.
        pub lease: Option<Token>,
    }

    /// Requests the exclusive right to create an object.
    #[derive(Default)]
    pub struct ClaimHeader {
        /// The part to create. `None` claims the whole object.
        pub part: Option<String>,
        /// Identifies the claims for one version, if there are several.
        pub group: Option<String>,
    }

    /// Grants a claim.
    pub struct Claimed {
        /// Identifies the claim.
        pub token: Token,
    }

    /// A lease. Carries descriptors: for the tables in field order, then for the first segments.
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
        pub owner: Owner,
        /// The backend of the memory.
        pub backend: String,
        /// The version's metadata.
        pub metadata: Option<Table>,
        /// The permissions of the name.
        pub mode: Option<u16>,
        /// The lifetime of the name.
        pub lifetime: Option<Lifetime>,
        /// The number of earlier versions that the name keeps.
        pub keep: Option<u32>,
        /// Whether the lease covers the whole version, so that the client can restore it.
        #[serde(default, deserialize_with = "or_default", skip_serializing_if = "std::ops::Not::not")]
        #[cfg_attr(feature = "schema", schemars(with = "Option<bool>"))]
        pub whole: bool,
        /// The requested parts.
        pub parts: Vec<LeasePartHeader>,
        /// The exact sizes of the first segments of all runs in bytes, run after run.
        pub sizes: Vec<u64>,
    }

    /// A part of a lease.
    pub struct LeasePartHeader {
        /// The part's name.
        pub name: String,
        /// The part's memory. The sizes are as claimed in the put.
        pub memory: Memory,
        /// The segments that follow, in runs of adjacent segments.
        pub runs: Vec<Run>,
        /// The arrays in the part.
        pub arrays: Option<Table>,
        /// The digest of the part's bytes, in a form that the putting client defines.
        pub digest: Option<String>,
    }

    /// A named array in a part.
    #[non_exhaustive]
    pub struct ArrayEntry {
        /// The array's name.
        pub name: String,
        /// The array's layout and offset.
        pub array: crate::array::ArrayDescriptor,
        /// The array's attributes: a JSON object.
        #[cfg_attr(feature = "schema", schemars(with = "Option<crate::wire::Check>"))]
        pub attributes: Option<Attached>,
    }
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

objects! {
    /// Deletes a name.
    pub struct Delete {
        /// The object's name.
        pub name: String,
        /// Identifies the request. If it is repeated, the server repeats the first answer, and deletes nothing.
        pub request: Option<Token>,
    }

    /// Asks the holders of versions to release their leases.
    pub struct Recall {
        /// The versions' UUIDs. Unknown ones are ignored.
        pub ids: Vec<String>,
    }

    /// Confirms a request.
    pub struct Done {}

    /// Refuses a request. The session continues.
    pub struct Refusal {
        /// The class of the refusal.
        #[cfg_attr(feature = "schema", schemars(with = "String", regex(pattern = "^[A-Za-z0-9_-]{1,32}$")))]
        pub code: RefusalCode,
        /// A human-readable sentence of at most [`crate::wire::MAX_MESSAGE`] bytes.
        pub message: String,
    }

    /// Releases a lease or a claim.
    pub struct Release {
        /// The token of the lease or claim.
        pub token: Token,
    }

    /// A reader's report that leased memory differs from its description.
    pub struct ReportHeader {
        /// The token of the lease.
        pub token: Token,
        /// The fault: one sentence.
        pub message: String,
    }

    /// Takes over the leases and puts of a closed connection.
    #[derive(Default)]
    pub struct Resume {
        /// The leases.
        #[serde(default, deserialize_with = "or_default")]
        #[cfg_attr(feature = "schema", schemars(with = "Option<Vec<ResumedLease>>"))]
        pub leases: Vec<ResumedLease>,
        /// The puts, by request. Names that end with their connection then depend on this one.
        #[serde(default, deserialize_with = "or_default")]
        #[cfg_attr(feature = "schema", schemars(with = "Option<Vec<Token>>"))]
        pub puts: Vec<Token>,
    }

    /// A lease from an earlier connection.
    pub struct ResumedLease {
        /// The lease's token.
        pub token: Token,
        /// The UUID of the leased version. A server that was started after the lease was granted knows the version only.
        pub id: String,
        /// How many bytes of the version the lease covers.
        pub size: u64,
    }

    /// The result of a [`Resume`], and the broker's identity.
    pub struct Resumed {
        /// The UUID of the broker's state. It changes if the broker has lost its objects.
        pub instance: String,
        /// Tokens that the broker does not know, or that belong to another user.
        pub lost: Vec<Token>,
    }
}
