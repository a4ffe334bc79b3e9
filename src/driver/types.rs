//! Plain words of the driver API: handles, places, attributes.

use std::sync::atomic::{AtomicU32, Ordering};

/// A driver object: no two of a process have the same. What one gives out carries it, so that no other takes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Identity(u32);

impl Identity {
    /// One that no driver object had before.
    pub(super) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// A physical allocation, as a driver object numbers it. Only a backend makes one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Handle {
    /// Who gave it out.
    pub(super) by: Identity,
    /// The backend's own number.
    pub(super) number: u64,
}

/// Where physical memory is, or who accesses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Location {
    /// A device, by ordinal: `CU_MEM_LOCATION_TYPE_DEVICE`. On an imported allocation it is this process's ordinal of the
    /// owner, or negative if the owner is not visible here.
    Device(i32),
    /// A NUMA node of this machine, or its CPUs: `CU_MEM_LOCATION_TYPE_HOST_NUMA`.
    HostNuma(i32),
}

impl Location {
    /// The NUMA node, if it is one.
    pub fn host_node(self) -> Option<i32> {
        match self {
            Self::HostNuma(node) => Some(node),
            Self::Device(_) => None,
        }
    }
}

/// What an allocation is made of and for: the part of `CUmemAllocationProp` that this crate uses, and how it is sealed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Properties {
    /// What holds the memory.
    pub location: Location,
    /// Whether it can be exported as a POSIX file descriptor. It must be asked for at creation, and reads `false` on an
    /// imported allocation, which can't be exported again.
    pub exportable: bool,
    /// Whether no holder of it, in any process, can write to it any more: see [`super::Verbs::seal`]. Nothing is made so: at
    /// creation it must be `false`.
    pub immutable: bool,
    /// Whether other devices of the bus, such as network cards, can access it: `gpuDirectRDMACapable`. It must be asked for at
    /// creation.
    pub gpu_direct_rdma: bool,
}

/// A device's memory, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryInfo {
    /// What could be allocated now.
    pub free: u64,
    /// All of it.
    pub total: u64,
}

/// A device attribute, of those that matter to sharing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Attribute {
    /// 1 if the device has virtual memory management.
    VirtualMemoryManagement,
    /// 1 if allocations can be exported as POSIX file descriptors.
    PosixFileDescriptor,
    /// 1 if the driver claims fabric handles. It may claim them and still refuse: try.
    FabricHandle,
    /// 1 if allocations can be made for GPUDirect RDMA.
    GpuDirectRdma,
    /// 0 if any process may use the device, else one of the exclusive modes.
    ComputeMode,
    /// 1 if the device has memory pools.
    MemoryPools,
    /// What pools can be exported as, a bit each: 1 is a POSIX file descriptor.
    PoolHandleTypes,
    /// The NUMA node of the CPUs next to the device, or negative.
    HostNumaId,
    /// 1 if allocations can be made in host memory, on a NUMA node.
    HostNumaVirtualMemoryManagement,
}

/// Which of the driver's two granularities.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Granularity {
    /// What sizes must be a multiple of.
    Minimum,
    /// What gives the best performance.
    Recommended,
}
