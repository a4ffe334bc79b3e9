//! What shared memory is and how another process opens it, in this library's own types.
//!
//! They say nothing of the wire: `src/encoding.rs` converts them to and from its plain data.

use std::{fmt, str::FromStr};

use crate::{driver::DeviceUuid, error::ParseError};

/// A way of sharing memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Mechanism {
    /// Virtual memory management: a descriptor for each allocation.
    Vmm,
    /// A memory pool's descriptor, and 64 bytes for each buffer in it.
    Pool,
    /// `cuIpcMemHandle`: 64 bytes and no descriptor.
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

/// Which memory it is: the device's own, or the host's next to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Placement {
    /// The device's own.
    #[default]
    Device,
    /// The host's, of the NUMA node next to the device: the CPU and the device both reach it.
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

/// A device, as two processes can both name it. Ordinals differ between processes; UUIDs do not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceIdentity {
    /// Its UUID.
    pub uuid: DeviceUuid,
    /// Its name, for people.
    pub name: String,
}

impl fmt::Display for DeviceIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name, self.uuid)
    }
}

/// The 64 bytes that open a pool's buffer (`CUmemPoolPtrExportData`) or a legacy allocation (`CUipcMemHandle`). Opaque.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Pointer(pub [u8; 64]);

/// How memory is shared, with what each mechanism needs to open it besides descriptors.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Sharing {
    /// [`Mechanism::Vmm`].
    Vmm {
        /// Which memory it is.
        placement: Placement,
        /// How many allocations it consists of.
        segments: u64,
    },
    /// [`Mechanism::Pool`].
    Pool {
        /// The pool, by a number that its owner chose.
        pool: u64,
        /// What opens the buffer.
        pointer: Pointer,
        /// Where the data begins behind the pointer, in bytes.
        offset: u64,
    },
    /// [`Mechanism::Legacy`].
    Legacy {
        /// What opens the allocation.
        pointer: Pointer,
        /// Where the data begins behind the pointer, in bytes.
        offset: u64,
    },
}

/// What is shared, and how: with the descriptors that belong to it, all that another process needs to open it.
///
/// A description that another process sent is not checked until the memory is opened.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Description {
    /// The device that owns it, or next to which it is.
    pub device: DeviceIdentity,
    /// How it is shared.
    pub sharing: Sharing,
    /// How many bytes of it hold data.
    pub size: u64,
    /// How many bytes it has: with [`Sharing::Vmm`] the sum of the segments.
    pub mapped_size: u64,
    /// Whether it is never written any more.
    pub immutable: bool,
}

impl Description {
    /// The way it is shared.
    pub fn mechanism(&self) -> Mechanism {
        match self.sharing {
            Sharing::Vmm { .. } => Mechanism::Vmm,
            Sharing::Pool { .. } => Mechanism::Pool,
            Sharing::Legacy { .. } => Mechanism::Legacy,
        }
    }

    /// Which memory it is. Pools and legacy memory are the device's own.
    pub fn placement(&self) -> Placement {
        match self.sharing {
            Sharing::Vmm { placement, .. } => placement,
            _ => Placement::Device,
        }
    }

    /// How many allocations it consists of; 0 unless it is shared by [`Mechanism::Vmm`].
    pub fn segments(&self) -> u64 {
        match self.sharing {
            Sharing::Vmm { segments, .. } => segments,
            _ => 0,
        }
    }

    /// The owner's number of the pool that it is of, if it is of one.
    pub fn pool(&self) -> Option<u64> {
        match self.sharing {
            Sharing::Pool { pool, .. } => Some(pool),
            _ => None,
        }
    }

    /// The 64 bytes that open it, unless it is shared by [`Mechanism::Vmm`].
    pub fn pointer(&self) -> Option<Pointer> {
        match self.sharing {
            Sharing::Pool { pointer, .. } | Sharing::Legacy { pointer, .. } => Some(pointer),
            Sharing::Vmm { .. } => None,
        }
    }
}

/// Some of the allocations of memory that is shared by [`Mechanism::Vmm`], side by side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Part {
    /// The index of the first of them.
    pub first: u64,
    /// How many they are.
    pub segments: u64,
    /// How many bytes of the memory lie before them.
    pub offset: u64,
    /// How many bytes they are together.
    pub size: u64,
}

/// `3 segments from segment 1 on, 6291456 bytes from byte 2097152 on`.
impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { first, segments, offset, size } = self;
        write!(f, "{segments} segments from segment {first} on, {size} bytes from byte {offset} on")
    }
}
