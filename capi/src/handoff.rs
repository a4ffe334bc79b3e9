//! Handoffs: serving an array to other processes, and taking one.

use std::{
    ffi::{c_char, c_int},
    mem::MaybeUninit,
    sync::Arc,
};

use vmmfd::{
    Error, bindings,
    channel::{Listener, socket_path},
    driver::Access,
    memory::Region,
    session::{
        Config,
        handoff::{self, Consumer, ServeOptions, Served, Unchecked},
    },
};

use crate::{
    argument::{config, descriptor, list, out, path, run_out, stop, unused},
    array::{Array, vmmfd_array_t},
    device::{driver, vmmfd_device_t},
    error::{Outcome, run, vmmfd_error_t},
    handle,
    memory::Memory,
    versioned::{options, versioned},
};

/// Serve any number of consumers, until the call is stopped.
pub const VMMFD_ANY_NUMBER: u64 = u64::MAX;

/// Options of a handoff, which start with `VMMFD_HANDOFF_OPTIONS`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct vmmfd_handoff_options_t {
    /// The size of this struct: `sizeof` it.
    pub struct_size: usize,
    /// A connected socket of type `SOCK_SEQPACKET`, such as one of a pair, used instead of a path. -1: none. The caller keeps it, and
    /// closes it after the call. One handoff for each socket: the call makes it non-blocking, and shuts it down at the end.
    pub socket: c_int,
    /// A descriptor, such as an eventfd(2), that stops the call within 50 ms after it becomes readable. -1: none. The caller keeps it.
    pub stop: c_int,
    /// The longest wait for a peer, and the longest silence of a peer, in milliseconds. 0: 30 s.
    pub timeout_ms: u64,
    /// Serving at a path: the number of consumers. 0: one; `VMMFD_ANY_NUMBER`: any number, until the call is stopped.
    pub consumers: u64,
    /// Users beside this process's user and root that the peer may run as.
    pub trust: *const u32,
    /// The number of users in `trust`.
    pub trust_count: usize,
    /// Taking: asks for write access.
    pub writable: bool,
}

versioned!(vmmfd_handoff_options_t);

struct Options {
    config: Config,
    consumers: u64,
    socket: Option<std::os::fd::OwnedFd>,
    writable: bool,
}

impl Options {
    fn of(given: *const vmmfd_handoff_options_t, path: *const c_char) -> Outcome<Self> {
        let Some(given) = options(given)? else {
            return Ok(Self { config: Config::default(), consumers: 0, socket: None, writable: false });
        };
        unused(given.socket != -1 && given.consumers != 0, "consumers", "with a socket")?;
        unused(given.socket != -1 && !path.is_null(), "path", "with a socket")?;
        let trust = list(given.trust, given.trust_count, "trust")?;
        let socket = (given.socket != -1).then(|| descriptor(given.socket, "socket")).transpose()?;
        Ok(Self {
            config: config(given.timeout_ms, trust, stop(given.stop)?.as_ref())?,
            consumers: given.consumers,
            socket,
            writable: given.writable,
        })
    }
}

