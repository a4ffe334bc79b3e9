//! What the project's own tests reach beneath the public API. Not for users: it may change at any time.

#![allow(unsafe_code)]

use std::sync::Arc;

use crate::driver::Driver;
pub use crate::driver::{
    bare::{Bare, Closing, Created, Opened, Opening},
    cuda::CudaDriver,
    diagnosis::{Diagnosis, EventHandle, MadeFor},
    host::{HostDriver, Live},
    kernels::{Counted, Kernels, Stretch},
    legacy::LegacyIpc,
    pool::{PoolHandle, Pools},
    types::{Granularity, Location, Properties},
    verbs::{Handle, Identity, Verbs},
    window::{PageLocked, Window},
};

/// Copies of memory that others may access at the same time.
pub mod copy {
    pub use crate::driver::copy::{read, write};
}

/// A driver of these verbs.
pub fn driver(verbs: Arc<dyn Verbs>) -> Driver {
    Driver::of(verbs)
}

/// The verbs of a driver.
///
/// # Safety
/// The caller unmaps, frees and releases nothing that a value of this crate owns, and maps nothing over it.
pub unsafe fn verbs(driver: &Driver) -> &dyn Verbs {
    driver.verbs()
}
