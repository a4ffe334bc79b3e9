//! Connections to a broker, and its requests.

use std::{
    ffi::{c_char, c_int},
    mem::MaybeUninit,
    os::fd::OwnedFd,
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use vmmfd::{
    broker::{Client, Condition, Lifetime, Put, PutPart},
    channel::{BrokerPath, Trust},
    session::Config,
};

use crate::{
    argument::{config, json, list, milliseconds, optional_text, out, path, run_out, stop, text, unknown, unused},
    array::vmmfd_array_t,
    device::vmmfd_device_t,
    error::{Failure, Outcome, run, run_logged, vmmfd_error_t},
    get::{build_get, vmmfd_get_options_t},
    handle::{self, handle},
    lease::vmmfd_lease_t,
    leased::Leased,
    listing::{Listing, vmmfd_listing_t},
    put::{self, Named},
    versioned::{options, versioned},
    watch::{Watches, Watching, vmmfd_watch_t},
};

/// A connection to a broker. Any threads may use it at once: it carries one request at a time, and a get that waits is paused for the
/// requests of other threads.
#[derive(Debug)]
pub struct vmmfd_broker_t {
    _opaque: [u8; 0],
}

handle!(vmmfd_broker_t, 4, "a broker", Broker);

pub(crate) struct Broker {
    pub(crate) client: Client,
    path: PathBuf,
    timeout: Duration,
    trust: Vec<u32>,
    stop: Option<Arc<OwnedFd>>,
    watches: Watches,
}

impl Broker {
    /// The configuration of another connection to the same broker.
    fn config(&self) -> Config {
        Config::default().timeout(self.timeout).wait(self.timeout).trust(Trust { uids: self.trust.clone() })
    }
}

/// Options of a connection to a broker, which start with `VMMFD_BROKER_OPTIONS`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct vmmfd_broker_options_t {
    /// The size of this struct: `sizeof` it.
    pub struct_size: usize,
    /// A descriptor, such as an eventfd(2), that stops the waits of all requests within 50 ms after it becomes readable. -1: none. The
    /// caller keeps it.
    pub stop: c_int,
    /// The longest wait for each answer of the broker, and for a broker after a restart, in milliseconds. 0: 30 s.
    pub timeout_ms: u64,
    /// The longest wait of `vmmfd_broker_connect` for a broker to listen, in milliseconds. 0: 1 s, or `timeout_ms` if that is shorter.
    pub wait_ms: u64,
    /// Users beside this process's user and root that the broker may run as.
    pub trust: *const u32,
    /// The number of users in `trust`.
    pub trust_count: usize,
}

versioned!(vmmfd_broker_options_t);

/// Connects to a broker. `path` is the socket's; NULL is `VMMFD_BROKER_SOCKET` of the environment, else this user's broker, else the
/// system's.
///
/// The caller frees `*broker` with `vmmfd_broker_free`; it is NULL after a failure. If the broker restarts, the next request and a thread
/// of the library connect again, and leases continue. The thread sleeps and blocks all signals. Blocks until a broker listens, for at most
/// `wait_ms`, and answers, for at most `timeout_ms`.
///
/// Errors: `VMMFD_NOT_FOUND` if no broker listens in time; `VMMFD_DENIED`; `VMMFD_DISCONNECTED`; `VMMFD_INTERRUPTED`; `VMMFD_INVALID`;
/// `VMMFD_SYSTEM`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_broker_connect(
    path: *const c_char,
    options: *const vmmfd_broker_options_t,
    broker: Option<&mut MaybeUninit<*mut vmmfd_broker_t>>,
) -> *mut vmmfd_error_t {
    run_out(broker, "broker", || {
        let options = self::options(options)?;
        let (timeout_ms, wait_ms, trust, stop) = match &options {
            Some(given) => {
                (given.timeout_ms, given.wait_ms, list(given.trust, given.trust_count, "trust")?, given.stop)
            }
            None => (0, 0, &[][..], -1),
        };
        let environment = || std::env::var_os("VMMFD_BROKER_SOCKET").filter(|path| !path.is_empty()).map(PathBuf::from);
        let path = self::path(path).map(PathBuf::from).or_else(environment);
        let found = BrokerPath::find(path.as_deref())?;
        let stop = self::stop(stop)?;
        let config = config(timeout_ms, trust, stop.as_ref())?;
        let trust = trust.to_vec();
        let path = found.path().to_owned();
        let timeout = config.timeout;
        let config = if wait_ms == 0 { config } else { config.wait(milliseconds(wait_ms, timeout)) };
        let client = Client::connect(&path, &config).map_err(|error| found.complete(error))?;
        Ok(handle::insert(Broker { client, path, timeout, trust, stop, watches: Watches::default() }))
    })
}