/// Serves an array to other processes, which take it with `vmmfd_handoff_take`, `vmmfd.take` in Python or the program `consumer`.
///
/// The memory must be of `vmmfd_memory_create` or `vmmfd_array_from_dlpack`. `path` is the socket's, NULL is this user's default; with
/// `socket` of the options, it is NULL, and the one peer of that socket is served. `served`, which may be NULL, is the number of consumers
/// that took the array; it is valid after a failure too. Consumers keep the memory allocated after this process frees it.
///
/// Blocks until the number of consumers has been served, at most `timeout_ms` without a consumer; with `VMMFD_ANY_NUMBER` until it is
/// stopped, which is then no error. First waits for all work in the device's primary context. Any thread may call it; to serve in the
/// background, call it from a thread of your own.
///
/// Errors: `VMMFD_TIMEOUT` if no consumer came; `VMMFD_INTERRUPTED` if it was stopped before; `VMMFD_INVALID` for other memory, and for a
/// path or socket that can't be used; `VMMFD_DISCONNECTED` and other errors of the first consumer that failed; `VMMFD_DRIVER`;
/// `VMMFD_SYSTEM`; `VMMFD_FORKED`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_handoff_serve(
    path: *const c_char,
    array: *const vmmfd_array_t,
    options: *const vmmfd_handoff_options_t,
    served: Option<&mut MaybeUninit<u64>>,
) -> *mut vmmfd_error_t {
    run(|| {
        let mut ignored = MaybeUninit::uninit();
        let served = out(Some(served.unwrap_or(&mut ignored)), "served")?;
        let array = handle::get(array)?;
        let Options { config, consumers, socket, writable } = Options::of(options, path)?;
        unused(writable, "writable", "when serving")?;
        let consumers = match consumers {
            0 => 1,
            // The library's own word for any number.
            VMMFD_ANY_NUMBER => 0,
            number => number,
        };
        let shared = array.memory.shared("serve it")?;
        // The work that this process queued on the device.
        shared.device().wait_for_work()?;
        let buffer = handoff::Buffer::new(Arc::clone(shared), Unchecked, Some(array.descriptor.clone()))?;
        let options = ServeOptions::default().consumers(consumers);
        let report = match socket {
            Some(socket) => vec![handoff::serve_connection(socket, &buffer, &options, &config, &|_| {})?],
            None => {
                let path = socket_path(crate::argument::path(path))?;
                let listener = Listener::bind(&path, &config)?;
                let report = handoff::serve(listener, &buffer, &options, &config, &|_| {});
                served.write(took(&report.served));
                match report.error {
                    Some(Error::Interrupted { .. }) if consumers == 0 => {}
                    Some(error) => return Err(error.into()),
                    None => {}
                }
                report.served
            }
        };
        served.write(took(&report));
        report.into_iter().try_for_each(|one| one.into_result().map(drop))?;
        Ok(())
    })
}

fn took(served: &[Served]) -> u64 {
    served.iter().filter(|one| one.error.is_none() && !one.mismatched()).count() as u64
}

/// Takes the array that another process serves: with `vmmfd_handoff_serve`, `vmmfd.serve` in Python or the program `producer`. Memory
/// without a type is an array of `uint8`.
///
/// `device` is the device to map the memory for, if it can reach the memory; NULL means the memory's own device, of the backend `auto`.
/// `path` and `socket` are as for `vmmfd_handoff_serve`. The memory is read-only unless `writable` of the options is set. The caller frees
/// `*array` with `vmmfd_array_free`; it is NULL after a failure. The memory remains valid after the producer exits, unless the producer
/// shares it by a pool or a legacy handle: it then lives as long as the producer.
///
/// Blocks until the producer listens and it is this consumer's turn, at most `timeout_ms` without a sign of the producer. Any thread may
/// call it.
///
/// Errors: `VMMFD_NOT_FOUND` if no process listens in time; `VMMFD_DISCONNECTED`; `VMMFD_DENIED` for a user that is not
/// trusted; `VMMFD_UNSUPPORTED` if this process has no device for the memory; `VMMFD_INTERRUPTED`; `VMMFD_INVALID`; `VMMFD_DRIVER`;
/// `VMMFD_SYSTEM`; `VMMFD_FORKED`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_handoff_take(
    device: *const vmmfd_device_t,
    path: *const c_char,
    options: *const vmmfd_handoff_options_t,
    array: Option<&mut MaybeUninit<*mut vmmfd_array_t>>,
) -> *mut vmmfd_error_t {
    run_out(array, "array", || {
        let Options { config, consumers, socket, writable } = Options::of(options, path)?;
        unused(consumers != 0, "consumers", "when taking")?;
        let (driver, selector) = match handle::optional(device)? {
            Some(open) => (open.device.driver().clone(), Some(open.selector())),
            None => (driver(None)?.0, None),
        };
        let consumer = match socket {
            Some(socket) => Consumer::over(socket, &driver, selector, &config, &|_| {})?,
            None => Consumer::connect(&driver, selector, &socket_path(self::path(path))?, &config, &|_| {})?,
        };
        let (object, descriptor) =
            bindings::take(consumer, if writable { Access::ReadWrite } else { Access::ReadOnly })?;
        let mapped_size = object.mapped_size();
        Ok(handle::insert(Array::new(Memory::opened(Arc::new(object), mapped_size), descriptor)?))
    })
}
