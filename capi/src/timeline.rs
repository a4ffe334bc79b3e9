//! The order of GPU work between processes: streams, timelines and completions.

use std::{
    ffi::{c_char, c_int, c_void},
    mem::MaybeUninit,
    os::fd::{AsFd, AsRawFd},
    time::Duration,
};

use vmmfd::{
    Error,
    channel::Cancel,
    driver::Stream,
    error::PeerError,
    memory::Device,
    session::order::{Completion, Order, Timeline},
};

use crate::{
    argument::{descriptor, is_readable, milliseconds, out, run_out, stop},
    device::vmmfd_device_t,
    error::{Failure, Outcome, run, run_logged, vmmfd_code_t, vmmfd_error_t},
    handle::{self, handle},
    versioned::versioned,
};

/// A number that streams of one process raise, and that streams and threads of any process wait for. Any threads may use it at once.
#[derive(Debug)]
pub struct vmmfd_timeline_t {
    _opaque: [u8; 0],
}

handle!(vmmfd_timeline_t, 10, "a timeline", Timed);

pub(crate) struct Timed {
    timeline: Timeline,
    /// `None` if no stream can use it.
    device: Option<Device>,
}

impl Timed {
    fn stream(&self, stream: *mut c_void) -> Outcome<Stream> {
        let problem = "this timeline was opened without a device: no stream can use it";
        self::stream(self.device.as_ref().ok_or_else(|| Failure::invalid(problem))?, stream)
    }
}

/// A stream of the caller.
pub(crate) fn stream(device: &Device, stream: *mut c_void) -> Outcome<Stream> {
    // SAFETY: the header states that the stream exists, and for how long.
    Ok(unsafe { device.driver().stream(device.ordinal(), stream.addr() as u64) }?)
}

/// Whether GPU work of a peer is done.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum vmmfd_completion_t {
    /// It is done, and all that it wrote is visible.
    VMMFD_DONE = 0,
    /// It is not done yet.
    VMMFD_PENDING = 1,
    /// The wait was released before it was known to be done: what was read behind the wait is undefined.
    VMMFD_LOST = 2,
}

pub(crate) fn completion(of: Completion) -> vmmfd_completion_t {
    match of {
        Completion::Done => vmmfd_completion_t::VMMFD_DONE,
        Completion::Pending => vmmfd_completion_t::VMMFD_PENDING,
        Completion::Lost => vmmfd_completion_t::VMMFD_LOST,
    }
}

/// How two processes order their GPU work.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct vmmfd_order_t {
    /// The size of this struct: `sizeof` it.
    pub struct_size: usize,
    /// Whether streams wait for streams. If not, a CPU waits for each buffer.
    pub gpu: bool,
    /// The reason for the order by CPUs, which ends with a null character, in UTF-8. A longer text is cut. Empty if streams wait.
    pub reason: [c_char; 255],
}

versioned!(vmmfd_order_t);

pub(crate) fn show_order(order: &Order) -> vmmfd_order_t {
    let reason = match order {
        Order::Gpu => "",
        Order::Cpu { reason } => reason,
    };
    let end = (0..=reason.len().min(254)).rev().find(|end| reason.is_char_boundary(*end));
    let mut shown = vmmfd_order_t { struct_size: 0, gpu: *order == Order::Gpu, reason: [0; 255] };
    for (to, from) in shown.reason.iter_mut().zip(reason.bytes().take(end.unwrap_or(0))) {
        *to = from as c_char;
    }
    shown
}

/// Creates a timeline whose value is 0, for streams of a device. Only this process records on it. Blocks for about a millisecond, for a
/// test of the streams.
///
/// The caller frees `*timeline` with `vmmfd_timeline_free`; it is NULL after a failure.
///
/// Errors: `VMMFD_UNSUPPORTED` if the device's streams can't wait for host memory, as on the host backend; `VMMFD_INVALID`; `VMMFD_SYSTEM`;
/// `VMMFD_FORKED`. Driver calls: `cuMemHostRegister`, `cuStreamCreate`, `cuStreamBatchMemOp`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_timeline_create(
    device: *const vmmfd_device_t,
    timeline: Option<&mut MaybeUninit<*mut vmmfd_timeline_t>>,
) -> *mut vmmfd_error_t {
    run_out(timeline, "timeline", || {
        let device = &handle::get(device)?.device;
        Ok(handle::insert(Timed { timeline: Timeline::create(device)?, device: Some(device.clone()) }))
    })
}

/// Opens another process's timeline from a descriptor of `vmmfd_timeline_descriptor`, which the caller keeps and may close afterwards.
/// With `device` NULL, no stream can use it, but this process can query it, wait on the CPU, and release.
///
/// The caller frees `*timeline` with `vmmfd_timeline_free`; it is NULL after a failure.
///
/// Errors: `VMMFD_SYSTEM` for a descriptor of something else; the errors of `vmmfd_timeline_create`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_timeline_open(
    device: *const vmmfd_device_t,
    fd: c_int,
    timeline: Option<&mut MaybeUninit<*mut vmmfd_timeline_t>>,
) -> *mut vmmfd_error_t {
    run_out(timeline, "timeline", || {
        let device = handle::optional(device)?.map(|open| open.device.clone());
        let timeline = Timeline::open(descriptor(fd, "fd")?, device.as_ref())?;
        Ok(handle::insert(Timed { timeline, device }))
    })
}

