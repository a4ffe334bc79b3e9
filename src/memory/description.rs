//! Descriptions of shared memory, for the process that opens it.
//!
//! These types do not depend on the wire format: `src/encoding.rs` converts them.

use std::{fmt, str::FromStr};

use crate::{driver::DeviceUuid, error::ParseError};

/// A mechanism for sharing memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Mechanism {
    /// Virtual memory management: one descriptor per allocation.
    Vmm,
    /// A memory pool: one descriptor, and 64 bytes per buffer.
    Pool,
    /// `cuIpcMemHandle`: 64 bytes, without a descriptor.
    Legacy,
}

impl fmt::Display for Mechanism {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Vmm => "vmm",
            Self::Pool => "pool",
            Self::Legacy => "legacy",
        })
    }
}

impl FromStr for Mechanism {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        match text {
            "vmm" => Ok(Self::Vmm),
            "pool" => Ok(Self::Pool),
            "legacy" => Ok(Self::Legacy),
            _ => Err(ParseError::new(text, "a mechanism", "vmm, pool or legacy")),
        }
    }
}

/// The location of memory: on the device or on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Placement {
    /// Device memory.
    #[default]
    Device,
    /// Host memory on the NUMA node closest to the device. The CPU and the device both reach it.
    Host,
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Device => "device",
            Self::Host => "host",
        })
    }
}

impl FromStr for Placement {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        match text {
            "device" => Ok(Self::Device),
            "host" => Ok(Self::Host),
            _ => Err(ParseError::new(text, "a location", "device or host")),
        }
    }
}

/// Identifies a device across processes. Ordinals differ between processes; UUIDs do not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceIdentity {
    /// The UUID.
    pub uuid: DeviceUuid,
    /// The display name.
    pub name: String,
}

impl fmt::Display for DeviceIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name, self.uuid)
    }
}

/// The opaque 64 bytes that open a pool buffer (`CUmemPoolPtrExportData`) or a legacy allocation (`CUipcMemHandle`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Pointer(pub [u8; 64]);

/// The mechanism that shares memory, with the data that it needs besides descriptors.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Sharing {
    /// [`Mechanism::Vmm`].
    Vmm {
        /// The location of the memory.
        placement: Placement,
        /// The number of allocations.
        segments: u64,
    },
    /// [`Mechanism::Pool`].
    Pool {
        /// The owner's number of the pool.
        pool: u64,
        /// Opens the buffer.
        pointer: Pointer,
        /// Start of the data relative to the pointer, in bytes.
        offset: u64,
    },
    /// [`Mechanism::Legacy`].
    Legacy {
        /// Opens the allocation.
        pointer: Pointer,
        /// Start of the data relative to the pointer, in bytes.
        offset: u64,
    },
}

/// Describes shared memory. Together with its descriptors, this is all that another process needs to open it.
///
/// A received description is not checked until the memory is opened.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Description {
    /// The device that owns the memory; for host memory, the device closest to it.
    pub device: DeviceIdentity,
    /// The mechanism and its data.
    pub sharing: Sharing,
    /// Bytes of data.
    pub size: u64,
    /// Bytes of memory: with [`Sharing::Vmm`] the sum of the segments.
    pub mapped_size: u64,
    /// Whether the memory is never written again.
    pub immutable: bool,
}

impl Description {
    /// The mechanism that shares the memory.
    pub fn mechanism(&self) -> Mechanism {
        match self.sharing {
            Sharing::Vmm { .. } => Mechanism::Vmm,
            Sharing::Pool { .. } => Mechanism::Pool,
            Sharing::Legacy { .. } => Mechanism::Legacy,
        }
    }

    /// The location of the memory. Pool buffers and legacy memory are always device memory.
    pub fn placement(&self) -> Placement {
        match self.sharing {
            Sharing::Vmm { placement, .. } => placement,
            _ => Placement::Device,
        }
    }

    /// The number of allocations; 0 unless the mechanism is [`Mechanism::Vmm`].
    pub fn segments(&self) -> u64 {
        match self.sharing {
            Sharing::Vmm { segments, .. } => segments,
            _ => 0,
        }
    }

    /// The owner's number of the pool, if the mechanism is [`Mechanism::Pool`].
    pub fn pool(&self) -> Option<u64> {
        match self.sharing {
            Sharing::Pool { pool, .. } => Some(pool),
            _ => None,
        }
    }

    /// The 64 bytes that open the memory; `None` if the mechanism is [`Mechanism::Vmm`].
    pub fn pointer(&self) -> Option<Pointer> {
        match self.sharing {
            Sharing::Pool { pointer, .. } | Sharing::Legacy { pointer, .. } => Some(pointer),
            Sharing::Vmm { .. } => None,
        }
    }
}

/// A run of consecutive segments of memory that is shared by [`Mechanism::Vmm`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
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

/// `3 segments from segment 1 on, 6291456 bytes from byte 2097152 on`.
impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { first, segments, offset, size } = self;
        write!(f, "{segments} segments from segment {first} on, {size} bytes from byte {offset} on")
    }
}
