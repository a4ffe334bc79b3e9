//! Types that all layers share: the backend, the access of a mapping, and a device's UUID.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::error::{ParseError, Result};

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

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::ReadOnly => "ro",
            Self::ReadWrite => "rw",
        })
    }
}

impl FromStr for Access {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        match text {
            "ro" => Ok(Self::ReadOnly),
            "rw" => Ok(Self::ReadWrite),
            _ => Err(ParseError::new(text, "an access", "ro or rw")),
        }
    }
}

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
