//! Descriptions of shared memory, for the process that opens it.
//!
//! These types do not depend on the wire format: `src/encoding.rs` converts them.

use crate::base::{DeviceIdentity, Mechanism, Placement, Pointer};

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
