//! Specification of the memory to allocate.

use super::{Mechanism, Placement};

/// The size and mechanism of memory to share, with the mechanism's options.
///
/// ```
/// use vmmfd::memory::{Placement, Spec};
///
/// let one_allocation: Spec = Spec::vmm(1 << 20).into();
/// let chunks_in_host_memory: Spec = Spec::vmm(1 << 30).chunk(64 << 20).placement(Placement::Host).into();
/// let for_rdma: Spec = Spec::vmm(1 << 20).gpu_direct_rdma().into();
/// let sealed_once_filled: Spec = Spec::vmm(1 << 20).sealed().into();
/// let in_its_own_pool = Spec::pool(1 << 20);
/// let with_a_legacy_handle = Spec::legacy(1 << 20);
/// ```
///
/// A pool buffer or legacy memory is one piece of device memory, without further options:
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

/// The options of each mechanism.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Vmm { chunk: Option<u64>, placement: Placement, rdma: Rdma },
    Pool,
    Legacy,
}

/// Whether RDMA can reach memory: `gpuDirectRDMACapable`, which can't be changed after the allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Rdma {
    /// The flag is not requested.
    #[default]
    Never,
    /// The flag is requested for device memory where [`super::Device::require_gpu_direct_rdma`] succeeds. Memory without the flag is
    /// created elsewhere, and if the driver refuses or ignores the flag.
    Auto,
    /// The allocation fails with [`DeviceError::Unsupported`](crate::error::DeviceError::Unsupported) if the memory can't have the flag.
    Required,
}

/// A [`Spec`] of memory that is shared by [`Mechanism::Vmm`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VmmSpec {
    size: u64,
    chunk: Option<u64>,
    placement: Placement,
    rdma: Rdma,
    sealed: bool,
}

impl Spec {
    /// Memory of `size` bytes that is shared with one descriptor per allocation. The default is one allocation in device memory.
    pub fn vmm(size: u64) -> VmmSpec {
        VmmSpec { size, chunk: None, placement: Placement::Device, rdma: Rdma::Never, sealed: false }
    }

    /// Memory of `size` bytes in a new pool. For several buffers in one pool see [`super::Shared::in_pool`].
    pub fn pool(size: u64) -> Self {
        Self { size, sealed: false, kind: Kind::Pool }
    }

    /// Memory of `size` bytes in its own block, shared by a legacy handle.
    pub fn legacy(size: u64) -> Self {
        Self { size, sealed: false, kind: Kind::Legacy }
    }

    /// Allocates memory that is filled and then sealed: see [`super::Shared::seal`].
    pub fn sealed(self) -> Self {
        Self { sealed: true, ..self }
    }

    /// The size of the data in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The mechanism that shares the memory.
    pub fn mechanism(&self) -> Mechanism {
        match self.kind {
            Kind::Vmm { .. } => Mechanism::Vmm,
            Kind::Pool => Mechanism::Pool,
            Kind::Legacy => Mechanism::Legacy,
        }
    }

    /// Whether the memory is filled and then sealed.
    pub fn is_sealed(&self) -> bool {
        self.sealed
    }
}

impl VmmSpec {
    /// Splits the memory into allocations of this size, rounded up to the granularity. The last allocation may be smaller. A receiver
    /// can then request a part.
    pub fn chunk(self, size: u64) -> Self {
        Self { chunk: Some(size), ..self }
    }

    /// Selects device memory or host memory.
    pub fn placement(self, placement: Placement) -> Self {
        Self { placement, ..self }
    }

    /// Allocates memory that RDMA can reach: `gpuDirectRDMACapable`, which can't be changed later.
    ///
    /// Requires the device memory of a GPU with support for it, and is not available on WSL2. Otherwise the allocation fails with
    /// [`DeviceError::Unsupported`](crate::error::DeviceError::Unsupported). See [`super::Device::require_gpu_direct_rdma`].
    pub fn gpu_direct_rdma(self) -> Self {
        self.rdma(Rdma::Required)
    }

    /// Selects whether RDMA can reach the memory. [`super::Shared::is_gpu_direct_rdma`] reports the result.
    pub fn rdma(self, rdma: Rdma) -> Self {
        Self { rdma, ..self }
    }

    /// Allocates memory that is filled and then sealed. It can't be exported before it is sealed: see [`super::Shared::seal`].
    pub fn sealed(self) -> Self {
        Self { sealed: true, ..self }
    }
}

impl From<VmmSpec> for Spec {
    fn from(VmmSpec { size, chunk, placement, rdma, sealed }: VmmSpec) -> Self {
        Self { size, sealed, kind: Kind::Vmm { chunk, placement, rdma } }
    }
}