/// An array to put, with its name in the object.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct vmmfd_named_array_t {
    /// The part of the object; NULL: `all`.
    pub part: *const c_char,
    /// The name, unique in the part.
    pub name: *const c_char,
    /// The array, in memory that this process created.
    pub array: *const vmmfd_array_t,
}

/// When a put succeeds.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum vmmfd_condition_t {
    /// If the name does not exist.
    VMMFD_PUT_NEW = 0,
    /// Always: an existing object gets a new version.
    VMMFD_PUT_ANY = 1,
    /// If `version` of the options is the current version.
    VMMFD_PUT_VERSION = 2,
}

/// When the broker deletes a name.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum vmmfd_lifetime_t {
    /// For a new name, when it is deleted explicitly; an existing name keeps its lifetime.
    VMMFD_UNTIL_DELETED = 0,
    /// When the connection that put it closes.
    VMMFD_WITH_MAKER = 1,
    /// When the connection that put it has closed and no lease is held.
    VMMFD_WHILE_LEASED = 2,
    /// `idle_ms` after its last lease, or after the put.
    VMMFD_UNTIL_IDLE = 3,
}

/// Options of a put, which start with `VMMFD_PUT_OPTIONS`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct vmmfd_put_options_t {
    /// The size of this struct: `sizeof` it.
    pub struct_size: usize,
    /// A value of `vmmfd_condition_t`.
    pub condition: u32,
    /// A value of `vmmfd_lifetime_t`.
    pub lifetime: u32,
    /// The version to replace, with `VMMFD_PUT_VERSION`.
    pub version: u64,
    /// The time in milliseconds, with `VMMFD_UNTIL_IDLE`.
    pub idle_ms: u64,
    /// The permissions of a new name, like a file's, at most 0666. 0: 0600. `r` allows get and list, `w` allows replacement.
    pub mode: u16,
    /// How many earlier versions the broker keeps without a lease.
    pub keep: u32,
    /// Metadata: a JSON object of at most 1 MiB; NULL for none.
    pub metadata: *const c_char,
    /// A digest of the bytes of an object with one part, in any format that the readers know; NULL for none.
    pub digest: *const c_char,
}

versioned!(vmmfd_put_options_t);

/// Publishes arrays under a name. The broker then holds the memory: this process may free it, or exit.
///
/// The arrays are in memory of `vmmfd_memory_create` or `vmmfd_array_from_dlpack`, on one device for each part; several may share memory.
/// `options` NULL means the defaults. `version`, which may be NULL, is the number of the new version. Readers map the memory read-only;
/// later writes of this process are visible to them. Blocks until all work in the device's primary context is done and the broker has
/// answered, for at most the connection's timeout.
///
/// Errors: `VMMFD_EXISTS`; `VMMFD_DIFFERS` if the current version is another one; `VMMFD_DENIED`; `VMMFD_INVALID`; `VMMFD_DISCONNECTED`;
/// `VMMFD_INTERRUPTED`; `VMMFD_DRIVER`; `VMMFD_SYSTEM`, also for a full broker and a quota; `VMMFD_FORKED`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_broker_put(
    broker: *const vmmfd_broker_t,
    name: *const c_char,
    arrays: *const vmmfd_named_array_t,
    count: usize,
    options: *const vmmfd_put_options_t,
    version: Option<&mut MaybeUninit<u64>>,
) -> *mut vmmfd_error_t {
    run(|| {
        let mut ignored = MaybeUninit::uninit();
        let version = out(Some(version.unwrap_or(&mut ignored)), "version")?;
        let broker = handle::get(broker)?;
        let mut put = Put::new(text(name, "name")?);
        let mut digest = None;
        if let Some(options) = self::options(options)? {
            (put, digest) = with_options(put, &options)?;
        }
        let named: Outcome<Vec<_>> = list(arrays, count, "arrays")?
            .iter()
            .map(|item| {
                let part = optional_text(item.part, "the part of an array")?.unwrap_or(put::PART);
                Ok(Named { part, name: text(item.name, "the name of an array")?, array: handle::get(item.array)? })
            })
            .collect();
        let mut parts = put::parts(&named?)?;
        if let Some(digest) = digest {
            let [part] = <[PutPart<'_>; 1]>::try_from(parts).map_err(|parts| {
                Failure::invalid(format!("digest is of one part, and the object has {}", parts.len()))
            })?;
            parts = vec![part.digest(digest)];
        }
        put = parts.into_iter().fold(put, Put::part);
        version.write(broker.client.put(&put)?.version);
        Ok(())
    })
}

