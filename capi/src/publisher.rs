//! Publishers of streams.

use std::{
    ffi::{c_char, c_int, c_void},
    mem::MaybeUninit,
    ops::Deref,
    os::fd::{AsFd, AsRawFd},
    ptr,
    time::Duration,
};

use vmmfd::{
    channel::socket_path,
    memory::Region,
    session::stream::{Event, Loan, MAX_USER_BYTES, PublishOptions, Published, Publisher},
    topic,
};

use crate::{
    argument::{config, descriptor, list, milliseconds, out, path, run_out, stop, text},
    broker::vmmfd_broker_t,
    device::vmmfd_device_t,
    error::{Failure, Outcome, run, run_logged, vmmfd_error_t},
    format::{self, vmmfd_format_t},
    handle::{self, handle},
    memory::{self, Memory, vmmfd_memory_t},
    timeline::{self, show_order, vmmfd_order_t},
    versioned::{Facts, options, versioned},
};

/// A publisher: it passes buffers of one pool to any number of subscribers. Any threads may use it at once.
#[derive(Debug)]
pub struct vmmfd_publisher_t {
    _opaque: [u8; 0],
}

handle!(vmmfd_publisher_t, 8, "a publisher", Publishing);

pub(crate) struct Publishing {
    publisher: Publisher,
    /// The permissions of its topics.
    mode: Option<u16>,
}

impl Deref for Publishing {
    type Target = Publisher;

    fn deref(&self) -> &Publisher {
        &self.publisher
    }
}

/// Options of a publisher, which start with `VMMFD_PUBLISHER_OPTIONS`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct vmmfd_publisher_options_t {
    /// The size of this struct: `sizeof` it.
    pub struct_size: usize,
    /// A descriptor, such as an eventfd(2), that stops the waits of all calls within 50 ms after it becomes readable. -1: none. The caller
    /// keeps it.
    pub stop: c_int,
    /// The place of the pool: a value of `vmmfd_placement_t`.
    pub placement: u32,
    /// The permissions of topics, such as 0640: the users who may read follow them. 0: 0600.
    pub mode: u16,
    /// The number of publications that a late subscriber can receive at once.
    pub history: u64,
    /// The most buffers that are on loan at a time. 0: one.
    pub loans: u64,
    /// How long the publisher waits for a subscriber with `VMMFD_EVERY` before it evicts the subscriber, in milliseconds. 0: such
    /// subscribers are refused.
    pub every_ms: u64,
    /// The longest silence of a subscriber that joins, in milliseconds. 0: 30 s.
    pub timeout_ms: u64,
    /// Users beside this process's user and root that subscribers may run as.
    pub trust: *const u32,
    /// The number of users in `trust`.
    pub trust_count: usize,
}

versioned!(vmmfd_publisher_options_t);

/// Allocates the pool of a publisher on a device: `room` buffers of `size` bytes each. With `size` 0 the sizes vary, and `room` is the size
/// of the pool in bytes. Subscribers come by `vmmfd_publisher_listen` and `vmmfd_publisher_admit`.
///
/// With a fixed size, a subscriber is refused if the pool has fewer buffers than the sum of: the buffers that each subscriber may hold, the
/// history (or the longest queue less 1), the loans, and 1. So no subscriber without `VMMFD_EVERY` can make a loan wait. `options` NULL
/// means the defaults. The caller frees `*publisher` with `vmmfd_publisher_free`; it is NULL after a failure. Blocks while the driver
/// allocates. A thread of the library serves all publishers of the process; it blocks all signals.
///
/// Errors: `VMMFD_INVALID` for a pool without room for a buffer and unknown options; the errors of `vmmfd_memory_create`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_publisher_create(
    device: *const vmmfd_device_t,
    size: u64,
    room: u64,
    options: *const vmmfd_publisher_options_t,
    publisher: Option<&mut MaybeUninit<*mut vmmfd_publisher_t>>,
) -> *mut vmmfd_error_t {
    run_out(publisher, "publisher", || {
        let open = handle::get(device)?;
        let mut pool = match (size, usize::try_from(room)) {
            (0, _) => PublishOptions::varying(room),
            (_, Ok(count)) => PublishOptions::fixed(size, count),
            _ => return Err(Failure::invalid(format!("room is {room}: pass the number of buffers"))),
        };
        let (mut own, mut mode) = (config(0, &[], None)?, None);
        if let Some(given) = self::options(options)? {
            let trust = list(given.trust, given.trust_count, "trust")?;
            own = config(given.timeout_ms, trust, stop(given.stop)?.as_ref())?;
            let count = |value| usize::try_from(value).unwrap_or(usize::MAX);
            mode = (given.mode != 0).then_some(given.mode);
            pool = pool.placement(memory::placement(given.placement)?);
            pool = pool.history(count(given.history)).loans(count(given.loans.max(1)));
            if given.every_ms > 0 {
                pool = pool.every(milliseconds(given.every_ms, Duration::ZERO));
            }
        }
        Ok(handle::insert(Publishing { publisher: Publisher::create(&open.device, &pool, &own)?, mode }))
    })
}

