//! A handoff by the driver's calls alone: what the library is measured against.

use std::{
    fmt::Debug,
    os::fd::{BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use super::{Identity, code, failure};
use crate::error::Result;

/// Memory that was created, and is mapped nowhere. It is there until [`Bare::release`], or the end of the process.
#[derive(Debug)]
pub struct Created {
    pub(super) by: Identity,
    pub(super) handle: u64,
}

/// Memory that was opened and is usable. It is there until [`Bare::close`], or the end of the process.
#[derive(Debug)]
pub struct BareMapping {
    pub(super) by: Identity,
    pub(super) handle: u64,
    pub(super) address: u64,
    pub(super) size: u64,
}

/// How long each call of an opening took.
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

/// How long each call of a closing took.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct Closing {
    /// `cuMemUnmap`.
    pub unmap: Duration,
    /// `cuMemAddressFree`.
    pub free: Duration,
    /// `cuMemRelease`.
    pub release: Duration,
}

/// The calls of a handoff, with no check, table or owner between them, but that what one driver object numbers is not given to
/// another.
///
/// What a call that fails half-way leaves behind stays until the process ends: this is for measuring, in processes of their
/// own.
///
/// # Errors
/// [`crate::Error::Driver`] of the call that failed; `CUDA_ERROR_INVALID_HANDLE` for what another driver object made.
pub trait Bare: Debug + Send + Sync {
    /// Allocates device memory that can be exported; `size` is a multiple of the granularity. `cuMemCreate`.
    fn create(&self, ordinal: i32, size: u64) -> Result<Created>;

    /// Exports it as a new descriptor. `cuMemExportToShareableHandle`.
    fn export(&self, created: &Created) -> Result<OwnedFd>;

    /// Gives it back. `cuMemRelease`.
    fn release(&self, created: Created) -> Result<()>;

    /// Opens memory for reading and writing. `cuMemImportFromShareableHandle`, `cuMemAddressReserve`, `cuMemMap`,
    /// `cuMemSetAccess`.
    fn open(&self, ordinal: i32, fd: BorrowedFd<'_>, size: u64) -> Result<(BareMapping, Opening)>;

    /// Closes it. `cuMemUnmap`, `cuMemAddressFree`, `cuMemRelease`.
    fn close(&self, opened: BareMapping) -> Result<Closing>;
}

/// That what is given back, or used, was made by this driver object: another one may have given out the same number.
pub(super) fn check(call: &'static str, made_by: Identity, own: Identity) -> Result<()> {
    if made_by == own { Ok(()) } else { Err(failure(call, code::INVALID_HANDLE)) }
}

/// The time since the last lap, which begins anew.
pub(super) fn lap(last: &mut Instant) -> Duration {
    let now = Instant::now();
    now - std::mem::replace(last, now)
}
