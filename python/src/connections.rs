//! The connections to a broker, and the program's handlers for lost and restored leases.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use pyo3::prelude::*;
use vmmfd::{
    bindings::{lock, of_known_broker},
    broker::{self, LossReason, Lost, Restored},
    fork::ProcessIdentity,
    session::Config,
};

use crate::{
    driver,
    error::Outcome,
    leased_memory::{Leased, Opening},
    memory::BrokerAddress,
    signals::{self, CloseFlag, Observer},
};

/// The most idle connections to keep.
const IDLE: usize = 8;

/// The connections to a broker: each call in progress has its own, so that it never waits for another thread's call and can be interrupted.
pub(crate) struct Connections {
    pub(crate) place: Arc<BrokerAddress>,
    /// Has no wait: see [`Connections::limit`].
    config: Config,
    /// How long the first connection waits for a broker to listen.
    wait: Duration,
    /// Whether a connection was made: later ones wait for the timeout, as the broker restarts.
    reached: AtomicBool,
    /// Leases of received arrays.
    pub(crate) shared: Mutex<HashMap<SharedKey, Weak<Leased>>>,
    /// The process that created them.
    made_by: ProcessIdentity,
    pub(crate) closed: CloseFlag,
    table: Mutex<Table>,
    pub(crate) handlers: Arc<Handlers>,
    /// Whether the present outage of the broker was logged.
    reported: AtomicBool,
}

/// The time without a broker after which a waiting call logs it.
const OUTAGE: Duration = Duration::from_millis(500);

/// The connection of a call: `None` until there is one.
type InUse = Arc<Mutex<Option<broker::Client>>>;

/// A version's id, a part, and a byte range of it.
type SharedKey = (String, String, u64, u64);

#[derive(Default)]
struct Table {
    idle: [Vec<broker::Client>; 2],
    busy: HashMap<u64, broker::Client>,
    next: u64,
}

/// The purpose of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Any request. Leases use such a connection, and keep it open.
    Any,
    /// Puts of names with the lifetime of the connection: leases must not keep it open.
    Maker,
}

/// A connection in use by one call, watch or claim. Returned to the pool when dropped.
pub(crate) struct Checkout {
    of: Arc<Connections>,
    purpose: Purpose,
    number: u64,
    client: Option<broker::Client>,
}

impl Checkout {
    pub(crate) fn closed(&self) -> &CloseFlag {
        &self.of.closed
    }

    /// Observes the waits of this connection's calls: see [`Connections::observer`].
    pub(crate) fn observer(&self) -> Observer {
        self.of.observer(Arc::new(Mutex::new(self.client.clone())))
    }
}

impl std::ops::Deref for Checkout {
    type Target = broker::Client;

    fn deref(&self) -> &broker::Client {
        self.client.as_ref().expect("it is there until it is dropped")
    }
}

impl Drop for Checkout {
    fn drop(&mut self) {
        let client = self.client.take();
        // In a fork, a thread of the parent may have held the lock.
        if self.of.made_by.is_current() {
            let unused = {
                let mut table = lock(&self.of.table);
                let busy = table.busy.remove(&self.number);
                let idle = &mut table.idle[self.purpose as usize];
                match client {
                    Some(client)
                        if !self.of.closed.is_set() && (idle.len() < IDLE || self.purpose == Purpose::Maker) =>
                    {
                        idle.push(client);
                        (busy, None)
                    }
                    client => (busy, client),
                }
            };
            drop(unused);
        }
    }
}

impl Connections {
    pub(crate) fn new(place: BrokerAddress, config: Config, wait: Duration) -> Self {
        Self {
            place: Arc::new(place),
            config,
            wait,
            reached: AtomicBool::new(false),
            shared: Mutex::default(),
            made_by: ProcessIdentity::current(),
            closed: CloseFlag::default(),
            table: Mutex::default(),
            handlers: Arc::default(),
            reported: AtomicBool::new(false),
        }
    }

    /// How long a new connection waits for a broker to listen.
    fn limit(&self) -> Duration {
        if self.reached.load(Ordering::Acquire) { self.place.timeout } else { self.wait }
    }

    /// Returns an observer of waits, which logs once for each outage that no broker answers.
    fn observer(self: &Arc<Self>, client: InUse) -> Observer {
        let of = Arc::downgrade(self);
        let since = Mutex::new(None);
        Arc::new(move || {
            let Some(of) = of.upgrade() else { return };
            let mut since = lock(&since);
            let connected = lock(&client).as_ref().is_some_and(broker::Client::is_connected);
            if connected {
                *since = None;
                return;
            }
            let waited = since.get_or_insert_with(Instant::now).elapsed();
            // After a longer wait, a broker listens, and the call waits for its answer.
            let limit = if waited > of.limit() + OUTAGE { of.place.timeout } else { of.limit() };
            // A shorter limit expires with its error as soon.
            let is_due = waited >= OUTAGE && limit > 2 * OUTAGE;
            if is_due && !of.reported.swap(true, Ordering::AcqRel) {
                // None during interpreter shutdown.
                Python::try_attach(|py| {
                    let report = py.import("vmmfd._outage").and_then(|module| module.getattr("report"));
                    let path = &of.place.path;
                    let limit = limit.as_secs_f64();
                    if let Err(error) = report.and_then(|report| report.call1((path, waited.as_secs_f64(), limit))) {
                        error.write_unraisable(py, None);
                    }
                });
            }
        })
    }

