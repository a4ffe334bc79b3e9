//! What a device's own kernels do with the pattern of the commands (`bin/src/check/pattern`).

use std::{fmt::Debug, time::Duration};

use crate::error::Result;

/// Which bytes a kernel works on, and what belongs there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stretch {
    /// Where the first byte is.
    pub address: u64,
    /// Which byte of the object that is: the two must differ by a multiple of 4, so that words are where words can be.
    pub start: u64,
    /// How many bytes.
    pub size: u64,
    /// The pattern's salt.
    pub salt: u32,
}

/// What a kernel found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counted {
    /// How many words were wrong.
    pub mismatches: u64,
    /// The index of the first of them, counted in words of the object.
    pub first: Option<u64>,
    /// How long the kernel ran, by events of the device.
    pub took: Duration,
}

/// Kernels that write and check the pattern at the speed of the device's memory.
///
/// The rules of [`super::Verbs`] hold here too, and one more: a kernel that meets memory without access ruins the context, so
/// what `ordinal`'s device may not access is answered with `CUDA_ERROR_INVALID_VALUE` and no kernel is started, as is a stretch
/// whose address and start do not fit together. All work is done when a call returns.
pub trait Kernels: Debug + Send + Sync {
    /// Whether the kernels of a device are loaded, so that the next call costs no more than its work.
    fn are_loaded(&self, ordinal: i32) -> bool;

    /// Loads them, unless they are: the driver compiles them for the device, which takes about 80 ms where it does not find them
    /// in its cache. Each call that needs them does it. `cuModuleLoadData`, `cuModuleGetFunction`.
    fn load(&self, ordinal: i32) -> Result<()>;

    /// Writes the pattern, and returns how long the kernel ran, by events of the device. `cuLaunchKernel`,
    /// `cuStreamSynchronize`.
    fn fill(&self, ordinal: i32, stretch: &Stretch) -> Result<Duration>;

    /// Checks the pattern. `cuLaunchKernel`, `cuMemcpyDtoH`.
    fn verify(&self, ordinal: i32, stretch: &Stretch) -> Result<Counted>;
}
