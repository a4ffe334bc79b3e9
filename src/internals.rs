//! What the project's own tests reach beneath the public API. Not for users: it may change at any time.

#![allow(unsafe_code)]

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    sync::Arc,
};

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
use crate::{
    broker::ServerConfig,
    driver::{Backend, Driver},
};

/// Copies of memory that others may access at the same time.
pub mod copy {
    pub use crate::driver::copy::{read, write};
}

/// What the broker's server says of a descriptor that it received: whether it accepts it as such memory, and whether it takes it for
/// a file whose close may block.
pub fn inspect_descriptor(
    fd: BorrowedFd<'_>,
    backend: Backend,
    size: u64,
    emulated: bool,
) -> (Result<(), String>, bool) {
    crate::broker::inspect_and_classify(fd, backend, size, emulated)
}

/// The configuration of a broker that accepts memfds as a GPU's memory, as the emulated driver makes it.
pub fn emulated(config: ServerConfig) -> ServerConfig {
    ServerConfig { emulated: true, ..config }
}

/// The records in a log of the broker's server, as JSON. What a killed server left of the last one is cut off.
///
/// # Errors
/// One sentence on why it can't be read.
pub fn read_catalogue(log: OwnedFd) -> Result<Vec<serde_json::Value>, String> {
    crate::broker::read_as_json(log)
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
