//! Handoffs with bare driver calls: the baseline for the library's benchmarks.

use std::{
    fmt::Debug,
    os::fd::{BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use super::{Identity, code, failure};
use crate::error::Result;

/// An unmapped allocation. Exists until [`Bare::release`] or the end of the process.
#[derive(Debug)]
pub struct Created {
    pub(super) by: Identity,
    pub(super) handle: u64,
}

/// Opened, usable memory. Exists until [`Bare::close`] or the end of the process.
#[derive(Debug)]
pub struct BareMapping {
    pub(super) by: Identity,
    pub(super) handle: u64,
    pub(super) address: u64,
    pub(super) size: u64,
}

/// The duration of each call of [`Bare::open`].
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct Opening {
    /// `cuMemImportFromShareableHandle`.
    pub import: Duration,
    /// `cuMemAddressReserve`.
    pub reserve: Duration,
    /// `cuMemMap`.
    pub map: Duration,
    /// `cuMemSetAccess`.
    pub set_access: Duration,
}

/// The duration of each call of [`Bare::close`].
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct Closing {
    /// `cuMemUnmap`.
    pub unmap: Duration,
    /// `cuMemAddressFree`.
    pub free: Duration,
    /// `cuMemRelease`.
    pub release: Duration,
}

/// The calls of a handoff, without checks, tables or owners. Only handles of another driver object are rejected.
///
/// A call that fails midway leaks its resources until the process exits: use it only in dedicated benchmark processes.
///
/// # Errors
/// [`crate::Error::Driver`] with the failed call; `CUDA_ERROR_INVALID_HANDLE` for a handle of another driver object.
pub trait Bare: Debug + Send + Sync {
    /// Allocates exportable device memory; `size` is a multiple of the granularity. `cuMemCreate`.
    fn create(&self, ordinal: i32, size: u64) -> Result<Created>;

    /// Exports the allocation as a new descriptor. `cuMemExportToShareableHandle`.
    fn export(&self, created: &Created) -> Result<OwnedFd>;

    /// Releases the allocation. `cuMemRelease`.
    fn release(&self, created: Created) -> Result<()>;

    /// Opens memory for reading and writing. `cuMemImportFromShareableHandle`, `cuMemAddressReserve`, `cuMemMap`,
    /// `cuMemSetAccess`.
    fn open(&self, ordinal: i32, fd: BorrowedFd<'_>, size: u64) -> Result<(BareMapping, Opening)>;

    /// Closes the memory. `cuMemUnmap`, `cuMemAddressFree`, `cuMemRelease`.
    fn close(&self, opened: BareMapping) -> Result<Closing>;
}

/// Checks that this driver object created a handle: another one may have the same number.
pub(super) fn check(call: &'static str, made_by: Identity, own: Identity) -> Result<()> {
    if made_by == own { Ok(()) } else { Err(failure(call, code::INVALID_HANDLE)) }
}

/// The time since `last`, which is then set to now.
pub(super) fn lap(last: &mut Instant) -> Duration {
    let now = Instant::now();
    now - std::mem::replace(last, now)
}
