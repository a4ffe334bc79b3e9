//! Access to private parts for the project's own commands and tests. Not a public API: it may change at any time.

#![allow(unsafe_code)]

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use nix::poll::PollFlags;

mod examples;

pub use self::examples::{ExampleBroker, ExampleFolder};
pub use crate::driver::{
    checkpoints::{Checkpoints, ProcessState},
    cuda::{CudaDriver, exit_at_once},
    diagnosis::{Diagnosis, EventHandle, MadeFor},
    host::{HostDriver, Live},
    kernels::{Counted, Kernels, PatternSpan},
    legacy::LegacyIpc,
    pool::{PoolHandle, Pools},
    streams::Streams,
    ties::ranks_of,
    types::{Granularity, Handle, Location, Properties, Retained},
    verbs::Verbs,
    window::{PageLocked, Window},
};
use crate::{
    array::ElementType,
    broker::ServerConfig,
    channel::{Cancel, Listener, Peer},
    driver::{Backend, DeviceUuid, Driver},
    error::{BrokerError, RefusalCode, Result},
    memory::{Description, DeviceIdentity, Mirror, Region, Selector, Shared, Sharing},
};
pub use crate::{
    bindings::TieCounts,
    broker::{
        MIN_FILE_LIMIT,
        notify::notify,
        server::{TimeLimits, command_of},
    },
    channel::{
        cancel::{deadline_after, eventfd},
        connect::connect_socket,
        path::default_broker_socket,
        record::{Record, RecordSocket},
    },
    memory::first_elements,
    session::interrupt::interruptibly,
    sys::take_passed,
    wire::{clean, is_unsafe_on_terminals, shorten},
};

/// The process of the command `keeper`.
pub mod keeper {
    pub use crate::broker::keeper::{check_reachable, run_keeper};
}

/// Sizes and counts as text.
pub mod units {
    pub use crate::error::units::{about, bytes, count};
}

/// NVML: the persistence and the memory of GPUs.
pub mod nvml {
    pub use crate::driver::nvml::{memory, persistence};
}

/// Detects WSL2.
pub mod wsl {
    pub use crate::driver::wsl::is_named_in;
}

/// Standard error that never blocks its process.
pub mod stderr {
    pub use crate::sys::{Stderr, flush_stderr, never_block_on_stderr};
}

/// Copies to and from memory that other processes may access at the same time.
pub mod copy {
    pub use crate::driver::copy::{read, write};
}

/// The broker's inspection of a received descriptor: whether it accepts the memory, and whether it expects that closing the file may block.
pub fn inspect_descriptor(
    fd: BorrowedFd<'_>,
    backend: Backend,
    size: u64,
    emulated: bool,
) -> (std::result::Result<(), String>, bool) {
    crate::broker::inspect_and_classify(fd, backend, size, emulated)
}

/// The configuration of a broker that accepts the emulated driver's memfds as GPU memory.
pub fn emulated(config: ServerConfig) -> ServerConfig {
    ServerConfig { emulated: true, ..config }
}

/// The configuration of a broker with other time limits.
pub fn with_limits(config: ServerConfig, limits: TimeLimits) -> ServerConfig {
    ServerConfig { limits, ..config }
}

/// Describes memory that is not immutable.
pub fn describe(device: DeviceIdentity, sharing: Sharing, size: u64, mapped_size: u64) -> Description {
    Description { device, sharing, size, mapped_size, immutable: false }
}

/// Waits until a descriptor is ready. Returns `false` at the deadline.
///
/// # Errors
/// [`Error::Interrupted`]; [`Error::System`]. See poll(2).
pub fn wait(cancel: &Cancel, fd: BorrowedFd<'_>, events: PollFlags, deadline: Instant) -> Result<bool> {
    cancel.wait(fd, events, deadline)
}

/// Waits for the given time.
///
/// # Errors
/// As for [`wait`].
pub fn pause(cancel: &Cancel, time: Duration) -> Result<()> {
    cancel.pause(time)
}

/// Accepts a pending connection of a listener, if there is one.
///
/// # Errors
/// [`Error::System`]. See accept(2).
pub fn accept(listener: &Listener) -> Result<Option<OwnedFd>> {
    listener.accept()
}

/// Checks that a broker could listen at a path. Creates no file.
///
/// # Errors
/// [`Error::Socket`](crate::Error::Socket); [`Error::System`](crate::Error::System).
pub fn check_socket(path: &Path) -> Result<()> {
    Listener::check_unserved(path)
}

/// The peer process of a socket.
///
/// # Errors
/// [`Error::System`].
pub fn peer_of(socket: &impl AsFd) -> Result<Peer> {
    Peer::of(socket)
}

/// The configuration of a server that exits once its keeper confirms that it holds everything, after `leave` is cancelled. The keeper stays
/// for the next server.
pub fn leaving(config: ServerConfig, leave: Cancel) -> ServerConfig {
    ServerConfig { leave: Some(leave), ..config }
}

/// The configuration of a server that starts its own program, with `arguments`, as its keeper, and ends the keeper when it exits on request.
pub fn with_own_keeper(config: ServerConfig, arguments: Vec<std::ffi::OsString>) -> ServerConfig {
    ServerConfig { own_keeper: Some(arguments), ..config }
}

/// Creates a broker's refusal.
pub fn refusal(code: RefusalCode, message: impl Into<String>) -> BrokerError {
    BrokerError::new(code, message)
}

/// The names of the element types.
pub fn element_type_names() -> impl Iterator<Item = &'static str> {
    ElementType::names()
}

/// Creates a mirror with a buffer of `room` bytes, for later ranges that are longer than the first.
///
/// # Errors
/// As for [`Mirror::of`].
pub fn sized_mirror(region: &dyn Region, offset: u64, length: u64, room: u64) -> Result<Mirror<'_>> {
    Mirror::sized(region, offset, length, room)
}

/// Writes zeros to the padding behind the data.
///
/// # Errors
/// As for [`Region::copy_in`].
pub fn clear_padding(memory: &Shared) -> Result<()> {
    memory.clear_padding()
}

/// Selects a device. `identity` returns a device's ordinal, UUID and display name.
///
/// # Errors
/// [`Error::Device`](crate::Error::Device) if no device or several match.
pub fn choose_device<T>(
    selector: Selector,
    backend: Backend,
    devices: &[T],
    identity: impl Fn(&T) -> (i32, DeviceUuid, String),
) -> Result<&T> {
    selector.choose(backend, devices, identity)
}

/// The UUID with the prefix of its backend, as [`Device::prefixed_uuid`](crate::memory::Device::prefixed_uuid).
pub fn prefixed_uuid(device: &DeviceIdentity) -> String {
    device.prefixed_uuid()
}

/// Serializes the UUIDs of devices in reports for users, with prefix. Messages have none.
pub fn for_users<T>(serialize: impl FnOnce() -> T) -> T {
    crate::base::for_users(serialize)
}

/// Creates a driver from its verbs.
pub fn driver(verbs: Arc<dyn Verbs>) -> Driver {
    Driver::of(verbs)
}

/// The verbs of a driver.
///
/// # Safety
/// The caller must not unmap, free, release or map over anything that a value of this crate owns.
pub unsafe fn verbs(driver: &Driver) -> &dyn Verbs {
    driver.verbs()
}
