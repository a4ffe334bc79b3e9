//! Types that all layers share: the backend, the access of a mapping, a device's identity, and facts about shared memory that messages have
//! too.

pub(crate) mod strict;

use std::{cell::Cell, fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de, ser::SerializeStruct};
use uuid::Uuid;

use self::strict::{no_texts, objects};
use crate::error::{ParseError, Result};

/// Implements `Display` and `FromStr` for an enum whose variants are words.
macro_rules! words {
    ($type:ty, $what:literal, $expected:literal, [$($variant:ident $word:literal),*]) => {
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(match self {
                    $(Self::$variant => $word,)*
                })
            }
        }

        impl FromStr for $type {
            type Err = ParseError;

            fn from_str(text: &str) -> Result<Self, ParseError> {
                match text {
                    $($word => Ok(Self::$variant),)*
                    _ => Err(ParseError::new(text, $what, $expected)),
                }
            }
        }
    };
}

/// The kind of memory behind a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// Memory of an NVIDIA GPU, through the CUDA driver.
    Cuda,
    /// Ordinary memory of this machine (memfd), without a GPU.
    Host,
}

impl Backend {
    /// The name used in options and on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Cuda => "cuda",
            Self::Host => "host",
        }
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// The access that a mapping gives its own process.
///
/// It restricts only this process: every process that holds the descriptor can map the memory with either access.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum Access {
    /// Read only: `CU_MEM_ACCESS_FLAGS_PROT_READ`.
    #[serde(rename = "ro")]
    ReadOnly,
    /// Read and write: `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
    #[serde(rename = "rw")]
    ReadWrite,
}

words!(Access, "an access", "ro or rw", [ReadOnly "ro", ReadWrite "rw"]);

/// A device's UUID. Unlike the ordinal, it identifies the same device in every process.
///
/// Parses in upper or lower case, with or without a prefix: the driver's (`GPU-`, `MIG-`) or the host backend's (`HOST-`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DeviceUuid(Uuid);

impl DeviceUuid {
    /// Creates a UUID from its bytes, in the order of `cuDeviceGetUuid_v2`.
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(Uuid::from_bytes(bytes))
    }

    /// The UUID with the backend's prefix: `GPU-` as in `CUDA_VISIBLE_DEVICES`, or `HOST-`.
    pub fn prefixed(self, backend: Backend) -> String {
        let prefix = match backend {
            Backend::Cuda => "GPU",
            Backend::Host => "HOST",
        };
        format!("{prefix}-{self}")
    }

    pub(crate) fn as_u128(self) -> u128 {
        self.0.as_u128()
    }

    /// Strips `GPU-`, `MIG-` or `HOST-` from a text, in either case.
    pub(crate) fn strip_prefix(text: &str) -> &str {
        let found = ["gpu-", "mig-", "host-"]
            .iter()
            .find(|prefix| text.get(..prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(prefix)));
        found.map_or(text, |prefix| &text[prefix.len()..])
    }
}

impl fmt::Display for DeviceUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for DeviceUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for DeviceUuid {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let expected = "32 hexadecimal digits in groups of 8, 4, 4, 4 and 12, with or without GPU- in front";
        Uuid::try_parse(Self::strip_prefix(text))
            .map(Self)
            .map_err(|_| ParseError::new(text, "a device's UUID", expected))
    }
}

impl TryFrom<String> for DeviceUuid {
    type Error = ParseError;

    fn try_from(text: String) -> Result<Self, ParseError> {
        text.parse()
    }
}

impl From<DeviceUuid> for String {
    fn from(uuid: DeviceUuid) -> Self {
        uuid.to_string()
    }
}

/// Deserializes a UUID with hyphens and without a prefix. Command lines accept more forms.
///
/// # Errors
/// The deserializer's errors.
fn uuid_of_one_form<'de, D: Deserializer<'de>>(from: D) -> Result<DeviceUuid, D::Error> {
    let text = String::deserialize(from)?;
    let hyphens = text.bytes().enumerate().all(|(at, byte)| (byte == b'-') == [8, 13, 18, 23].contains(&at));
    match text.parse() {
        Ok(uuid) if text.len() == 36 && hyphens => Ok(uuid),
        _ => Err(de::Error::custom("a device's UUID is not 32 hexadecimal digits in groups of 8, 4, 4, 4 and 12")),
    }
}

