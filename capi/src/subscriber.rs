//! Subscribers of streams.

use std::{
    ffi::{c_char, c_int, c_void},
    mem::MaybeUninit,
    os::fd::{AsFd, AsRawFd},
    sync::Arc,
    time::Duration,
};

use vmmfd::{
    Error,
    channel::socket_path,
    error::PeerError,
    memory::Region,
    session::stream::{Policy, Received, Sample, SubscribeOptions, Subscriber},
    topic::{Change, Follower, Topics, Update},
};

use crate::{
    argument::{config, descriptor, list, milliseconds, out, path, run_out, stop, text, unknown, unused},
    broker::vmmfd_broker_t,
    device::{driver, vmmfd_device_t},
    error::{Failure, Outcome, run, run_logged, vmmfd_error_t},
    format::{self, vmmfd_format_t},
    handle::{self, handle},
    memory::{Memory, Source, vmmfd_memory_t},
    owned::Kept,
    timeline::{self, show_order, vmmfd_completion_t, vmmfd_order_t},
    versioned::{Facts, options, versioned},
};

/// A subscriber of a stream, or of the streams of topics. Any threads may use it at once.
#[derive(Debug)]
pub struct vmmfd_subscriber_t {
    _opaque: [u8; 0],
}

handle!(vmmfd_subscriber_t, 9, "a subscriber", Subscribed);

pub(crate) enum Subscribed {
    Stream(Box<Subscriber>),
    Topics(Follower),
}

/// What happens to buffers that a subscriber has no room for, because it has as many as it may hold.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum vmmfd_policy_t {
    /// The newest waits at the publisher, and replaces an older one: a slow subscriber skips to the newest.
    VMMFD_LATEST = 0,
    /// The newest wait at the publisher, at most `queue` of them.
    VMMFD_QUEUE = 1,
    /// The publisher waits, so the subscriber skips nothing. Only if the publisher allows it.
    VMMFD_EVERY = 2,
}

/// Options of a subscriber, which start with `VMMFD_SUBSCRIBER_OPTIONS`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct vmmfd_subscriber_options_t {
    /// The size of this struct: `sizeof` it.
    pub struct_size: usize,
    /// A connected socket of type `SOCK_SEQPACKET`, used instead of a path. -1: none. The library keeps a duplicate; the caller closes its
    /// own after the call.
    pub socket: c_int,
    /// A descriptor, such as an eventfd(2), that stops the waits of all calls within 50 ms after it becomes readable. -1: none. The caller
    /// keeps it.
    pub stop: c_int,
    /// The longest wait for the publisher to listen, and its longest silence while this subscriber joins, in milliseconds. 0: 30 s.
    pub timeout_ms: u64,
    /// A value of `vmmfd_policy_t`.
    pub policy: u32,
    /// The most buffers that wait with `VMMFD_QUEUE`: 1 to 1,024. 0 with the other policies.
    pub queue: u32,
    /// The most buffers that this subscriber has at a time: samples that exist, and buffers on their way to it. At most 64. 0: one.
    pub held: u32,
    /// The most earlier publications to receive at once.
    pub history: u32,
    /// Users beside this process's user and root that the publisher may run as.
    pub trust: *const u32,
    /// The number of users in `trust`.
    pub trust_count: usize,
    /// A broker that introduces the publishers of topics, used instead of a path. NULL: none.
    pub broker: *const vmmfd_broker_t,
    /// Whether to follow all topics whose names start with the given text. Only with a `broker`.
    pub prefix: bool,
}

versioned!(vmmfd_subscriber_options_t);

fn subscription(given: &vmmfd_subscriber_options_t) -> Outcome<SubscribeOptions> {
    let number = |value: u32, name: &str| {
        u16::try_from(value).map_err(|_| Failure::invalid(format!("{name} is {value}: the limit is 65535")))
    };
    let policy = match given.policy {
        0 => Policy::Latest,
        1 => Policy::Queue(number(given.queue, "queue")?),
        2 => Policy::Every,
        other => return Err(unknown("policy", other)),
    };
    unused(given.queue != 0 && given.policy != 1, "queue", "without VMMFD_QUEUE")?;
    let held = number(given.held.max(1), "held")?;
    Ok(SubscribeOptions::default().policy(policy).held(held).history(number(given.history, "history")?))
}