/// Accepts subscribers at a place from now on: without a `broker`, at a socket path. `place` NULL is this user's default path. Replaces an
/// earlier path. With a `broker`, `place` is the name of a topic, at which the broker introduces subscribers until the publisher finishes or
/// is freed; a publisher may have a path and several topics. Does not wait for subscribers.
///
/// A topic outlives the handle `broker`, and a restart of the broker: the streams go on, and new subscribers wait for its successor. Blocks
/// until the broker has answered.
///
/// Errors: `VMMFD_INVALID` for a path or name that can't be used; `VMMFD_EXISTS` if the topic has another publisher; `VMMFD_SYSTEM`, also
/// if another process listens at the path; `VMMFD_DISCONNECTED` and `VMMFD_INTERRUPTED`, of the broker; `VMMFD_FORKED`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_publisher_listen(
    publisher: *const vmmfd_publisher_t,
    broker: *const vmmfd_broker_t,
    place: *const c_char,
) -> *mut vmmfd_error_t {
    run(|| {
        let publisher = handle::get(publisher)?;
        match handle::optional(broker)? {
            Some(broker) => topic::open(&broker.client, text(place, "place")?, &publisher, publisher.mode)?,
            None => publisher.listen(&socket_path(path(place))?)?,
        }
        Ok(())
    })
}

/// Accepts the subscriber at the other end of a connected socket of type `SOCK_SEQPACKET`. Does not wait for it.
///
/// The library keeps a duplicate of `socket`. The caller closes its own after the call, because the subscriber sees the end of a publisher
/// only when all duplicates are closed.
///
/// Errors: `VMMFD_INVALID` for another descriptor; `VMMFD_SYSTEM`; `VMMFD_FORKED`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_publisher_admit(publisher: *const vmmfd_publisher_t, socket: c_int) -> *mut vmmfd_error_t {
    run(|| Ok(handle::get(publisher)?.admit(descriptor(socket, "socket")?)?))
}

/// Describes the buffers that are published from now on. `format` is sent when it changes, not with each buffer. Does not block.
///
/// Errors: `VMMFD_INVALID` for more than 64 arrays, a blob of more than 65,536 bytes, arrays that are not inside a buffer of the fixed
/// size, and wrong layouts; `VMMFD_SYSTEM`; `VMMFD_FORKED`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_publisher_set_format(
    publisher: *const vmmfd_publisher_t,
    format: *const vmmfd_format_t,
) -> *mut vmmfd_error_t {
    run(|| Ok(handle::get(publisher)?.set_format(&format::read(format)?)?))
}

/// Takes a free buffer, to fill and publish: memory with an address in `vmmfd_memory_info`, which contains the bytes of an earlier
/// publication. `size` 0 is the fixed size of the publisher's buffers.
///
/// The caller passes `*loan` to `vmmfd_loan_publish`, or frees it with `vmmfd_memory_free`, after which the buffer is free again; it is NULL
/// after a failure. Blocks for at most `timeout_ms` while all loans are taken, while a subscriber with `VMMFD_EVERY` has no room, and, if
/// the sizes vary, while the pool is full. With `timeout_ms` 0 it does not block, and `*loan` is NULL without an error if no buffer is free;
/// the descriptor of the publisher is then readable after the next change.
///
/// Errors: `VMMFD_TIMEOUT` after `timeout_ms`, with the processes that have the buffers; `VMMFD_INVALID` for a size of 0 if the sizes vary,
/// and for a size that exceeds the fixed size or the pool; `VMMFD_INTERRUPTED`; `VMMFD_SYSTEM`; `VMMFD_FORKED`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_publisher_loan(
    publisher: *const vmmfd_publisher_t,
    size: u64,
    timeout_ms: u64,
    loan: Option<&mut MaybeUninit<*mut vmmfd_memory_t>>,
) -> *mut vmmfd_error_t {
    run_out(loan, "loan", || {
        let publisher = handle::get(publisher)?;
        let limit = milliseconds(timeout_ms, Duration::ZERO);
        let loan = match (size, timeout_ms) {
            (0, 0) => publisher.try_loan()?,
            (0, _) => Some(publisher.loan(limit)?),
            (size, 0) => publisher.try_loan_of(size)?,
            (size, _) => Some(publisher.loan_of(size, limit)?),
        };
        Ok(loan.map_or(ptr::null_mut(), |loan| handle::insert(Memory::lent(loan))))
    })
}

