//! Recalls: the owner of a name asks readers for the memory of its versions.

use std::{
    ffi::{c_char, c_int},
    mem::MaybeUninit,
    ptr,
    time::Duration,
};

use vmmfd::broker::{Recall, RecallHolder, RecallOf};

use crate::{
    argument::{milliseconds, run_out, text, unused},
    broker::vmmfd_broker_t,
    error::vmmfd_error_t,
    handle,
    owned::{self, Kept},
};

/// A lease of a recalled version.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct vmmfd_holder_t {
    /// The process's command; NULL if the broker can't read it.
    pub command: *const c_char,
    /// The version's number.
    pub version: u64,
    /// The size of the leased memory in bytes, as its creator claimed.
    pub size: u64,
    /// The process, in the broker's PID namespace; 0 if it has no number there.
    pub pid: c_int,
    /// The process's user.
    pub uid: u32,
    /// Whether the lease is released, or its process exited or disconnected. The end of the wait is no acknowledgement.
    pub acknowledged: bool,
}

/// The result of a recall. The caller frees it with `vmmfd_recall_free`, which also frees the texts.
#[repr(C)]
#[derive(Debug)]
pub struct vmmfd_recall_t {
    /// The number of holders.
    pub holder_count: usize,
    /// The leases of the versions at the time of the request and since then.
    pub holders: *const *const vmmfd_holder_t,
    /// Whether the broker holds none of the versions any more. Their memory is free, except where a process has it mapped without a lease.
    pub free: bool,
    /// Whether a name keeps one of the versions without a lease.
    pub kept: bool,
}

/// Asks the processes that hold a version to release it, and waits until they have released it. No process can be forced: end a process that
/// does not acknowledge.
///
/// `version` is the version; 0 is the current one, and of a deleted name all versions that are still held. With `earlier`, and `version` 0,
/// all versions are recalled but the current one. The holders see it by `vmmfd_lease_recalled` and by handlers of the other languages. The
/// caller frees `*recall` with `vmmfd_recall_free`; it is NULL after a failure. Blocks for at most `wait_ms`, where 0 does not wait for the
/// holders, and for the broker's answers, each for at most the connection's timeout.
///
/// Errors: `VMMFD_NOT_FOUND` if there is no such object or version; `VMMFD_DENIED` if this user may not delete the name;
/// `VMMFD_DISCONNECTED`; `VMMFD_INTERRUPTED`; `VMMFD_INVALID`; `VMMFD_SYSTEM`; `VMMFD_FORKED`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_broker_recall(
    broker: *const vmmfd_broker_t,
    name: *const c_char,
    version: u64,
    earlier: bool,
    wait_ms: u64,
    recall: Option<&mut MaybeUninit<*mut vmmfd_recall_t>>,
) -> *mut vmmfd_error_t {
    run_out(recall, "recall", || {
        let broker = handle::get(broker)?;
        let of = match (version, earlier) {
            (0, false) => RecallOf::Current,
            (version, false) => RecallOf::Version(version),
            (version, true) => {
                unused(version != 0, "version", "with earlier")?;
                RecallOf::Earlier
            }
        };
        let within = milliseconds(wait_ms, Duration::ZERO);
        Ok(allocate(&broker.client.recall(text(name, "name")?, of, within)?))
    })
}

fn allocate(recall: &Recall) -> *mut vmmfd_recall_t {
    let mut kept = Kept::default();
    let holder = |RecallHolder { lease, acknowledged, .. }: &RecallHolder| vmmfd_holder_t {
        command: lease.command.as_deref().map_or(ptr::null(), |command| kept.text(command)),
        version: lease.version,
        size: lease.size,
        pid: lease.pid,
        uid: lease.uid,
        acknowledged: *acknowledged,
    };
    let holders: Vec<_> = recall.holders.iter().map(holder).collect();
    let holder_count = holders.len();
    let holders = kept.addresses(holders);
    kept.allocate(vmmfd_recall_t { holder_count, holders, free: recall.free, kept: recall.kept })
}

/// Frees the result of a recall. Does not block.
#[unsafe(no_mangle)]
pub extern "C" fn vmmfd_recall_free(recall: *mut vmmfd_recall_t) {
    owned::free(recall);
}