/// Subscribes to the publisher at a socket path, or at the other end of `socket` of the options, and maps its pool, read-only.
///
/// With a `broker` of the options, `path` is the name of a topic, or with `prefix` the start of the names of several. The subscriber then
/// receives from their publishers, now and later, and the other options apply to each of them. It outlives the handle `broker`, and waits
/// for the broker's successor. The call does not wait for publishers: `vmmfd_subscriber_receive` reports them, also if they refuse.
///
/// `device` is the device to map the pool for, if it can reach the pool; NULL means the pool's own device, of the backend `auto`. `path`
/// NULL is this user's default; with a `socket` it is NULL. `options` NULL means the defaults: `VMMFD_LATEST`, one buffer at a time. The
/// caller frees `*subscriber` with `vmmfd_subscriber_free`; it is NULL after a failure. Blocks until the publisher listens and the pool is
/// mapped, at most `timeout_ms` without a sign of the publisher.
///
/// Errors: `VMMFD_NOT_FOUND` if no process listens in time; `VMMFD_SYSTEM` if the publisher's pool has too few buffers for another
/// subscriber, or the stream is complete; `VMMFD_DENIED` if the publisher does not allow `VMMFD_EVERY`, and for a user that is not trusted;
/// `VMMFD_DISCONNECTED` if the publisher is gone; `VMMFD_UNSUPPORTED` if this process has no device for the pool; `VMMFD_INTERRUPTED`;
/// `VMMFD_INVALID`; `VMMFD_DRIVER`; `VMMFD_FORKED`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_subscriber_connect(
    device: *const vmmfd_device_t,
    path: *const c_char,
    options: *const vmmfd_subscriber_options_t,
    subscriber: Option<&mut MaybeUninit<*mut vmmfd_subscriber_t>>,
) -> *mut vmmfd_error_t {
    run_out(subscriber, "subscriber", || {
        let mut wanted = SubscribeOptions::default();
        let (mut own, mut socket, mut broker, mut prefix) = (config(0, &[], None)?, None, None, false);
        if let Some(given) = self::options(options)? {
            (broker, prefix) = (handle::optional(given.broker)?, given.prefix);
            unused(given.socket != -1 && broker.is_some(), "broker", "with a socket")?;
            unused(prefix && broker.is_none(), "prefix", "without a broker")?;
            unused(given.socket != -1 && !path.is_null(), "path", "with a socket")?;
            wanted = subscription(&given)?;
            let trust = list(given.trust, given.trust_count, "trust")?;
            own = config(given.timeout_ms, trust, stop(given.stop)?.as_ref())?;
            socket = (given.socket != -1).then(|| descriptor(given.socket, "socket")).transpose()?;
        }
        let (driver, selector) = match handle::optional(device)? {
            Some(open) => (open.device.driver().clone(), Some(open.selector())),
            None => (driver(None)?.0, None),
        };
        if let Some(broker) = broker {
            let name = text(path, "path")?;
            let topics = if prefix { Topics::Prefix(name) } else { Topics::Named(name) };
            let follower = Follower::new(&broker.client, topics, &driver, selector, &wanted, &own)?;
            return Ok(handle::insert(Subscribed::Topics(follower)));
        }
        let subscriber = match socket {
            Some(socket) => Subscriber::over(socket, &driver, selector, &wanted, &own)?,
            None => Subscriber::connect(&driver, selector, &socket_path(self::path(path))?, &wanted, &own)?,
        };
        Ok(handle::insert(Subscribed::Stream(Box::new(subscriber))))
    })
}

/// The result of `vmmfd_subscriber_receive`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum vmmfd_received_t {
    /// No buffer arrived in time.
    VMMFD_NOTHING = 0,
    /// A buffer.
    VMMFD_SAMPLE = 1,
    /// The publisher has finished, and this subscriber has received its last buffer.
    VMMFD_ENDED = 2,
    /// The publisher's process died, or freed the publisher without `vmmfd_publisher_finish`.
    VMMFD_CRASHED = 3,
    /// The first publisher of a topic was joined.
    VMMFD_JOINED = 4,
    /// A later publisher of a topic was joined: it numbers its publications anew, and its format may differ.
    VMMFD_RESET = 5,
    /// The publisher of a topic can't be joined, or has ended this subscription. If it is full or does not answer, it is tried again
    /// without another report.
    VMMFD_FAILED = 6,
}

