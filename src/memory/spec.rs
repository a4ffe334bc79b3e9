//! What memory to make.

use super::{Mechanism, Placement};

/// What memory to share, and how. It says only what its mechanism can do.
///
/// ```
/// use vmmfd::memory::{Placement, Spec};
///
/// let one_allocation: Spec = Spec::vmm(1 << 20).into();
/// let chunks_of_the_hosts_memory: Spec = Spec::vmm(1 << 30).chunk(64 << 20).placement(Placement::Host).into();
/// let for_a_network_card: Spec = Spec::vmm(1 << 20).gpu_direct_rdma().into();
/// let sealed_once_filled: Spec = Spec::vmm(1 << 20).sealed().into();
/// let of_a_pool_of_its_own = Spec::pool(1 << 20);
/// let by_a_legacy_handle = Spec::legacy(1 << 20);
/// ```
///
/// A pool's buffer and legacy memory are one piece of the device's own memory, and nothing else can be said of them:
///
/// ```compile_fail,E0599
/// let chunks = vmmfd::memory::Spec::pool(1 << 20).chunk(64 << 10);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spec {
    pub(super) size: u64,
    pub(super) sealed: bool,
    pub(super) kind: Kind,
}

/// What a [`Spec`] says besides the size, for each mechanism.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Vmm { chunk: Option<u64>, placement: Placement, gpu_direct_rdma: bool },
    Pool,
    Legacy,
}

/// A [`Spec`] of memory that is shared by [`Mechanism::Vmm`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VmmSpec {
    size: u64,
    chunk: Option<u64>,
    placement: Placement,
    gpu_direct_rdma: bool,
    sealed: bool,
}

impl Spec {
    /// Memory of `size` bytes that is shared by a descriptor for each allocation: one allocation of the device's own memory,
    /// unless more is said.
    pub fn vmm(size: u64) -> VmmSpec {
        VmmSpec { size, chunk: None, placement: Placement::Device, gpu_direct_rdma: false, sealed: false }
    }

    /// Memory of `size` bytes in a pool of its own. For several buffers in one pool see [`super::Shared::in_pool`].
    pub fn pool(size: u64) -> Self {
        Self { size, sealed: false, kind: Kind::Pool }
    }

    /// Memory of `size` bytes that is shared by a legacy handle, in a block of its own.
    pub fn legacy(size: u64) -> Self {
        Self { size, sealed: false, kind: Kind::Legacy }
    }

    /// It is to be filled and then sealed: see [`super::Shared::seal`].
    pub fn sealed(self) -> Self {
        Self { sealed: true, ..self }
    }

    /// How many bytes of data it is to hold.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The way it is shared.
    pub fn mechanism(&self) -> Mechanism {
        match self.kind {
            Kind::Vmm { .. } => Mechanism::Vmm,
            Kind::Pool => Mechanism::Pool,
            Kind::Legacy => Mechanism::Legacy,
        }
    }

    /// Whether it is to be filled and then sealed.
    pub fn is_sealed(&self) -> bool {
        self.sealed
    }
}

impl VmmSpec {
    /// Makes it of several allocations of this size, rounded up to the granularity; the last one may be smaller. Receivers can
    /// then ask for a part.
    pub fn chunk(self, size: u64) -> Self {
        Self { chunk: Some(size), ..self }
    }

    /// Which memory it is.
    pub fn placement(self, placement: Placement) -> Self {
        Self { placement, ..self }
    }

    /// Makes it reachable by RDMA: `gpuDirectRDMACapable`, which is fixed when memory is made. A GPU's own memory alone can be,
    /// where the device supports it, and never on WSL2; elsewhere making it fails with
    /// [`DeviceError::Unsupported`](crate::error::DeviceError::Unsupported). See [`super::Device::require_gpu_direct_rdma`].
    pub fn gpu_direct_rdma(self) -> Self {
        Self { gpu_direct_rdma: true, ..self }
    }

    /// It is to be filled and then sealed. It can't be exported before: see [`super::Shared::seal`].
    pub fn sealed(self) -> Self {
        Self { sealed: true, ..self }
    }
}

impl From<VmmSpec> for Spec {
    fn from(VmmSpec { size, chunk, placement, gpu_direct_rdma, sealed }: VmmSpec) -> Self {
        Self { size, sealed, kind: Kind::Vmm { chunk, placement, gpu_direct_rdma } }
    }
}
