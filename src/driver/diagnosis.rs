//! Driver calls that only diagnose the driver, and that sharing does not use.

use std::{fmt::Debug, os::fd::OwnedFd, path::PathBuf, time::Duration};

use super::Handle;
use crate::error::Result;

/// An event. Only a backend creates handles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EventHandle(pub(super) u64);

/// The purpose of an allocation, beyond a shareable descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MadeFor {
    /// A fabric handle, without a descriptor: `CU_MEM_HANDLE_TYPE_FABRIC`.
    Fabric,
    /// A descriptor, and access by other devices on the bus: `gpuDirectRDMACapable`.
    Rdma,
}

/// Calls that probe a driver's features.
///
/// The rules of [`super::Verbs`] apply: a handle, an address or an event that this driver object did not return fails with
/// `CUDA_ERROR_INVALID_VALUE` and does not reach the driver. `ordinal` is the device whose primary context and default stream are used. An
/// event is used on the device that it was created or opened on.
pub trait Diagnosis: Debug + Send + Sync {
    /// The path of the loaded driver library, as reported by the loader. `dladdr`.
    fn library(&self) -> Result<PathBuf>;

    /// Allocates device memory for a purpose. [`super::Verbs::release`] and [`super::Verbs::map`] accept the handle. A driver that claims
    /// [`super::Attribute::FabricHandle`] may still fail with `CUDA_ERROR_NOT_PERMITTED`. `cuMemCreate`.
    fn create_with(&self, ordinal: i32, size: u64, made_for: MadeFor) -> Result<Handle>;

    /// Exports memory created with [`MadeFor::Fabric`]: `CUmemFabricHandle`. `cuMemExportToShareableHandle` with
    /// `CU_MEM_HANDLE_TYPE_FABRIC`.
    fn export_fabric(&self, handle: Handle) -> Result<[u8; 64]>;

    /// Exports a mapped range of whole pages, created with [`MadeFor::Rdma`], as a new close-on-exec dma-buf.
    /// `cuMemGetHandleForAddressRange` with `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`.
    fn export_dma_buf(&self, ordinal: i32, address: u64, size: u64) -> Result<OwnedFd>;

    /// Copies between two ranges of mapped memory, of one or two devices, and returns the duration, including completion. If the ranges
    /// overlap, the contents of the overlap are undefined. `cuMemcpyDtoD_v2`, `cuCtxSynchronize`.
    fn copy_within(&self, ordinal: i32, to: u64, from: u64, size: u64) -> Result<Duration>;

    /// Stores a word with a kernel, at a mapped address that is a multiple of 4, whatever the access. Without write access the kernel
    /// faults: this call and all later calls in the primary context fail with `CUDA_ERROR_ILLEGAL_ADDRESS`, even through other driver
    /// objects. So use it in a dedicated process. `cuModuleLoadData`, `cuLaunchKernel`, `cuCtxSynchronize`, `cuModuleUnload`.
    fn store(&self, ordinal: i32, address: u64, value: u32) -> Result<()>;

    /// Creates an exportable event. `cuEventCreate` with `CU_EVENT_DISABLE_TIMING` and `CU_EVENT_INTERPROCESS`.
    fn event_create(&self, ordinal: i32) -> Result<EventHandle>;

    /// Returns the handle that another process needs to open an event: `CUipcEventHandle`. `cuIpcGetEventHandle`.
    fn event_export(&self, ordinal: i32, event: EventHandle) -> Result<[u8; 64]>;

    /// Opens another process's event. Fails with `CUDA_ERROR_MAP_FAILED` if that process runs as another user.
    /// `cuIpcOpenEventHandle`.
    fn event_open(&self, ordinal: i32, handle: &[u8; 64]) -> Result<EventHandle>;

    /// Records an event after all work submitted to the default stream. `cuEventRecord`.
    fn event_record(&self, ordinal: i32, event: EventHandle) -> Result<()>;

    /// Waits until all work before the event's last recording has finished, in whichever process it was recorded. Returns at once if the
    /// event was never recorded. There is no deadline. `cuStreamWaitEvent`, `cuStreamSynchronize`.
    fn event_wait(&self, ordinal: i32, event: EventHandle) -> Result<()>;

    /// Destroys a created or opened event. Other holders keep it. `cuEventDestroy_v2`.
    fn event_destroy(&self, ordinal: i32, event: EventHandle) -> Result<()>;
}