/// A mechanism for sharing memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Mechanism {
    /// Virtual memory management: one descriptor per allocation.
    Vmm,
    /// A memory pool: one descriptor, and 64 bytes per buffer.
    Pool,
    /// `cuIpcMemHandle`: 64 bytes, without a descriptor.
    Legacy,
}

words!(Mechanism, "a mechanism", "vmm, pool or legacy", [Vmm "vmm", Pool "pool", Legacy "legacy"]);

/// The location of memory: on the device or on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Placement {
    /// Device memory.
    #[default]
    Device,
    /// Host memory on the NUMA node closest to the device. The CPU and the device both reach it.
    Host,
}

words!(Placement, "a location", "device or host", [Device "device", Host "host"]);

/// The name of the host backend's device.
pub const DEVICE_NAME: &str = "host memory (no GPU)";

/// Identifies a device across processes. Ordinals differ between processes; UUIDs do not.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(remote = "Self")]
pub struct DeviceIdentity {
    /// The device's UUID.
    #[serde(deserialize_with = "uuid_of_one_form")]
    #[cfg_attr(
        feature = "schema",
        schemars(with = "String", regex(pattern = "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$"))
    )]
    pub uuid: DeviceUuid,
    /// The device's name. Only informative.
    pub name: String,
}

// Not by `objects!`, because the UUID has two forms.
objects!(@deserialize DeviceIdentity);

impl strict::Clean for DeviceIdentity {
    fn clean(&mut self) {
        self.name.clean();
    }
}

no_texts!(DeviceUuid);

thread_local! {
    static FOR_USERS: Cell<bool> = const { Cell::new(false) };
}

/// Serializes the UUIDs of devices in the form that users know, with prefix. Messages have none.
pub(crate) fn for_users<T>(serialize: impl FnOnce() -> T) -> T {
    FOR_USERS.set(true);
    let result = serialize();
    FOR_USERS.set(false);
    result
}

impl DeviceIdentity {
    /// The UUID with the prefix of its backend: a message does not name the backend, but only the host backend has a device of its name.
    pub(crate) fn prefixed_uuid(&self) -> String {
        self.uuid.prefixed(if self.name == DEVICE_NAME { Backend::Host } else { Backend::Cuda })
    }
}

impl Serialize for DeviceIdentity {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut fields = to.serialize_struct("DeviceIdentity", 2)?;
        if FOR_USERS.get() {
            fields.serialize_field("uuid", &self.prefixed_uuid())?;
        } else {
            fields.serialize_field("uuid", &self.uuid)?;
        }
        fields.serialize_field("name", &self.name)?;
        fields.end()
    }
}

impl fmt::Display for DeviceIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name, self.uuid)
    }
}

/// The opaque 64 bytes that open a pool buffer (`CUmemPoolPtrExportData`) or a legacy allocation (`CUipcMemHandle`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(transparent)]
pub struct Pointer(
    #[serde(with = "hex::serde")]
    #[cfg_attr(feature = "schema", schemars(with = "String", regex(pattern = "^[0-9a-fA-F]{128}$")))]
    pub [u8; 64],
);

objects! {
    /// A run of consecutive segments of memory that is shared by [`Mechanism::Vmm`].
    #[derive(Copy, Default)]
    pub struct Run {
        /// Index of the first segment.
        pub first: u64,
        /// Number of segments.
        pub segments: u64,
        /// Offset of the first segment in the memory, in bytes.
        pub offset: u64,
        /// Total size of the segments, in bytes.
        pub size: u64,
    }
}

/// `3 segments from segment 1 on, 6291456 bytes from byte 2097152 on`.
impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { first, segments, offset, size } = self;
        write!(f, "{segments} segments from segment {first} on, {size} bytes from byte {offset} on")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuid_parses_with_any_prefix_and_case() {
        let bare = "53e9a7d2-1f0c-5b7e-9c55-0123456789ab";
        let want: DeviceUuid = bare.parse().unwrap();
        for text in [format!("GPU-{bare}"), format!("gpu-{}", bare.to_uppercase()), format!("HOST-{bare}")] {
            assert_eq!(text.parse::<DeviceUuid>().unwrap(), want);
        }
        for text in ["", "GPU-", "GPU-53e9", "\u{df}pu-", "xyz-53e9a7d2-1f0c-5b7e-9c55-0123456789ab"] {
            assert!(text.parse::<DeviceUuid>().is_err(), "{text:?}");
        }
    }
}
