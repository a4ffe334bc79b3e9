//! Safe wrappers of system calls for descriptors, memfds and processes. Apart from `driver/`, the only place with `unsafe`.
#![allow(unsafe_code)]

mod descriptor;
pub mod dlpack;
pub mod fork;
mod heap;
pub(crate) mod inherited;
mod lock;
pub(crate) mod memfd;
mod process;
mod socket;
mod stderr;
mod steps;
pub(crate) mod table;
pub(crate) mod thread;
mod words;

pub use self::descriptor::eventfd;
pub use self::lock::{lock, try_lock};
pub use self::process::take_passed;
pub use self::stderr::{Stderr, flush_stderr, never_block_on_stderr};
pub use self::steps::interruptible;
pub(crate) use self::{
    descriptor::{above_standard, epoll, occupy_standard, replace},
    heap::Heap,
    process::{fork_process, monotonic, pidfd_of, process_of, started_ms},
    socket::{pass_descriptors, passes_descriptors, peer_groups, peer_process, unread},
    words::Words,
};

/// The uid that the kernel reports for a user without a mapping in this user namespace: `/proc/sys/kernel/overflowuid`, or the kernel's
/// default of 65534 if the file can't be read. Reads the file once. Does not block.
///
/// See user_namespaces(7).
pub(crate) fn overflow_uid() -> u32 {
    const DEFAULT: u32 = 65534;
    static UID: std::sync::OnceLock<u32> = std::sync::OnceLock::new();
    *UID.get_or_init(|| {
        let text = std::fs::read_to_string("/proc/sys/kernel/overflowuid");
        text.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(DEFAULT)
    })
}