/// Publishes a loan with `user_size` bytes of the program's own, at most 4,096. Waits for no subscriber.
///
/// On success the handle `loan` is freed; after a failure the caller frees it with `vmmfd_memory_free`. `number`, which may be NULL, is the
/// number of the publication, counted from 1. Without `idle`, blocks until all work in the device's primary context has finished. With
/// `idle` it does not block: the program has already waited for its own work on the buffer.
///
/// Errors: `VMMFD_INVALID` for memory that is no loan, for too many bytes, while another call or a DLPack tensor uses the loan, and after
/// `vmmfd_publisher_finish`; `VMMFD_DRIVER` if the GPU's work failed; `VMMFD_FORKED`. Driver call: `cuCtxSynchronize`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_loan_publish(
    loan: *mut vmmfd_memory_t,
    user: *const c_void,
    user_size: usize,
    idle: bool,
    number: Option<&mut MaybeUninit<u64>>,
) -> *mut vmmfd_error_t {
    publish(loan, user, user_size, number, |lent, user| {
        Ok(if idle { lent.announce(user) } else { lent.publish(user) }?)
    })
}

fn publish(
    loan: *mut vmmfd_memory_t,
    user: *const c_void,
    user_size: usize,
    number: Option<&mut MaybeUninit<u64>>,
    publish: impl FnOnce(Loan, &[u8]) -> Outcome<Published>,
) -> *mut vmmfd_error_t {
    run(|| {
        let mut ignored = MaybeUninit::uninit();
        let number = out(Some(number.unwrap_or(&mut ignored)), "number")?;
        let user: &[u8] = list(user.cast(), user_size, "user")?;
        if user_size > MAX_USER_BYTES {
            return Err(Failure::invalid(format!("user_size is {user_size}: the limit is {MAX_USER_BYTES}")));
        }
        let lent = handle::get(loan)?.take_loan()?;
        number.write(publish(lent, user)?.number);
        handle::remove(loan)
    })
}

/// Publishes a loan like `vmmfd_loan_publish`, behind the work that a stream has now. Waits neither for this work nor for subscribers: the
/// streams of subscribers wait for it (`vmmfd_subscriber_receive_on`), or their CPUs. If streams can't order the work
/// (`vmmfd_publisher_order`), the call waits for the stream. The first call takes about a millisecond longer.
///
/// `stream` is a `CUstream` or `cudaStream_t` of the publisher's device, which exists during the call; NULL is the legacy default stream.
///
/// Errors: `VMMFD_INVALID` for a stream of another device and in a capture; `VMMFD_UNSUPPORTED` on the host backend; the errors of
/// `vmmfd_loan_publish`. Driver calls: `cuStreamIsCapturing`, `cuStreamBatchMemOp`; sometimes `cuMemHostRegister` or `cuStreamSynchronize`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_loan_publish_on(
    loan: *mut vmmfd_memory_t,
    stream: *mut c_void,
    user: *const c_void,
    user_size: usize,
    number: Option<&mut MaybeUninit<u64>>,
) -> *mut vmmfd_error_t {
    publish(loan, user, user_size, number, |lent, user| {
        let stream = timeline::stream(lent.device(), stream)?;
        Ok(lent.publish_on(&stream, user)?)
    })
}

/// How publications on streams reach subscribers. Does not block. Before the first publication on a stream, it is the device's claim.
///
/// Errors: `VMMFD_INVALID`; `VMMFD_FORKED`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_publisher_order(
    publisher: *const vmmfd_publisher_t,
    order: *mut vmmfd_order_t,
) -> *mut vmmfd_error_t {
    run(|| {
        let order = Facts::of(order, "order")?;
        order.write(&show_order(&handle::get(publisher)?.order()));
        Ok(())
    })
}