fn with_options<'a>(mut put: Put<'a>, options: &vmmfd_put_options_t) -> Outcome<(Put<'a>, Option<String>)> {
    if options.condition != vmmfd_condition_t::VMMFD_PUT_VERSION as u32 {
        unused(options.version != 0, "version", "without VMMFD_PUT_VERSION")?;
    }
    if options.lifetime != vmmfd_lifetime_t::VMMFD_UNTIL_IDLE as u32 {
        unused(options.idle_ms != 0, "idle_ms", "without VMMFD_UNTIL_IDLE")?;
    }
    put = put.condition(match options.condition {
        0 => Condition::New,
        1 => Condition::Any,
        2 => Condition::Version(options.version),
        other => return Err(unknown("condition", other)),
    });
    put = match options.lifetime {
        0 => put,
        1 => put.lifetime(Lifetime::Maker),
        2 => put.lifetime(Lifetime::Leased),
        3 => put.lifetime(Lifetime::Idle { ms: options.idle_ms }),
        other => return Err(unknown("lifetime", other)),
    };
    if options.mode != 0 {
        put = put.mode(options.mode);
    }
    if options.keep != 0 {
        put = put.keep(options.keep);
    }
    if let Some(metadata) = optional_text(options.metadata, "metadata")? {
        json(options.metadata, "metadata")?;
        put = put.metadata_text(metadata)?;
    }
    Ok((put, optional_text(options.digest, "digest")?.map(str::to_owned)))
}

/// Leases an object, and maps its memory read-only.
///
/// `device` is the device to map the memory for; NULL means the device that owns it, of the object's backend. `options` NULL means the
/// current version, without a wait. The broker counts this process among the readers until the lease is freed. The caller frees `*lease`
/// with `vmmfd_lease_free`; it is NULL after a failure. Blocks for `wait_ms`, for the broker's answer within the connection's timeout, and
/// for the driver's calls; `vmmfd_broker_interrupt` interrupts the wait.
///
/// Errors: `VMMFD_NOT_FOUND`; `VMMFD_TIMEOUT` if the object did not appear in time; `VMMFD_DIFFERS` if it is not as expected;
/// `VMMFD_DENIED`; `VMMFD_UNSUPPORTED` if this process has no device for it; `VMMFD_INTERRUPTED`; `VMMFD_DISCONNECTED`; `VMMFD_INVALID`;
/// `VMMFD_DRIVER`; `VMMFD_SYSTEM`; `VMMFD_FORKED`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_broker_get(
    broker: *const vmmfd_broker_t,
    device: *const vmmfd_device_t,
    name: *const c_char,
    options: *const vmmfd_get_options_t,
    lease: Option<&mut MaybeUninit<*mut vmmfd_lease_t>>,
) -> *mut vmmfd_error_t {
    run_out(lease, "lease", || {
        let broker = handle::get(broker)?;
        let device = handle::optional(device)?;
        let lease = broker.client.get(&build_get(text(name, "name")?, options)?)?;
        let object = match device {
            Some(open) => lease.open(open.device.driver(), Some(open.selector()))?,
            None => {
                let (driver, _) = crate::device::driver(Some(lease.backend()))?;
                lease.open(&driver, None)?
            }
        };
        Ok(handle::insert(Arc::new(Leased::new(object, broker.client.clone()))))
    })
}

