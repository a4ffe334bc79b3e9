//! The driver API's plain types: handles, locations, attributes.

use std::sync::atomic::{AtomicU32, Ordering};

/// The identity of a driver object, unique in the process. Handles carry it, so that no other driver object accepts them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Identity(u32);

impl Identity {
    /// A new identity.
    pub(super) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// A physical allocation. Only a backend creates handles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Handle {
    /// The driver object that returned it.
    pub(super) by: Identity,
    /// The backend's number.
    pub(super) number: u64,
}

/// Where physical memory is, or which processor accesses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Location {
    /// A device, by ordinal: `CU_MEM_LOCATION_TYPE_DEVICE`. For an imported allocation, the owner's ordinal in this process, or negative if
    /// the owner is not visible here.
    Device(i32),
    /// A NUMA node of this machine, or its CPUs: `CU_MEM_LOCATION_TYPE_HOST_NUMA`.
    HostNuma(i32),
}

impl Location {
    /// The NUMA node, for [`Location::HostNuma`].
    pub fn host_node(self) -> Option<i32> {
        match self {
            Self::HostNuma(node) => Some(node),
            Self::Device(_) => None,
        }
    }
}

/// The properties of an allocation: the part of `CUmemAllocationProp` that this crate uses, and whether it is sealed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Properties {
    /// The location of the memory.
    pub location: Location,
    /// Whether the allocation can be exported as a POSIX file descriptor. Must be requested at creation. `false` for an imported
    /// allocation, which can't be exported again.
    pub exportable: bool,
    /// Whether the allocation can never be written again: see [`super::Verbs::seal`]. Must be `false` at creation.
    pub immutable: bool,
    /// Whether other devices on the bus, such as network cards, can access it: `gpuDirectRDMACapable`. Must be requested at creation.
    pub gpu_direct_rdma: bool,
}

/// An allocation that was found at an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retained {
    /// A handle of the allocation, for [`super::Verbs::release`].
    pub handle: Handle,
    /// The address at which it is mapped.
    pub start: u64,
    /// Its size in bytes.
    pub size: u64,
}

/// A device's memory, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Memory that can be allocated now.
    pub free: u64,
    /// All memory.
    pub total: u64,
}

/// A device attribute that matters for sharing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Attribute {
    /// 1 if the device has virtual memory management.
    VirtualMemoryManagement,
    /// 1 if allocations can be exported as POSIX file descriptors.
    PosixFileDescriptor,
    /// 1 if the driver claims fabric handles. It may still refuse them: only an attempt proves support.
    FabricHandle,
    /// 1 if allocations support GPUDirect RDMA.
    GpuDirectRdma,
    /// 0 if any process may use the device, otherwise an exclusive mode.
    ComputeMode,
    /// 1 if the device has memory pools.
    MemoryPools,
    /// The supported handle types of pools, as a bit mask: 1 is a POSIX file descriptor.
    PoolHandleTypes,
    /// The NUMA node of the CPUs closest to the device, or negative.
    HostNumaId,
    /// 1 if the driver can allocate host memory on a NUMA node.
    HostNumaVirtualMemoryManagement,
    /// 1 if contexts on the device are shared with other processes by MPS.
    Mps,
    /// 1 if streams can wait for 64-bit words.
    StreamMemoryOperations,
}

/// The two granularities of the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Granularity {
    /// Sizes must be multiples of it.
    Minimum,
    /// The granularity with the best performance.
    Recommended,
}