/// The result of a receive, with the buffer if there is one. The pointers are valid until `memory` is freed.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct vmmfd_sample_t {
    /// The size of this struct: `sizeof` it.
    pub struct_size: usize,
    /// The result. Without `VMMFD_SAMPLE`, all later fields but `pid`, `topic`, `epoch` and `error` are 0 or NULL.
    pub result: vmmfd_received_t,
    /// The publisher's process. Of topics, only with `VMMFD_CRASHED`, else 0.
    pub pid: c_int,
    /// The buffer, mapped read-only. The caller frees it with `vmmfd_memory_free`, which gives the buffer back.
    pub memory: *mut vmmfd_memory_t,
    /// The address of the buffer on the device, the `CUdeviceptr`; on the host backend an address of this process.
    pub address: u64,
    /// The size of the buffer in bytes.
    pub size: u64,
    /// The number of the publication, counted from 1.
    pub number: u64,
    /// The time of the publication, in nanoseconds of `CLOCK_MONOTONIC`, which all processes of the machine share.
    pub published_ns: u64,
    /// The number of publications between the sample before and this one, which this subscriber did not get. 0 for the first.
    pub skipped: u64,
    /// The publisher's own bytes.
    pub user: *const c_void,
    /// The number of bytes in `user`, at most 4,096.
    pub user_size: usize,
    /// The description of the buffer, without arrays and blob until the publisher sets it.
    pub format: *const vmmfd_format_t,
    /// The reason for `VMMFD_FAILED`, else NULL. The caller frees it with `vmmfd_error_free`.
    pub error: *mut vmmfd_error_t,
    /// The publisher's run: another publisher of the topic has another epoch. 0 without topics.
    pub epoch: u64,
    /// The topic's name, which ends with a null character. Empty without topics.
    pub topic: [c_char; 256],
}

versioned!(vmmfd_sample_t);

/// Waits for the next buffer, for at most `timeout_ms`; 0 is not to wait. Buffers arrive in the order of publication. `sample->result` is the
/// kind of the result: a wait without a buffer, the end of the stream and the death of the publisher are no errors. Of topics, the results
/// have `topic` and `epoch`, and receiving continues after each of them.
///
/// The caller frees `sample->memory` with `vmmfd_memory_free`, from any thread, also after the subscriber or the publisher is gone. This
/// waits until all work in the device's primary context has finished, and then gives the buffer back, unless an array or a DLPack tensor
/// still uses it: then the last of them gives it back.
///
/// Errors: `VMMFD_DISCONNECTED` if the publisher has evicted this subscriber or broke the protocol, after which calls return `VMMFD_INVALID`
/// and samples remain readable; `VMMFD_INTERRUPTED`; `VMMFD_INVALID`; `VMMFD_SYSTEM`; `VMMFD_FORKED`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_subscriber_receive(
    subscriber: *const vmmfd_subscriber_t,
    timeout_ms: u64,
    sample: *mut vmmfd_sample_t,
) -> *mut vmmfd_error_t {
    receive(subscriber, sample, |subscriber, shown| {
        let limit = milliseconds(timeout_ms, Duration::ZERO);
        match subscriber {
            Subscribed::Stream(subscriber) => {
                let received = in_time(limit, || subscriber.try_receive(), || subscriber.receive(limit))?;
                show_received(subscriber, received, shown);
            }
            Subscribed::Topics(follower) => {
                if let Some(update) = in_time(limit, || follower.try_receive(), || follower.receive(limit))? {
                    show_update(update, shown);
                }
            }
        }
        Ok(())
    })
}