/// The kind of a stream's event.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum vmmfd_stream_event_kind_t {
    /// A kind that this version of the library does not know.
    VMMFD_STREAM_UNKNOWN = 0,
    /// A subscriber has mapped the pool, and receives the next publication.
    VMMFD_STREAM_JOINED = 1,
    /// A subscriber was freed.
    VMMFD_STREAM_LEFT = 2,
    /// A subscriber's process has exited, closed the connection or broken the protocol. Its buffers return when its process exits.
    VMMFD_STREAM_LOST = 3,
    /// A subscriber with `VMMFD_EVERY` gave no buffer back for `every_ms`. Its buffers return when it gives them back or its process exits.
    VMMFD_STREAM_EVICTED = 4,
    /// A loan got no buffer in time: the error of the loan has the processes that have buffers.
    VMMFD_STREAM_STARVED = 5,
}

/// An event of a publisher.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct vmmfd_stream_event_t {
    /// The size of this struct: `sizeof` it.
    pub struct_size: usize,
    /// The kind.
    pub kind: vmmfd_stream_event_kind_t,
    /// The subscriber's process; 0 for `VMMFD_STREAM_STARVED`.
    pub pid: c_int,
    /// The subscriber's number, which the publisher uses once; 0 for `VMMFD_STREAM_STARVED`.
    pub id: u64,
}

versioned!(vmmfd_stream_event_t);

/// Returns the next event of a publisher. `*found` is false if there is none. The publisher keeps the last 1,024 events. Does not block.
///
/// Errors: `VMMFD_INVALID`; `VMMFD_FORKED`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_publisher_event(
    publisher: *const vmmfd_publisher_t,
    event: *mut vmmfd_stream_event_t,
    found: Option<&mut MaybeUninit<bool>>,
) -> *mut vmmfd_error_t {
    use vmmfd_stream_event_kind_t::*;
    run(|| {
        let facts = Facts::of(event, "event")?;
        let found = out(found, "found")?;
        let Some(event) = handle::get(publisher)?.event() else { return Ok(()) };
        let (kind, subscriber) = match event {
            Event::Joined(subscriber) => (VMMFD_STREAM_JOINED, Some(subscriber)),
            Event::Left { subscriber, orderly: true, .. } => (VMMFD_STREAM_LEFT, Some(subscriber)),
            Event::Left { subscriber, .. } => (VMMFD_STREAM_LOST, Some(subscriber)),
            Event::Evicted(subscriber) => (VMMFD_STREAM_EVICTED, Some(subscriber)),
            Event::Starved { .. } => (VMMFD_STREAM_STARVED, None),
            _ => (VMMFD_STREAM_UNKNOWN, None),
        };
        let (pid, id) = subscriber.map_or((0, 0), |subscriber| (subscriber.peer.pid, subscriber.id));
        facts.write(&vmmfd_stream_event_t { struct_size: 0, kind, pid, id });
        found.write(true);
        Ok(())
    })
}

/// Returns a descriptor that is readable, in poll(2) and epoll(7), when an event waits or a buffer may be free. Then call
/// `vmmfd_publisher_event` until it finds none, and `vmmfd_publisher_loan` with `timeout_ms` 0.
///
/// The publisher owns the descriptor: do not close, read or write it. `*fd` is -1 after a failure. Does not block.
///
/// Errors: `VMMFD_INVALID`; `VMMFD_FORKED`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_publisher_descriptor(
    publisher: *const vmmfd_publisher_t,
    fd: Option<&mut MaybeUninit<c_int>>,
) -> *mut vmmfd_error_t {
    run(|| {
        let fd = out(fd, "fd")?;
        fd.write(-1);
        fd.write(handle::get(publisher)?.as_fd().as_raw_fd());
        Ok(())
    })
}

/// Completes the stream: nothing more can be published, and each subscriber receives `VMMFD_ENDED` behind the buffers that wait for it.
/// Blocks until all subscribers have received and given back everything, for at most `timeout_ms`, after which waiting buffers are lost.
/// Afterwards the caller frees the publisher.
///
/// Errors: `VMMFD_INTERRUPTED` and `VMMFD_SYSTEM`; a publisher that is then freed looks crashed. `VMMFD_INVALID`; `VMMFD_FORKED`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_publisher_finish(publisher: *const vmmfd_publisher_t, timeout_ms: u64) -> *mut vmmfd_error_t {
    run(|| {
        let limit = milliseconds(timeout_ms, Duration::ZERO);
        handle::get(publisher)?.complete(limit)?;
        Ok(())
    })
}

/// Frees a publisher and closes its connections. Without `vmmfd_publisher_finish` before, subscribers receive `VMMFD_CRASHED`. Samples of
/// subscribers remain readable. Does not wait for subscribers.
#[unsafe(no_mangle)]
pub extern "C" fn vmmfd_publisher_free(publisher: *mut vmmfd_publisher_t) {
    run_logged(|| handle::remove(publisher));
}
