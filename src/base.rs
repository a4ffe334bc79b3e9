//! Types that all layers share: the backend, the access of a mapping, and a device's UUID.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::error::{ParseError, Result};

/// Where the memory really is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// Memory of an NVIDIA GPU, through the CUDA driver.
    Cuda,
    /// Ordinary memory of this machine (memfd). No GPU takes part.
    Host,
}

impl Backend {
    /// Its name, as in options and on the wire.
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

/// What a mapping allows its own process to do.
///
/// It protects this process from itself only: any process that holds the descriptor may map the memory either way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
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

/// A device's UUID: the only name of a device that means the same in two processes.
///
/// It is read in any case, bare or with the driver's prefix (`GPU-`, `MIG-`) or the host's (`HOST-`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DeviceUuid(Uuid);

impl DeviceUuid {
    /// The UUID of these bytes, in the order that `cuDeviceGetUuid_v2` gives them.
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(Uuid::from_bytes(bytes))
    }

    /// The UUID with the prefix that says of what it is: `GPU-` as in `CUDA_VISIBLE_DEVICES`, or `HOST-`.
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

    /// A text without the prefix that says what kind of device it is.
    pub(crate) fn without_kind(text: &str) -> &str {
        let kind = ["gpu-", "mig-", "host-"]
            .iter()
            .find_map(|prefix| text.get(..prefix.len()).filter(|p| p.eq_ignore_ascii_case(prefix)));
        kind.map_or(text, |prefix| &text[prefix.len()..])
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
        let bare = Self::without_kind(text);
        let expected = "32 hexadecimal digits in groups of 8, 4, 4, 4 and 12, with or without GPU- in front";
        Uuid::try_parse(bare).map(Self).map_err(|_| ParseError::new(text, "a device's UUID", expected))
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
    fn a_uuid_is_read_with_any_prefix_and_case() {
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