/// Lists the objects whose names start with `prefix` and that this user may read, sorted by name. NULL is every name.
///
/// The caller frees `*listing` with `vmmfd_listing_free`; it is NULL after a failure. Blocks until the broker answers, for at most the
/// connection's timeout.
///
/// Errors: `VMMFD_DISCONNECTED`; `VMMFD_INTERRUPTED`; `VMMFD_INVALID`; `VMMFD_SYSTEM`; `VMMFD_FORKED`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_broker_list(
    broker: *const vmmfd_broker_t,
    prefix: *const c_char,
    listing: Option<&mut MaybeUninit<*mut vmmfd_listing_t>>,
) -> *mut vmmfd_error_t {
    run_out(listing, "listing", || {
        let broker = handle::get(broker)?;
        let summaries = broker.client.list(optional_text(prefix, "prefix")?.unwrap_or_default())?;
        let mut listing = Listing::default();
        for summary in &summaries {
            listing.add(summary, None);
        }
        Ok(listing.allocate())
    })
}

/// Describes an object, as a listing of one: its current version, or `version` if it is not 0. Unlike in a list, the object has its
/// metadata.
///
/// The caller frees `*listing` with `vmmfd_listing_free`; it is NULL after a failure. Blocks until the broker answers, for at most the
/// connection's timeout.
///
/// Errors: `VMMFD_NOT_FOUND`; `VMMFD_DISCONNECTED`; `VMMFD_INTERRUPTED`; `VMMFD_INVALID`; `VMMFD_SYSTEM`; `VMMFD_FORKED`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_broker_stat(
    broker: *const vmmfd_broker_t,
    name: *const c_char,
    version: u64,
    listing: Option<&mut MaybeUninit<*mut vmmfd_listing_t>>,
) -> *mut vmmfd_error_t {
    run_out(listing, "listing", || {
        let broker = handle::get(broker)?;
        let info = broker.client.stat(text(name, "name")?, (version > 0).then_some(version))?;
        let mut listing = Listing::default();
        listing.add(&info.version.summary, Some(info.metadata_text()));
        Ok(listing.allocate())
    })
}

/// Deletes a name. Readers keep their leases, and the broker keeps the memory until the last lease is released. Blocks until the broker
/// answers, for at most the connection's timeout.
///
/// Errors: `VMMFD_NOT_FOUND`; `VMMFD_DENIED` if another user owns the name; `VMMFD_DISCONNECTED`; `VMMFD_INTERRUPTED`; `VMMFD_INVALID`;
/// `VMMFD_SYSTEM`; `VMMFD_FORKED`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_broker_delete(broker: *const vmmfd_broker_t, name: *const c_char) -> *mut vmmfd_error_t {
    run(|| {
        handle::get(broker)?.client.delete(text(name, "name")?)?;
        Ok(())
    })
}

/// Starts to watch the events of names that start with `prefix` and that this user may read; NULL is every name. The events start now.
///
/// The watch has its own connection and thread. The caller frees `*watch` with `vmmfd_watch_free`; it is NULL after a failure. Blocks until
/// the broker answers, for at most the connection's timeout.
///
/// Errors: `VMMFD_DISCONNECTED`; `VMMFD_DENIED`; `VMMFD_INTERRUPTED`; `VMMFD_INVALID`; `VMMFD_SYSTEM`; `VMMFD_FORKED`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_broker_watch(
    broker: *const vmmfd_broker_t,
    prefix: *const c_char,
    watch: Option<&mut MaybeUninit<*mut vmmfd_watch_t>>,
) -> *mut vmmfd_error_t {
    run_out(watch, "watch", || {
        let broker = handle::get(broker)?;
        let prefix = optional_text(prefix, "prefix")?.unwrap_or_default();
        let watch = Watching::start(&broker.path, &broker.config(), prefix, broker.stop.clone())?;
        broker.watches.add(&watch);
        Ok(handle::insert(watch))
    })
}

/// Ends the waits of other threads: a get on this connection, and each `vmmfd_watch_next` of its watches, which then fail with
/// `VMMFD_INTERRUPTED`. Does nothing if none waits. Blocks only while the socket is full.
///
/// Errors: `VMMFD_DISCONNECTED`; `VMMFD_INVALID`; `VMMFD_SYSTEM`; `VMMFD_FORKED`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_broker_interrupt(broker: *const vmmfd_broker_t) -> *mut vmmfd_error_t {
    run(|| {
        let broker = handle::get(broker)?;
        broker.watches.interrupt();
        broker.client.stop()?;
        Ok(())
    })
}

/// Frees a connection. It closes when its last lease is freed; names with the lifetime `VMMFD_WITH_MAKER` are then deleted. Does not block.
#[unsafe(no_mangle)]
pub extern "C" fn vmmfd_broker_free(broker: *mut vmmfd_broker_t) {
    run_logged(|| handle::remove(broker));
}