    /// Interrupts the waits of other threads, and closes the connections that no lease needs. Does nothing in a fork, or if already closed.
    pub(crate) fn close(&self, py: Python<'_>) {
        if !self.made_by.is_current() || self.closed.set() {
            return;
        }
        py.detach(|| {
            let (idle, busy) = {
                let mut table = lock(&self.table);
                let busy: Vec<broker::Client> = table.busy.values().cloned().collect();
                (std::mem::take(&mut table.idle), busy)
            };
            drop(idle);
            for client in busy {
                // If the broker does not answer, the waiting call notices the flag itself.
                let _ = client.stop();
            }
        });
    }

    /// Takes an unused connection. Blocks while a new one connects.
    fn take(self: &Arc<Self>, purpose: Purpose) -> Outcome<Checkout> {
        let idle = lock(&self.table).idle[purpose as usize].pop();
        let client = match idle {
            Some(client) => client,
            None => {
                let config = self.config.clone().wait(self.limit());
                let client = broker::Client::connect(&self.place.path, &config);
                let client = match self.reached.load(Ordering::Acquire) {
                    true => client.map_err(of_known_broker)?,
                    false => client?,
                };
                self.reached.store(true, Ordering::Release);
                let lost = Arc::clone(&self.handlers);
                let restored = Arc::clone(&self.handlers);
                client.on_lost(move |_, what| lost.lost(what));
                client.on_restored(move |_, what| restored.restored(what));
                client
            }
        };
        let mut table = lock(&self.table);
        let number = table.next;
        table.next += 1;
        table.busy.insert(number, client.clone());
        drop(table);
        Ok(Checkout { of: Arc::clone(self), purpose, number, client: Some(client) })
    }

    /// Runs a request, with the GIL released, until it is answered, a signal handler raises, or this is closed.
    pub(crate) fn call<T: Send>(
        self: &Arc<Self>,
        py: Python<'_>,
        purpose: Purpose,
        work: impl FnOnce(&Checkout) -> Outcome<T> + Send,
    ) -> Outcome<T> {
        self.call_with(py, purpose, |client| work(&client))
    }

    /// As [`Connections::call`], for work that may keep the connection.
    pub(crate) fn call_with<T: Send>(
        self: &Arc<Self>,
        py: Python<'_>,
        purpose: Purpose,
        work: impl FnOnce(Checkout) -> Outcome<T> + Send,
    ) -> Outcome<T> {
        self.check()?;
        let client = InUse::default();
        let observer = self.observer(Arc::clone(&client));
        let done = signals::run_observed(py, &[&self.closed], Some(observer), || {
            let checkout = self.take(purpose)?;
            lock(&client).clone_from(&checkout.client);
            let done = work(checkout);
            // The last clone closes the connection: here, without the GIL.
            lock(&client).take();
            done
        });
        if done.is_ok() {
            self.reported.store(false, Ordering::Release);
        }
        done
    }

    /// Fails if it is closed, and in a fork.
    pub(crate) fn check(&self) -> Outcome<()> {
        self.made_by.check()?;
        match self.closed.is_set() {
            true => Err(signals::closed_error()),
            false => Ok(()),
        }
    }

    /// Maps a lease. Blocks for the driver calls.
    pub(crate) fn open(
        &self,
        lease: broker::Lease,
        Opening { device, selection, copy_on_write }: Opening,
    ) -> Outcome<Arc<Leased>> {
        // With "auto", the object's backend decides: a broker may have memory of both.
        let backend = if self.place.backend == "auto" { lease.backend() } else { &self.place.backend };
        let driver = driver::driver(backend)?;
        let object = match copy_on_write {
            true => lease.open_copy_on_write(&driver, device)?,
            false => lease.open(&driver, device)?,
        };
        Ok(Leased::new(object, selection, Arc::clone(&self.place)))
    }
}

/// The program's handlers.
#[derive(Default)]
pub(crate) struct Handlers {
    /// Whether a handler was ever added.
    any: AtomicBool,
    // Only threads attached to Python take these locks, so none is held while the garbage collector runs.
    pub(crate) lost: Mutex<Vec<Py<PyAny>>>,
    pub(crate) restored: Mutex<Vec<Py<PyAny>>>,
}

impl Handlers {
    fn lost(&self, lost: &Lost) {
        let kind = match lost.reason {
            LossReason::Unreachable => "unreachable",
            LossReason::Ended => "ended",
            LossReason::NotRestored(_) => "not-restored",
            _ => "unknown",
        };
        let version = lost.version;
        self.call(&self.lost, (&lost.name, version, &lost.id, kind, lost.reason.to_string()));
    }

    fn restored(&self, restored: &Restored) {
        let Restored { name, version, id, rebuilt, .. } = restored;
        self.call(&self.restored, (name, version, id, rebuilt));
    }

    /// Calls the handlers on this thread, which belongs to a connection. Not during interpreter shutdown.
    fn call<T>(&self, handlers: &Mutex<Vec<Py<PyAny>>>, arguments: T)
    where
        T: Clone + for<'py> pyo3::call::PyCallArgs<'py>,
    {
        if !self.any.load(Ordering::Acquire) {
            return;
        }
        Python::try_attach(|py| {
            let handlers: Vec<Py<PyAny>> = {
                let handlers = lock(handlers);
                handlers.iter().map(|handler| handler.clone_ref(py)).collect()
            };
            for handler in handlers {
                if let Err(error) = handler.call1(py, arguments.clone()) {
                    error.write_unraisable(py, Some(handler.bind(py)));
                }
            }
        });
    }

    pub(crate) fn add(&self, with: &Mutex<Vec<Py<PyAny>>>, handler: Py<PyAny>) {
        lock(with).push(handler);
        self.any.store(true, Ordering::Release);
    }
}