/// Raises the value by 1 when all earlier work of a stream is done. `*value` is the new value. Does not wait for the work.
///
/// `stream` is a `CUstream` or `cudaStream_t` of the timeline's device; NULL is the legacy default stream. It exists until the next record
/// on another stream, or until the timeline is freed.
///
/// Errors: `VMMFD_INVALID` if another process records, for a stream of another device, in a capture, and for the per-thread default stream;
/// `VMMFD_DISCONNECTED` after a release; `VMMFD_DRIVER`; `VMMFD_FORKED`. Driver calls: `cuStreamIsCapturing`, `cuStreamBatchMemOp`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_timeline_record(
    timeline: *const vmmfd_timeline_t,
    stream: *mut c_void,
    value: Option<&mut MaybeUninit<u64>>,
) -> *mut vmmfd_error_t {
    run_out(value, "value", || {
        let timed = handle::get(timeline)?;
        Ok(timed.timeline.record(&timed.stream(stream)?)?)
    })
}

/// Lets a stream wait until the value is reached, at most `timeout_ms` long. Does not block. After this time all waits for the timeline are
/// released, in all processes, and it can't be used any more. `stream` is as for `vmmfd_timeline_record`, and exists during the call.
///
/// Errors: the errors of `vmmfd_timeline_record`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_timeline_wait(
    timeline: *const vmmfd_timeline_t,
    stream: *mut c_void,
    value: u64,
    timeout_ms: u64,
) -> *mut vmmfd_error_t {
    run(|| {
        let timed = handle::get(timeline)?;
        Ok(timed.timeline.wait(&timed.stream(stream)?, value, milliseconds(timeout_ms, Duration::ZERO))?)
    })
}

/// Blocks until the value is reached, for at most `timeout_ms`. `stop` is a descriptor, such as an eventfd(2), that ends the wait within
/// 50 ms after it becomes readable; -1 is none.
///
/// Errors: `VMMFD_TIMEOUT` after this time; `VMMFD_DISCONNECTED` after a release; `VMMFD_INTERRUPTED`; `VMMFD_INVALID`; `VMMFD_SYSTEM`;
/// `VMMFD_FORKED`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_timeline_wait_cpu(
    timeline: *const vmmfd_timeline_t,
    value: u64,
    timeout_ms: u64,
    stop: c_int,
) -> *mut vmmfd_error_t {
    run(|| {
        let timed = handle::get(timeline)?;
        let mut cancel = Cancel::new()?;
        if let Some(stop) = self::stop(stop)? {
            cancel = cancel.with_check(move || is_readable(&stop));
        }
        match timed.timeline.wait_cpu(value, milliseconds(timeout_ms, Duration::ZERO), &cancel) {
            Err(Error::Peer(PeerError::Timeout { waited, .. })) => {
                let message = format!("the timeline did not reach {value} within {waited:?}");
                Err(Failure::Own(vmmfd_code_t::VMMFD_TIMEOUT, message, None))
            }
            result => Ok(result?),
        }
    })
}

/// Returns whether the value was reached. Does not block.
///
/// Errors: `VMMFD_INVALID`; `VMMFD_FORKED`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_timeline_completion(
    timeline: *const vmmfd_timeline_t,
    value: u64,
    completion: Option<&mut MaybeUninit<vmmfd_completion_t>>,
) -> *mut vmmfd_error_t {
    run_out(completion, "completion", || Ok(self::completion(handle::get(timeline)?.timeline.completion(value))))
}

/// Returns the value now; after a release the largest number. Does not block.
///
/// Errors: `VMMFD_INVALID`; `VMMFD_FORKED`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_timeline_value(
    timeline: *const vmmfd_timeline_t,
    value: Option<&mut MaybeUninit<u64>>,
) -> *mut vmmfd_error_t {
    run_out(value, "value", || Ok(handle::get(timeline)?.timeline.value()))
}

/// Ends all waits for the timeline, in all processes. Values that were not reached are lost. Does not block, and makes no driver call.
///
/// Errors: `VMMFD_INVALID`; `VMMFD_FORKED`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_timeline_release(timeline: *const vmmfd_timeline_t) -> *mut vmmfd_error_t {
    run(|| {
        handle::get(timeline)?.timeline.release();
        Ok(())
    })
}

/// Releases the waits when a process ends, or closes its end of a connection. `peer` is the pidfd of the process, or a connected socket. The
/// library keeps a duplicate. Does not block.
///
/// Errors: `VMMFD_INVALID`; `VMMFD_SYSTEM`; `VMMFD_FORKED`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_timeline_release_with(timeline: *const vmmfd_timeline_t, peer: c_int) -> *mut vmmfd_error_t {
    run(|| Ok(handle::get(timeline)?.timeline.release_with(descriptor(peer, "peer")?)?))
}

/// Returns the descriptor of the timeline, to send to another process over the program's own socket (`SCM_RIGHTS`). A holder can wait and
/// release.
///
/// The timeline owns the descriptor: do not close it. `*fd` is -1 after a failure. Does not block.
///
/// Errors: `VMMFD_INVALID`; `VMMFD_FORKED`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_timeline_descriptor(
    timeline: *const vmmfd_timeline_t,
    fd: Option<&mut MaybeUninit<c_int>>,
) -> *mut vmmfd_error_t {
    run(|| {
        let fd = out(fd, "fd")?;
        fd.write(-1);
        fd.write(handle::get(timeline)?.timeline.as_fd().as_raw_fd());
        Ok(())
    })
}

/// Frees a timeline. Of a device, blocks while any stream of the device waits for a timeline: to end such waits, call
/// `vmmfd_timeline_release` first.
#[unsafe(no_mangle)]
pub extern "C" fn vmmfd_timeline_free(timeline: *mut vmmfd_timeline_t) {
    run_logged(|| handle::remove(timeline));
}
