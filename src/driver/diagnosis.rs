//! What a diagnosis asks of a driver, and sharing has no use for.

use std::{fmt::Debug, os::fd::OwnedFd, path::PathBuf, time::Duration};

use super::Handle;
use crate::error::Result;

/// An event, as the driver numbers it. Only a backend makes one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EventHandle(pub(super) u64);

/// What memory is made for, other than to be shared by a descriptor alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MadeFor {
    /// A fabric handle, and no descriptor: `CU_MEM_HANDLE_TYPE_FABRIC`.
    Fabric,
    /// A descriptor, and access by other devices of the bus: `gpuDirectRDMACapable`.
    Rdma,
}

/// What is asked of a driver only to find out what it can do.
///
/// The rules of [`super::Verbs`] hold here too: a handle, an address or an event that this driver object did not give out
/// is answered with `CUDA_ERROR_INVALID_VALUE` and does not reach the driver. `ordinal` is the device whose primary context
/// and default stream the call is made in; an event is used on the one that it was made or opened on.
pub trait Diagnosis: Debug + Send + Sync {
    /// The file that the driver library was loaded from, as the loader names it. `dladdr`.
    fn library(&self) -> Result<PathBuf>;

    /// Allocates device memory that is made for something. The handle is like any other: [`super::Verbs::release`] gives it
    /// back, and [`super::Verbs::map`] maps it. A driver that claims [`super::Attribute::FabricHandle`] may still refuse one
    /// with `CUDA_ERROR_NOT_PERMITTED`. `cuMemCreate`.
    fn create_with(&self, ordinal: i32, size: u64, made_for: MadeFor) -> Result<Handle>;

    /// Exports memory made for [`MadeFor::Fabric`]: `CUmemFabricHandle`. `cuMemExportToShareableHandle` with
    /// `CU_MEM_HANDLE_TYPE_FABRIC`.
    fn export_fabric(&self, handle: Handle) -> Result<[u8; 64]>;

    /// A new, close-on-exec dma-buf of a range of whole pages, all of it mapped, of memory made for [`MadeFor::Rdma`].
    /// `cuMemGetHandleForAddressRange` with `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`.
    fn export_dma_buf(&self, ordinal: i32, address: u64, size: u64) -> Result<OwnedFd>;

    /// Copies between two ranges of mapped memory, of one device or of two, and returns how long that took, from before the
    /// call until it is done. What lies in both ranges may hold anything afterwards. `cuMemcpyDtoD_v2`, `cuCtxSynchronize`.
    fn copy_within(&self, ordinal: i32, to: u64, from: u64, size: u64) -> Result<Duration>;

    /// Stores a word by a kernel, at a mapped address that is a multiple of 4, whatever access there is. Without access for
    /// writing it faults: `CUDA_ERROR_ILLEGAL_ADDRESS` is the answer to this call, and to all that follow in the primary
    /// context, also through other driver objects. So it is for a process of its own. `cuModuleLoadData`, `cuLaunchKernel`,
    /// `cuCtxSynchronize`, `cuModuleUnload`.
    fn store(&self, ordinal: i32, address: u64, value: u32) -> Result<()>;

    /// Makes an event that can be exported. `cuEventCreate` with `CU_EVENT_DISABLE_TIMING` and `CU_EVENT_INTERPROCESS`.
    fn event_create(&self, ordinal: i32) -> Result<EventHandle>;

    /// What another process needs to open an event: `CUipcEventHandle`. `cuIpcGetEventHandle`.
    fn event_export(&self, ordinal: i32, event: EventHandle) -> Result<[u8; 64]>;

    /// Opens an event of another process. Where that runs as another user it fails with `CUDA_ERROR_MAP_FAILED`.
    /// `cuIpcOpenEventHandle`.
    fn event_open(&self, ordinal: i32, handle: &[u8; 64]) -> Result<EventHandle>;

    /// Records an event behind all work of the default stream so far. `cuEventRecord`.
    fn event_record(&self, ordinal: i32, event: EventHandle) -> Result<()>;

    /// Waits until all work is done that was before the event where it was recorded last, in whichever process: for one that
    /// never was, not at all. There is no deadline. `cuStreamWaitEvent`, `cuStreamSynchronize`.
    fn event_wait(&self, ordinal: i32, event: EventHandle) -> Result<()>;

    /// Gives an event back, made or opened. Who else has it keeps it. `cuEventDestroy_v2`.
    fn event_destroy(&self, ordinal: i32, event: EventHandle) -> Result<()>;
}
