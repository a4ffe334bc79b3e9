//! Kernels for the test pattern of the commands (`bin/src/check/pattern`).

use std::{fmt::Debug, time::Duration};

use crate::error::Result;

/// The memory that a kernel processes, and the expected pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PatternSpan {
    /// The address of the first byte.
    pub address: u64,
    /// Offset of the first byte in the object. Differs from `address` by a multiple of 4, so that words are aligned.
    pub start: u64,
    /// Size in bytes.
    pub size: u64,
    /// The pattern's salt.
    pub salt: u32,
}

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counted {
    /// The number of wrong words.
    pub mismatches: u64,
    /// The index of the first wrong word in the object.
    pub first: Option<u64>,
    /// The kernel's duration, by device events.
    pub took: Duration,
}

/// Kernels that write and check the pattern at the speed of the device's memory.
///
/// The rules of [`super::Verbs`] apply. In addition, a kernel that lacks access to memory would fault, which destroys the context. So
/// memory that the device may not access, and a span whose address and start don't match, fail with `CUDA_ERROR_INVALID_VALUE`, and
/// no kernel is started. All work has finished when a call returns.
pub trait Kernels: Debug + Send + Sync {
    /// Whether a device's kernels are loaded, so that the next call only takes its own time.
    fn are_loaded(&self, ordinal: i32) -> bool;

    /// Loads the kernels unless they are loaded. The driver compiles them for the device, which takes about 80 ms if they are not in its
    /// cache. Other calls load them if necessary. `cuModuleLoadData`, `cuModuleGetFunction`.
    fn load(&self, ordinal: i32) -> Result<()>;

    /// Writes the pattern, and returns the kernel's duration, by device events. `cuLaunchKernel`,
    /// `cuStreamSynchronize`.
    fn fill(&self, ordinal: i32, span: &PatternSpan) -> Result<Duration>;

    /// Checks the pattern. `cuLaunchKernel`, `cuMemcpyDtoH`.
    fn verify(&self, ordinal: i32, span: &PatternSpan) -> Result<Counted>;
}
