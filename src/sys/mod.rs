//! System calls that no crate here wraps, each behind a safe function. The only place outside `driver/` with `unsafe`.
#![allow(unsafe_code)]

#[cfg(feature = "broker")]
mod descriptor;
#[cfg(feature = "broker")]
mod file;
pub mod fork;
#[cfg(feature = "broker")]
mod process;
#[cfg(feature = "broker")]
mod socket;
// Of these the commands alone use all.
#[cfg(feature = "broker")]
#[cfg_attr(not(feature = "tools"), allow(dead_code))]
mod stderr;

#[cfg(all(test, feature = "broker"))]
pub(crate) use self::file::tests::without_kcmp;
#[cfg(feature = "tools")]
pub(crate) use self::stderr::never_block_on_stderr;
#[cfg(feature = "broker")]
pub(crate) use self::stderr::{Stderr, flush_stderr};
#[cfg(feature = "broker")]
pub(crate) use self::{
    descriptor::replace,
    file::kcmp,
    process::{Program, started_ms, take_passed},
    socket::{pass_descriptors, passes_descriptors, peer_groups, unread},
};

/// The uid that the kernel shows in place of one that this user namespace does not map: `/proc/sys/kernel/overflowuid`, or the
/// kernel's default of 65534 where that can't be read. It is read once. Does not block.
///
/// See user_namespaces(7).
#[cfg(feature = "broker")]
pub(crate) fn overflow_uid() -> u32 {
    const DEFAULT: u32 = 65534;
    static UID: std::sync::OnceLock<u32> = std::sync::OnceLock::new();
    *UID.get_or_init(|| {
        let text = std::fs::read_to_string("/proc/sys/kernel/overflowuid");
        text.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(DEFAULT)
    })
}