/// Receives like `vmmfd_subscriber_receive`, for work on a stream: does not wait until the publisher's GPU has written the buffer. The stream
/// waits instead, at most `timeout_ms` long. If the publisher's process ends or is late, the stream continues, and `vmmfd_sample_completion`
/// returns `VMMFD_LOST`. If streams can't order the work (`vmmfd_subscriber_order`), the call waits until the buffer is written. The first
/// call takes about a millisecond longer.
///
/// `stream` is a `CUstream` or `cudaStream_t` of the device that has the pool mapped, and exists until the sample is freed; NULL is the
/// legacy default stream. Use the sample's address on this stream only. `vmmfd_memory_free` gives the buffer back behind the work that the
/// stream then has, and does not wait for it; `vmmfd_memory_copy_out` waits for the stream.
///
/// Errors: `VMMFD_INVALID` for a stream of another device, in a capture, for the per-thread default stream, for `timeout_ms` 0, and for a
/// subscriber of topics; `VMMFD_DISCONNECTED` also once the publisher was late; the errors of `vmmfd_subscriber_receive`. Driver calls:
/// `cuStreamIsCapturing`, `cuStreamBatchMemOp`; at the first call `cuMemHostRegister`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_subscriber_receive_on(
    subscriber: *const vmmfd_subscriber_t,
    stream: *mut c_void,
    timeout_ms: u64,
    sample: *mut vmmfd_sample_t,
) -> *mut vmmfd_error_t {
    receive(subscriber, sample, |subscriber, shown| {
        let subscriber = of_stream(subscriber)?;
        if timeout_ms == 0 {
            return Err(Failure::invalid("timeout_ms is 0: the stream needs time to wait for the publisher"));
        }
        let limit = milliseconds(timeout_ms, Duration::ZERO);
        let stream = timeline::stream(subscriber.device(), stream)?;
        let received = in_time(limit, || Ok(None), || subscriber.receive_on(&stream, limit))?;
        show_received(subscriber, received, shown);
        Ok(())
    })
}

/// Whether the publisher's GPU has written a sample. `VMMFD_PENDING` is possible only with `vmmfd_subscriber_receive_on`; after `VMMFD_LOST`,
/// discard what was read. Does not block.
///
/// Errors: `VMMFD_INVALID`, also for memory that is no sample; `VMMFD_FORKED`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_sample_completion(
    memory: *const vmmfd_memory_t,
    completion: Option<&mut MaybeUninit<vmmfd_completion_t>>,
) -> *mut vmmfd_error_t {
    run_out(completion, "completion", || match &handle::get(memory)?.source {
        Source::Received { sample, .. } => Ok(timeline::completion(sample.completion())),
        _ => Err(Failure::invalid("this memory is no sample: pass memory of vmmfd_subscriber_receive")),
    })
}

/// Whether the streams of `vmmfd_subscriber_receive_on` wait for the publisher's, or why not. The first call tests it, and blocks for about a
/// millisecond.
///
/// Errors: `VMMFD_INVALID`, also for a subscriber of topics; `VMMFD_FORKED`. Driver calls: `cuMemHostRegister`, `cuStreamCreate`,
/// `cuStreamBatchMemOp`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_subscriber_order(
    subscriber: *const vmmfd_subscriber_t,
    order: *mut vmmfd_order_t,
) -> *mut vmmfd_error_t {
    run(|| {
        let order = Facts::of(order, "order")?;
        order.write(&show_order(&of_stream(&*handle::get(subscriber)?)?.order()));
        Ok(())
    })
}

fn of_stream(subscriber: &Subscribed) -> Outcome<&Subscriber> {
    match subscriber {
        Subscribed::Stream(subscriber) => Ok(subscriber),
        Subscribed::Topics(_) => {
            Err(Failure::invalid("a subscriber of topics has no order of GPU work yet: connect to a path"))
        }
    }
}

fn receive(
    subscriber: *const vmmfd_subscriber_t,
    sample: *mut vmmfd_sample_t,
    receive: impl FnOnce(&Subscribed, &mut vmmfd_sample_t) -> Outcome<()>,
) -> *mut vmmfd_error_t {
    run(|| {
        let facts = Facts::of(sample, "sample")?;
        let subscriber = handle::get(subscriber)?;
        // SAFETY: zeros are a valid value of a struct with a size.
        let mut shown: vmmfd_sample_t = unsafe { MaybeUninit::zeroed().assume_init() };
        receive(&subscriber, &mut shown)?;
        facts.write(&shown);
        Ok(())
    })
}

fn show_received(subscriber: &Subscriber, received: Option<Received>, shown: &mut vmmfd_sample_t) {
    use vmmfd_received_t::*;
    shown.pid = subscriber.peer().pid;
    match received {
        Some(Received::Sample(sample)) => show(sample, shown),
        Some(Received::Ended) => shown.result = VMMFD_ENDED,
        Some(_) => shown.result = VMMFD_CRASHED,
        None => {}
    }
}

/// Receives without waiting if `limit` is 0. `None` if nothing arrives in time.
fn in_time<T>(
    limit: Duration,
    now: impl FnOnce() -> vmmfd::Result<Option<T>>,
    wait: impl FnOnce() -> vmmfd::Result<T>,
) -> vmmfd::Result<Option<T>> {
    if limit.is_zero() {
        return now();
    }
    match wait() {
        Ok(received) => Ok(Some(received)),
        Err(Error::Peer(PeerError::Timeout { .. })) => Ok(None),
        Err(error) => Err(error),
    }
}

fn show_update(Update { topic, epoch, change, .. }: Update, shown: &mut vmmfd_sample_t) {
    use vmmfd_received_t::*;
    shown.epoch = epoch;
    // A name is shorter than the field, whose last byte remains 0.
    for (to, from) in shown.topic[..255].iter_mut().zip(topic.bytes()) {
        *to = from as c_char;
    }
    match change {
        Change::Sample(sample) => show(sample, shown),
        Change::Joined => shown.result = VMMFD_JOINED,
        Change::Reset => shown.result = VMMFD_RESET,
        Change::Ended => shown.result = VMMFD_ENDED,
        Change::Crashed(peer) => (shown.result, shown.pid) = (VMMFD_CRASHED, peer.pid),
        Change::Failed(error) => (shown.result, shown.error) = (VMMFD_FAILED, Failure::Library(error).allocate()),
        // None of this version.
        _ => {}
    }
}

fn show(sample: Sample, shown: &mut vmmfd_sample_t) {
    let sample = Arc::new(sample);
    let mut kept = Kept::default();
    (shown.address, shown.size) = (sample.address(), sample.size());
    (shown.number, shown.skipped) = (sample.number(), sample.skipped_before());
    shown.published_ns = u64::try_from(sample.published_at().as_nanos()).unwrap_or(u64::MAX);
    (shown.user, shown.user_size) = (sample.user().as_ptr().cast(), sample.user().len());
    shown.format = format::show(sample.format(), &mut kept);
    shown.result = vmmfd_received_t::VMMFD_SAMPLE;
    shown.memory = handle::insert(Memory::received(&sample, kept));
}

/// Returns a descriptor that is readable, in poll(2) and epoll(7), when something has arrived or the publisher is gone. Then call
/// `vmmfd_subscriber_receive` with `timeout_ms` 0 until it returns `VMMFD_NOTHING`. At the end of the stream it remains readable; not with
/// topics.
///
/// The subscriber and its samples own the descriptor: do not close, read or write it. `*fd` is -1 after a failure. Does not block.
///
/// Errors: `VMMFD_INVALID`; `VMMFD_FORKED`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_subscriber_descriptor(
    subscriber: *const vmmfd_subscriber_t,
    fd: Option<&mut MaybeUninit<c_int>>,
) -> *mut vmmfd_error_t {
    run(|| {
        let fd = out(fd, "fd")?;
        fd.write(-1);
        fd.write(match &*handle::get(subscriber)? {
            Subscribed::Stream(subscriber) => subscriber.as_fd().as_raw_fd(),
            Subscribed::Topics(follower) => follower.as_fd().as_raw_fd(),
        });
        Ok(())
    })
}

/// Frees a subscriber, which leaves the stream. Its samples remain valid, and are given back when they are freed. A call of another thread
/// finishes first: `stop` of the options ends its wait. Does not block.
#[unsafe(no_mangle)]
pub extern "C" fn vmmfd_subscriber_free(subscriber: *mut vmmfd_subscriber_t) {
    run_logged(|| handle::remove(subscriber));
}
